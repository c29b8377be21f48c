"""Our functions on PyTorch's own sample and error inputs, with func.grad, jvp and output strides.

If torch and onepass differ by more than the tolerance, an fp64 run decides: the error of torch, which keeps statistics in
half precision, must be more than twice ours. CELLS lists where that happens at PyTorch's own tolerance.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like

import onepass.functional as O

NAMES = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm")
OPS = {name: next(op for op in op_db if op.name == f"nn.functional.{name}" and not op.variant_test_name) for name in NAMES}
TOLERANCE = {torch.float64: (1e-7, 1e-7), torch.float32: (1e-5, 2e-5), torch.bfloat16: (1.6e-2, 1.6e-2), torch.float16: (2e-3, 2e-3)}
every_op = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def _copy(t, layout, dtype=None):
    if not isinstance(t, torch.Tensor):
        return t
    copy = t.detach().clone().to(dtype or t.dtype)
    if layout == "noncontiguous" and copy.numel() > 1:
        copy = noncontiguous_like(copy)
    if layout == "channels_last" and copy.dim() in (4, 5):
        copy = copy.contiguous(memory_format=torch.channels_last if copy.dim() == 4 else torch.channels_last_3d)
    return copy.detach().requires_grad_(t.requires_grad)


def _run(function, sample, layout, dtype=None, dy=None):
    """Output, gradients and inputs after the call, in order."""
    args = [_copy(t, layout, dtype) for t in (sample.input, *sample.args)]
    kwargs = {k: _copy(t, layout, dtype) for k, t in sample.kwargs.items()}
    y = function(*args, **kwargs)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape) if dy is None else dy
    dy = dy.to(y.dtype)
    grads = torch.autograd.grad(y, wanted, dy, allow_unused=True) if wanted and y.requires_grad else ()
    return y, args[0], [y.detach(), *grads, *(t.detach() for t in tensors)]


@every_dtype
@every_op
def test_samples(name, dtype):
    count = 0
    for sample in OPS[name].reference_inputs("cpu", dtype, requires_grad=True):
        for layout in ("plain", "noncontiguous", "channels_last"):
            if layout == "channels_last" and sample.input.dim() not in (4, 5):
                continue
            y, x, ours = _run(getattr(O, name), sample, layout)
            expected, _, torchs = _run(getattr(F, name), sample, layout)
            assert y.shape == expected.shape and y.dtype == expected.dtype and y.requires_grad == expected.requires_grad
            assert y.stride() == torch.empty_like(x).stride()
            for i, (mine, other) in enumerate(zip(ours, torchs)):
                _close(mine, other, lambda i=i, sample=sample: _run(getattr(F, name), sample, "plain", torch.float64)[2][i])
            count += 1
    assert count > 10


def _close(mine, other, truth):
    assert (mine is None) == (other is None)
    if mine is None:
        return
    rtol, atol = TOLERANCE[mine.dtype]
    try:
        assert_close(mine, other, rtol=4 * rtol, atol=4 * atol, equal_nan=True)
    except AssertionError:
        errors = [(t.double() - truth()).abs().max() for t in (mine, other)]
        assert mine.dtype in (torch.bfloat16, torch.float16) and 2 * errors[0] < errors[1]


# Where torch's result is off by more than PyTorch's tolerance, and ours is not: norm, dtype, shape of x, and result. In
# float16 and bfloat16 these are 28 samples, counting each layout, with and without gradients. The gradients of a
# single value are 0; torch has rounding errors there.
CELLS = {
    ("layer_norm", torch.float32, (1,), "dx"),
    ("layer_norm", torch.float32, (1,), "dweight"),
    ("group_norm", torch.float16, (20, 6, 10, 10), "dweight"),
    ("batch_norm", torch.bfloat16, (5, 5, 5), "y"),
    ("instance_norm", torch.bfloat16, (3, 2, 3, 4), "y"),
}
RESULTS = ("y", "dx", "dweight", "dbias")


@every_op
def test_where_we_differ_torch_is_farther_from_fp64(name):
    """Every sample is within PyTorch's tolerance, or four times the tolerance for gradients.

    CELLS lists the exceptions, in which our result is closer to fp64 than torch's.
    """
    found = set()
    for dtype, (rtol, atol) in TOLERANCE.items():
        for sample in OPS[name].reference_inputs("cpu", dtype, requires_grad=True):
            dy = torch.randn(sample.input.shape, generator=torch.Generator().manual_seed(0))
            for layout in ("plain", "noncontiguous", "channels_last"):
                if layout == "channels_last" and sample.input.dim() not in (4, 5):
                    continue
                ours, torchs = (_run(getattr(module, name), sample, layout, dy=dy)[2] for module in (O, F))
                for result, mine, other, i in zip(RESULTS, ours, torchs, range(len(ours))):
                    slack = 1 if result == "y" else 4
                    if mine is None or torch.allclose(mine, other, rtol=slack * rtol, atol=slack * atol, equal_nan=True):
                        continue
                    exact = _run(getattr(F, name), sample, "plain", torch.float64, dy)[2][i]
                    errors = [(t.double() - exact).abs().max().item() for t in (mine, other)]
                    cell = name, dtype, tuple(sample.input.shape), result
                    assert errors[0] <= errors[1], f"{cell}, {layout}: we are off by {errors[0]:.2g}, torch by {errors[1]:.2g}"
                    assert_close(mine.double(), exact, rtol=slack * rtol, atol=slack * atol, msg=lambda said, cell=cell: f"{cell}: {said}")
                    found.add(cell)
    assert found <= CELLS


@pytest.mark.parametrize("name", [name for name in NAMES if OPS[name].error_inputs_func])
def test_errors(name):
    for error in OPS[name].error_inputs("cpu"):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            getattr(O, name)(sample.input, *sample.args, **sample.kwargs)


def _differentiable(name):
    """Small fp64 samples as functions of their differentiable tensors, with fixed running statistics."""
    for sample in OPS[name].sample_inputs("cpu", torch.float64, requires_grad=True):
        flat = [sample.input, *sample.args, *sample.kwargs.values()]
        tensors = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad]
        if not tensors or any(t.numel() == 0 for t in tensors) or sum(t.numel() for t in tensors) > 60:
            continue

        def call(function, given, sample=sample):
            values = iter(given)

            def place(t):
                if not isinstance(t, torch.Tensor):
                    return t
                return next(values) if t.requires_grad else t.clone()

            args = [place(t) for t in (sample.input, *sample.args)]
            return function(*args, **{k: place(t) for k, t in sample.kwargs.items()})

        fixed = any(isinstance(t, torch.Tensor) and not t.requires_grad for t in flat)
        yield call, [t.detach() for t in tensors], fixed and sample.kwargs.get("training", sample.kwargs.get("use_input_stats", True))


@every_op
def test_gradcheck(name):
    for call, tensors, _ in _differentiable(name):
        inputs = [t.clone().requires_grad_() for t in tensors]
        function = lambda *given, call=call: call(getattr(O, name), given)  # noqa: E731
        assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)


@every_op
def test_func_grad_and_jvp(name):
    for call, tensors, updates in _differentiable(name):
        if updates:  # functorch forbids updating a captured buffer, torch's norms included
            continue
        numbers = tuple(range(len(tensors)))

        def loss(function, call=call):
            return lambda *given: (call(function, given) ** 2).sum()

        ours = torch.func.grad(loss(getattr(O, name)), numbers)(*tensors)
        inputs = [t.clone().requires_grad_() for t in tensors]
        expected = torch.autograd.grad(loss(getattr(F, name))(*inputs), inputs, allow_unused=True)
        for mine, other in zip(ours, expected):
            assert_close(mine, torch.zeros_like(mine) if other is None else other, rtol=1e-6, atol=1e-7, equal_nan=True)
        tangents = tuple(torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, tangent = torch.func.jvp(loss(getattr(O, name)), tuple(tensors), tangents)
        along = sum((g * t).sum() for g, t in zip(ours, tangents))
        assert_close(tangent, along, equal_nan=True)


def test_this_file_reads_every_norm():
    assert set(NAMES) == {name for name in O.__all__ if hasattr(F, name)}
