"""The structure of the code: who imports whom, what `import onepass` loads, and what the wheel holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onepass

SOURCE = Path(onepass.__file__).parent
ROOT = Path(__file__).parents[1]

# Each folder of the package, and the folders it may import from. `onepass` is the package itself (`import onepass`).
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "backends": {"core"},
    "check": {"core"},
    "planning": {"backends", "core"},
    "dispatch": {"planning", "backends", "check", "core"},
    "functional": {"dispatch", "check", "core"},
    "nn": {"functional", "check"},
    "patching": {"nn", "functional", "core"},
    "precompiling": {"patching", "dispatch", "backends"},
    "onepass": {"functional", "nn", "patching", "precompiling", "planning", "core"},
    "verify": {"onepass", "functional", "nn", "dispatch", "planning", "backends", "check", "core"},
    "bench": {"verify", "onepass", "planning", "core"},
}
ALLOWED["cli"] = set(ALLOWED)
ALLOWED["__main__"] = {"cli"}  # `python -m onepass`
BACKENDS = sorted(path.parent.name for path in (SOURCE / "backends").glob("*/__init__.py"))  # none imports another


def _sources(folder: str = "") -> list[Path]:
    found = sorted((SOURCE / folder).rglob("*.py"))
    assert found, folder
    return found


def _module(path: Path) -> list[str]:
    """["onepass", "core", "view"] for src/onepass/core/view.py; a package is named without `__init__`."""
    parts = ["onepass", *path.relative_to(SOURCE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(path: Path) -> Iterator[list[str]]:
    """Every module that a file imports, as a list of names, wherever the import stands.

    `from onepass import nn` imports onepass.nn, and `from onepass import __version__` imports onepass.
    """
    package = _module(path) if path.name == "__init__.py" else _module(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = start + (node.module.split(".") if node.module else [])
            for alias in node.names:
                inside = module[:1] == ["onepass"] and _exists(SOURCE.joinpath(*module[1:], alias.name))
                yield [*module, alias.name] if inside else module


def _exists(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def _folder(module: list[str]) -> str:
    return module[1] if len(module) > 1 else "onepass"


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_go_one_way(folder):
    files = [path for path in _sources() if _folder(_module(path)) == folder]
    assert files, f"there is no {folder}/: the table is out of date"
    wrong = {
        f"{path.relative_to(SOURCE)} imports {'.'.join(module)}"
        for path in files
        for module in _imports(path)
        if module[0] == "onepass" and _folder(module) not in {folder, *ALLOWED[folder]}
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_folder_is_in_the_table():
    assert {_folder(_module(path)) for path in _sources()} == set(ALLOWED)


def test_the_table_has_no_cycle():
    def visit(folder: str, path: tuple[str, ...]) -> None:
        assert folder not in path, " -> ".join((*path, folder))
        for other in ALLOWED[folder]:
            visit(other, (*path, folder))

    for folder in ALLOWED:
        visit(folder, ())


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_imports_no_other_backend(name):
    others = [["onepass", "backends", other] for other in BACKENDS if other != name]
    for path in _sources(f"backends/{name}"):
        assert [module for module in _imports(path) if module[:3] in others] == [], path


def test_imports_are_read(tmp_path, monkeypatch):
    """`_imports` sees relative imports, absolute ones, and those inside functions."""
    for name in ("core/view.py", "core/__init__.py", "nn/__init__.py", "__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    path = tmp_path / "nn" / "rows.py"
    path.write_text(
        "import torch.nn\nimport onepass.core.view\nfrom onepass import __version__, nn\nfrom . import rows\n"
        "def f():\n    from ..core.view import View\n    from onepass.core import view\n"
    )
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    found = [".".join(module) for module in _imports(path)]
    view = "onepass.core.view"
    assert found == ["torch.nn", view, "onepass", "onepass.nn", "onepass.nn.rows", view, view]


def test_kernels_name_no_norm():
    """A backend knows views and parameter maps. It may call torch's own functions by their names."""
    files = [path for path in (SOURCE / "backends").rglob("*") if path.suffix in (".py", ".h", ".c")]
    assert {path.suffix for path in files} == {".py", ".h", ".c"}
    for path in files:
        ours = re.sub(r"(torch|aten)(\.\w+)*", "", path.read_text())
        assert not re.search(r"(layer|group|batch|instance|rms|switchable)_?norm", ours, re.IGNORECASE), path


def _fresh(code: str) -> list[str]:
    """The lines that a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_is_light():
    """`import onepass` loads neither triton nor dynamo nor DTensor, and takes less than 0.3 s after torch."""
    code = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import onepass\n"
        "print(time.perf_counter() - start)\n"
        "print([m for m in ('triton', 'torch._dynamo', 'torch.distributed.tensor') if m in sys.modules])\n"
    )
    runs = [_fresh(code) for _ in range(3)]
    assert {run[1] for run in runs} == {"[]"}
    assert min(float(run[0]) for run in runs) < 0.3


@pytest.mark.parametrize(
    "use", ["", "onepass.explain(onepass.functional.layer_norm, torch.ones(2, 3), (3,)); import onepass.cli, onepass.verify"]
)
def test_dir_shows_the_public_names(use):
    """`dir(onepass)` shows `__all__` alone, also once other parts are imported, and every name can be used."""
    code = (
        f"import torch, onepass\n{use}\nprint(dir(onepass) == sorted(onepass.__all__), [getattr(onepass, n) for n in dir(onepass)] != [])"
    )
    assert _fresh(code) == ["True True"]


def test_the_wheel_holds_the_package_alone():
    """hatch ships `packages` and nothing else. It leaves out files that git ignores."""
    sections = re.findall(r"^\[tool\.hatch\.build.*?(?=^\[)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert [section.strip() for section in sections] == ['[tool.hatch.build.targets.wheel]\npackages = ["src/onepass"]']
    shipped = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in shipped} == {".py", ".c", ".cpp", ".h", ".typed"}
    ignored = [line.strip("/*\n") for line in (ROOT / ".gitignore").read_text().splitlines()]
    assert [path for path in shipped for word in ignored if word in path.relative_to(SOURCE).parts or path.name.endswith(word)] == []


def test_the_package_does_not_import_what_only_developers_run():
    for path in _sources():
        assert [module for module in _imports(path) if module[0] in ("benchmarks", "tests", "examples")] == [], path


def test_benchmarks_start_from_the_root():
    """`python -m benchmarks.X` finds onepass and the other benchmarks. One process asks all of them for --help."""
    pytest.importorskip("triton")  # some of them compile kernels
    scripts = [path for path in (ROOT / "benchmarks").rglob("*.py") if "__main__" in path.read_text() and "argparse" in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in scripts]
    assert len(names) >= 8
    code = f"""
import runpy, sys
for name in {names!r}:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0, name
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: python -m benchmarks.") == len(names), done.stdout
