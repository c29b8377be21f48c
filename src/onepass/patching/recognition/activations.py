"""Find the activation of onepass that a module or a function computes, by comparing results, not names."""

from __future__ import annotations

import types
from itertools import product
from typing import Any

import torch
from torch import nn

from onepass.patching.analysis.analyze import analyze_forward, analyze_function
from onepass.patching.analysis.branch_recorder import BranchRecorder
from onepass.patching.analysis.values import Analysis
from onepass.patching.guards import is_plain
from onepass.patching.swapped_norm import ACTIVATIONS

from .stand_ins import isolated, stand_in, trial_key
from .trial_cases import DTYPES

_names: dict[Any, str | None] = {}


def activation_name(act: Any) -> str | None:
    """Return the name of the activation that a module or a function computes, such as "silu"; None if onepass lacks it."""
    if isinstance(act, nn.Module) and (
        any(True for _ in act.parameters()) or any(True for _ in act.children()) or "forward" in act.__dict__
    ):
        return None
    key = trial_key(act) if isinstance(act, nn.Module) else act
    if key not in _names:
        try:
            analysis = analyze_forward(act, Analysis()) if isinstance(act, nn.Module) else analyze_function(act)
            changeable = [path for path, value in analysis.guarded.items() if is_plain(value) and path != "self.inplace"]
            matching = [] if changeable else [name for name in ACTIVATIONS if _computes(act, name, analysis)]
        except Exception:  # `act` cannot be compared, so it is not fused
            matching = []
        _names[key] = matching[0] if matching else None
    return _names[key]


def _computes(act: Any, name: str, analysis: Analysis) -> bool:
    """Return whether `act` computes the activation `name`.

    The two are compared for several dtypes, ranks and sizes, in training and evaluation, with and without gradients.
    """
    recorder, function = BranchRecorder(analysis), ACTIVATIONS[name]
    far = torch.tensor([-1e6, -1e3, -100, 100, 1e3, 1e6], dtype=torch.float32)
    line = torch.cat([torch.linspace(-20, 20, 4001, dtype=torch.float32), far])
    inputs = (line, line[:24].view(2, 3, 4), line[:1], line[:0])
    with isolated():
        for x, dtype, needs_grad, training in product(inputs, DTYPES, (True, False), (True, False)):
            call, twin = recorder.instrumented(act), None
            if isinstance(act, nn.Module):
                twin = stand_in(act, type(act))
                call, twin.training = types.MethodType(recorder.instrumented(type(act).forward), twin), training
            key = None if twin is None else trial_key(twin)
            tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-6)
            given = [x.to(dtype).requires_grad_(needs_grad) for _ in range(2)]
            with torch.set_grad_enabled(needs_grad):
                found, expected = call(given[0] * 1), function(given[1])
            pairs = [(found, expected)]
            if needs_grad and x.numel():
                pairs += zip(torch.autograd.grad(found.sum(), given[0]), torch.autograd.grad(expected.sum(), given[1]))
            if any(a.dtype != b.dtype or not torch.allclose(a, b, tolerance, tolerance, equal_nan=True) for a, b in pairs):
                return False
            if twin is not None and trial_key(twin) != key:  # the call changed the module
                return False
    return not recorder.one_sided_condition()
