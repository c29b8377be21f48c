"""A cache of C kernels that was copied: another folder, another user, no compiler, and a folder that cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import onepass
from onepass.backends.c import build, cache, machine

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="C kernels are for Linux and macOS"),
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"),
]

SOURCE = Path(onepass.__file__).parents[1]
RUN = """
import logging, torch, onepass
logging.basicConfig(format="%(message)s", level="INFO")
x = torch.randn(4, 8, requires_grad=True)
y = onepass.functional.layer_norm(x, (8,))
y.sum().backward()
print(onepass.explain(onepass.functional.layer_norm, x, (8,)).forward.family, onepass.backends.c.library.state())
"""


def run(folder: Path, code: str = RUN, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("CC", "ONEPASS_CPU", "ONEPASS_MARCH")}
    env = {**inherited, "PYTHONPATH": str(SOURCE), "ONEPASS_CACHE": str(folder), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "cache"
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiling the CPU kernels") == done.stderr.count("compiled the CPU kernels") == 1
    return folder


@pytest.fixture
def shipped(built, tmp_path):
    """A copy of the cache that nobody but root can write."""
    folder = tmp_path / "another" / "place"
    shutil.copytree(built, folder)
    (folder / "lock").unlink()
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize("environment", [{}, {"PATH": ""}, {"CC": "no-such-compiler"}], ids=lambda e: str(e))
def test_a_copied_cache_needs_no_compiler(shipped, environment):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in shipped.iterdir() if path.name != "lock")
    done = run(shipped, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"c {shipped}"), done.stdout + done.stderr
    assert "compiled" not in done.stderr and "without its C kernels" not in done.stderr
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in shipped.iterdir() if path.name != "lock")


def test_an_empty_cache_without_a_compiler_runs_torch(tmp_path):
    """So the tests above can fail."""
    done = run(tmp_path / "cache", CC="false")
    assert done.stdout.startswith("aten") and "without its C kernels" in done.stderr


AS_ANOTHER = """
import os, pathlib
from onepass.backends.c import build
build.SOURCES = pathlib.Path(os.environ["SOURCES"])  # the other user may not be able to read this checkout
os.setgid(12345)
os.setuid(12345)
print(build.library()._name)
"""


def test_another_user_finds_what_root_has_compiled(built):
    if os.getuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as place:
        folder, sources = Path(place) / "cache", Path(place) / "src"
        shutil.copytree(built, folder)
        shutil.copytree(build.SOURCES, sources)
        for path in (Path(place), folder, sources, *sources.iterdir()):
            path.chmod(0o755)
        done = run(folder, AS_ANOTHER, CC="false", SOURCES=str(sources))
        assert done.stdout.startswith(str(folder)), done.stderr
        os.chown(next(folder.glob("*.so")), 54321, 54321)
        refused = run(folder, AS_ANOTHER, CC="false", SOURCES=str(sources))
        assert "belongs to, or can be written by, other users" in refused.stderr


def test_the_name_of_a_library_has_no_path(monkeypatch, tmp_path):
    """Neither the folder of the compiler nor that of the sources nor the user changes the name."""
    monkeypatch.setenv("CC", "/usr/bin/gcc")
    before = build._key(), build._variant()
    shutil.copytree(build.SOURCES, tmp_path / "src")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setenv("CC", "/opt/gcc")
    for name in ("HOME", "USER", "LOGNAME"):
        monkeypatch.setenv(name, "/somebody")
    assert (build._key(), build._variant()) == before
    (tmp_path / "src" / "onepass.c").write_text("changed")
    assert build._key() != before[0]


def test_options_of_the_compiler_are_never_mixed(monkeypatch):
    """A library made with a sanitizer must not stand in for another one."""
    keys = set()
    for cc in ("gcc", "gcc -fsanitize=address", "clang"):
        monkeypatch.setenv("CC", cc)
        keys.add(build._key())
    assert len(keys) == 2


# ONEPASS_MARCH


BASELINE = "armv8-a" if os.uname().machine in ("aarch64", "arm64") else "x86-64"


@pytest.mark.slow
def test_a_library_for_a_level_runs_on_another_cpu(tmp_path):
    """Its name does not depend on the CPU, as that of a library for one CPU does."""
    other = 'from onepass.backends.c import build\nbuild._cpu = lambda: "another CPU"\n' + RUN
    folder = tmp_path / "cache"
    assert run(folder, ONEPASS_MARCH=BASELINE).stdout.startswith("c ")
    (library,) = folder.glob("*.so")
    assert run(folder, other, ONEPASS_MARCH=BASELINE, CC="false").stdout.startswith(f"c {library}")
    assert run(folder, other, CC="false").stdout.startswith("aten")


def test_an_unknown_level_is_a_reason(monkeypatch):
    monkeypatch.setenv("ONEPASS_MARCH", "native")
    with pytest.raises(cache.Unavailable, match=f"ONEPASS_MARCH='native', expected one of {BASELINE}"):
        machine.level()


def test_a_level_that_the_cpu_lacks_is_a_reason():
    everything = " ".join(machine.LEVELS["x86-64-v4"])
    machine.check_level("x86-64-v4", everything)
    with pytest.raises(cache.Unavailable, match="ONEPASS_MARCH=x86-64-v3, but this CPU lacks avx2: set a lower level"):
        machine.check_level("x86-64-v3", everything.replace("avx2 ", ""))
