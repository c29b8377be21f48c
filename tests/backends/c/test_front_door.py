"""Compiling and loading the front door: what happens if something is missing. The compiler is a script that copies the real module."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import onepass
from onepass.backends.c import build, front_door
from onepass.backends.c.cache import Unavailable
from onepass.dispatch import front_door as door

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the front door is for Linux and macOS")
NAMES = {"apply", "launcher", "memory", "node_type", "remember"}
# Runs a norm. `wait` waits until a compilation in the background has ended.
NORM = """
import sys, threading, time, torch
import onepass.functional as F
from onepass.dispatch.front_door import State
x = torch.randn(2, 4, requires_grad=True)
F.layer_norm(x, (4,)).sum().backward()
def wait():
    for thread in threading.enumerate():
        if thread.name == "onepass-front-door":
            thread.join(60)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder with a compiler, `cxx`, which counts its runs in `runs` and does what is in `body`; and an empty cache."""
    monkeypatch.delenv(door.VARIABLE, raising=False)
    try:
        real = build.load_or_compile(front_door.RECIPE)._name
    except Unavailable as reason:
        pytest.skip(str(reason))
    script = tmp_path / "cxx"
    script.write_text(
        f'#!/bin/sh\nfor word in "$@"; do [ "$prev" = -o ] && out="$word"; prev="$word"; done\nREAL={real}\n'
        f"echo run >> {tmp_path}/runs\n. {tmp_path}/body\n"
    )
    script.chmod(0o755)
    (tmp_path / "body").write_text('cp "$REAL" "$out"')
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEPASS_CPU", "off")  # so that processes do not compile the C kernels
    return tmp_path


def runs(fake: Path) -> int:
    return len((fake / "runs").read_text().split()) if (fake / "runs").exists() else 0


def start(fake: Path, code: str, **more: str) -> subprocess.Popen[str]:
    """Run NORM and then `code` in another process. Its current folder has a `torch.py`, which nothing may import."""
    folder, script = fake / "current", fake / f"{uuid4()}.py"
    folder.mkdir(exist_ok=True)
    (folder / "torch.py").write_text("raise ImportError('this is not torch')")
    script.write_text(NORM + code)
    env = {**os.environ, "PYTHONPATH": str(Path(onepass.__file__).parents[1]), **more}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-W", "ignore", str(script)], stdout=pipe, stderr=pipe, text=True, env=env, cwd=folder)


def output(process: subprocess.Popen[str]) -> str:
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return said.strip()


def reason(may_compile: bool = True) -> str:
    with pytest.raises(Unavailable) as found:
        front_door.load(may_compile)
    return str(found.value)


def test_it_is_compiled_once(fake):
    assert "not compiled yet" in reason(may_compile=False)
    assert runs(fake) == 0
    module = front_door.load(may_compile=True)
    assert set(dir(module)) >= NAMES and runs(fake) == 1
    assert set(dir(front_door.load(may_compile=False))) >= NAMES and runs(fake) == 1


FAILURES = {
    "no compiler": (lambda fake, patch: patch.setenv("CXX", "no-such-compiler"), "there is no C++ compiler (no-such-compiler)"),
    "an open quotation": (lambda fake, patch: patch.setenv("CXX", "g++ '-O2"), "No closing quotation"),
    "fails": (lambda fake, patch: (fake / "body").write_text("echo nonsense >&2; exit 1"), "failed: nonsense"),
    "half a library": (lambda fake, patch: (fake / "body").write_text('head -c 2000 "$REAL" > "$out"'), "half a library"),
    "no Python.h": (
        lambda fake, patch: patch.setattr(front_door.sysconfig, "get_path", lambda name: str(fake)),
        "Python's headers are missing",
    ),
    "a cache for all": (lambda fake, patch: ((fake / "cache").mkdir(), (fake / "cache").chmod(0o777)), "other users"),
    "no GIL": (lambda fake, patch: patch.setattr(front_door.sysconfig, "get_config_var", lambda name: 1), "global lock"),
    "no sources": (lambda fake, patch: patch.setattr(front_door, "FOLDER", fake / "nowhere"), "sources cannot be read"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_has_a_reason(fake, monkeypatch, failure):
    cause, expected = FAILURES[failure]
    cause(fake, monkeypatch)
    assert expected in reason()
    monkeypatch.setattr(door.State, "reason", "closed before")
    assert expected in door.open_now()


def test_a_damaged_module_is_compiled_again(fake):
    front_door.load(may_compile=True)
    (module,) = (fake / "cache").glob("front-door-*.so")
    damaged = module.with_suffix(".damaged")
    damaged.write_bytes(module.read_bytes()[:-1])
    os.replace(damaged, module)  # not written in place, since this process has loaded it
    assert "is damaged" in reason(may_compile=False)
    front_door.load(may_compile=True)
    assert runs(fake) == 2


def test_the_key_depends_on_what_must_fit(monkeypatch):
    before = front_door._key()
    assert front_door._key() == before
    monkeypatch.setenv("CXX", "g++ -fsanitize=address")
    other = front_door._key()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert len({before, other, front_door._key()}) == 3


def test_two_processes_compile_it_once_in_the_background(fake):
    (fake / "body").write_text('sleep 1; cp "$REAL" "$out"')
    both = [start(fake, "wait(); print(repr(State.reason))") for _ in range(2)]
    assert [output(process) for process in both] == ["''", "''"]
    assert runs(fake) == 1


@pytest.mark.slow
def test_a_process_may_end_while_it_is_compiled(fake):
    (fake / "body").write_text('sleep 3; cp "$REAL" "$out"')
    output(start(fake, f"import os\nwhile not os.path.exists({str(fake / 'runs')!r}): time.sleep(0.05)"))
    assert not list((fake / "cache").glob("front-door-*.so"))
    deadline = time.monotonic() + 60
    while not list((fake / "cache").glob("front-door-*.so")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert set(dir(front_door.load(may_compile=False))) >= NAMES and runs(fake) == 1


def test_a_process_that_ends_waits_until_the_module_is_loaded(fake):
    """A thread that is inside a C++ module when Python ends would abort the process."""
    (fake / "body").write_text('sleep 1; cp "$REAL" "$out"')
    code = """
from onepass.dispatch import front_door
load, began = front_door._open, threading.Event()
def slowly(may_compile):
    began.set()
    time.sleep(1)
    print(load(may_compile), flush=True)
front_door._open = slowly
assert began.wait(60)
"""
    assert output(start(fake, code)) == "True"


def test_python_does_the_work_if_it_is_off_or_fails(fake):
    (fake / "body").write_text("echo nonsense >&2; exit 1")
    environments = {door.VARIABLE: "off"}, {"CXX": "no-such-compiler"}, {}
    processes = [start(fake, "wait(); print(State.reason, F.layer_norm(x, (4,)).requires_grad)", **more) for more in environments]
    off, missing, failed = map(output, processes)
    assert off == f"{door.VARIABLE}=off True"
    assert missing == "there is no C++ compiler (no-such-compiler) True"
    assert failed.endswith("failed: nonsense True")
    assert runs(fake) == len(front_door.STANDARDS)  # only the last process compiles
