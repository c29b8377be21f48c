"""Records which families run, in which direction, and how many GPU kernels they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

from onepass.backends.gpu.family import GpuFamily
from onepass.dispatch import launchers
from onepass.planning.registry import FAMILIES

GPU_FAMILIES = [family.name for family in FAMILIES if isinstance(family, GpuFamily)]


class Run(NamedTuple):
    family: str
    direction: str
    kernels: int  # GPU kernels launched; 0 for families of the CPU


@contextmanager
def recorded_runs() -> Iterator[list[Run]]:
    """A list that gets a Run for every launcher that is called inside the block.

    Example: `with recorded_runs() as runs: layer_norm(x, (8,))`
    """
    runs: list[Run] = []
    launched = [0]

    def record(family: str, direction: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            before = launched[0]
            result = launch(*args)
            runs.append(Run(family, direction, launched[0] - before))
            return result

        return run

    def wrap(family: Any, method: str) -> Callable[..., Any]:
        make = getattr(family, method)

        def made(*args: Any, **keywords: Any) -> Any:
            launch = make(*args, **keywords)
            if launch is None:
                return None
            return record(family.name, "backward" if method.endswith("backward") else "forward", launch)

        return made

    methods = "forward", "backward", "infer", "infer_extras", "track", "train_track", "train_forward", "train_backward"
    methods += "train_extras", "train_extras_backward"
    patches = [patch.object(family, method, wrap(family, method)) for family in FAMILIES for method in methods]
    patches += _count_kernels(launched)
    launchers.forget_all()  # launchers that exist already would not be seen
    for one in patches:
        one.start()
    try:
        yield runs
    finally:
        for one in patches:
            one.stop()
        launchers.forget_all()


def _count_kernels(launched: list[int]) -> list[Any]:
    """Counts the calls of Triton kernels, if Triton is installed."""
    if find_spec("triton") is None:
        return []
    from onepass.backends.gpu import short_backward, short_forward
    from onepass.backends.gpu.launch.chain import Chain

    launch, prepare = Chain.launch, short_forward.prepared

    def counted(self: Any, *args: Any) -> Any:
        launched[0] += len(self.steps)
        return launch(self, *args)

    def prepared(chain: Any, arguments: Any, outputs: Any, returned: Any, careful: Any, *more: Any) -> Any:
        """A prepared function launches without `Chain.launch`, unless it is `careful`."""
        made = prepare(chain, arguments, outputs, returned, careful, *more)

        def counted_prepared(*args: Any) -> Any:
            launched[0] += len(chain.steps)
            return made(*args)

        return made if made is careful else counted_prepared

    return [
        patch.object(Chain, "launch", counted),
        *(patch.object(module, "prepared", prepared) for module in (short_forward, short_backward)),
    ]


def require_ran(runs: list[Run], family: str, *directions: str) -> None:
    """Raise unless this family ran, and no other, in exactly these directions, with kernels of its own."""
    assert runs, f"nothing ran; {family} was expected"
    assert {run.family for run in runs} == {family}, f"{runs} ran; {family} was expected"
    assert {run.direction for run in runs} == set(directions), f"{runs} ran; {directions} were expected"
    if family in GPU_FAMILIES:
        assert all(run.kernels for run in runs), f"{runs}: a launcher launched no kernel"
