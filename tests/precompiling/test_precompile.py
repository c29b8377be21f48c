"""`onepass.precompile`: what it compiles, what it leaves untouched, and its errors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.backends.c import build
from onepass.dispatch import launchers

from ..conftest import compiled
from ..recorder import recorded_runs

needs_c = pytest.mark.skipif(not compiled(), reason="there are no C kernels")


class Net(nn.Module):
    """Norms with and without running statistics, dropout, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU()
        self.batch, self.dropout, self.calls = nn.BatchNorm2d(8), nn.Dropout(0.5), 0
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        self.last = x.detach().sum() + random.random() + numpy.random.rand()
        y = self.dropout(self.batch(self.act(self.norm(self.conv(x)))))
        return {"y": y * scale, "more": [y.mean(), "text", None]}


@pytest.fixture
def model() -> Net:
    net = Net()
    onepass.patch(net)
    return net


def directions(model: nn.Module, *inputs: Any, **kwargs: Any) -> set[tuple[str, str]]:
    """Which families ran in which direction."""
    with recorded_runs() as runs:
        onepass.precompile(model, *inputs, **kwargs)
    return {(run.family, run.direction) for run in runs}


@needs_c
def test_training_runs_a_backward_and_evaluation_does_not(model):
    x = torch.randn(2, 3, 8, 8)
    assert directions(model, x) == {("c", "forward"), ("c", "backward")}
    assert directions(model, x, training=False) == {("c", "forward")}
    model.eval()
    assert directions(model, x) == {("c", "forward")}
    assert directions(model, x, training=True) == {("c", "forward"), ("c", "backward")}


@needs_c
def test_what_was_precompiled_is_not_prepared_again(model, monkeypatch):
    """A later call finds launchers."""
    x = torch.randn(2, 3, 8, 8)
    for training in (True, False):
        report = onepass.precompile(model, x, training=training)
        found = launchers.known()
        assert report.calls == len(found) == 2
        model.train(training)
        with torch.set_grad_enabled(training):
            y = model(x)["y"]
            if training:
                y.sum().backward()
        assert launchers.known() == found


def test_the_c_library_is_compiled_once_and_then_found(monkeypatch, tmp_path, anew, model):
    if not compiled():
        pytest.skip("there are no C kernels")
    build.library.cache_clear()
    from onepass.backends.c import library

    library.load.cache_clear()
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "cache"))
    x = torch.randn(2, 3, 8, 8)
    first = onepass.precompile(model, x)
    assert (first.compiled, first.cached, first.failure) == (1, 0, "")
    assert list((tmp_path / "cache").glob("*.so")) and first.seconds >= first.kernels[0][1] > 0
    assert "compiled the CPU kernels with" in str(first) and "2 kinds of norm calls: 1 kernel compiled, 0 already compiled" in str(first)
    for _ in range(2):  # from memory, then from the disk
        again = onepass.precompile(model, x)
        assert (again.compiled, again.cached) == (0, 1) and "0 kernels compiled, 1 already compiled" in str(again)
        build.library.cache_clear()
        library.load.cache_clear()


def test_a_failed_build_is_in_the_report(monkeypatch, tmp_path, anew, model):
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.delenv("ONEPASS_CPU", raising=False)
    with pytest.warns(UserWarning, match="without its C kernels"):
        report = onepass.precompile(model, torch.randn(2, 3, 8, 8))
    assert report.failure == "there is no C compiler (no-such-compiler)" and (report.compiled, report.cached) == (0, 0)
    assert "FAILED: the CPU kernels cannot be used: there is no C compiler" in str(report)


def test_c_kernels_that_are_off_are_no_failure(by_torch, model):
    report = onepass.precompile(model, torch.randn(2, 3, 8, 8))
    assert not report.failure and (report.calls, report.compiled, report.cached) == (2, 0, 0)


# What is left untouched


def state(model: Net) -> tuple[Any, ...]:
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    rng = torch.get_rng_state(), random.getstate(), tuple(map(str, numpy.random.get_state()))
    return [t.clone() for t in tensors], [m.training for m in model.modules()], model.calls, rng, list(map(id, tensors))


def assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:3] == after[1:3] and before[4] == after[4]
    assert torch.equal(before[3][0], after[3][0]) and before[3][1:] == after[3][1:]


@pytest.mark.parametrize("training", [None, True, False])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_state_is_left_untouched(model, training, fails, frozen):
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    model(x)["y"].sum().backward()
    grad = x.grad
    if frozen:
        model.batch.eval()  # in a training model
    before = state(model)
    if fails:
        with pytest.raises(TypeError):
            onepass.precompile(model, x, training=training, scale="nonsense")
    else:
        onepass.precompile(model, x, training=training, scale=2.0)
    assert_same(before, state(model))
    assert x.grad is grad and x.requires_grad


def test_the_run_changes_the_state(model):
    """So the test above can fail."""
    before = state(model)
    model(torch.randn(2, 3, 8, 8))
    after = state(model)
    assert not torch.equal(before[0][-4], after[0][-4]) or before[2] != after[2]
    assert before[4] != after[4] and not torch.equal(before[3][0], after[3][0]) and before[3][1] != after[3][1]


def test_a_pending_backward_still_works():
    """A buffer that the run did not change is not written, since autograd may have saved it."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = onepass.nn.LayerNorm(8)
            self.register_buffer("scale", torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * self.scale

    model, x = Scaled(), torch.randn(4, 8)
    y = model(x)
    onepass.precompile(model, x)
    y.sum().backward()


# Models of several kinds


@dataclass
class Output:
    y: Tensor
    loss: Tensor | None = None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = onepass.nn.LayerNorm(8)

    def forward(self, batch: dict[str, Tensor]) -> Output:
        return Output(self.norm(batch["x"]))


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return onepass.functional.layer_norm(x, x.shape[-1:])


@needs_c
def test_structured_arguments_and_results():
    assert directions(Structured(), {"x": torch.randn(4, 8)}) == {("c", "forward"), ("c", "backward")}
    assert directions(Structured(), batch={"x": torch.randn(4, 8)}) == {("c", "forward"), ("c", "backward")}


def test_a_model_without_parameters():
    report = onepass.precompile(Functional(), torch.randn(4, 8))
    assert report.calls == 1 and "no backward ran" in str(report)
    assert "no backward" not in str(onepass.precompile(Functional(), torch.randn(4, 8, requires_grad=True)))


def test_under_inference_mode():
    model, x = onepass.nn.LayerNorm(8), torch.randn(4, 8)
    with torch.inference_mode():
        assert onepass.precompile(model, x).calls == 1
        assert onepass.precompile(model, x, training=False).calls == 1


def test_distributed_data_parallel_is_unwrapped(monkeypatch):
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Structured()
    assert onepass.precompile(wrapped, {"x": torch.randn(4, 8)}).calls == 1


# Errors


def test_a_model_without_norms_of_onepass():
    with pytest.raises(ValueError, match=r"model has no norm of onepass, .*: call onepass.patch\(model\) first"):
        onepass.precompile(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8))


def test_norms_that_do_not_run_are_noted():
    class Unused(Structured):
        def forward(self, batch: Tensor) -> Tensor:
            return batch * 2

    report = onepass.precompile(Unused(), torch.randn(4, 8))
    assert report.calls == 0 and "no norm of onepass ran" in str(report)


@pytest.mark.parametrize("wrong", [nn.LayerNorm, lambda x: x, "model"])
def test_no_module(wrong):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not"):
        onepass.precompile(wrong, torch.randn(4, 8))


def test_no_inputs():
    with pytest.raises(TypeError, match="example_inputs is empty; expected the arguments with which the model is called"):
        onepass.precompile(onepass.nn.LayerNorm(8))


def test_a_lazy_model():
    with pytest.raises(ValueError, match=r"'0\.weight' without a shape yet"):
        onepass.precompile(nn.Sequential(nn.LazyLinear(8), onepass.nn.LayerNorm(8)), torch.randn(4, 8))


# On a GPU


@pytest.mark.gpu
def test_kernels_are_compiled_once_on_a_gpu(tmp_path, monkeypatch, caplog):
    """A process that has precompiled compiles nothing in the calls that follow, forward and backward."""
    import logging

    from onepass.backends.gpu.launch import source

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source.loaded.cache_clear()
    model, x = Structured().cuda(), {"x": torch.randn(4, 8, device="cuda")}
    generator = torch.cuda.get_rng_state()
    first = onepass.precompile(model, x)
    assert first.compiled >= 2 and first.cached == 0
    caplog.set_level(logging.INFO, "onepass")
    model(x).y.sum().backward()
    assert not [record for record in caplog.records if record.name == "onepass"]
    assert torch.equal(generator, torch.cuda.get_rng_state())
    for _ in range(2):  # from memory, then from the disk
        again = onepass.precompile(model, x)
        assert (again.compiled, again.cached) == (0, first.compiled)
        source.loaded.cache_clear()
