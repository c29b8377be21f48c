"""On a GPU: the case list within the error budget, torch's autocast, and parameters left on another device."""

import pytest
import torch
import torch.nn.functional as F

import onepass
import onepass.functional as O
from onepass.bench import cases, verify

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_case(case):
    assert [cell for cell in verify.verify([case], device="cuda") if not cell.ok] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_autocast_as_torch_does_it(dtype):
    x = torch.randn(4, 8, 5, 6, device="cuda").to(dtype)
    weight, bias = torch.randn(2, 8, device="cuda", dtype=torch.promote_types(dtype, torch.float32))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        calls = {
            "group_norm": (2, weight, bias),
            "layer_norm": ((6,),),
            "rms_norm": ((6,),),
            "instance_norm": (None, None, weight, bias),
            "batch_norm": (None, None, weight, bias, True),
        }
        for name, args in calls.items():
            ours, torchs = getattr(O, name)(x, *args), getattr(F, name)(x, *args)
            assert ours.dtype == torchs.dtype, name
            torch.testing.assert_close(ours, torchs)


def test_a_weight_on_the_cpu():
    x = torch.randn(4, 8, device="cuda")
    O.layer_norm(x, (8,), torch.ones(8, device="cuda"))  # the kind of call is known by now
    for _ in range(2):
        with pytest.raises(RuntimeError, match="weight is on cpu"):
            O.layer_norm(x, (8,), torch.ones(8))


def test_autocast_of_a_sum():
    """The sum keeps its dtype, the norm of it is taken in float32, as torch does it unfused."""
    x, residual = torch.randn(2, 4, 8, device="cuda").half()
    with torch.autocast("cuda", dtype=torch.float16):
        y, total = O.add_layer_norm(x, residual, (8,), activation="silu")
        torch.testing.assert_close(y, F.silu(F.layer_norm(x + residual, (8,))))
        assert total.dtype == torch.float16 and y.dtype == torch.float32
        y, total = O.add_group_norm(x, residual, 2, modulate=(x, residual))
        assert total.dtype == torch.float16 and y.dtype == torch.float32


def test_out_and_statistics():
    x = torch.randn(4, 8, 5, 6, device="cuda").to(memory_format=torch.channels_last)
    expected = O.group_norm(x, 2, activation="silu", return_stats=True)
    assert expected.mean.is_cuda and expected.mean.shape == (4, 2)
    assert O.group_norm(x, 2, activation="silu", out=x) is x and torch.equal(x, expected.output)
    rows, out = torch.randn(6, 8, device="cuda"), torch.empty(6, 8, device="cuda")
    torch.ops.onepass.layer_norm_out(out, rows, None, None, 6, 8, 1e-5)
    torch.testing.assert_close(out, F.layer_norm(rows, (8,)))


@pytest.mark.parametrize("extra", ["scale", "residual", "mean_weight"])
def test_an_extra_on_the_cpu(extra):
    x = torch.randn(4, 8, 5, device="cuda")
    calls = {
        "scale": lambda: O.group_norm(x, 2, modulate=(torch.ones(4, 8), None)),
        "residual": lambda: O.add_group_norm(x, x.cpu(), 2),
        "mean_weight": lambda: O.switchable_norm(x, torch.ones(3), torch.ones(3, device="cuda"), training=True),
    }
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{extra} is on cpu"):
            calls[extra]()


KINDS = {  # a call for each family, and what it runs on
    "row": lambda x: O.layer_norm(x, x.shape[-1:], activation="silu"),
    "row_reread": lambda x: O.layer_norm(x.reshape(1, -1), (x.numel(),)),
    "tile": lambda x: O.layer_norm2d(x, activation="relu"),
    "tile_reread": lambda x: O.group_norm(x.to(memory_format=torch.channels_last), 4, activation="silu"),
    "apply": lambda x: O.batch_norm(x, *torch.ones(2, x.shape[1], device=x.device)),
}


def _input(dtype=torch.float16):
    return torch.randn(3, 20, 64, 96, device="cuda").to(dtype)


def _plan(call, x):
    return onepass.explain(call, x).forward.family


@pytest.mark.parametrize("family", KINDS)
def test_the_planner_picks_it(family):
    assert _plan(KINDS[family], _input()) == family


@pytest.mark.parametrize("family", KINDS)
def test_two_runs_give_the_same_bits(family):
    x = _input()
    assert all(torch.equal(KINDS[family](x), KINDS[family](x)) for _ in range(5))


@pytest.mark.parametrize("family", KINDS)
def test_graph_capture(family):
    x = _input()
    expected = KINDS[family](x)
    KINDS[family](x)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        y = KINDS[family](static)
    static.copy_(x)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("family", KINDS)
def test_several_streams(family):
    x = _input()
    inputs = [x * k for k in range(1, 5)]
    expected = [KINDS[family](t) for t in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for t, stream in zip(inputs, streams):
            with torch.cuda.stream(stream):
                results.append(KINDS[family](t))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i % 4]) for i, y in enumerate(results))


@pytest.mark.parametrize("family", KINDS)
def test_misaligned(family):
    """Memory that begins anywhere gives the same numbers, up to the order of sums."""
    x = _input(torch.float32)
    expected = KINDS[family](x)
    for shift in (1, 2, 3):
        moved = torch.empty(x.numel() + 4, device="cuda")[shift : shift + x.numel()].view(x.shape).copy_(x)
        torch.testing.assert_close(KINDS[family](moved), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("family", KINDS)
def test_another_device(family):
    x = _input()
    assert torch.equal(KINDS[family](x.to("cuda:1")).cpu(), KINDS[family](x).cpu())


@pytest.mark.parametrize("shape", [(64, 512), (64, 20000), (64, 70000), (64, 24, 8, 8)])
def test_batch_invariance(shape):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    norm = (lambda t: O.group_norm(t.to(memory_format=torch.channels_last), 4)) if len(shape) == 4 else (lambda t: O.rms_norm(t, shape[1:]))
    with onepass.batch_invariant(True):
        together = norm(x)
        for n in (1, 3, 17):
            assert torch.equal(norm(x[:n].clone()), together[:n])


def test_parameters_that_are_not_contiguous():
    x, params = torch.randn(64, 256, device="cuda"), torch.randn(256, 2, device="cuda")
    with torch.no_grad():
        y = O.layer_norm(x, (256,), params[:, 0], params[:, 1])
    torch.testing.assert_close(y, F.layer_norm(x, (256,), *params.T.contiguous()))


def test_training_goes_on():
    """The backward, by formulas on the GPU, of statistics that a kernel kept."""
    x = torch.randn(4, 20, 16, 16, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(20, device="cuda", requires_grad=True)
    ours = torch.autograd.grad(O.group_norm(x, 4, weight).square().sum(), (x, weight))
    exact = torch.autograd.grad(F.group_norm(x.double(), 4, weight.double()).square().sum(), (x, weight))
    torch.testing.assert_close(ours, exact)


def test_compile():
    x = torch.randn(4, 20, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    function = torch.compile(lambda t: O.group_norm(t * 2, 4, activation="silu") + 1, fullgraph=True)
    torch.testing.assert_close(function(x), F.silu(F.group_norm(x * 2, 4)) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["row", "row_reread", "tile_reread", "apply"])
def test_more_than_2_31_elements(family):
    shape = {"row": (2**21 + 1, 1024), "row_reread": (1, 2**31 + 8), "tile_reread": (3, 8, 2**14, 5462), "apply": (3, 8, 2**14, 5462)}[
        family
    ]
    x = torch.empty(shape, dtype=torch.float16, device="cuda").normal_()
    if family == "tile_reread":
        x = x.to(memory_format=torch.channels_last)
    calls = {
        "tile_reread": lambda t: O.group_norm(t, 2),
        "apply": lambda t: O.batch_norm(t, *torch.full((2, 8), 0.5, device="cuda", dtype=torch.float16)),
    }
    call = calls.get(family, lambda t: O.rms_norm(t, t.shape[-1:], eps=1e-5))
    assert x.numel() > 2**31 and _plan(call, x) == family
    y = call(x)
    for part in (slice(0, 1), slice(len(x) - 1, len(x))):  # of rows or samples
        piece = x[part].flatten()[-(2**20) :].double()
        if family == "apply":
            expected = (piece - 0.5) / (0.5 + 1e-5) ** 0.5
        elif family == "tile_reread":
            expected = F.group_norm(x[part].float(), 2).flatten()[-(2**20) :].double()
        else:
            rstd = x[part].float().square().mean().add(1e-5).rsqrt().double()
            expected = piece * rstd
        torch.testing.assert_close(y[part].flatten()[-(2**20) :].double(), expected, rtol=2**-9, atol=2**-9)
