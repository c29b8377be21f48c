"""The accuracy check before a measurement: it finds every wrong result, and agrees with the oracle."""

from functools import partial

import pytest
import torch

from onepass.bench import accuracy, measure, timing
from onepass.bench.suite import Row
from onepass.verify import calls, cases, oracle, tensors
from onepass.verify.cases import Case

TINY = Row(Case("layer_norm", (16, 64)), torch.bfloat16, 0.5)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", partial(timing.interleaved, seconds=0.01))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


class Off(torch.autograd.Function):
    """The identity, whose gradient has one element off by a factor."""

    @staticmethod
    def forward(ctx, t, factor):
        ctx.factor = factor
        return t.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        wrong = grad.clone()
        wrong.view(-1)[-1] *= ctx.factor
        return wrong, None


@pytest.mark.parametrize(
    ("case", "wrong", "factor"),
    [
        *((TINY.case, name, 1.02) for name in ("x", "weight", "bias")),
        *((Case("layer_norm", (4, 8, 64), modulate=True), name, 1.02) for name in ("scale", "shift")),
        (Case("rms_norm", (16, 64), residual=True), "residual", 1.02),
        *((Case("switchable_norm", (4, 6, 5, 5)), name, 1.5) for name in ("mean_weight", "var_weight")),  # their budget is generous
    ],
    ids=lambda value: getattr(value, "op", None),
)
def test_every_wrong_gradient_is_found(case, wrong, factor, monkeypatch):
    def provider(case, operands):
        return calls.onepass_call(case, operands._replace(**{wrong: Off.apply(getattr(operands, wrong), factor)}))

    monkeypatch.setattr(accuracy, "SLICE", 100)
    row = Row(case, torch.float32, direction="backward")
    ours, torchs = measure.measure(row, providers={"onepass": provider, "torch": calls.onepass_call})
    assert "wrong" in ours["error"] and not ours["correct"] and "us" not in ours
    assert torchs["correct"] and torchs["us"] > 0


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.init != "inf" and case.shape[0]][::4], ids=lambda case: case.name)
def test_slices_agree_with_the_oracle(case, monkeypatch):
    monkeypatch.setattr(accuracy, "SLICE", 50)
    operands = tensors.make(case, torch.bfloat16)
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    outcomes = {run.__name__: oracle.evaluate(case, operands, dy, run) for run in (calls.by_onepass, calls.by_torch)}
    worst = {name: oracle.worst(outcome, exact.value, exact.allowed) for name, outcome in outcomes.items()}
    for name, error in accuracy.largest_errors(case, operands, outcomes).items():
        assert error == pytest.approx(worst[name].forward, rel=1e-3)
    for name, error in accuracy.largest_errors(case, operands, outcomes, dy).items():
        assert error == pytest.approx(worst[name].backward, rel=1e-3)
