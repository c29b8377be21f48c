"""How the commands print layouts and times."""

from __future__ import annotations

from onepass.verify.cases import Case

from .arguments import LAYOUTS


def layout_name(case: Case) -> str:
    """Return the layout of a case: "nchw" or "nhwc" if x has four dimensions, otherwise the name in `case.layout`."""
    return {name: short for short, name in LAYOUTS.items()}[case.layout] if len(case.shape) == 4 else case.layout


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
