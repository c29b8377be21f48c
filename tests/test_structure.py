"""The shape of the code: one-way arrows, a light import, and no kernel that knows a norm."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import onepass

SOURCE = Path(onepass.__file__).parent

# Each room, and the rooms it may import from. What is not listed imports nothing of ours.
ARROWS = {
    "__init__": {"functional", "nn", "patching", "plan"},
    "patching": {"functional", "nn"},
    "nn": {"functional", "check", "check_extras"},
    "functional": {"check", "check_extras", "ops", "reference", "problem", "spec", "moments"},
    "check_extras": {"check", "memory", "spec"},
    "check": {"memory", "spec"},
    "ops": {"graph", "memory", "operands", "plan", "families", "device", "reference", "problem", "spec"},
    "graph": {"spec"},
    "plan": {"families", "tiling_backward", "device", "problem"},
    "families": {"tiling", "tiling_alone", "tiling_backward", "tiling_ring", "tiling_team", "device", "problem"},
    "tiling_alone": {"tiling", "tiling_team", "device", "problem"},
    "tiling_ring": {"tiling", "device", "problem"},
    "tiling_team": {"tiling", "device", "problem"},
    "tiling_backward": {"tiling", "device", "problem"},
    "tiling": {"device", "problem"},
    "kernels": {"allocate", "memory", "plan", "tiling", "tiling_backward", "reference", "problem", "moments"},
    "cpu": {"allocate", "memory", "plan", "device", "reference", "problem", "moments"},
    "reference": {"problem", "spec", "moments"},
    "operands": {"check", "memory", "problem", "spec"},
    "problem": {"spec"},
    "bench": {
        "cpu",
        "kernels",
        "__init__",
        "functional",
        "families",
        "tiling",
        "plan",
        "device",
        "reference",
        "problem",
        "spec",
        "moments",
    },
    "cli": {"__init__", "bench", "cpu", "families", "ops", "plan", "device", "spec"},
}


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """The rooms that a file imports, by its relative imports."""
    found: set[str] = set()
    depth = len(path.relative_to(SOURCE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level < depth:  # inside the room
                continue
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            found |= {name if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists() else "__init__" for name in names}
    return found


def test_arrows_go_one_way():
    for path in SOURCE.rglob("*.py"):
        room = _room(path)
        assert _imports(path) - {room} <= ARROWS.get(room, set()), path


def test_arrows_have_no_cycle():
    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, " -> ".join((*path, room))
        for other in ARROWS.get(room, set()):
            visit(other, (*path, room))

    for room in ARROWS:
        visit(room, ())


def test_kernels_name_no_norm():
    """A backend knows views and parameter maps. (torch's own functions are called by their names.)"""
    for path in [*(SOURCE / "cpu").glob("*.py"), *(SOURCE / "kernels").glob("*.py")]:
        ours = re.sub(r"(torch|aten)(\.\w+)*", "", path.read_text())
        assert not re.search(r"(layer|group|batch|instance|rms|switchable)_?norm", ours, re.IGNORECASE), path


def test_import_is_light():
    """Neither triton nor dynamo nor DTensor, and under 0.3 s over torch."""
    code = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import onepass\n"
        "print(time.perf_counter() - start)\n"
        "print([m for m in ('triton', 'torch._dynamo', 'torch.distributed.tensor') if m in sys.modules])\n"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n") for _ in range(3)]
    assert {run[1] for run in runs} == {"[]"}
    assert min(float(run[0]) for run in runs) < 0.3
