"""How the commands print layouts and times."""

from __future__ import annotations

from onepass.verify.cases import Case

LAYOUTS = {"nchw": "contiguous", "nhwc": "channels_last"}


def layout_name(case: Case) -> str:
    """The short name of a case's layout if x has four dimensions, else the long one."""
    return {name: short for short, name in LAYOUTS.items()}[case.layout] if len(case.shape) == 4 else case.layout


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
