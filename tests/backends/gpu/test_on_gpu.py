"""On a GPU: the case list, autocast, parameters on another device, graphs, streams, and torch.compile.

Families whose programs wait for one another are tested beside other work on the GPU.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
import torch.nn.functional as F

import onepass
import onepass.functional as O
from onepass.backends.gpu.row import schedule_peeled
from onepass.planning.choose import plan
from onepass.planning.options import CannotForce
from onepass.verify import cases, matrix

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_case(case):
    assert [cell for cell in matrix.verify([case], device="cuda") if not cell.ok] == []


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
    O.layer_norm(x, (8,), torch.ones(8, device="cuda"))  # this kind of call is in the cache now
    for _ in range(2):
        with pytest.raises(RuntimeError, match="weight is on cpu"):
            O.layer_norm(x, (8,), torch.ones(8))


def test_autocast_of_a_sum():
    """The sum keeps its dtype and its norm runs in float32, as in torch without fusion."""
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


SHARING = ("team", "ring", "whole_set")  # their programs exchange moments, and the planner does not choose them for every size


@contextmanager
def pinned(family):
    """Force a family. On other GPUs than Hopper, skip the test if the family cannot run."""
    try:
        with onepass.force(family):
            yield
    except CannotForce as reason:
        if torch.cuda.get_device_capability() == (9, 0):
            raise
        pytest.skip(str(reason))


def _sharing(family):
    def call(x):
        x = x.repeat(1, 16, 1, 1).to(memory_format=torch.channels_last)
        with pinned(family):
            return O.group_norm(x, 32, activation="silu")

    return call


def _long_rows(family, length):
    """A set is one run, which is read as rows that follow one another."""

    def call(x):
        rows = x.flatten()[: x.numel() // length * length].reshape(-1, length).clone()
        with pinned(family):
            return O.layer_norm(rows, (length,), activation="silu")

    return call


LONG_ROWS = {  # 52001 is odd, so the rows begin at different places between multiples of 16 bytes
    "ring, long rows": _long_rows("ring", 40960),
    "ring, odd rows": _long_rows("ring", 52001),
    "whole_set, long rows": _long_rows("whole_set", 40960),
}


KINDS = {  # a call and an input for each family
    "row": lambda x: O.layer_norm(x, x.shape[-1:], activation="silu"),
    "row_reread": lambda x: O.layer_norm(x.reshape(1, -1)[:, 1:], (x.numel() - 1,)),
    "tile": lambda x: O.layer_norm2d(x, activation="relu"),
    "team": lambda x: O.group_norm(x.to(memory_format=torch.channels_last), 4, activation="silu"),
    "tile_reread": lambda x: O.group_norm(x.repeat(1, 1, 8, 24).to(memory_format=torch.channels_last), 4, activation="silu"),
    "apply": lambda x: O.batch_norm(x, *torch.ones(2, x.shape[1], device=x.device)),
    **{family: _sharing(family) for family in SHARING},
    **LONG_ROWS,
}


def _input(dtype=torch.float16):
    return torch.randn(3, 20, 64, 96, device="cuda").to(dtype)


def _plan(call, x):
    return onepass.explain(call, x).forward.family


@pytest.mark.parametrize("family", [family for family in KINDS if family not in (*SHARING, *LONG_ROWS)])
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
    """Misaligned memory gives the same numbers, up to the order of sums."""
    x = _input(torch.float32)
    expected = KINDS[family](x)
    for shift in (1, 2, 3):
        moved = torch.empty(x.numel() + 4, device="cuda")[shift : shift + x.numel()].view(x.shape).copy_(x)
        torch.testing.assert_close(KINDS[family](moved), expected)


def _running(x, channels):
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.zeros(channels, device="cuda", dtype=dtype), torch.ones(channels, device="cuda", dtype=dtype)


ODD = {
    "long rows": lambda x: O.layer_norm(x.view(5, -1), (x.numel() // 5,)),
    "short rows": lambda x: O.rms_norm(x.view(-1, 120), (120,)),
    "images": lambda x: O.group_norm(x.view(2, 60, 100, -1), 12, activation="gelu"),
    "channels-last": lambda x: O.instance_norm(x.view(2, 100, -1, 60).permute(0, 3, 1, 2)),
    "running statistics": lambda x: O.batch_norm(x.view(20, 30, -1), *_running(x, 30), training=True),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_for_an_odd_address(name, dtype):
    """The first call with such an x plans again; calls with other addresses stay as they were."""
    x = torch.randn(2 * 60 * 100 * 110, device="cuda", dtype=dtype)
    exact = ODD[name](x.double()).to(dtype)
    moved = torch.empty(x.numel() + 3, device="cuda", dtype=dtype)[3:].copy_(x)
    before = ODD[name](x)
    for t in (moved, x, moved, moved.clone()):
        torch.testing.assert_close(
            ODD[name](t), exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
        )
    assert torch.equal(ODD[name](x), before)


# Rows of these images lie abreast: rows of few channels, and rows that do not begin at multiples of 16 bytes.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("n, channels, side, groups", [(2, 3, 1201, 1), (1, 7, 999, 7), (2, 100, 301, 4), (3, 36, 403, 12)])
def test_rows_abreast(n, channels, side, groups, shift, dtype):
    images = torch.randn(n, channels, side, side + 1, device="cuda") + torch.randn(channels, 1, 1, device="cuda")
    whole = torch.empty(images.numel() + shift, device="cuda", dtype=dtype)
    x = whole[shift:].view(n, side, side + 1, channels).permute(0, 3, 1, 2).copy_(images)
    weight, bias = torch.randn(2, channels, device="cuda").to(dtype)
    exact = F.group_norm(x.double().contiguous(), groups, weight.double(), bias.double())
    limit = 2**-7 if dtype == torch.bfloat16 else 2**-17
    with onepass.force("tile_reread"):
        assert "abreast" in str(onepass.explain(lambda x: O.group_norm(x, groups, weight, bias), x).forward.launches[0])
        y = O.group_norm(x, groups, weight, bias)
        running = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        z = O.batch_norm(x, *running, weight.float(), bias.float(), training=True, momentum=1.0)
    torch.testing.assert_close(y.double(), exact, rtol=limit, atol=limit)
    wide = x.double().contiguous()
    torch.testing.assert_close(z.double(), F.batch_norm(wide, None, None, weight.double(), bias.double(), True), rtol=limit, atol=limit)
    torch.testing.assert_close(running[0].double(), wide.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(running[1].double(), wide.var((0, 2, 3)), rtol=1e-5, atol=1e-6)


# Runs of odd length: in BatchNorm several for each set, in GroupNorm one, and in LayerNorm each element has its own parameters.
PEELED = {
    "batch_norm": lambda x, w, b: O.batch_norm(x.view(3, 24, -1), *_running(x, 24), training=True),
    "group_norm": lambda x, w, b: O.group_norm(x.view(4, 18, -1), 6, w[:18], b[:18], activation="silu"),
    "layer_norm": lambda x, w, b: O.layer_norm(x.view(8, -1), (x.numel() // 8,), w, b),
    "one row": lambda x, w, b: O.rms_norm(x.view(-1), (x.numel(),)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("length", [283 * 283, 17 * 17, 33001])
@pytest.mark.parametrize("name", PEELED)
def test_runs_whose_ends_are_peeled_off(name, length, shift, dtype):
    """A plan for an aligned x runs with batch_invariant also if x is not aligned."""
    size = 72 * length
    x = torch.empty(size + shift, device="cuda", dtype=dtype)[shift:].copy_(torch.randn(size, device="cuda") + 3)
    weight, bias = (torch.randn(2, size // 8, device="cuda") + 1).to(dtype)
    before, limit = x.clone(), 2**-6 if dtype == torch.bfloat16 else 2**-15
    for invariant in (False, True):
        with onepass.force("row_reread"), onepass.batch_invariant(invariant):
            y = PEELED[name](x, weight, bias)
        with onepass.force("reference"):
            exact = PEELED[name](x.double(), weight.double(), bias.double())
        torch.testing.assert_close(y.double(), exact, rtol=limit, atol=limit)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("length", [301, 767, 1027, 4101, 5003, 8205])
def test_rows_whose_ends_are_peeled_off(length, shift, dtype):
    """Programs have several rows. A plan for an aligned x is replaced if x is not aligned."""
    enough = schedule_peeled.LEAST_OF_SHORT * torch.cuda.get_device_properties(0).multi_processor_count // length + 1
    size = max(3001, enough) * length
    x = torch.empty(size + shift, device="cuda", dtype=dtype)[shift:].copy_(torch.randn(size, device="cuda") + 3).view(-1, length)
    weight, bias = (torch.randn(2, length, device="cuda") + 1).to(dtype)
    images, limit = x[: x.shape[0] // 8 * 8].view(-1, 8, length), 2**-6 if dtype == torch.bfloat16 else 2**-15
    with onepass.force("row"):
        assert ("peeled off" in str(onepass.explain(O.layer_norm, x, (length,)).forward.launches[0])) == (not shift)
        y, z = O.layer_norm(x, (length,), weight, bias), O.rms_norm(x, (length,), weight)
        scaled = O.instance_norm(images, weight=weight[:8])
    wide = x.double()
    torch.testing.assert_close(y.double(), F.layer_norm(wide, (length,), weight.double(), bias.double()), rtol=limit, atol=limit)
    torch.testing.assert_close(z.double(), F.rms_norm(wide, (length,), weight.double(), 1e-6), rtol=limit, atol=limit)
    exact = F.instance_norm(images.double(), weight=weight[:8].double())
    torch.testing.assert_close(scaled.double(), exact, rtol=limit, atol=limit)


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


DIFFUSION = ((2, 320, 64, 64), (2, 1280, 32, 32), (8, 1280, 16, 16), (16, 320, 64, 64), (4, 512, 64, 64))


def _norm(family, x):
    with onepass.force(family):
        return O.group_norm(x, 32, activation="silu")


def _images(shape, dtype=torch.float16):
    return torch.randn(shape, device="cuda").to(dtype).to(memory_format=torch.channels_last)


def _assert_right(y, x):
    torch.testing.assert_close(y, F.silu(F.group_norm(x.double().contiguous(), 32)).to(y.dtype))


@pytest.fixture(params=SHARING)
def shared(request):
    """A family whose programs wait for one another, with images of several shapes and its outputs when it runs alone."""
    family, found = request.param, []
    for x in map(_images, DIFFUSION):
        with pinned(family):
            found.append((x, _norm(family, x)))
        _assert_right(found[-1][1], x)
    torch.cuda.synchronize()
    return family, found


class Lane:
    """A stream that runs a family on images, and counts elements that differ from those of a run alone.

    The host does not wait until `wrong` is read.
    """

    def __init__(self, family, images):
        self.family, self.images, self.stream = family, images, torch.cuda.Stream()
        self._wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()

    def _run(self, images):
        for x, expected in images:
            self._wrong.add_((_norm(self.family, x) != expected).sum())

    def run(self, times, first=0):
        """Run `times` calls, with the shapes in turn."""
        with torch.cuda.stream(self.stream):
            self._run(islice(cycle(self.images), first, first + times))

    def capture(self):
        self.run(len(self.images))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._run(self.images)
        return self

    def replay(self):
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    @property
    def wrong(self):
        torch.cuda.synchronize()
        return self._wrong.item()


def test_teams_on_several_streams(shared):
    """Different shapes run at the same time."""
    lanes = [Lane(*shared) for _ in range(4)]
    for turn in range(100):
        for i, lane in enumerate(lanes):
            lane.run(1, first=turn + i)
    assert [lane.wrong for lane in lanes] == [0] * 4


def test_teams_in_two_graphs_at_once(shared):
    family, images = shared
    lanes = Lane(family, images).capture(), Lane(family, images[::-1]).capture()
    for _ in range(200):
        for lane in lanes:
            lane.replay()
    assert [lane.wrong for lane in lanes] == [0, 0]


def test_teams_in_a_graph_and_outside_of_it_at_once(shared):
    inside, outside = Lane(*shared).capture(), Lane(*shared)
    for turn in range(200):
        inside.replay()
        outside.run(2, first=turn)
    assert inside.wrong == outside.wrong == 0


def test_teams_in_a_graph_back_to_back(shared):
    lane = Lane(*shared).capture()
    for _ in range(300):
        lane.replay()
    lane.run(20)  # without the graph, on the same stream
    assert lane.wrong == 0


def test_a_graph_of_teams_reads_its_input_anew(shared):
    family, ((x, expected), *_) = shared
    lane = Lane(family, [(torch.zeros_like(x), expected)]).capture()
    lane.images[0][0].copy_(x)
    before = lane.wrong  # on zeros
    lane.replay()
    assert 0 < before == lane.wrong


def test_teams_in_two_threads(shared):
    family, images = shared
    lanes = Lane(family, images), Lane(family, images[::-1])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda lane: lane.run(300), lanes))
    assert [lane.wrong for lane in lanes] == [0, 0]


@pytest.mark.parametrize("times", [1000, pytest.param(10000, marks=pytest.mark.slow)])
def test_teams_leave_no_memory_behind(shared, times):
    lanes = [Lane(*shared), Lane(*shared).capture()]

    def allocated(calls):
        for i in range(calls):
            lanes[i % 2].run(1, first=i // 2)
            if i % 10 == 0:
                lanes[1].replay()
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    assert allocated(10) == allocated(times)
    assert [lane.wrong for lane in lanes] == [0, 0]


def test_teams_give_the_same_bits_every_time(shared):
    lane = Lane(*shared)
    lane.run(20 * len(DIFFUSION))
    assert lane.wrong == 0


@pytest.mark.parametrize("family", [*SHARING, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_teams_on_memory_that_lies_otherwise(family, dtype):
    """If a family cannot read this memory, another runs, or it raises."""
    shape, wide = (2, 320, 24, 40), _images((4, 448, 48, 44), dtype)
    x = _images(shape, dtype)
    inputs = [
        wide[:2, 64:384, :24, 2:42],
        wide[:2, :320, ::2, :40],
        wide[::2, 3:323, :24, :40],
        wide[:1, :320, :24, :40].expand(2, -1, -1, -1),
    ]
    for shift in (1, 2, 3, 4):
        flat = torch.empty(x.numel() + 8, dtype=dtype, device="cuda")[shift : shift + x.numel()]
        inputs.append(flat.view(2, 24, 40, 320).movedim(-1, 1).copy_(x))
    ran = 0
    for t in inputs:
        try:
            y = _norm(family, t)
        except CannotForce:
            continue
        ran += 1
        _assert_right(y, t)
    assert ran == len(inputs) or family


@pytest.mark.parametrize("family", SHARING)
def test_teams_with_parameters_anywhere(family):
    x, flat = _images((2, 320, 24, 40)), torch.randn(700, device="cuda").half()
    weight, bias = flat[1:321], flat[330:650]
    with pinned(family):
        y = O.group_norm(x, 32, weight, bias)
    torch.testing.assert_close(y, F.group_norm(x.double().contiguous(), 32, weight.double(), bias.double()).half())


@pytest.mark.parametrize("family", SHARING)
@pytest.mark.parametrize("shape", DIFFUSION)
def test_batch_invariance_of_teams(family, shape):
    x = _images((17, *shape[1:]))
    with onepass.batch_invariant(True), pinned(family):
        together = _norm(family, x)
        for n in (1, 2, 5, 16):
            assert torch.equal(_norm(family, x[:n].clone(memory_format=torch.preserve_format)), together[:n])


@pytest.mark.parametrize("shape", [(2, 320, 64, 64), (2, 1280, 32, 32), (4, 512, 64, 64), (64, 512, 64, 64)])
def test_the_planner_picks_teams(shape):
    """The planner chooses teams where they were measured to be faster."""
    with pinned("team"):
        _norm("team", _images(shape))
    assert _plan(lambda x: O.group_norm(x, 32, activation="silu"), _images(shape)) in SHARING


def test_without_cooperative_launches():
    """Another family runs, and `explain` says why."""
    explained = onepass.explain(O.group_norm, _images(DIFFUSION[0]), 32)
    device = replace(explained.device, no_team="programs cannot be launched together here")
    planned = plan(explained.problem, device)
    assert planned.family not in SHARING and set(SHARING) <= dict(planned.why_not).keys()
    assert device.no_team in " ".join(dict(planned.why_not)["team"])
    assert device.no_team in str(replace(explained, device=device, forward=planned)).partition("\nbackward")[0]


def test_parameters_that_are_not_contiguous():
    x, params = torch.randn(64, 256, device="cuda"), torch.randn(256, 2, device="cuda")
    with torch.no_grad():
        y = O.layer_norm(x, (256,), params[:, 0], params[:, 1])
    torch.testing.assert_close(y, F.layer_norm(x, (256,), *params.T.contiguous()))


BACKWARD = {  # a call for each family of the backward
    "row": lambda x, w: O.layer_norm(x, x.shape[-1:], w[: x.shape[-1]], activation="silu"),
    "row_reread": lambda x, w: O.batch_norm(x, None, None, w[:20], w[:20], training=True),
    "whole_set": lambda x, w: O.group_norm(x, 4, w[:20], w[:20], activation="silu"),
    "tile": lambda x, w: O.layer_norm2d(x, w[:20], w[:20], activation="relu"),
    "tile_reread": lambda x, w: O.group_norm(x.to(memory_format=torch.channels_last), 4, w[:20], w[:20], activation="silu"),
    "apply": lambda x, w: O.batch_norm(x, *torch.ones(2, x.shape[1], device=x.device, dtype=x.dtype), w[:20], w[:20]),
}


def _leaves(dtype=torch.float16):
    weight = torch.linspace(-1, 1, 20000, device="cuda").to(dtype)
    return _input(dtype).requires_grad_(), weight.requires_grad_()


def _gradients(call, x, weight):
    return torch.autograd.grad(call(x, weight), (x, weight), torch.ones_like(x))


@pytest.mark.parametrize("family", BACKWARD)
def test_the_planner_picks_it_for_the_backward(family):
    assert onepass.explain(BACKWARD[family], *_leaves()).backward.family == family


@pytest.mark.parametrize("family", BACKWARD)
def test_gradients_have_the_same_bits_twice(family):
    leaves = _leaves()
    first = _gradients(BACKWARD[family], *leaves)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(_gradients(BACKWARD[family], *leaves), first))


@pytest.mark.parametrize("shape", DIFFUSION)
def test_teams_in_a_backward(shape):
    """The gradients are right, and have the same bits on two streams at once and in every call."""
    x = torch.randn(shape, device="cuda").to(torch.float16).requires_grad_()
    weight, bias = (torch.randn(shape[1], device="cuda").half().requires_grad_() for _ in range(2))
    dy = torch.randn_like(x)
    exact = F.silu(F.group_norm(x.double(), 32, weight.double(), bias.double()))
    expected = torch.autograd.grad(exact, (x, weight, bias), dy.double())
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for stream in islice(cycle(streams), 40):
        with torch.cuda.stream(stream), pinned("whole_set"):
            found.append(torch.autograd.grad(O.group_norm(x, 32, weight, bias, activation="silu"), (x, weight, bias), dy))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for grads in found[1:] for a, b in zip(grads, found[0]))
    for ours, right in zip(found[0], expected):
        torch.testing.assert_close(ours.double(), right.double(), rtol=2**-9, atol=2**-9 * right.abs().max().item())


@pytest.mark.parametrize("shape", [(1000, 64), (300, 4096), (200, 16384), (33, 40000)])
def test_parameter_gradients_of_rows_have_the_same_bits_twice(shape):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.randn(2, shape[1], device="cuda").unbind()
    weight, bias, dy = weight.requires_grad_(), bias.requires_grad_(), torch.randn_like(x)
    runs = [torch.autograd.grad(O.layer_norm(x, shape[1:], weight, bias), (x, weight, bias), dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))
    exact = torch.autograd.grad(F.layer_norm(x.double(), shape[1:], weight.double(), bias.double()), (x, weight, bias), dy.double())
    for ours, right in zip(runs[0], exact):
        torch.testing.assert_close(ours.double(), right.double(), rtol=2**-7, atol=2**-7 * right.abs().max().item())


def test_a_training_step_in_a_graph():
    """Forward, backward and optimizer, captured and replayed, give the same as the steps without a graph."""

    def model():
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 32, 3), onepass.nn.GroupNorm(4, 32), onepass.nn.BatchNorm2d(32), torch.nn.Flatten(1)]
        return torch.nn.Sequential(*layers, onepass.nn.LayerNorm(32 * 14 * 14), torch.nn.Linear(32 * 14 * 14, 8)).cuda()

    x = torch.randn(16, 3, 16, 16, device="cuda")

    def step(net, optimizer):
        optimizer.zero_grad(set_to_none=False)
        net(x).square().mean().backward()
        optimizer.step()

    nets = model(), model()
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in nets]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            for net, optimizer in zip(nets, optimizers):
                step(net, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(nets[1], optimizers[1])
    for _ in range(3):
        step(nets[0], optimizers[0])
        graph.replay()
    for ours, captured in zip(nets[0].state_dict().values(), nets[1].state_dict().values()):
        torch.testing.assert_close(ours, captured)


@pytest.mark.parametrize("family", BACKWARD)
def test_compile_with_gradients(family):
    """There is no graph break, and the numbers are the same."""
    x, weight = _leaves(torch.float32)
    call = torch.compile(lambda t, w: BACKWARD[family](t * 2, w) + 1, fullgraph=True)
    expected = _gradients(lambda t, w: BACKWARD[family](t * 2, w) + 1, x, weight)
    torch.testing.assert_close(_gradients(call, x, weight), expected)


def test_the_backward_allocates_little():
    """It allocates the gradients and partial sums of the parameters, and nothing else of x's size."""
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y, dy = O.layer_norm(x, (4096,), weight), torch.randn_like(x)
    torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(y, (x, weight), dy)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * x.numel() * x.element_size()


def test_double_backward_by_the_definition():
    x = torch.randn(6, 40, device="cuda", requires_grad=True)
    (dx,) = torch.autograd.grad(O.layer_norm(x, (40,)).square().sum() + O.layer_norm(x, (40,)).pow(3).sum(), x, create_graph=True)
    (ours,) = torch.autograd.grad(dx.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    y = F.layer_norm(wide, (40,))
    (dwide,) = torch.autograd.grad(y.square().sum() + y.pow(3).sum(), wide, create_graph=True)
    (exact,) = torch.autograd.grad(dwide.square().sum(), wide)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3)


def test_compile():
    x = torch.randn(4, 20, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    function = torch.compile(lambda t: O.group_norm(t * 2, 4, activation="silu") + 1, fullgraph=True)
    torch.testing.assert_close(function(x), F.silu(F.group_norm(x * 2, 4)) + 1)


@pytest.mark.parametrize("shape", [(2, 320, 64, 64), (2, 1280, 32, 32), (64, 512, 64, 64)])
def test_teams_compiled_into_graphs(shape):
    """Counters that are created while torch.compile warms up must not be in the memory pool of its graphs."""
    x = _images(shape)
    call = torch.compile(lambda t: O.group_norm(t * 2, 32, activation="silu") + 0, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            y = call(x).clone()
    _assert_right(y, x * 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["row", "row_reread", "tile_reread"])
def test_gradients_of_more_than_2_31_elements(family):
    shape = {"row": (2**21 + 1, 1024), "row_reread": (3, 2**30 - 8), "tile_reread": (3, 8, 2**14, 5462)}[family]
    x = torch.empty(shape, dtype=torch.float16, device="cuda").normal_()
    x = (x.to(memory_format=torch.channels_last) if family == "tile_reread" else x).requires_grad_()
    dy = torch.empty_like(x).normal_()
    y = O.group_norm(x, 2) if family == "tile_reread" else O.rms_norm(x, shape[-1:], eps=1e-5)
    (dx,) = torch.autograd.grad(y, x, dy)
    del y
    with torch.no_grad():
        for part in (slice(0, 1), slice(len(x) - 1, len(x))):
            v, d = x[part].float(), dy[part].float()
            dims = (2, 3) if family == "tile_reread" else -1
            if family == "tile_reread":
                v, d = v.unflatten(1, (2, 4)), d.unflatten(1, (2, 4))
                dims = (2, 3, 4)
                v = v - v.mean(dims, keepdim=True)
            rstd = v.square().mean(dims, keepdim=True).add(1e-5).rsqrt()
            v *= rstd
            c1 = d.mean(dims, keepdim=True) if family == "tile_reread" else 0
            expected = (d - c1 - v * (d * v).mean(dims, keepdim=True)) * rstd
            tail = slice(-(2**20), None)
            torch.testing.assert_close(dx[part].float().flatten()[tail], expected.flatten()[tail], rtol=2**-9, atol=2**-9)


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
    for part in (slice(0, 1), slice(len(x) - 1, len(x))):  # the first and the last row or sample
        piece = x[part].flatten()[-(2**20) :].double()
        if family == "apply":
            expected = (piece - 0.5) / (0.5 + 1e-5) ** 0.5
        elif family == "tile_reread":
            expected = F.group_norm(x[part].float(), 2).flatten()[-(2**20) :].double()
        else:
            rstd = x[part].float().square().mean().add(1e-5).rsqrt().double()
            expected = piece * rstd
        torch.testing.assert_close(y[part].flatten()[-(2**20) :].double(), expected, rtol=2**-9, atol=2**-9)
