"""The graph pass of compiled.py as inductor takes it.

This is a file of its own, because it imports inductor. Inductor pickles its passes to make the keys of its cache, so the class must be
found by its name.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from . import compiled, inductor_lowering


class NeighbourPass(CustomGraphPass):
    """Runs the pass that the user had set, if any, and then `fuse_neighbours`."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        inductor_lowering.register()
        compiled.fuse_neighbours(graph)

    def uuid(self) -> Any:
        """Return what identifies this pass in inductor's cache, or None if the user's pass cannot be identified."""
        before = None if self.before is None else getattr(self.before, "uuid", lambda: None)()
        unknown = self.before is not None and before is None
        return None if unknown else (get_hash_for_files((__file__, str(compiled.__file__))), before)

    def __getstate__(self) -> dict[str, Any]:
        return {"before": self.before, "uuid": self.uuid()}  # another version of the pass gives another key

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.before = state["before"]
