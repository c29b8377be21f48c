"""The matrix of every case on every family."""

from onepass.verify import cases, matrix


def test_an_empty_cell_without_a_reason_fails():
    assert not matrix.Cell(cases.CASES[0], "blockwise", matrix.DTYPES[0]).ok
    assert matrix.Cell(cases.CASES[0], "blockwise", matrix.DTYPES[0], reasons=("because",)).ok
