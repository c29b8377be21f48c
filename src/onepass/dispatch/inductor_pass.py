"""One pass for inductor, made of the graph passes of compiled_choice.py and compiled.py.

This is a file of its own, because it imports inductor. Inductor pickles its passes to make the keys of its cache. Pickle must find
the class by its name, so the class is not local to a function.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from onepass.planning.options import current_options

from . import compiled, compiled_choice


class NormPass(CustomGraphPass):
    """Runs the user's own pass first, if there is one. Then it takes norms over, merges neighbours into them, and gives some back."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        from . import inductor_lowering  # it imports the rest of inductor, which may not be loaded when a pass is made

        if self.before is not None:
            self.before(graph)
        inductor_lowering.register()
        compiled_choice.adopt(graph)
        compiled.fuse_neighbours(graph)
        compiled_choice.give_back(graph)

    def uuid(self) -> Any:
        """Return what identifies this pass in inductor's cache, or None if the user's pass cannot be identified."""
        before = None if self.before is None else getattr(self.before, "uuid", lambda: None)()
        unknown = self.before is not None and before is None
        options = current_options()  # the pass depends on them
        return None if unknown else (_hash_of_package(), before, options.family, options.invariant)

    def __getstate__(self) -> dict[str, Any]:
        return {"before": self.before, "uuid": self.uuid()}  # another version of onepass gives another key

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.before = state["before"]


@cache
def _hash_of_package() -> Any:
    """Return a hash of all our Python files: the pass, the planner with its constants, and the form of the calls in generated code."""
    package = Path(__file__).parents[1]
    return get_hash_for_files(tuple(str(path) for path in sorted(package.rglob("*.py"))))
