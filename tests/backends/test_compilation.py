"""What is said when a kernel is compiled, and what is recorded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import onepass
from onepass.backends import compilation
from onepass.backends.compilation import Compilation, need, recorded


@pytest.fixture(autouse=True)
def nothing_shown(monkeypatch):
    monkeypatch.setattr(compilation, "_shown", set())


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "onepass" and record.levelno == logging.INFO]


def test_a_compilation_is_logged_with_its_time(caplog):
    caplog.set_level(logging.INFO, "onepass")
    with recorded() as record, Compilation("a kernel", "compiling") as made:
        assert not messages(caplog)
        made.begin()
        assert messages(caplog) == ["compiling a kernel"]
    assert messages(caplog)[1].startswith("compiled a kernel in 0.0")
    assert [name for name, _ in record.compiled] == ["a kernel"]


def test_a_hit_says_nothing(caplog):
    caplog.set_level(logging.DEBUG, "onepass")
    with recorded() as record, Compilation("a kernel", "compiling"):
        need("a kernel")
    assert not messages(caplog) and record.needed == {"a kernel"} and not record.compiled


def test_a_failure_is_logged_and_not_recorded(caplog):
    caplog.set_level(logging.INFO, "onepass")
    with recorded() as record, pytest.raises(OSError), Compilation("a kernel", "compiling") as made:
        made.begin()
        raise OSError
    assert "failed after" in messages(caplog)[1] and not record.compiled


def test_records_nest_and_end():
    with recorded() as outer:
        need(1)
        with recorded() as inner:
            need(2)
        need(3)
    need(4)
    assert (outer.needed, inner.needed) == ({1, 2, 3}, {2})


# Compiles twice, in a process that has not set up logging. `compilation` is imported without torch, which takes seconds.
TWICE = f"""
import logging, sys, types
sys.modules["onepass"] = types.ModuleType("onepass")
sys.modules["onepass"].__path__ = [{str(Path(onepass.__file__).parent)!r}]
sys.modules["onepass.backends"] = types.ModuleType("onepass.backends")
sys.modules["onepass.backends"].__path__ = [{str(Path(onepass.__file__).parent / "backends")!r}]
from onepass.backends.compilation import Compilation
SETUP
for name in ("one", "two"):
    with Compilation(name, "compiling kernels") as made:
        made.begin()
"""


def shown(setup: str, terminal: bool) -> str:
    """What a process with or without a terminal prints to stderr."""
    import pty

    command = [sys.executable, "-c", TWICE.replace("SETUP", setup)]
    if not terminal:
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    ours, theirs = pty.openpty()
    subprocess.run(command, stderr=theirs, check=True)
    os.write(theirs, b".")  # so that there is something to read
    text = os.read(ours, 10000).decode().replace("\r", "")
    os.close(ours)
    os.close(theirs)
    return text.removesuffix(".")


@pytest.mark.skipif(os.name != "posix", reason="there are no pseudo-terminals")
@pytest.mark.parametrize(
    "setup, terminal, expected",
    [
        ("", True, "onepass: compiling kernels …\n"),
        ("", False, ""),
        ("logging.getLogger('onepass').setLevel('ERROR')", True, ""),
        ("logging.basicConfig(level='WARNING')", True, ""),
        ("logging.basicConfig(format='%(message)s', level='INFO')", True, "compiling one\ncompiled one in 0.0 s\n"),
        ("logging.basicConfig(format='%(message)s', level='INFO')", False, "compiling one\ncompiled one in 0.0 s\n"),
    ],
)
def test_a_terminal_shows_one_line_unless_logging_is_set_up(setup, terminal, expected):
    text = shown(setup, terminal)
    assert text == expected + (expected.replace("one", "two") if "one\n" in expected else "")
