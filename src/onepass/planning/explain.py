"""`explain`, which describes in words how a call would run.

A *set* is the elements that share one mean and variance. A *family* is one way to compute norms (backends/family.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from onepass.backends.family import BACKWARD, FORWARD, Family
from onepass.core.device import KNOWN_DEVICES, Device
from onepass.core.problem import NormProblem

from .choose import Plan, plan
from .compiled import choose
from .options import CannotForce, Options, current_options, options_in_context
from .registry import FAMILIES, family_named


class ExplainRequested(Exception):
    """Raised by a norm that `explain` calls, instead of running. Carries the problem and device of the call."""

    def __init__(self, problem: NormProblem, device: Device) -> None:
        super().__init__(problem, device)
        self.problem, self.device = problem, device


@dataclass(frozen=True)
class Explanation:
    """A description of how a call would run.

    `str()` of it lists the sets, the view of memory, the parameters, the plans, and why other families were not chosen.
    """

    problem: NormProblem
    device: Device
    forward: Plan
    backward: Plan
    options: Options

    def on(self, name: str) -> Explanation:
        """Return how the call would run on another GPU: "a100", "h200", "b200", "mi300x" or "rx7900". No GPU is needed.

        Example: `onepass.explain(onepass.functional.group_norm, x, 32).on("h200")`
        """
        if name not in KNOWN_DEVICES:
            raise ValueError(f"name is {name!r}, expected one of {', '.join(KNOWN_DEVICES)}: other GPUs must be present to plan for them")
        return explanation(self.problem, KNOWN_DEVICES[name], self.options)

    def __str__(self) -> str:
        p = self.problem
        parts = [("x", f"{list(p.shape)} {_name(p.dtype)} with strides {list(p.stride)}, on {self.device.name or self.device.kind}")]
        if p.addends:
            dtypes = " and ".join(_name(dtype) for dtype in p.addends)
            parts[0] = ("sum", f"x + residual, {dtypes}, rounded to {parts[0][1]}; what follows is about the sum")
        parts += [("sets", _sets(p)), ("view", _view(p))]
        if p.copied:
            parts.append(("copy", f"x is copied first: {p.copied}"))
        elif not p.aligned:
            copies = any(step.needs_aligned_x(p) for step in self.forward.launches[:1])
            how = "the forward copies x first" if copies else "the forward loads it element by element"
            parts.append(("address", f"x does not begin at a multiple of 16 bytes: {how}"))
        if p.x is not None and p.param is not None and p.modulation is not None:
            operands = (("weight", p.weight), ("bias", p.bias)), (("scale", p.scale), ("shift", p.shift))
            for title, named, index in zip(("parameter", "modulated"), operands, (p.param, p.modulation)):
                words = " and ".join(f"{name} ({_name(dtype)})" for name, dtype in named if dtype)
                if words or title == "parameter":
                    parts.append((title, f"{words or 'none given'}; the element at (o, r, s, t) uses number {index}"))
        parts.append(("result", _formula(p)))
        for chosen in (self.forward, self.backward):
            what = family_named(chosen.family).summary
            parts.append((chosen.direction, f"{chosen}: {what}; at least {p.min_bytes(chosen.direction)} bytes ({_traffic(p, chosen)})"))
            if p.from_y and chosen.direction == "backward":
                parts.append(("", f'save="y": the forward keeps y in the place of x, and {_inverse(p)}'))
            parts += [("", f"launch {step}") for step in chosen.launches]
            parts += [("", f"not {names}: {reason}") for names, reason in grouped(self._unable(chosen))]
            able = ", ".join(self._able(chosen))
            parts += [("", f"not {able}: {self._why_chosen(chosen)}")] if able else []
        parts += self._compiled()
        return "\n".join(f"{title:9} {text}" for title, text in parts)

    def _compiled(self) -> list[tuple[str, str]]:
        """Return who would compute the norm under torch.compile, where it has no neighbours that inductor could fuse."""
        p = self.problem
        if p.x is None or p.given or p.scale or p.shift or p.spec.mix or p.from_y or p.spec.weight_offset:
            return []  # these stay with onepass
        inference, training = (choose(p, self.device, self.options, training) for training in (False, True))
        return [("compiled", f"without neighbours to fuse, by {inference}"), ("", f"in training, by {training}")]

    def _unable(self, chosen: Plan) -> Iterator[tuple[str, str]]:
        """Yield (name, reasons) for each family that the planner could not choose."""
        for family in FAMILIES:
            reasons = self._reasons(family, chosen)
            if reasons:
                yield family.name, "; ".join(reasons)
            elif family.name != chosen.family and self._only_forced(family, chosen):
                yield family.name, "it runs only if it is forced"

    def _able(self, chosen: Plan) -> Iterator[str]:
        """Yield the name and cost of each family that could run the call but was not chosen."""
        for family in FAMILIES:
            if family.name != chosen.family and not self._reasons(family, chosen) and not self._only_forced(family, chosen):
                yield f"{family.name} ({self._cost(family, chosen):.0f} µs)"

    def _only_forced(self, family: Family, chosen: Plan) -> bool:
        """Return whether the planner never chooses a family that could run the call. Its cost may be infinite."""
        return family.only_forced or self._cost(family, chosen) == inf

    def _why_chosen(self, chosen: Plan) -> str:
        if self.options.family is not None:
            return f"{chosen.family} is forced"
        return f"{chosen.family} is estimated at {self._cost(family_named(chosen.family), chosen):.0f} µs"

    def _reasons(self, family: Family, chosen: Plan) -> list[str]:
        return family.unsupported(self.problem.for_direction(chosen.direction), self.device, chosen.direction)

    def _cost(self, family: Family, chosen: Plan) -> float:
        return family.cost(self.problem.for_direction(chosen.direction), self.device, chosen.direction, self.options.invariant)


def grouped(reasons: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (names, reason), with the names of all families that give this reason, joined by commas."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    for reason, families in names.items():
        yield ", ".join(families), reason


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _sets(p: NormProblem) -> str:
    """Describe which elements share statistics, and which statistics."""
    axes = p.spec.factor(p.shape)
    kept, reduced = (", ".join(dict.fromkeys(a.name for a in axes if a.reduced == r)) for r in (False, True))
    count = prod(p.stat_shape)
    moments = "mean and variance" if p.spec.centered else "mean square"
    sizes = "".join(f", {name}={size}" for name, size in p.spec.sizes)
    each = prod(p.shape) // max(count, 1)
    words = f"read as [{p.spec.axes}]{sizes}, x has {count} sets, one for each ({kept}), of {each} elements ({reduced}); "
    if p.given:
        return words + f"their {moments} are given, eps {p.spec.eps:g}"
    if p.spec.mix:
        norms = ["of the set alone" if norm.strip() == "-" else f"of all sets along {norm.strip()}" for norm in p.spec.mix.split(",")]
        norms[-1] += " (given)" if p.last_given else ""
        return words + f"each uses a weighted mean of the means, and of the variances, {', '.join(norms)}; eps {p.spec.eps:g}"
    return words + f"each shares one {moments}, eps {p.spec.eps:g}"


def _view(p: NormProblem) -> str:
    """Describe the four-axis view of memory, and where the elements of a set are in it."""
    if p.x is None:
        return "none: " + ("there are no elements" if 0 in p.shape else "this memory cannot be seen as four axes")
    v = p.x
    words = f"x[o, r, s, t] with outer {v.outer}, reps {v.reps}, sets {v.sets}, run {v.run}; strides {v.strides}: "
    if v.reps == 1:
        return words + f"a set is one run of {v.run} contiguous elements"
    return words + (f"a set is {v.reps} runs of {v.run}" if v.run > 1 else f"a set is {v.reps} single elements") + f", {v.strides[1]} apart"


def _formula(p: NormProblem) -> str:
    words = "(x - mean)·rstd" if p.spec.centered else "x·rstd"
    if p.weight:
        words += f"·(weight + {p.spec.weight_offset:g})" if p.spec.weight_offset else "·weight"
    words += " + bias" if p.bias else ""
    if p.scale:
        words = f"({words})·(1 + scale)" if p.bias else f"{words}·(1 + scale)"
    words += " + shift" if p.shift else ""
    return f"y = {p.spec.activation}({words})" if p.spec.activation else f"y = {words}"


def _inverse(p: NormProblem) -> str:
    """Return the formula that computes x_hat from y."""
    words = "(y - shift)" if p.shift else "y"
    words += "/(1 + scale)" if p.scale else ""
    words = f"({words} - bias)" if p.bias else words
    if p.weight:
        words += f"/(weight + {p.spec.weight_offset:g})" if p.spec.weight_offset else "/weight"
    return f"x_hat = {words}"


def _traffic(p: NormProblem, chosen: Plan) -> str:
    """Name the tensors whose bytes `NormProblem.min_bytes` counts for this plan."""
    if chosen.direction == "forward":
        moved = "x and residual read, sum and y written" if p.addends else "x read, y written"
    else:
        moved = "the sum, dy and the sum's gradient" if p.addends else "y and dy" if p.from_y else "x and dy"
        moved += " read, dx written"
    return f"{moved}, each parameter read, once"


def explanation(problem: NormProblem, device: Device, options: Options) -> Explanation:
    """Plan the forward and the backward of a problem on a device, and return both as an Explanation."""
    forward, back = plan(problem, device, FORWARD, options), problem.for_direction(BACKWARD)
    try:
        backward = plan(back, device, BACKWARD, options)
    except CannotForce:  # the forced family may have no backward; then let the planner choose
        backward = plan(back, device, BACKWARD)
    return Explanation(problem, device, forward, backward, options)


def explain(norm: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Describe how a call would run, without running it: which family, which launches, and why no other family.

    The method `.on("h200")` of the result describes the same call on a GPU that need not be present.

    Example: `print(onepass.explain(onepass.functional.group_norm, x, 32))`
    """
    if not callable(norm):
        raise TypeError(
            f"explain(): argument 'norm' must be callable, not {type(norm).__name__}; got {norm!r:.80}: pass a function of "
            "onepass.functional, or a module, and then its arguments"
        )
    options = current_options()
    token = options_in_context.set(options._replace(explain=True))
    try:
        (copy.deepcopy(norm) if hasattr(norm, "state_dict") else norm)(*args, **kwargs)  # a copy, as a module may count its calls
    except ExplainRequested as asked:
        return explanation(asked.problem, asked.device, options)
    finally:
        options_in_context.reset(token)
    raise TypeError(
        f"{norm!r} did not reach a norm of onepass by the direct route, the only one that is planned here; pass a function of "
        "onepass.functional or a module of onepass.nn with plain tensors, outside of compile and of functorch's transforms"
    )
