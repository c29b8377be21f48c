"""Runs one program with torch and with onepass, and compares the outcomes."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from onepass import functional as O

from .changes import CONVERTING
from .compare import for_torch, judge
from .program import draw, execute
from .raw_ops import is_raw, raw


def run(seed: int, index: int, device: str = "cpu") -> str:
    """Run program number `index`, and return what is wrong, or "". Every tenth is a call of `raw` instead."""
    if is_raw(index):
        return raw(seed, index, device)
    program = draw(seed, index)
    reference = for_torch(program)
    torchs = None if program.freed else execute(reference, F, index, device=device)
    exact = replace(reference, before="" if reference.before.endswith(CONVERTING[:3]) else reference.before)
    return judge(program, torchs, execute(program, O, index, device=device), lambda: execute(exact, F, index, True, device))
