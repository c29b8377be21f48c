"""Every problem that compute-sanitizer sees can run by its family, and every GPU family has problems."""

import pytest

from benchmarks import sanitize
from onepass.backends.family import BACKWARD, FORWARD
from onepass.backends.gpu.family import GpuFamily
from onepass.backends.gpu.mix.launch import MixWeightsLaunch
from onepass.backends.gpu.partials.sums import JointSums, SumsLaunch
from onepass.backends.gpu.ring.launch_backward import COLUMNS, ELEMENTS, KINDS, RingBackwardLaunch
from onepass.bench.suite import Row, problem_of
from onepass.core.device import KNOWN_DEVICES
from onepass.planning.choose import plan
from onepass.planning.options import Options
from onepass.planning.registry import FAMILIES


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if isinstance(family, GpuFamily)])
def test_the_family_can_run_its_problems(family):
    for case, dtype in sanitize.PROBLEMS[family]:
        assert plan(problem_of(Row(case, dtype)), KNOWN_DEVICES["h200"], options=Options(family)).launches


def test_backwards_run_all_families_and_kinds_of_launches():
    device = KNOWN_DEVICES["h200"]
    jobs = sanitize.jobs(BACKWARD, device)
    assert {family for family, *_ in jobs} == {*sanitize.PROBLEMS} - {"team"}  # which has no backward
    assert sanitize.jobs(FORWARD, device)[0][0] == "row"
    assert {(case, dtype) for _, case, dtype in jobs} >= {*sanitize.BACKWARDS, *sanitize.PROBLEMS["ring"]}
    plans = [plan(problem_of(Row(case, dtype)), device, BACKWARD, Options(family)) for family, case, dtype in jobs]
    launches = [launch for found in plans for launch in found.launches]
    rings = [launch for launch in launches if isinstance(launch, RingBackwardLaunch)]
    assert {ring.kind for ring in rings} == {*KINDS} and {ring.by_column for ring in rings} == {True, False}
    assert {(ring.kind, ring.tiles > 1) for ring in rings} >= {(COLUMNS, True), (COLUMNS, False), (ELEMENTS, True), (ELEMENTS, False)}
    assert {SumsLaunch, JointSums, MixWeightsLaunch} <= {type(launch) for launch in launches}
