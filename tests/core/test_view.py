"""The view table, proved element by element: which elements share a set, and which parameter each one uses."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepass.cli import picture
from onepass.core import norms, spec
from onepass.core.problem import NormProblem, bind
from onepass.core.view import ParamMap, View
from onepass.verify.tensors import lay_out


def _brute_force(definition: spec.NormSpec, x: torch.Tensor, set_of, param_of, modulation_of=lambda index: 0) -> NormProblem:
    """Check every (o, r, s, t) of the view.

    `set_of`, `param_of` and `modulation_of` give the expected set and parameters.
    """
    problem = bind(definition, x)
    view, y_view, param, modulation = problem.x, problem.y, problem.param, problem.modulation
    assert view is not None and y_view is not None and param is not None and modulation is not None
    stride = problem.y_stride if problem.copied else x.stride()
    where: dict[int, list[tuple[int, ...]]] = {}  # address -> the indices of x that live there (several if x is expanded)
    for index in itertools.product(*map(range, x.shape)):
        where.setdefault(sum(i * s for i, s in zip(index, stride)), []).append(index)
    y_where = {sum(i * s for i, s in zip(index, problem.y_stride)): index for index in itertools.product(*map(range, x.shape))}
    sets: dict[tuple[int, int], set] = {}
    seen = set()
    for o, r, s, t in itertools.product(*map(range, view.sizes)):
        index = y_where[sum(i * k for i, k in zip((o, r, s, t), y_view.strides))]
        address = sum(i * k for i, k in zip((o, r, s, t), view.strides))
        assert index in where[address], "x and y disagree about the element"
        assert param.index(o, r, s, t) == param_of(index), (o, r, s, t, index)
        assert modulation.index(o, r, s, t) == modulation_of(index), (o, r, s, t, index)
        sets.setdefault((o, s), set()).add(set_of(index))
        seen.add(index)
    assert len(seen) == x.numel(), "the view misses elements"
    assert all(len(members) == 1 for members in sets.values()), "one set of the view mixes sets of the norm"
    assert len(set.union(*sets.values())) == len(sets), "one set of the norm is split over sets of the view"
    assert view.run == 1 or view.strides[3] == y_view.strides[3] == 1
    return problem


def _norms(shape: tuple[int, ...], groups: int):
    """Each norm, with its definition as functions of the indices of x."""
    _n, c, *_rest = shape
    width = c // groups
    yield norms.group_norm(groups), lambda i: (i[0], i[1] // width), lambda i: i[1]
    yield norms.instance_norm(), lambda i: i[:2], lambda i: i[1]
    yield norms.batch_norm(), lambda i: i[1], lambda i: i[1]
    yield norms.layer_norm2d(), lambda i: (i[0], i[2:]), lambda i: i[1]
    for rank in range(1, len(shape) + 1):
        tail = shape[-rank:]
        flat = lambda i, tail=tail, rank=rank: int(torch.tensor([0]) + sum(v * _step(tail, k) for k, v in enumerate(i[-rank:])))  # noqa: E731
        yield norms.layer_norm(rank), lambda i, rank=rank: i[: len(i) - rank], flat
        yield norms.rms_norm(rank, 1e-6), lambda i, rank=rank: i[: len(i) - rank], flat


def _step(shape: tuple[int, ...], k: int) -> int:
    step = 1
    for n in shape[k + 1 :]:
        step *= n
    return step


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("shape, groups", [((2, 6, 3, 4), 3), ((3, 4, 5), 2), ((2, 6), 1), ((1, 4, 2, 3), 4), ((2, 4, 1, 2, 3), 2)])
def test_every_norm_in_every_layout(shape, groups, layout):
    x = lay_out(torch.empty(shape), layout)
    for definition, set_of, param_of in _norms(shape, groups):
        if bind(definition, x).x is None:
            # One parameter per element, in another order than x: these three reduced axes cannot be merged into two.
            assert len(definition.params.split()) > 2 and layout in ("channels_last", "transposed")
        else:
            _brute_force(definition, x, set_of, param_of)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_memory(seed):
    """Random shapes under random permutations and slices of memory."""
    draw = random.Random(seed)
    groups = draw.choice([1, 2, 3])
    shape = (draw.randint(1, 3), groups * draw.randint(1, 3), *(draw.randint(1, 3) for _ in range(draw.randint(0, 3))))
    order = draw.sample(range(len(shape)), len(shape))
    padded = [shape[d] + draw.choice([0, 0, 1]) for d in order]
    x = torch.empty(padded).permute([order.index(d) for d in range(len(shape))])
    x = x[tuple(slice(0, n) for n in shape)]
    for definition, set_of, param_of in _norms(shape, groups):
        if bind(definition, x).x is not None:  # a few permutations have no view; the reference family runs them
            _brute_force(definition, x, set_of, param_of)


def _extended(shape: tuple[int, ...], groups: int):
    """Norms that torch does not have. Yields the definition, and the expected set, parameter and modulation."""
    _, *positions, c = shape
    width = c // groups
    yield norms.group_norm(groups, channel_dim=-1), lambda i: (i[0], i[-1] // width), lambda i: i[-1], lambda i: 0
    yield norms.instance_norm(channel_dim=-1), lambda i: (i[0], i[-1]), lambda i: i[-1], lambda i: 0
    yield norms.batch_norm(channel_dim=-1), lambda i: i[-1], lambda i: i[-1], lambda i: 0
    per_sample = lambda i: i[0] * c + i[-1]  # noqa: E731
    yield norms.group_norm(groups, channel_dim=-1, modulated=True), lambda i: (i[0], i[-1] // width), lambda i: i[-1], per_sample
    yield norms.instance_norm(channel_dim=-1, modulated=True), lambda i: (i[0], i[-1]), lambda i: i[-1], per_sample
    yield norms.layer_norm(1, modulated=True), lambda i: i[:-1], lambda i: i[-1], per_sample
    yield norms.rms_norm(1, 1e-6, modulated=True), lambda i: i[:-1], lambda i: i[-1], per_sample
    if positions:
        first = positions[0]
        rank = len(shape) - 1
        yield norms.layer_norm(rank, granularity="channel"), lambda i: i[0], lambda i: i[1], lambda i: 0
        yield norms.layer_norm(rank, granularity="global"), lambda i: i[0], lambda i: 0, lambda i: 0
        by_channel = lambda i: i[0] * first + i[1]  # noqa: E731
        yield norms.layer_norm(rank, granularity="channel", modulated=True), lambda i: i[0], lambda i: i[1], by_channel
        yield norms.layer_norm2d(modulated=True), lambda i: (i[0], i[2:]), lambda i: i[1], by_channel


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "transposed", "reversed", "sliced", "expanded"])
@pytest.mark.parametrize("shape, groups", [((2, 3, 4, 6), 3), ((3, 5, 4), 2), ((2, 6), 2), ((2, 4, 1, 2, 3), 3), ((1, 4, 2, 6), 6)])
def test_modulation_granularity_and_channels_last(shape, groups, layout):
    x = lay_out(torch.empty(shape), layout)
    for definition, set_of, param_of, modulation_of in _extended(shape, groups):
        if bind(definition, x).x is None:  # (1) has no term for kept axes inside the reduced ones without a parameter
            assert layout in ("transposed", "reversed")
            continue
        _brute_force(definition, x, set_of, param_of, modulation_of)


def _rows():
    """The table of views: norm, layout, view sizes and parameter map, for N=2, C=6, H=3, W=4, G=3."""
    n, c, size, g = 2, 6, 12, 3
    k = c // g
    nchw, nhwc = "contiguous", "channels_last"
    yield norms.group_norm(g), nchw, (n * g, 1, 1, k * size), ParamMap(1, g, k, 0, 0, size, 1)
    yield norms.group_norm(g), nhwc, (n, size, g, k), ParamMap(1, 1, 0, 0, k, 1, 1)
    yield norms.instance_norm(), nchw, (n * c, 1, 1, size), ParamMap(1, c, 1, 0, 0, 1, 0)
    yield norms.instance_norm(), nhwc, (n, size, c, 1), ParamMap(1, 1, 0, 0, 1, 1, 0)
    yield norms.batch_norm(), nchw, (1, n, c, size), ParamMap(1, 1, 0, 0, 1, 1, 0)
    yield norms.batch_norm(), nhwc, (1, n * size, c, 1), ParamMap(1, 1, 0, 0, 1, 1, 0)
    yield norms.layer_norm2d(), nchw, (n, c, size, 1), ParamMap(1, 1, 0, 1, 0, 1, 0)
    yield norms.layer_norm2d(), nhwc, (n * size, 1, 1, c), ParamMap(1, 1, 0, 0, 0, 1, 1)
    yield norms.layer_norm(2), nhwc, (n, size, c, 1), ParamMap(1, 1, 0, 1, 0, 1, 0)
    yield norms.layer_norm(3), nchw, (n, 1, 1, c * size), ParamMap(1, 1, 0, 0, 0, 1, 1)
    yield norms.layer_norm(3), nhwc, (n, size, 1, c), ParamMap(1, 1, 0, 1, 0, 1, size)
    yield norms.layer_norm(3, granularity="channel"), nchw, (n, 1, 1, c * size), ParamMap(1, 1, 0, 0, 0, size, 1)
    yield norms.layer_norm(3, granularity="channel"), nhwc, (n, size, 1, c), ParamMap(1, 1, 0, 0, 0, 1, 1)
    yield norms.layer_norm(3, granularity="global"), nchw, (n, 1, 1, c * size), ParamMap(1, 1, 0, 0, 0, 1, 0)
    yield norms.layer_norm(3, granularity="global"), nhwc, (n, 1, 1, c * size), ParamMap(1, 1, 0, 0, 0, 1, 0)


@pytest.mark.parametrize("definition, layout, sizes, param", list(_rows()))
def test_the_table(definition, layout, sizes, param):
    problem = bind(definition, lay_out(torch.empty(2, 6, 3, 4), layout))
    assert problem.x is not None
    assert (problem.x.sizes, problem.param, problem.copied) == (sizes, param, "")


def test_modulation_is_a_second_map():
    problem = bind(norms.layer_norm(1, modulated=True), torch.empty(2, 7, 5))
    assert problem.x is not None and problem.x.sizes == (14, 1, 1, 5)
    assert problem.param == ParamMap(1, 1, 0, 0, 0, 1, 1) and problem.modulation == ParamMap(7, 2, 5, 0, 0, 1, 1)


def test_heads_of_a_fused_projection_need_no_copy():
    qkv = torch.empty(5, 3 * 4 * 8)
    problem = bind(norms.rms_norm(1, 1e-6), qkv[:, 32:64].view(5, 4, 8))
    assert problem.x == View(5, 1, 4, 8, strides=(96, 0, 8, 1)) and not problem.copied


def test_copies_are_said():
    x = torch.empty(4, 6, 5, 8)[..., ::2]
    problem = bind(norms.batch_norm(), x)
    assert problem.x is not None and "no four-axis view of strides" in problem.copied


def test_min_bytes():
    problem = bind(norms.layer_norm(1), torch.empty(10, 8, dtype=torch.float16), torch.empty(8), torch.empty(8))
    assert problem.min_bytes("forward") == 2 * 10 * 8 * 2 + 2 * 8 * 4
    assert problem.min_bytes("backward") == 3 * 10 * 8 * 2 + 2 * 8 * 4


def test_the_picture_shows_the_sets():
    """The picture is drawn from the views. Its sets agree with the definitions."""
    sizes = {"BatchNorm": 16, "InstanceNorm": 4, "GroupNorm, 2 groups": 12, "LayerNorm over C": 6, "LayerNorm2d": 6}
    for title, definition, order in picture.PANELS:
        cube = picture.members(picture.problem_of(definition, order), order, 1, 2, 3)
        assert cube.shape == (4, 6, 4) and cube.sum() == sizes.get(title, 24)
        alone = {"BatchNorm": cube[:, 2].all(), "InstanceNorm": cube[1, 2].all(), "GroupNorm, 2 groups": cube[1, :3].all()}
        assert alone.get(title, cube[1, :, 3].all())
