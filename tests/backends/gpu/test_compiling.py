"""Compiling Triton kernels for a GPU that need not be present: what is said, and caches that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]

# Compiles a kernel for a GPU, in a process without Triton's interpreter. `loaded` is the function that a launch calls; without a
# GPU, it only must not load the kernel.
COMPILE = """
import logging, sys
import triton
from triton.backends.compiler import GPUTarget
from onepass.backends.compilation import recorded
from onepass.backends.gpu.forward import kernels
from onepass.backends.gpu.launch import source as sources
from onepass.bench.suite import SUITE, problem_of
from onepass.core.device import KNOWN_DEVICES
from onepass.planning.choose import plan
from onepass.planning.options import Options

compile = triton.compile
sources.triton.compile = lambda source, target, options: compile(source, target=GPUTarget("cuda", 90, 32), options=options)
triton.compiler.CompiledKernel._init_handles = lambda self: None
logging.basicConfig(format="%(levelname)s %(message)s", level="INFO")
problem = problem_of(SUITE[0])
source = kernels(problem, plan(problem, KNOWN_DEVICES["h200"], "forward", Options()).launches, False)[0].source()
with recorded() as record:
    for device in (0, 1):
        sources.loaded(source, device)
print(len(record.compiled))
"""


def compiled(folder: Any, **environment: str) -> tuple[int, list[str]]:
    """The number of compiled kernels, and the messages of a process."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env = {**inherited, "TRITON_CACHE_DIR": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), [line for line in done.stderr.splitlines() if line.startswith(("INFO", "WARNING"))]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A cache with the kernel, and what `compiled` returned when it was new."""
    folder = tmp_path_factory.mktemp("compiling") / "cache"
    return folder, compiled(folder)


def test_a_kernel_is_announced_when_it_is_compiled_and_never_again(first):
    folder, (count, said) = first
    assert count == 1 and len(said) == 2
    assert said[0] == "INFO compiling the GPU kernel row_forward"
    assert said[1].startswith("INFO compiled the GPU kernel row_forward in ")
    assert compiled(folder) == (0, [])


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="interpreted functions have no hash")
def test_called_functions_are_hashed_before_a_kernel(monkeypatch):
    """In another order, Triton 3.6 gives a kernel another hash, and does not find it in its cache."""
    from triton import JITFunction

    from onepass.backends.gpu.device import affine, moments
    from onepass.backends.gpu.forward import kernels
    from onepass.backends.gpu.launch import source
    from onepass.backends.gpu.row import kernel
    from onepass.bench.suite import SUITE, problem_of
    from onepass.core.device import KNOWN_DEVICES
    from onepass.planning.choose import plan

    problem, order = problem_of(SUITE[0]), list[Any]()
    (made,) = kernels(problem, plan(problem, KNOWN_DEVICES["h200"]).launches)
    monkeypatch.setattr(source, "_hashed", set())
    monkeypatch.setattr(JITFunction, "cache_key", property(order.append))
    hash(made.source())
    calls = [affine.parameter, affine.scale_and_shift, affine.fold_affine, kernel._resident, kernel.row_forward]
    assert [function for function in dict.fromkeys(map(id, order)) if function in map(id, calls)] == [id(call) for call in calls]
    assert any(function is moments.merge for function in order)


def test_a_cache_that_cannot_be_written_is_read(first):
    folder, _ = first
    files = sorted(path for path in folder.rglob("*"))
    for path in (*files, folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert compiled(folder, PATH="") == (0, [])
    assert sorted(path for path in folder.rglob("*")) == files
    for path in (folder, *files):
        path.chmod(0o755)


def test_a_kernel_that_such_a_cache_lacks_is_compiled_in_a_temporary_folder(tmp_path):
    """A file in the place of the folder stops root, too."""
    (tmp_path / "file").write_text("")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    count, said = compiled(tmp_path / "file" / "cache", TMPDIR=str(temporary))
    assert count == 2  # once for each of the two devices
    warnings = [line for line in said if line.startswith("WARNING")]
    assert len(warnings) == 1 and "cannot be written (Not a directory)" in warnings[0] and "TRITON_CACHE_DIR" in warnings[0]
    assert not list(temporary.glob("onepass-*"))
