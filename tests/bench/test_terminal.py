"""Tables and progress, as plain text and by rich on a terminal."""

import os
import subprocess
import sys

import pytest

from onepass.bench import terminal

SHOW = """
import sys
from onepass.bench import terminal
{setup}
for item in terminal.progress(range(20), 20, lambda item: f"item [{{item}}]"):
    pass
terminal.print_table([["norm", "note"], ["layer_norm", "[b]bold[/b]"]])
"""


def test_plain_text(capsys):
    assert list(terminal.progress("abc", 3, str.upper, log=True)) == ["a", "b", "c"]
    terminal.print_table([["norm", "ms"], ["layer_norm", "1.5"], ["rms", "12"]])
    shown = capsys.readouterr()
    assert shown.err == "1/3 A\n2/3 B\n3/3 C\n"
    assert shown.out == "norm        ms\n──────────────\nlayer_norm  1.5\nrms         12\n"


def test_plain_progress_is_ten_lines(capsys):
    assert len(list(terminal.progress(range(1000), 1000, str))) == 1000
    assert capsys.readouterr().err.splitlines()[-1] == "1000/1000 999"
    list(terminal.progress(range(1000), 1000, str))
    assert len(capsys.readouterr().err.splitlines()) == 10


def test_rows_appear_one_by_one(capsys):
    with terminal.growing_table(["norm", "ms"], [6, 4]) as add:
        assert capsys.readouterr().out.splitlines() == ["norm    ms", "──────────"]
        for name in ("a", "b"):
            add([name, "1"])
            assert capsys.readouterr().out == f"{name}       1\n"


@pytest.mark.skipif(os.name != "posix", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("installed", [True, False])
def test_on_a_terminal(installed):
    """rich draws a bar, and removes it. Without rich, a terminal shows plain text. Brackets are text, not markup."""
    if installed:
        pytest.importorskip("rich")
    setup = "" if installed else "terminal.find_spec = lambda name: None"
    shown = _on_a_terminal(SHOW.format(setup=setup))
    assert "[b]bold[/b]" in shown and "layer_norm" in shown
    assert ("20/20 item [19]" in shown) == (not installed)
    assert ("━" in shown) == installed


def _on_a_terminal(code: str) -> str:
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # Linux reports the end of a terminal as an error
            pass
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    return shown.decode()
