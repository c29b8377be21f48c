"""Every problem that compute-sanitizer sees can run by its family, and every GPU family has problems."""

import pytest

from benchmarks import sanitize
from onepass.backends.gpu.family import GpuFamily
from onepass.bench.suite import Row, problem_of
from onepass.core.device import KNOWN_DEVICES
from onepass.planning.choose import plan
from onepass.planning.options import Options
from onepass.planning.registry import FAMILIES


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if isinstance(family, GpuFamily)])
def test_the_family_can_run_its_problems(family):
    for case, dtype in sanitize.PROBLEMS[family]:
        assert plan(problem_of(Row(case, dtype)), KNOWN_DEVICES["h200"], options=Options(family)).launches
