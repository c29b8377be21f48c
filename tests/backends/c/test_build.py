"""Compiling and caching the C kernels when something is wrong: failures, time limits, locks, leftovers, and untrusted files.

The compilers here are small scripts that count their runs. One that must succeed copies a library of empty functions.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import onepass
import onepass.functional as F
from onepass.backends.c import build, cache, library
from onepass.cli.main import main

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="C kernels are for Linux and macOS"),
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"),
]
as_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="there is no /proc")
FUNCTIONS = ("forward", "track", "backward", "threads")
EMPTY = "".join(f"int onepass_{name}(void) {{ return 0; }}\n" for name in FUNCTIONS)
COPY = 'cp "$HERE/empty.so" "$out"'


def compile_library(source: str, path: Path) -> Path:
    path.with_suffix(".c").write_text(source)
    command = [
        next(filter(None, map(shutil.which, ("cc", "gcc", "clang")))),
        "-shared",
        "-fPIC",
        str(path.with_suffix(".c")),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True)
    return path


# Imports `build` without torch, which takes seconds.
LIGHT = f"""
import os, signal, sys, threading, time, types
for name in ("onepass", "onepass.backends", "onepass.backends.c"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join({str(Path(onepass.__file__).parents[1])!r}, *name.split("."))]
from onepass.backends.c import build
"""


def name_and_state(pid: int) -> tuple[str, str]:
    """The name and the state of a process on Linux, or empty strings if there is none."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", ""
    return name.partition("(")[2], rest.split()[0]


class Fake:
    """A compiler: a script that counts its runs and then runs `body`, which may use $out, $HERE and $@."""

    def __init__(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here, self.cache, self.log = here, here / "cache", here / "runs"
        self.path, self.monkeypatch = here / "fake-cc", monkeypatch
        compile_library(EMPTY, here / "empty.so")
        self.does(COPY)
        # The functions are empty, so tests must not run kernels. They go as far as `library()`.
        monkeypatch.setenv("CC", str(self.path))
        monkeypatch.setenv("HERE", str(here))
        monkeypatch.setenv("ONEPASS_CACHE", str(self.cache))
        monkeypatch.delenv("ONEPASS_CPU", raising=False)

    def does(self, body: str) -> None:
        """Change what the compiler does.

        The script stays the same file, since the cache identifies a compiler by its size and time.
        """
        (self.here / "body").write_text(body)
        if not self.path.exists():
            self.path.write_text(
                '#!/bin/sh\nprev=; for word in "$@"; do [ "$prev" = -o ] && out="$word"; prev="$word"; done\n'
                'echo $$ >> "$HERE/pids"; echo "$*" >> "$HERE/runs"\n. "$HERE/body"\n'
            )
            self.path.chmod(0o755)

    def end(self) -> None:
        """Kill `sleep` processes that outlived the compiler."""
        pids = self.here / "pids"
        for pid in pids.read_text().split() if pids.exists() else []:
            if name_and_state(int(pid))[0] == "sleep":
                os.kill(int(pid), signal.SIGKILL)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def library(self, suffix: str = "so") -> Path:
        (found,) = self.cache.glob(f"cpu-*.{suffix}")
        return found

    def start(self, code: str = "build.library()", stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Run code in another process."""
        return subprocess.Popen([sys.executable, "-c", LIGHT + code], stdout=subprocess.PIPE, stderr=stderr, text=True)

    def wait(self, lines: int = 1, log: str = "runs") -> None:
        """Wait until a log has so many lines. "runs" has a line for each run of the compiler."""
        until, path = time.monotonic() + 60, self.here / log
        while not path.exists() or len(path.read_text().splitlines()) < lines:
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.fixture
def fake(tmp_path, monkeypatch, anew):
    compiler = Fake(tmp_path, monkeypatch)
    yield compiler
    compiler.end()


def forget() -> None:
    build.library.cache_clear()
    library.load.cache_clear()


def shapes(count: int = 20) -> None:
    """Calls of several kinds, each of which needs the kernels."""
    for n in range(count):
        x = torch.randn(3, 8 + n)
        torch.testing.assert_close(F.layer_norm(x, (8 + n,)), torch.nn.functional.layer_norm(x, (8 + n,)))


def explained() -> str:
    return str(onepass.explain(F.layer_norm, torch.randn(4, 8), (8,)))


def refused() -> str:
    """The reason why there are no kernels, the same each time."""
    with pytest.raises(cache.Unavailable) as first:
        build.library()
    with pytest.raises(cache.Unavailable) as second:
        build.library()
    assert str(first.value) == str(second.value)
    return str(first.value)


# What fails, how often the compiler may run, and the message.
FAILURES = {
    "fails": ("echo nonsense >&2; exit 1", 3, "failed: nonsense"),
    "says nothing": ("exit 1", 3, "failed: it said nothing"),
    "full disk": ("echo 'cannot write: No space left on device' >&2; exit 1", 1, "No space left on device"),
    "hangs": ("sleep 100", 1, "did not end within 1 s"),
    "is killed": ("kill -9 $$", 3, "killed by signal 9"),
    "writes nothing": ("exit 0", 3, "failed: it said nothing"),
    "writes half a file": ('head -c 2000 "$HERE/empty.so" > "$out"', 3, "half a library"),
    "writes no library": ('echo nonsense > "$out"', 1, "cannot be loaded"),
    "writes another library": ('cp "$HERE/other.so" "$out"', 1, "onepass_forward"),
    "writes a directory": ('mkdir "$out"', 3, "failed"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_remembered_and_said_once(fake, monkeypatch, failure):
    body, most, reason = FAILURES[failure]
    compile_library("int other(void) { return 0; }", fake.here / "other.so")
    fake.does(body)
    if failure == "hangs":
        monkeypatch.setattr(build, "LIMIT", 1)
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shapes()
        assert reason in explained() and reason in explained()
        assert reason in library.state() and reason in library.state()
    assert fake.runs <= most
    assert time.monotonic() - started < 15
    assert [reason in str(w.message) for w in said] == [True]
    assert not list(fake.cache.glob("build-*"))


def no_compiler(fake: Fake) -> str:
    fake.monkeypatch.setenv("CC", "no-such-compiler -O2")
    return "there is no C compiler (no-such-compiler)"


def open_quotation(fake: Fake) -> str:
    fake.monkeypatch.setenv("CC", "gcc '-O2")
    return "No closing quotation"


def compiler_is_no_program(fake: Fake) -> str:
    fake.path.write_bytes(b"\x7fELF nonsense")
    return "Exec format error"


def cache_is_a_file(fake: Fake) -> str:
    fake.cache.write_text("")
    return "no place for the compiled kernels"


def cache_below_a_file(fake: Fake) -> str:
    (fake.here / "file").write_text("")
    fake.monkeypatch.setenv("ONEPASS_CACHE", str(fake.here / "file" / "cache"))
    return "no place for the compiled kernels"


def no_home(fake: Fake) -> str:
    """As in a container whose user has no entry in /etc/passwd."""
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    fake.monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "ONEPASS_CACHE", "XDG_CACHE_HOME"):
        fake.monkeypatch.delenv(name, raising=False)
    fake.monkeypatch.chdir(fake.here)
    return "HOME is not set"


def unknown_user(fake: Fake) -> str:
    fake.monkeypatch.chdir(fake.here)
    fake.monkeypatch.setenv("ONEPASS_CACHE", "~no-such-user/cache")
    return "cannot be expanded"


def lock_is_a_directory(fake: Fake) -> str:
    (fake.cache / "lock").mkdir(parents=True)
    fake.cache.chmod(0o700)
    return "cannot be kept"


def disk_is_full(fake: Fake) -> str:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    fake.monkeypatch.setattr(build.tempfile, "mkdtemp", full)
    return "No space left on device"


def sources_are_missing(fake: Fake) -> str:
    fake.monkeypatch.setattr(build, "SOURCES", fake.here / "nowhere")
    return "C sources cannot be read"


def something_unforeseen(fake: Fake) -> str:
    def unforeseen() -> str:
        raise RuntimeError("of a kind nobody thought of")

    fake.monkeypatch.setattr(build, "_cpu", unforeseen)
    return "RuntimeError: of a kind nobody thought of"


WRONG = [
    no_compiler,
    open_quotation,
    compiler_is_no_program,
    cache_is_a_file,
    cache_below_a_file,
    no_home,
    unknown_user,
    lock_is_a_directory,
    disk_is_full,
    sources_are_missing,
    something_unforeseen,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_what_is_wrong_is_a_reason(fake, wrong: Callable[[Fake], str]):
    """A call never raises for this."""
    reason = wrong(fake)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shapes(3)
        assert reason in explained() and reason in library.state()
    assert [reason in str(w.message) for w in said] == [True]
    assert not fake.runs
    assert not (fake.here / "~").exists() and not (fake.here / "~no-such-user").exists()


def test_doctor_says_the_reason(fake, capsys):
    """doctor gives the reason each time, in its first lines and nowhere else."""
    fake.monkeypatch.setenv("CC", "gcc '-O2")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert main(["doctor"]) == 0
        assert 'C kernels       cannot be used: CC="gcc \'-O2" cannot be read as a command' in capsys.readouterr().out


def test_c_is_required(fake):
    """Each call raises, and the compiler runs once."""
    fake.does("echo nonsense >&2; exit 1")
    fake.monkeypatch.setenv("ONEPASS_CPU", "c")
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"ONEPASS_CPU=c, but .*nonsense"):
            F.layer_norm(torch.randn(4, 8), (8,))
    assert fake.runs == 3  # once with each flag


@pytest.mark.parametrize("wrong", ["bytes", "nothing"])
def test_processors_that_nobody_can_read(fake, wrong):
    (fake.here / "cpuinfo").write_bytes(b"model name: \xff\xfe\n")

    def other(path: str, *args: object, **kwargs: object):
        if wrong == "nothing":
            raise PermissionError(path)
        return open(fake.here / "cpuinfo", *args, **kwargs)  # pyright: ignore[reportArgumentType, reportCallIssue]

    fake.monkeypatch.setattr(build, "open", other, raising=False)
    build.library()


@pytest.mark.parametrize("state", ["none", "closed"])
def test_without_stderr(fake, state):
    with open(os.devnull, "w") as file:
        pass
    fake.monkeypatch.setattr(sys, "stderr", None if state == "none" else file)
    build.library()


# The flags


def test_next_flag_where_one_is_unknown(fake):
    fake.does(f'case "$*" in *native*) echo unknown flag >&2; exit 1;; esac; {COPY}')
    build.library()
    assert [("-march=native" in line, "-mcpu=native" in line) for line in fake.log.read_text().splitlines()] == [
        (True, False),
        (False, True),
        (False, False),
    ]


def test_all_tries_share_one_limit(fake):
    fake.does("sleep 1.2; echo nonsense >&2; exit 1")
    fake.monkeypatch.setattr(build, "LIMIT", 2)
    started = time.monotonic()
    assert "nonsense" in refused()
    assert time.monotonic() - started < 3.5 and fake.runs <= 2


@needs_proc
def test_a_time_out_ends_what_the_compiler_started(fake):
    fake.does('sleep 100 & echo $! > "$HERE/pid"; wait')
    fake.monkeypatch.setattr(build, "LIMIT", 1)
    assert "did not end" in refused()
    pid, until = int((fake.here / "pid").read_text()), time.monotonic() + 5
    while name_and_state(pid)[1] not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.02)
    assert name_and_state(pid)[1] in ("", "Z")  # gone, or a zombie


def test_what_a_compiler_leaves_running_is_not_waited_for(fake):
    """A compiler may leave a server running, which keeps the compiler's output open."""
    fake.does(f'sleep 20 & echo $! > "$HERE/pid"; {COPY}')
    started = time.monotonic()
    build.library()
    assert time.monotonic() - started < 5
    os.kill(int((fake.here / "pid").read_text()), signal.SIGKILL)


def test_interrupt_is_not_remembered(fake):
    fake.does("exec sleep 100")
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        build.library()
    assert not list(fake.cache.glob("build-*"))
    fake.does(COPY)
    build.library()


# Threads, processes and forks


@pytest.mark.parametrize("works", [True, False])
def test_threads_compile_once(fake, works):
    fake.does(f"sleep 0.3; {COPY if works else 'echo No space left on device >&2; exit 1'}")
    outcomes: list[object] = []

    def ask() -> None:
        try:
            outcomes.append(build.library())
        except cache.Unavailable as reason:
            outcomes.append(str(reason))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.runs == 1 and len(outcomes) == 8 and len(set(map(str, outcomes))) == 1


def test_waiting_for_another_process_has_a_limit(fake):
    fake.does("exec sleep 60")
    stuck = fake.start()
    try:
        fake.wait()
        waiting = fake.start("build.LIMIT = 1\nbuild.library()")
        try:
            said = waiting.communicate(timeout=30)[1]
        finally:
            waiting.kill()
        assert f"process {stuck.pid} on " in said and "was not done after 1 s" in said and str(fake.cache / "lock") in said
        assert fake.runs == 1
    finally:
        stuck.kill()


def test_a_terminal_shows_what_is_waited_for(fake):
    import pty

    fake.does(f"sleep 2; {COPY}")
    first = fake.start()
    fake.wait()
    ours, theirs = pty.openpty()
    second = fake.start(stderr=theirs)
    assert second.wait(60) == 0 == first.wait(60)
    os.write(theirs, b".")  # so that there is something to read
    shown = os.read(ours, 10000).decode()
    os.close(ours)
    os.close(theirs)
    assert f"waiting for process {first.pid} on " in shown and str(fake.cache / "lock") in shown
    assert fake.runs == 1


def test_a_killed_process_leaves_nothing_for_ever(fake):
    fake.does('echo half > "$out"; touch "$TMPDIR/cc1.s"; echo . >> "$HERE/wrote"; exec sleep 100')
    for n in range(3):
        process = fake.start()
        fake.wait(n + 1, "wrote")
        process.kill()
        process.communicate()
    assert list(fake.cache.glob("build-*"))
    fake.end()
    fake.does(COPY)
    build.library()
    kept = fake.library()
    assert sorted(fake.cache.iterdir()) == sorted([kept, kept.with_suffix(".sha256"), fake.cache / "lock"])


def test_folders_of_other_machines_are_left_for_a_day(fake):
    """Locks of other machines may not be visible here."""
    fake.cache.mkdir(mode=0o700)
    young, old = fake.cache / "build-elsewhere-1", fake.cache / "build-elsewhere-2"
    young.mkdir()
    old.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    build.library()
    assert young.exists() and not old.exists()


def test_locks_do_not_pile_up(fake):
    for n in range(4):
        fake.monkeypatch.setenv("CC", f"{fake.path} -DNUMBER={n}")
        forget()
        build.library()
    assert len(list(fake.cache.glob("*.so"))) == 4
    assert [path.name for path in fake.cache.iterdir() if path.suffix not in (".so", ".sha256")] == ["lock"]


FORK = """
library = threading.Thread(target=build.library)
library.start()
while not os.path.exists(os.environ["HERE"] + "/runs"):
    time.sleep(0.02)
child = os.fork()
if not child:
    {child}
library.join()
{parent}
"""


def test_a_forked_child_does_not_keep_the_lock(fake):
    """The parent compiled after the fork."""
    fake.does(f"sleep 1; {COPY}")
    parent = fake.start(FORK.format(child="time.sleep(30); os._exit(0)", parent="print(child, flush=True)"))
    child = 0
    try:
        child = int(parent.stdout.readline())  # pyright: ignore[reportOptionalMemberAccess]
        fake.library().unlink()
        other = fake.start("build.LIMIT = 5\nbuild.library()")
        try:
            assert other.wait(20) == 0, other.stderr.read()  # pyright: ignore[reportOptionalMemberAccess]
        finally:
            other.kill()
    finally:
        parent.kill()
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_lock(fake):
    fake.does("exec sleep 100")
    code = FORK.format(child="print(os.getpid(), flush=True); time.sleep(30); os._exit(0)", parent="")
    parent = fake.start(code)
    child = int(parent.stdout.readline())  # pyright: ignore[reportOptionalMemberAccess]
    try:
        parent.kill()
        parent.wait()
        fake.does(COPY)
        other = fake.start("build.LIMIT = 5\nbuild.library()")
        try:
            assert other.wait(20) == 0
        finally:
            other.kill()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_forked_while_a_thread_compiles(fake):
    """The child does not have the thread. It waits for its parent's library, and does not touch its parent's folder."""
    fake.does(f"sleep 1; {COPY}")
    process = fake.start(FORK.format(child="build.library(); sys.exit(0)", parent="print(os.waitpid(child, 0)[1])"))
    try:
        out, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out.strip()) == (0, "0"), said
    assert fake.runs == 1


# What is in the cache


def damage_digest(data: bytes) -> Callable[[Fake], object]:
    return lambda fake: fake.library("sha256").write_bytes(data)


def digest_is_a_directory(fake: Fake) -> None:
    path = fake.library("sha256")
    path.unlink()
    path.mkdir()


def digest_is_a_pipe(fake: Fake) -> None:
    path = fake.library("sha256")
    path.unlink()
    os.mkfifo(path)


def library_is_a_pipe(fake: Fake) -> None:
    path = fake.library()
    path.unlink()
    os.mkfifo(path)


def library_is_a_directory(fake: Fake) -> None:
    path = fake.library()
    path.unlink()
    path.mkdir()


def half_a_library(fake: Fake) -> None:
    path, other = fake.library(), fake.here / "half.so"
    other.write_bytes(path.read_bytes()[:2000])
    os.replace(other, path)  # the mapped file must not change


def library_is_a_link(fake: Fake) -> None:
    path = fake.library()
    shutil.move(path, fake.here / "elsewhere.so")
    path.symlink_to(fake.here / "elsewhere.so")


def group_can_write_library(fake: Fake) -> None:
    fake.library().chmod(0o660)


def all_can_write_digest(fake: Fake) -> None:
    fake.library("sha256").chmod(0o606)


def library_of_another(fake: Fake) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(fake.library(), 12345, 12345)


BROKEN = {
    "digest is not text": damage_digest(b"\xff\xfe\x00"),
    "digest is empty": damage_digest(b""),
    "digest is another": damage_digest(b"0" * 64),
    "digest is too long": lambda fake: fake.library("sha256").write_bytes(fake.library("sha256").read_bytes() + b"0"),
    **{
        function.__name__.replace("_", " "): function
        for function in (
            digest_is_a_directory,
            digest_is_a_pipe,
            library_is_a_pipe,
            library_is_a_directory,
            half_a_library,
            library_is_a_link,
            group_can_write_library,
            all_can_write_digest,
            library_of_another,
        )
    },
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_library_is_compiled_again(fake, broken):
    build.library()
    BROKEN[broken](fake)
    # In another process, since a pipe could block forever.
    process = fake.start()
    try:
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert fake.runs == 2
    for path in (fake.library(), fake.library("sha256")):
        state = path.lstat()
        assert stat.S_ISREG(state.st_mode) and not state.st_mode & 0o022 and state.st_uid == os.getuid()
    forget()
    build.library()
    assert fake.runs == 2


def test_a_library_not_to_be_trusted_is_refused_where_none_can_be_compiled(fake):
    build.library()
    fake.library().chmod(0o666)
    fake.does("echo nonsense >&2; exit 1")
    forget()
    reason = refused()
    assert "nonsense" in reason and f"{fake.library()} belongs to, or can be written by, other users" in reason


def test_a_full_directory_in_the_way_is_a_reason_before_the_compiler_runs(fake):
    build.library()
    digest_is_a_directory(fake)
    (fake.library("sha256") / "file").write_text("")
    forget()
    assert "is a directory, and in the way" in refused() and fake.runs == 1


@as_root
@pytest.mark.parametrize("who", ["another", "group"])
def test_a_folder_of_others_is_refused(fake, who):
    build.library()
    os.chown(fake.cache, 12345, 12345) if who == "another" else fake.cache.chmod(0o770)
    forget()
    assert "belongs to, or can be written by, other users" in refused()


@as_root
def test_what_belongs_to_root_is_trusted(fake):
    """Root may provide libraries in a folder that only root can write."""
    build.library()
    fake.monkeypatch.setattr(os, "geteuid", lambda: 12345)
    fake.monkeypatch.setattr(os, "getuid", lambda: 12345)
    forget()
    build.library()
    assert fake.runs == 1


@as_root
def test_what_the_effective_user_may_trust(fake):
    """A program that runs as root for a user must not run the user's libraries."""
    build.library()
    os.chown(fake.cache, 12345, 12345)
    fake.monkeypatch.setattr(os, "getuid", lambda: 12345)
    forget()
    assert "other users" in refused()


def test_a_umask_that_lets_the_group_write(fake):
    before = os.umask(0o002)
    try:
        fake.does('rm -f "$out"; cat "$HERE/empty.so" > "$out"; chmod 775 "$out"')
        build.library()
        forget()
        build.library()
    finally:
        os.umask(before)
    assert fake.runs == 1


@needs_proc
def test_what_was_checked_is_loaded(fake):
    """If somebody replaces the file after it was read, the file that was read is loaded."""
    assert fake.start().wait(60) == 0  # in another process, since the loader of this one would return what it has loaded
    wrong = compile_library(EMPTY.replace("return 0", "return 666"), fake.here / "wrong.so")
    path, plain = fake.library(), build.sha256
    exchanged = []

    def exchange(data: bytes):
        if data.startswith(b"\x7fELF") and not exchanged:
            exchanged.append(path)
            os.replace(wrong, path)
        return plain(data)

    for module in {sys.modules[name] for name in ("onepass.backends.c.build", "onepass.backends.c.cache") if name in sys.modules}:
        fake.monkeypatch.setattr(module, "sha256", exchange)
    loaded = build.library()
    assert exchanged and loaded.onepass_forward() == 0 and loaded._name == str(path)


@needs_proc
def test_a_new_library_is_not_taken_for_an_old_one(fake):
    """The loader identifies libraries by the names under which they were loaded."""
    for value in (0, 1, 2, 3):
        compile_library(EMPTY.replace("return 0", f"return {value}"), fake.here / "empty.so")
        shutil.rmtree(fake.cache, ignore_errors=True)
        forget()
        assert build.library().onepass_forward() == value


def test_where_there_is_no_proc(fake):
    """As on macOS. The library is loaded by its path."""
    exists = os.path.exists
    fake.monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path))
    assert build.library()._name == str(fake.library())


WINDOWS = """
import sys, os
import onepass, torch
sys.modules["fcntl"] = None
for name in ("getuid", "geteuid", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "register_at_fork", "killpg", "memfd_create", "pread"):
    delattr(os, name)
from onepass.backends.c import library
print(library.state())
onepass.functional.layer_norm(torch.randn(4, 8), (8,))
"""


def test_a_system_without_owners(fake):
    """As on Windows. The import works, and the state gives the reason."""
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cannot be used: C kernels are for Linux and macOS" in done.stdout
    assert not fake.runs
