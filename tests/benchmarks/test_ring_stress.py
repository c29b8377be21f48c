"""The stress test of the ring, which delays one hand-over at a time. On a Hopper GPU, nothing may be wrong."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from math import ceil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import onepass
from benchmarks import ring_stress
from benchmarks.resources import TARGETS
from benchmarks.ring_stress import FENCES, HANDOVERS, SHAPES, Cell, Tally
from onepass.core import device

H200 = TARGETS["sm_90"][1]
RING = Path(onepass.__file__).parent / "backends" / "gpu" / "ring"


def test_every_hand_over_stands_in_the_kernels_once():
    text = "".join(path.read_text() for path in RING.glob("*.py"))
    found = re.findall(r'(?:late|crowded)\(mode\.stress, "([^"]+)"', text)
    assert sorted(found) == sorted(filter(None, HANDOVERS))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("one block", {"tiles": 1, "back": 0, "at_once": 1, "ragged": False}),
        ("two at once", {"tiles": 1, "back": 0, "at_once": 2, "ragged": False}),
        ("tiles", {"tiles": 3, "back": 0, "at_once": 1}),
        ("ragged", {"back": 0, "ragged": True}),
        ("again", {"back": 3, "at_once": 1}),
        ("columns", {"by_column": True, "by_row": False, "back": 0}),
        ("rows", {"by_column": True, "by_row": True, "back": 0}),
        ("one set", {"single": True, "ragged": True, "messages": 1, "back": 0}),
        ("runs", {"folded": True, "tiles": 2, "back": 0, "phases": 1}),
        ("runs again", {"folded": True, "tiles": 1, "back": 3}),
        ("odd runs", {"folded": True, "tiles": 2, "phases": 8, "ragged": True}),
    ],
)
def test_shapes_refill_their_slots(name, expected):
    shape = SHAPES[name]
    _, (launch,) = ring_stress.planned(shape, H200)
    mode = launch.mode(None)
    assert {key: getattr(mode, key) for key in expected} == expected
    rows = ceil(launch.walk.reps / launch.block_i)
    assert rows >= launch.members and launch.units >= 2 * launch.teams
    assert launch.units // launch.teams * launch.tiles * ceil(rows / launch.members) > 2 * launch.slots
    assert 4 * launch.programs <= H200.sms


def test_a_launch_passes_nothing_of_it():
    """The stress is compiled in as a constant. So a launch passes no more arguments than before."""
    production, stressed = (ring_stress.source("one block", stress, H200) for stress in (None, "apply block/none"))
    assert production.types == stressed.types and "apply block/none" in dict(stressed.constants).values()
    changed = set(stressed.constants) ^ set(production.constants)
    assert {value for _, value in changed} == {None, "apply block/none"}


COMPILE = """
import json, sys
from benchmarks import ring_stress
from benchmarks.resources import TARGETS
target, device = TARGETS["sm_90"]
stresses = json.loads(sys.argv[1])
print(json.dumps([ring_stress.source("one block", stress, device).compile(target).asm["ptx"] for stress in stresses]))
"""


def test_what_is_compiled():
    """The production kernel reads no clock, and has a fence between the wait for a slot and the copy into it.

    Kernels of the stress test have the delay and the fence that it asks for.
    """
    stresses = [None, "apply block/none", "apply crowd/readers"]
    command = [
        sys.executable,
        "-c",
        COMPILE,
        json.dumps(stresses),
    ]  # a separate process: under TRITON_INTERPRET there is nothing to compile
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    production, delayed, crowded = json.loads(printed.splitlines()[-1])
    wait, copy, arrive = r"mbarrier\.try_wait", r"cp\.async\.bulk\.tensor", r"mbarrier\.arrive\.shared"
    fence = r"fence\.proxy\.async"

    def order(ptx: str) -> list[str]:
        return [match.lastgroup for match in re.finditer(f"(?P<wait>{wait})|(?P<copy>{copy})|(?P<fence>{fence})|(?P<arrive>{arrive})", ptx)]

    def before(ptx: str, event: str) -> list[str]:
        found = order(ptx)
        return [found[at - 1] for at, what in enumerate(found) if what == event]

    assert "%clock64" not in production and "st.volatile.shared" not in production
    assert before(production, "copy") == ["fence"] and order(production).count("fence") == 2  # the other follows the mbarrier setup
    assert before(delayed, "copy") == ["wait"] and "%clock64" in delayed
    assert before(crowded, "copy") == ["wait"] and crowded.count("st.volatile.shared") == 32 and "fence" in before(crowded, "arrive")


def test_cells():
    cells = ring_stress.cells(list(HANDOVERS), FENCES)
    assert cells[0] == Cell("apply block", "early", 1) and len(set(cells)) == len(cells)
    assert {(cell.handover, cell.streams) for cell in cells if cell.fence == "load"} == {(name, n) for name in HANDOVERS for n in (1, 4)}
    assert {cell.handover for cell in cells if cell.fence == "readers"} < set(HANDOVERS)
    assert ring_stress.shapes_of(Cell("reduce release", "load", 1)) == ["again"]
    assert ring_stress.cells(["combine reset"], ["load"]) == [Cell("combine reset", "load", 1), Cell("combine reset", "load", 4)]


def test_verdict():
    right, wrong = Tally(100), Tally(100, 2, 128)
    tallies = {Cell("", "load", 1): right, Cell("apply block", "early", 1): wrong, Cell("apply block", "none", 4): wrong}
    words, failures = ring_stress.verdict(tallies)
    assert failures == 0 and "the planted fault was seen" in words and "without it 2 launches" in words
    assert "100: 2 WRONG, 128 elements" in ring_stress.summary(tallies) and "nothing" in ring_stress.summary(tallies)
    assert ring_stress.verdict({**tallies, Cell("", "load", 4): wrong})[1] == 1
    assert ring_stress.verdict({Cell("apply block", "early", 1): right})[1] == 1  # the planted fault was not seen


def test_what_a_lane_counts(monkeypatch):
    """Runs on the CPU. In every other launch two rows of one block are wrong, in different columns."""
    for name, stand_in in (("Stream", lambda: None), ("stream", nullcontext), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(ring_stress, "DEVICE", "cpu")
    inputs = [torch.randn(2, 8, 3, 3).half().to(memory_format=torch.channels_last) for _ in range(ring_stress.INPUTS)]
    calls = []

    def launch(x):
        calls.append(x)
        y, rstd = x.clone(), torch.ones(2)
        if len(calls) % 2 == 0:
            y[0, :4, 1, 1] += 1
            y[1, 2:8, 0, 0] = torch.nan
        return [y, rstd]

    lane = ring_stress.Lane(launch, inputs, [[x, torch.ones(2)] for x in inputs], captured=False)
    for _ in range(3):
        lane.step()
    assert lane.counts() == (3 * ring_stress.BATCH, 9, 90) and len(calls) == 18
    assert lane.pattern() == "2 rows, 4, 6 columns of each"


def test_an_unknown_name(capsys):
    with pytest.raises(SystemExit):
        ring_stress.main(["--only", "apply blok"])
    assert "--only apply blok: unknown; expected some of load copy" in capsys.readouterr().err


@pytest.fixture(scope="module")
def images():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the ring is a Hopper's")
    made: dict[str, ring_stress.Images] = {}

    def image(name: str) -> ring_stress.Images:
        return made.setdefault(name, ring_stress.Images(name, device.describe(torch.device("cuda"))))

    return image


@pytest.mark.gpu
@pytest.mark.parametrize("handover", HANDOVERS)
def test_nothing_is_wrong_where_one_is_late(handover, images):
    cell = Cell(handover, "load", 4)
    found = ring_stress.run(cell, images(ring_stress.shapes_of(cell)[0]), 0.3)
    assert found["launches"] > 0 and (found["wrong"], found["elements"]) == (0, 0)


@pytest.mark.gpu
def test_a_slot_released_too_early_shows(images):
    assert ring_stress.run(Cell("apply block", "early", 1), images("one block"), 0.3)["wrong"] > 0
