"""The rows that `onepass bench` measures."""

from dataclasses import replace

from onepass.bench.suite import BACKWARD_SUITE, SUITE, problem_of


def test_names_are_unique():
    assert len({row.name for row in (*SUITE, *BACKWARD_SUITE)}) == len(SUITE) + len(BACKWARD_SUITE)
    assert {row.direction for row in SUITE} == {"forward"} and {row.direction for row in BACKWARD_SUITE} == {"backward"}


def test_copies_are_the_least_traffic():
    for row in (*SUITE, *BACKWARD_SUITE):
        problem = replace(problem_of(row), weight=None, bias=None, scale=None, shift=None)
        assert problem.min_bytes(row.direction) == 2 * row.copies * row.nbytes, row.name
