"""Planning is pure: the same problem, device and options give the same plan on any machine."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import onepass
from onepass.backends.family import BACKWARD, FORWARD
from onepass.bench.suite import BACKWARD_SUITE, SUITE, problem_of
from onepass.core import norms
from onepass.core.device import KNOWN_DEVICES, Device
from onepass.core.operands import OptionalOperands
from onepass.core.problem import bind
from onepass.dispatch import launchers
from onepass.planning.choose import plan
from onepass.planning.explain import explanation
from onepass.planning.options import DEFAULT, CannotForce, Options
from onepass.planning.registry import FAMILIES, family_named
from onepass.verify.tensors import lay_out

CPU, GPU = Device("cpu"), Device("cuda", "any")


def _bind(definition, shape=(4, 8, 6, 6), layout="contiguous", dtype=torch.float32, **flags):
    x = lay_out(torch.empty(shape, dtype=dtype, device="meta"), layout, "meta")  # planning needs no memory
    params = None if not flags.pop("affine", True) else torch.empty(1, dtype=dtype, device="meta")
    return bind(definition, x, params, params, **flags)


@pytest.mark.parametrize(
    "problem, forward, backward",
    [
        (_bind(norms.layer_norm(1)), "aten.rows", "aten.rows"),
        (_bind(norms.layer_norm(1), layout="transposed"), "aten.rows", "aten.rows"),
        (_bind(norms.layer_norm(1), dtype=torch.bfloat16), "aten.rows", "blockwise"),
        (_bind(norms.rms_norm(1, 1e-6)), "aten.rows", "blockwise"),
        (_bind(norms.group_norm(4)), "aten.row_groups", "aten.row_groups"),
        (_bind(norms.group_norm(4), affine=False), "aten.rows", "aten.rows"),
        (_bind(norms.group_norm(4), layout="channels_last"), "blockwise", "blockwise"),
        (_bind(norms.instance_norm()), "aten.row_groups", "aten.row_groups"),
        (_bind(norms.instance_norm(), track=True), "blockwise", "blockwise"),
        (_bind(norms.batch_norm()), "aten.channels", "aten.channels"),
        (_bind(norms.batch_norm(), dtype=torch.float16), "blockwise", "blockwise"),
        (_bind(norms.batch_norm(), layout="channels_last"), "blockwise", "blockwise"),
        (_bind(norms.batch_norm(), given=True), "aten.given", "blockwise"),
        (_bind(norms.layer_norm2d()), "blockwise", "blockwise"),
        (_bind(norms.layer_norm2d(), layout="channels_last"), "aten.rows", "aten.rows"),
        (_bind(norms.layer_norm(1), shape=(0, 8)), "reference", "reference"),
    ],
)
def test_the_plan(problem, forward, backward):
    assert str(plan(problem, CPU, "forward")) == forward
    assert str(plan(problem, CPU, "backward")) == backward


def test_a_gpu_runs_what_is_proved_there():
    chosen = plan(_bind(norms.layer_norm(1)), GPU)
    assert chosen.family == "blockwise" and "on the CPU only" in dict(chosen.why_not)["aten"][0]


def test_problems_are_hashable_and_plans_pure():
    one, two = _bind(norms.group_norm(2)), _bind(norms.group_norm(2))
    assert one == two and hash(one) == hash(two) and plan(one, CPU) == plan(two, CPU)


def test_the_last_family_supports_everything():
    for device in (CPU, GPU):
        for layout in ("contiguous", "channels_last", "strided"):
            assert FAMILIES[-1].unsupported(_bind(norms.group_norm(4), layout=layout), device, "backward") == []
        assert FAMILIES[-1].unsupported(_bind(norms.group_norm(4), shape=(0, 8)), device, "backward") == []


def test_force():
    x = torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    with (
        pytest.raises(
            ValueError,
            match="'fast' is unknown; expected one of c, aten, row, tile, whole_set, ring, team, apply, row_reread, tile_reread, block",
        ),
        onepass.force("fast"),
    ):
        pass
    with onepass.force("aten"), pytest.raises(onepass.CannotForce, match="27000 times the error budget"):
        onepass.functional.group_norm(x, 4)
    assert plan(_bind(norms.group_norm(4)), CPU, options=Options(family="reference")).family == "reference"


def test_explain(by_torch):
    text = str(onepass.explain(onepass.functional.group_norm, torch.randn(2, 320, 8, 8), 32))
    for part in ("outer 64, reps 1, sets 1, run 640", "(o % 32)·10 + (t // 64)", "aten.row", "at least 327680 bytes"):
        assert part in text
    copied = str(onepass.explain(onepass.functional.batch_norm, torch.randn(4, 6, 5, 8)[..., ::2], None, None, training=True))
    assert "x is copied first: no four-axis view" in copied
    with pytest.raises(TypeError, match="did not reach a norm"):
        onepass.explain(torch.relu, torch.randn(2))


def test_explain_reads_like_a_colleague(by_torch):
    x, weight, scale = torch.randn(4, 32, 8, 8).to(memory_format=torch.channels_last), torch.ones(32), torch.ones(4, 32)
    text = str(onepass.explain(onepass.functional.group_norm, x, 8, weight, weight, activation="silu", modulate=(scale, scale)))
    for part in (
        "32 sets, one for each (n, g), of 256 elements (k, *l); each shares one mean and variance",
        "outer 4, reps 64, sets 8, run 4; strides (2048, 32, 4, 1): a set is 64 runs of 4, 32 apart",
        "weight (float32) and bias (float32); the element at (o, r, s, t) uses number s·4 + t",
        "scale (float32) and shift (float32); the element at (o, r, s, t) uses number (o % 4)·32 + s·4 + t",
        "y = silu(((x - mean)·rstd·weight + bias)·(1 + scale) + shift)",
        "forward   blockwise: reduce, combine and apply",
        f"at least {2 * 4 * 32 * 64 * 4 + 2 * 32 * 4 + 2 * 4 * 32 * 4} bytes (x read, y written, each parameter read, once)",
        "not aten: torch's channels-last kernel",
        "not reference (",
        "µs): blockwise is estimated at ",
    ):
        assert part in text, text
    added = str(
        onepass.explain(onepass.functional.add_rms_norm, torch.ones(4, 8).half(), torch.ones(4, 8), (8,), weight[:8], weight_offset=1.0)
    )
    for part in (
        "x + residual, float16 and float32, rounded to [4, 8] float32",
        "x·rstd·(weight + 1)",
        "sum and y written",
        f"{32 * 14 + 32} bytes",
    ):
        assert part in added, added
    with onepass.force("reference"):
        assert "µs): reference is forced" in str(onepass.explain(onepass.functional.layer_norm, torch.ones(2, 4), (4,)))


def test_explain_does_not_run():
    mean, var = torch.zeros(6), torch.ones(6)
    onepass.explain(onepass.functional.batch_norm, torch.randn(4, 6), mean, var, training=True)
    assert not mean.any()


def test_explain_for_a_gpu_that_is_not_here():
    x = torch.empty(2, 512, 256, 256, dtype=torch.float16, device="meta").to(memory_format=torch.channels_last)
    here = onepass.explain(onepass.functional.group_norm, x, 32)
    there = here.on("h200")
    assert (here.forward.family, there.forward.family, there.backward.family) == ("blockwise", "ring", "ring")
    assert "on H200" in str(there) and re.search(r"team \(\d+ µs\), .*: ring is estimated at \d+ µs", str(there))
    with pytest.raises(ValueError, match="'h100', expected one of a100, h200"):
        here.on("h100")


def test_a_family_that_runs_only_if_it_is_forced(monkeypatch):
    monkeypatch.setattr(family_named("blockwise"), "only_forced", True, raising=False)
    problem = _bind(norms.layer_norm(1), (4, 8))
    assert plan(problem, GPU).family == "reference"
    assert plan(problem, GPU, options=Options("blockwise")).family == "blockwise"
    assert "not blockwise: it runs only if it is forced" in str(explanation(problem, GPU, Options()))


H200, MI300 = KNOWN_DEVICES["h200"], KNOWN_DEVICES["mi300x"]
PLAIN = Device("cuda", "some GPU", 60, 32, 49152, True, False, "")


@pytest.mark.parametrize("device", [H200, PLAIN, MI300], ids=lambda device: device.name)
@pytest.mark.parametrize(
    "problem, family, backward",
    [
        (_bind(norms.layer_norm(1), (4096, 256)), "row", "row"),
        (_bind(norms.layer_norm(1), (4096, 16384)), "row", ("ring", "row", "row")),
        (_bind(norms.layer_norm(1), (4096, 32768)), ("ring", "row", "row"), ("ring", "row_reread", "row_reread")),
        (_bind(norms.layer_norm(1), (4096, 32769)), ("ring", "row_reread", "row_reread"), "row_reread"),
        (_bind(norms.rms_norm(1, 1e-6), (1, 2**23)), "row_reread", "row_reread"),
        (
            _bind(norms.group_norm(32), (2, 320, 64, 64), dtype=torch.float16),
            ("whole_set", "row_reread", "row_reread"),
            ("whole_set", "row_reread", "row_reread"),
        ),
        (_bind(norms.group_norm(32), (1, 128, 1024, 1024), "channels_last", torch.float16), "tile_reread", "tile_reread"),
        (_bind(norms.group_norm(32), (2, 320, 4, 4), "channels_last", torch.float16), "whole_set", "tile"),
        (_bind(norms.instance_norm(), (8, 64, 14, 14), "channels_last", torch.float16), "tile", "tile"),
        (_bind(norms.instance_norm(), (8, 64, 56, 56)), "row", ("whole_set", "whole_set", "row")),
        (_bind(norms.batch_norm(), (64, 64, 56, 56)), ("ring", "row_reread", "row_reread"), ("ring", "row_reread", "row_reread")),
        (_bind(norms.batch_norm(), (64, 64, 56, 56), "channels_last"), "tile_reread", "tile_reread"),
        (_bind(norms.batch_norm(), (64, 64, 56, 56), given=True), "apply", "apply"),
        (_bind(norms.layer_norm2d(), (8, 96, 56, 56)), "tile", "tile"),
        (_bind(norms.switchable_norm(True), (8, 64, 56, 56), "channels_last"), "tile_reread", "tile_reread"),
        (_bind(norms.layer_norm(1), (64, 256), dtype=torch.float64), "blockwise", "blockwise"),
        (_bind(norms.layer_norm(1), (0, 256)), "reference", "reference"),
    ],
)
def test_the_plan_on_a_gpu(problem, family, backward, device):
    """If there are three families, each is for one device. Programs can share sets on the H200 and on some GPU."""
    at = (H200, PLAIN, MI300).index(device)
    for direction, families in ((FORWARD, family), (BACKWARD, backward)):
        assert plan(problem, device, direction).family == (families if isinstance(families, str) else families[at])


@pytest.mark.parametrize("device", [H200, PLAIN, MI300], ids=lambda device: device.name)
@pytest.mark.parametrize("row", SUITE, ids=lambda row: row.name)
def test_what_is_launched(row, device):
    """Every launch has 2ⁿ warps, at most 1024 threads, blocks that cover its set, and memory for its stages."""
    problem = problem_of(row)
    for step in plan(problem, device).launches:
        w = step.walk
        assert step.warps & (step.warps - 1) == 0 and step.warps * device.warp <= 1024 and 0 < step.programs < 2**31
        for block in (step.block_i, step.block_j, getattr(step, "block_run", 1), getattr(step, "sets_per_block", 1)):
            assert block & (block - 1) == 0
        if step.name in ("whole_set", "team", "ring"):
            assert step.programs == step.teams * step.members and step.teams <= step.units
        if step.name == "whole_set":
            assert step.members == 1 or step.programs * step.warps * device.warp <= 512 * device.sms  # with 128 registers for each
            assert step.units == w.total and w.run % step.block_j == 0
            assert step.members * step.rows >= w.reps > (step.members - 1) * step.rows
            assert step.block_i == step.warps * device.warp and step.vectors * step.block_i * step.block_j >= step.rows * w.run
        elif step.name == "team":
            assert step.programs <= device.sms
            assert step.members * step.rows >= w.reps > (step.members - 1) * step.rows and step.blocks * step.sets >= w.sets
            assert step.block_j >= step.sets * w.run and (step.block_i >= step.rows or not step.resident)
        elif step.name == "ring":
            assert step.programs <= device.sms
            assert step.spans * step.span >= w.columns and step.span % w.run == 0 and step.tiles * step.block_j >= step.span
        elif step.name in ("row", "tile") and step.resident:
            assert (step.block_j if step.name == "row" else step.block_i) + step.remainder >= (w.run if step.name == "row" else w.reps)
        elif step.name == "row":
            split = step.split
            assert split.parts_r * split.chunk_r >= w.reps and split.parts_t * split.chunk_t * step.block_j >= w.run
            assert w.reps == 1 or step.block_i == 1 or step.block_j >= w.run  # see _part in row/kernel.py
        elif step.name == "tile":
            assert step.parts_r * step.chunk_r >= w.reps and step.blocks * step.block_j >= w.columns
        stages = step.slots if step.name == "ring" else getattr(step, "stages", 1)
        assert stages == 1 or (stages - 1) * step.block_i * step.block_j * problem.dtype.itemsize <= device.shared
        assert not (getattr(step, "pdl_trigger", False) or getattr(step, "pdl_wait", False)) or device.chains


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(256,), (2**17,), (320, 8, 8), (640, 8, 16), (160, 64, 64), (320, 64, 64)])
@pytest.mark.parametrize(
    "device", [H200, replace(H200, no_team="whole_set"), PLAIN, MI300], ids=lambda device: device.name + device.no_team[:5]
)
def test_invariant_plans_do_not_know_the_batch(shape, residual, layout, device):
    """One sample and many have the same family and the same launch shape, except for the number of programs."""

    def cut(n: int):
        definition = norms.layer_norm(1) if len(shape) == 1 else norms.group_norm(32)
        x = lay_out(torch.empty((n, *shape), dtype=torch.float16, device="meta"), layout if len(shape) > 1 else "contiguous", "meta")
        problem = bind(definition, x, torch.empty(1), optional=OptionalOperands(residual=x if residual else None))
        chosen = plan(problem, device, options=Options(invariant=True))
        bare = {"total": 0, "x": (), "y": (), "param": None, "modulation": None}
        return chosen.family, [
            replace(p, programs=0, walk=replace(p.walk, **bare)) for p in chosen.launches if p.name != "combine" and not p.reads_statistics
        ]

    assert cut(1) == cut(3) == cut(64) == cut(4096)


@pytest.mark.parametrize("step", [50257, 50261, 50264])
@pytest.mark.parametrize("family", [None, "row_reread"])
def test_invariant_plans_do_not_know_how_far_rows_are_apart(family, step):
    """x of one row has no distance between rows, and y has another than an x that is a slice."""

    def cut(n: int):
        x = torch.empty(n, step, dtype=torch.float16, device="meta")[:, :50257]
        problem = bind(norms.layer_norm(1), x, torch.empty(50257), torch.empty(50257))
        chosen = plan(problem, H200, options=Options(family, invariant=True))
        return chosen.family, family_named("row_reread").cost(problem, H200, "forward", True), getattr(chosen.launches[0], "peel", 0)

    assert cut(1) == cut(2) == cut(64)


@pytest.mark.parametrize(
    "problem",
    [
        _bind(norms.layer_norm(1), (2**22, 4)),
        _bind(norms.batch_norm(), (1, 2**16), given=True),
        _bind(norms.switchable_norm(True), (256, 2048, 7, 7)),
        _bind(norms.rms_norm(1, 1e-6), (2**16, 3, 2)),
    ],
)
def test_small_sets_share_programs(problem):
    for step in plan(problem, H200).launches:
        if step.name != "combine":
            assert step.block_i * step.block_j >= 1024, step


def test_few_rows_get_many_threads():
    """A thread has one vector of a row. With a batch-invariant plan, the number of rows must not matter."""
    few, many = (_bind(norms.layer_norm(1), (rows, 4096), dtype=torch.bfloat16) for rows in (128, 8192))
    (one,), (other,) = (plan(problem, H200).launches for problem in (few, many))
    assert 32 * one.warps * 8 == one.block_i * one.block_j == 4096 and 32 * other.warps * 8 < other.block_i * other.block_j
    (one,), (other,) = (plan(problem, H200, options=Options("row", invariant=True)).launches for problem in (few, many))
    assert one.warps == other.warps


def test_tiles_load_ahead_only_through_shared_memory():
    """Runs with an odd number of 16-bit elements would be kept in registers, which spilled."""
    odd, even = (_bind(norms.group_norm(groups), (4, 280, 18, 18), "channels_last", torch.bfloat16) for groups in (40, 20))
    (one,), (other,) = (plan(problem, H200, options=Options("tile")).launches for problem in (odd, even))
    assert one.remainder and one.stages == 1 and other.stages == 3 and one.warps > other.warps


@pytest.mark.parametrize(
    "length, aligned, unaligned", [(45, True, True), (181, True, True), (46, True, False), (96, False, False), (400, False, False)]
)
def test_stripes_of_short_rows(length, aligned, unaligned):
    """If x and y are loaded and stored few bytes at a time. Without them if only x is, because of its address."""
    problem = _bind(norms.rms_norm(1, 1e-6), (20000, length), dtype=torch.bfloat16)
    for now, expected in ((problem, aligned), (replace(problem, aligned=False), unaligned)):
        assert (plan(now, H200, options=Options("row")).launches[0].stripe > 0) == expected


def test_the_ends_of_odd_runs_are_peeled_off():
    """If runs are long, and x and y begin at the same distance from a multiple of 16 bytes."""
    odd = _bind(norms.batch_norm(), (8, 90, 233, 233), dtype=torch.float16)
    strided = bind(norms.layer_norm(1), torch.empty(40, 50261, dtype=torch.float16, device="meta")[:, :50257])
    short, even = (_bind(norms.batch_norm(), (8, 90, side, side), dtype=torch.float16) for side in (15, 232))
    for problem, peel in ((odd, 8), (replace(odd, aligned=False), 0), (strided, 0), (short, 0), (even, 0)):
        launches = plan(problem, H200, options=Options("row_reread")).launches
        assert launches[0].peel == launches[-1].peel == peel
        launches = plan(problem, H200, options=Options("row_reread", invariant=True)).launches
        assert not launches[0].peel  # where a run begins must not decide in which order its elements are added


def test_rows_loaded_ahead_fit_in_shared_memory():
    """Parameters that all rows share are not loaded ahead. Those of groups of several channels are."""
    small = replace(H200, shared=101376, no_ring="another GPU")
    row = _bind(norms.layer_norm(1), (4096, 5311), dtype=torch.float32)
    group = _bind(norms.group_norm(8), (4096, 24, 45, 45), dtype=torch.float32)
    for problem, device, stages in ((row, H200, 3), (row, small, 3), (group, small, 1)):
        (launch,) = plan(problem, device, options=Options("row")).launches
        assert launch.peel and launch.stages == stages


@pytest.mark.parametrize(
    "channels, groups, side, peels", [(200, 8, 15, (8, 0)), (64, 2, 128, (0, 0)), (90, 3, 189, (8, 8)), (64, 2, 181, (0, 8))]
)
def test_groups_and_channels_may_begin_at_different_places(channels, groups, side, peels):
    """`reduce` reads groups as they lie in memory, and `apply` reads channels."""
    problem = _bind(norms.group_norm(groups), (2, channels, side, side), dtype=torch.float16)
    reduce, _, apply = plan(problem, H200, options=Options("row_reread")).launches
    assert (reduce.peel, apply.peel) == peels


@pytest.mark.parametrize("dtype, channels, copies", [(torch.float32, 80, True), (torch.float16, 80, False), (torch.float32, 81, True)])
def test_when_an_x_at_an_odd_address_is_copied_first(dtype, channels, copies):
    """If that lets a loop load vectors ahead. Elements of 16 bits are not loaded ahead. A plan for that address loads nothing ahead."""
    problem = _bind(norms.batch_norm(), (8, channels, 209, 210), "channels_last", dtype)
    assert plan(problem, H200, options=Options("tile_reread")).launches[0].needs_aligned_x(problem) == copies
    odd = replace(problem, aligned=False)
    assert not plan(odd, H200, options=Options("tile_reread")).launches[0].needs_aligned_x(odd)


@pytest.mark.parametrize("family, copies", [("team", False), ("whole_set", False), ("ring", True)])
def test_only_ring_always_copies_an_x_at_an_odd_address(family, copies):
    """A descriptor cannot begin there. In other families only x is loaded element by element."""
    problem = _bind(norms.instance_norm(), (6, 400, 32, 33), "channels_last", torch.float16)
    assert plan(problem, H200, options=Options(family)).launches[0].needs_aligned_x(problem) == copies


def test_a_copy_is_part_of_the_cost():
    """At an odd address `ring` must copy x first, and `whole_set` need not."""
    problem = _bind(norms.rms_norm(1, 1e-6), (669, 65536), "contiguous", torch.float32)
    assert plan(problem, H200).family == "ring"
    odd = replace(problem, aligned=False)
    assert plan(odd, H200).family == "whole_set"
    assert "multiple of 16 bytes" not in str(explanation(problem, H200, DEFAULT))
    assert "does not begin at a multiple of 16 bytes: the forward loads it element by element" in str(explanation(odd, H200, DEFAULT))
    images = replace(_bind(norms.instance_norm(), (12, 160, 99, 99), "channels_last", torch.float16), aligned=False)
    assert "the forward copies x first" in str(explanation(images, H200, DEFAULT))


@pytest.mark.parametrize(
    "shape, layout, family, warps",
    [
        ((39, 32000), "contiguous", "row", 32),
        ((9, 400000), "contiguous", "row_reread", 32),
        ((1, 80, 90, 90), "channels_last", "tile_reread", 8),
    ],
)
def test_more_warps_at_an_odd_address(shape, layout, family, warps):
    """There each element is loaded alone, so a thread has few."""
    from onepass.backends.gpu.forward import kernels

    problem = _bind(norms.group_norm(1) if len(shape) == 4 else norms.layer_norm(1), shape, layout, torch.bfloat16)
    first = kernels(problem, plan(problem, H200, options=Options(family)).launches)[0]
    assert first.source(["x"]).warps == warps > first.source().warps
    assert all(launch.unaligned_warps * MI300.warp <= 1024 for launch in plan(problem, MI300, options=Options(family)).launches[:1])


def test_sets_of_several_runs_are_gathered():
    """One program reads the runs of a set one after another."""
    problem = _bind(norms.batch_norm(), (8, 256, 14, 14), dtype=torch.bfloat16)
    chosen = plan(problem, H200)
    (launch,) = chosen.launches
    assert (chosen.family, launch.programs, launch.block_j) == ("row", 256, 2048) and launch.reads == 1


@pytest.mark.parametrize("shape, name, programs", [((8, 64, 56, 56), "row", 8 * 64 * 4), ((32, 512, 7, 7), "tile", 784)])
def test_given_statistics_are_applied_in_the_order_of_memory(shape, name, programs):
    """A program has one block of a run, or reads short runs across sets."""
    (launch,) = plan(_bind(norms.batch_norm(), shape, given=True), H200).launches
    assert (launch.name, launch.programs) == (name, programs)


def test_long_odd_runs_are_cut_the_same_way_in_every_batch():
    one, many = (_bind(norms.layer_norm(1), (rows, 2**22 + 1)) for rows in (1, 5))
    one, many = (plan(problem, H200, options=Options("row_reread", invariant=True)).launches[0] for problem in (one, many))
    assert (one.block_j, one.warps, one.stages, one.split) == (many.block_j, many.warps, many.stages, many.split)


def test_short_rows_share_a_program():
    """A row of up to 256 elements belongs to one warp: a program has a multiple of as many rows as warps."""
    for dtype in (torch.float16, torch.float32):
        for length in (8, 19, 64, 128, 200, 256):
            (launch,) = plan(_bind(norms.rms_norm(1, 1e-6), (100000, length), dtype=dtype), H200, options=Options("row")).launches
            assert launch.block_i % launch.warps == 0, (dtype, length)


def test_a_long_row_fills_the_gpu():
    for step in plan(_bind(norms.layer_norm(1), (1, 2**24)), H200).launches[::2]:
        assert step.programs >= H200.sms


def _diffusion(n, channels, side):
    return _bind(norms.group_norm(32), (n, channels, side, side), "channels_last", torch.float16)


@pytest.mark.parametrize(
    "problem, members",
    [(_diffusion(2, 320, 64), 8), (_diffusion(2, 1280, 32), 2), (_diffusion(2, 640, 32), 4)],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_teams_for_diffusion_models(problem, members):
    """Teams use one launch on nearly all multiprocessors."""
    (step,) = plan(problem, H200, options=Options("team")).launches
    assert (step.members, step.resident) == (members, True)
    assert 0.9 * H200.sms <= step.programs <= H200.sms and step.units == step.teams


@pytest.mark.parametrize(
    "problem, family, members",
    [
        *((_diffusion(2, 320, 64), "team", 8), (_diffusion(2, 1280, 32), "whole_set", 4), (_diffusion(2, 1920, 32), "whole_set", 4)),
        *((_diffusion(2, 640, 32), "whole_set", 1), (_diffusion(2, 1280, 8), "row", 1), (_diffusion(8, 1280, 16), "whole_set", 1)),
        *((_diffusion(16, 320, 64), "tile_reread", 5), (_diffusion(2, 640, 64), "tile_reread", 13)),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_the_fastest_for_diffusion_models(problem, family, members):
    """The planner chooses what was fastest on an H200 (docs/measured.md)."""
    chosen = plan(problem, H200)
    first = chosen.launches[0]
    assert (chosen.family, first.parts_r if family == "tile_reread" else getattr(first, "members", 1)) == (family, members)


@pytest.mark.parametrize("device", [H200, PLAIN, MI300], ids=lambda device: device.name)
@pytest.mark.parametrize("shape", [(3, 7, 40, 41), (1, 30, 9, 9), (5, 33, 128, 1), (2, 640, 64, 64), (64, 1920, 8, 8), (2, 60, 301, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [1, 3, 32])
@pytest.mark.parametrize("invariant", [False, True])
def test_sets_alone_have_every_element(shape, dtype, groups, invariant, device):
    problem = _bind(norms.group_norm(groups), (shape[0], shape[1] * groups, *shape[2:]), "channels_last", dtype)
    try:
        (step,) = plan(problem, device, options=Options("whole_set", invariant=invariant)).launches
    except CannotForce as reason:
        assert "a set is one run" in str(reason) or "is too large for the registers of one team" in str(reason)
        return
    w, threads = step.walk, step.warps * device.warp
    assert step.members * step.rows >= w.reps > (step.members - 1) * step.rows and step.units == w.total
    assert w.run % step.block_j == 0 and step.block_i == threads and step.vectors * threads * step.block_j >= step.rows * w.run
    assert step.members == 1 or (step.programs * threads <= 512 * device.sms and not device.no_team)


@pytest.mark.parametrize("shape", [(3, 7, 40, 41), (1, 30, 9, 9), (5, 33, 128, 1), (2, 640, 64, 64), (64, 1920, 8, 8), (2, 60, 301, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [1, 3, 32])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_team_has_every_row_and_column(shape, dtype, groups, invariant):
    channels = shape[1] * groups
    problem = _bind(norms.group_norm(groups), (shape[0], channels, *shape[2:]), "channels_last", dtype)
    try:
        (step,) = plan(problem, H200, options=Options("team", invariant=invariant)).launches
    except CannotForce as reason:
        assert "a set is one run" in str(reason) or "is longer than the 256 columns" in str(reason)
        return
    w = step.walk
    assert step.members * step.rows >= w.reps > (step.members - 1) * step.rows
    assert step.blocks * step.sets >= w.sets > (step.blocks - 1) * step.sets and step.block_j >= step.sets * w.run
    assert step.members <= step.programs <= H200.sms and step.programs % step.members == 0


@pytest.mark.parametrize("shape", [(3, 7, 40, 41), (1, 30, 16, 9), (2, 10, 64, 64), (8, 60, 8, 8), (2, 3, 31, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [1, 3, 32])
@pytest.mark.parametrize("invariant", [False, True])
def test_whole_sets_have_every_element_in_a_backward(shape, dtype, groups, invariant):
    problem = _bind(norms.group_norm(groups), (shape[0], shape[1] * groups, *shape[2:]), dtype=dtype)
    try:
        step, sums = plan(problem, H200, BACKWARD, Options("whole_set", invariant=invariant)).launches
    except CannotForce as reason:
        assert shape[2] * shape[3] % 32 and "a channel has fewer than 32 elements" in str(reason)
        return
    channel = shape[2] * shape[3]
    assert step.stretches * step.block_j == step.walk.run and channel % step.block_j == 0 and step.block_j <= 512 // dtype.itemsize
    assert step.members * step.steps * step.block_i >= step.stretches > (step.members - 1) * step.steps * step.block_i
    assert sums.cells == step.walk.total * step.stretches and sums.sums == shape[1] * groups
    _can_wait(step)


def _can_wait(step):
    """Programs that wait for each other run at the same time, and their registers suffice for that."""
    assert step.members <= step.programs and step.programs % step.members == 0
    assert step.members == 1 or step.programs <= step.programs_per_sm * H200.sms
    assert step.programs_per_sm * step.warps * 32 * step.max_registers <= 65536


@pytest.mark.parametrize("row", [row for row in BACKWARD_SUITE if row.nbytes > 2**24], ids=lambda row: row.name)
def test_the_backward_of_ring_needs_little_memory(row):
    backward = pytest.importorskip("onepass.backends.gpu.backward")
    problem = problem_of(row)
    chosen = plan(problem, H200, BACKWARD)
    if chosen.family == "ring":
        assert 4 * sum(backward.steps_of(problem, chosen.launches, backward.ALL, False).workspace.values()) <= 0.02 * row.nbytes


def test_the_backward_of_whole_sets_stores_few_cells():
    """With short stretches, cells may take much memory only if x is small. With batch invariance, they never may."""
    short = [_bind(norms.instance_norm(), (batch, 64, 56, 56), dtype=torch.float16) for batch in (8, 512)]
    long = [_bind(norms.group_norm(32), (batch, 320, 64, 64), dtype=torch.float16) for batch in (1, 512)]
    assert [plan(problem, H200, BACKWARD).family for problem in short] == ["whole_set", "row"]
    invariant = [plan(problem, H200, BACKWARD, Options(invariant=True)).family for problem in (*short, *long)]
    assert invariant == ["row", "row", "ring", "ring"]


@pytest.mark.parametrize("device, stages", [("a100", 2), ("h200", 3)])
def test_the_gradient_of_a_sum_takes_shared_memory_too(device, stages):
    x = torch.empty(4000, 8192, device="meta")
    problem = bind(norms.layer_norm(1), x, x[0], x[0], optional=OptionalOperands(x))
    assert plan(problem, KNOWN_DEVICES[device], BACKWARD).launches[0].stages == stages
    assert plan(bind(norms.layer_norm(1), x, x[0], x[0]), KNOWN_DEVICES[device], BACKWARD).launches[0].stages == 3


def test_a_mix_of_very_many_sets():
    x = torch.empty(65536, 33000, 2, dtype=torch.float16, device="meta").transpose(1, 2).contiguous().transpose(1, 2)
    chosen = plan(bind(norms.switchable_norm(True), x, None, None), H200)
    assert dict(chosen.why_not)["tile_reread"] == ("there are 2**30 sets or more, and the kernels of a mix count them in 32 bits",)


@pytest.mark.parametrize("shape", [(32, 512, 256, 256), (2, 512, 256, 256), (64, 512, 64, 64), (32, 256, 128, 128)])
def test_a_ring_for_what_is_large(shape):
    """Large x stays in shared memory, several units at a time, on nearly all multiprocessors."""
    problem = _bind(norms.group_norm(32), shape, "channels_last", torch.float16)
    chosen = plan(problem, H200)
    (step,) = chosen.launches
    assert chosen.family == "ring" and step.resident and step.programs >= 0.9 * H200.sms
    assert 3 * step.blocks <= step.slots and step.slots * step.block_i * step.block_j * 2 <= H200.shared
    assert plan(problem, replace(H200, no_ring="another GPU")).family == "tile_reread"


@pytest.mark.parametrize("shape", [(3, 7, 40, 41), (1, 30, 9, 9), (5, 32, 128, 1), (2, 640, 64, 64), (64, 1920, 8, 8), (2, 60, 301, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_ring_has_every_row_and_set(shape, dtype, groups, invariant):
    problem = _bind(norms.group_norm(groups), (shape[0], shape[1] * groups, *shape[2:]), "channels_last", dtype)
    try:
        (step,) = plan(problem, H200, options=Options("ring", invariant=invariant)).launches
    except CannotForce as reason:
        assert any(word in str(reason) for word in ("a set is one run", "begin at multiples of 16", "combined at a time"))
        return
    w, span = step.walk, step.span
    assert step.tiles * step.block_j >= span
    assert step.spans * span >= w.columns and (step.spans == 1 or span % w.run == 0) and step.sets >= min(span // w.run, w.sets)
    rows = math.ceil(w.reps / step.block_i)
    assert step.members <= rows and step.members <= step.programs <= H200.sms and step.programs % step.members == 0
    assert step.blocks <= step.keep or (step.back and 0 < step.keep <= step.slots)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_ring_keeps_parameters_that_all_rows_share(invariant):
    """Members of a team keep the weights of their elements in shared memory only if each element has one, the same in every row."""

    def kept(definition, shape, weight_shape, **more):
        x, weight = (torch.empty(of, dtype=torch.float16, device="meta") for of in (shape, weight_shape))
        (step,) = plan(bind(definition, x, weight, weight, **more), H200, options=Options("ring", invariant=invariant)).launches
        return step.kept

    assert kept(norms.layer_norm(1), (64, 131072), (131072,))
    assert not kept(norms.group_norm(2), (8, 131072), (131072,))  # two rows in turn have different weights
    scale = torch.empty(8, 40000, dtype=torch.float16, device="meta")
    one_weight = norms.layer_norm(1, granularity="global", modulated=True)
    assert not kept(one_weight, (8, 40000), (), optional=OptionalOperands(None, scale, scale))


def test_without_teams():
    chosen = plan(_diffusion(2, 320, 64), replace(H200, no_team="200 programs must run at the same time"))
    assert chosen.family == "tile_reread" and ("team", ("200 programs must run at the same time",)) in chosen.why_not
    assert plan(_diffusion(2, 320, 64), H200, "backward").family == "tile_reread"


def test_a_team_that_does_not_fit_is_planned_again(monkeypatch):
    """Compiling may show that a team does not fit. Then another family runs, and explain gives the reason."""
    forward = pytest.importorskip("onepass.backends.gpu.forward")
    monkeypatch.setattr(launchers, "describe", lambda device: H200)
    monkeypatch.setattr(forward, "check_launchable", lambda _, launches, *__: "too many programs" if launches[0].name == "team" else "")
    chosen, device = launchers.plan_launchable(_diffusion(2, 320, 64), torch.device("cuda", 0), Options())
    assert chosen.family == "tile_reread" and device == replace(H200, no_team="too many programs")
    monkeypatch.setattr(
        forward, "check_launchable", lambda _, launches, *__: "too many programs" if getattr(launches[0], "members", 1) > 1 else ""
    )
    chosen, device = launchers.plan_launchable(_diffusion(2, 1280, 32), torch.device("cuda", 0), Options())
    assert chosen.family not in ("whole_set", "team") and device.no_team == "too many programs"
    with pytest.raises(CannotForce, match="too large for the registers of one team: too many programs"):
        launchers.plan_launchable(_diffusion(2, 1280, 32), torch.device("cuda", 0), Options("whole_set"))


@pytest.mark.parametrize("direction, family", [(FORWARD, "team"), (FORWARD, "whole_set"), (BACKWARD, "whole_set")])
def test_a_team_whose_programs_do_not_fit_says_so(direction, family, monkeypatch):
    forward = pytest.importorskip("onepass.backends.gpu.forward")
    from onepass.backends.gpu.launch.kernel import Kernel
    from onepass.backends.gpu.launch.occupancy import NotResident

    def load(kernel, device):
        raise NotResident("too many programs" if kernel.cooperative else "not asked for")

    monkeypatch.setattr(Kernel, "load", load)
    monkeypatch.setattr(forward, "INTERPRETED", False)
    monkeypatch.setattr(forward, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    problem = _bind(norms.group_norm(32), (2, 320, 64, 64), "channels_last" if family == "team" else "contiguous", torch.float16)
    launches = plan(problem, H200, direction, Options(family)).launches
    assert launches[0].members > 1
    assert family_named(family).check_launchable(problem, launches, torch.device("cuda", 0), direction) == "too many programs"


@pytest.mark.parametrize(
    "problem, peeled",
    [
        (_bind(norms.layer_norm(1), (9001, 767)), True),
        (_bind(norms.layer_norm(1), (9001, 767), affine=False), True),
        (_bind(norms.layer_norm(1), (9001, 767), dtype=torch.float16), True),
        (_bind(norms.layer_norm(1), (3001, 767), dtype=torch.float16), False),  # few elements
        (_bind(norms.layer_norm(1), (1001, 5003), dtype=torch.float16), True),
        (_bind(norms.instance_norm(), (64, 64, 75, 75), dtype=torch.float16), True),
        (_bind(norms.instance_norm(), (64, 64, 75, 75)), False),  # the elements of a row share their parameters
    ],
)
def test_which_rows_of_odd_length_are_peeled(problem, peeled):
    (launch,) = plan(problem, H200, options=Options("row")).launches
    assert bool(launch.peel) == peeled


@pytest.mark.parametrize("length, blocks", [(65, (64, 8)), (131, (128, 8)), (139, (128, 16)), (112, (128, 0))])
def test_rows_a_little_longer_than_a_power_of_two(length, blocks):
    (launch,) = plan(_bind(norms.layer_norm(1), (300000, length), dtype=torch.float16), H200, options=Options("row")).launches
    assert (launch.block_j, launch.remainder) == blocks
