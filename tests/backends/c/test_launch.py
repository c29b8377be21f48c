"""The C kernels: compiling and caching, threads and forks, conversions, activations, and random problems."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import onepass
import onepass.functional as F
from benchmarks import random_problems
from onepass.backends.c import build, library
from onepass.backends.c import problem as c_problem
from onepass.core.spec import ACTIVATIONS
from onepass.dispatch import launchers

HALVES = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
pytestmark = needs_compiler


@pytest.fixture
def own(monkeypatch, tmp_path, anew):
    """An empty cache, for a process that has not used the kernels yet."""
    monkeypatch.delenv("ONEPASS_CPU", raising=False)
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def explained() -> str:
    return str(onepass.explain(F.layer_norm, torch.randn(4, 8), (8,)))


def works_by_torch(reason: str) -> None:
    """torch's kernels run, and `explain` gives the reason."""
    x = torch.randn(16, 64)
    torch.testing.assert_close(F.layer_norm(x, (64,)), torch.nn.functional.layer_norm(x, (64,)))
    assert "forward   aten" in explained() and reason in explained()
    assert reason in library.state()


def test_no_compiler(own, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    works_by_torch("there is no C compiler (no-such-compiler)")


def test_failing_compiler(own, monkeypatch):
    monkeypatch.setenv("CC", "false")
    works_by_torch("false failed: it said nothing")


def test_compiler_that_writes_nothing(own, monkeypatch):
    monkeypatch.setenv("CC", "true")
    works_by_torch("true failed")


@pytest.mark.skipif(os.name != "posix" or os.getuid() == 0, reason="nothing is read-only for root")
def test_read_only_home(own, monkeypatch):
    monkeypatch.delenv("ONEPASS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = own / "home"
    home.mkdir(mode=0o500)
    monkeypatch.setenv("HOME", str(home))
    works_by_torch("no place for the compiled kernels")


def test_cache_that_is_a_file(own, monkeypatch):
    (own / "cache").write_text("not a folder")
    works_by_torch("no place for the compiled kernels")


def test_cache_that_others_can_write(own):
    (own / "cache").mkdir()
    (own / "cache").chmod(0o777)
    works_by_torch("can be written by, other users")


def test_off(own, monkeypatch):
    monkeypatch.setenv("ONEPASS_CPU", "off")
    assert "forward   aten" in explained() and "not c: ONEPASS_CPU=off" in explained()
    assert not (own / "cache").exists()


def test_c_is_required(own, monkeypatch):
    monkeypatch.setenv("ONEPASS_CPU", "c")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="ONEPASS_CPU=c, but there is no C compiler"):
        F.layer_norm(torch.randn(4, 8), (8,))


def test_unknown_setting(own, monkeypatch):
    monkeypatch.setenv("ONEPASS_CPU", "fast")
    with pytest.raises(ValueError, match="ONEPASS_CPU='fast', expected off, c, or nothing"):
        F.layer_norm(torch.randn(4, 8), (8,))


def test_compiled_once_and_mended(own):
    """A library is compiled once and found again. If its bytes have changed, it is compiled again."""
    F.layer_norm(torch.randn(4, 8), (8,))
    (path,) = (own / "cache").glob("*.so")
    assert "forward   c" in explained() and str(path) in library.state()
    written = path.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library()._name == str(path) and path.stat().st_mtime_ns == written
    other = own / "half.so"
    other.write_bytes(path.read_bytes()[:2000])  # as a full disk leaves it; the mapped file must not change
    os.replace(other, path)
    build.library.cache_clear()
    assert build.library()._name == str(path) and path.stat().st_size > 2000


START = """
import time, onepass.backends.c.build as build
started = time.perf_counter()
build.library()
print(time.perf_counter() - started)
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "ONEPASS_CACHE": str(cache), **environment}
    return subprocess.Popen([sys.executable, "-c", START], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_several_processes_start_at_once(tmp_path):
    processes = [start(tmp_path / "cache") for _ in range(3)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    assert not list((tmp_path / "cache").glob("build-*"))
    quickest = min(float(start(tmp_path / "cache").communicate(timeout=60)[0]) for _ in range(3))
    assert quickest < 0.05


def test_import_compiles_nothing(tmp_path):
    code = "import onepass, onepass.nn, onepass.functional, sys; assert 'onepass.backends.c.build' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "ONEPASS_CACHE": str(tmp_path / "cache")}, check=True)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", random_problems.DTYPES)
def test_threads_do_not_change_bits(threads, layout, dtype):
    """For each norm, forward and backward, at a size that is divided among threads."""
    x = torch.randn(6, 48, 40, 40).to(dtype).to(memory_format=layout).requires_grad_()
    w, b = (torch.randn(48).to(dtype).requires_grad_() for _ in range(2))
    dy = torch.randn_like(x)
    norms = {
        "group": lambda: F.group_norm(x, 6, w, b, activation="silu"),
        "instance": lambda: F.instance_norm(x, weight=w, bias=b),
        "batch": lambda: F.batch_norm(x, None, None, w, b, True),
        "2d": lambda: F.layer_norm2d(x, w, b),
        "rows": lambda: F.layer_norm(x, (40, 40)),
    }
    for name, norm in norms.items():
        results = []
        for n in (1, 2, 5):
            threads(n)
            y = norm()
            wanted = (x, w, b) if name != "rows" else (x,)
            results.append((y.detach(), *torch.autograd.grad(y, wanted, dy)))
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other)), name


def test_as_many_threads_as_torch(threads):
    for n in (1, 3, 2):
        threads(n)
        assert library.load().threads() == n


def _in_a_fork(queue, x) -> None:
    # In deterministic mode torch fills new memory, and with several threads that waits forever in a fork.
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(4)  # a DataLoader sets one thread
    y = F.layer_norm(x, (256,))
    queue.put((tuple(y.shape), library.load().threads(), "forked" in library.state()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_fork_does_not_wait_for_threads(threads):
    threads(3)
    x = torch.randn(512, 256)
    F.layer_norm(x, (256,))  # starts the threads of the runtime, which a fork does not copy
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_a_fork, args=(queue, x))
    process.start()
    try:
        assert queue.get(timeout=60) == ((512, 256), 1, True)
    finally:
        process.join(10)
        process.kill()


class _Normalized(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return F.group_norm(torch.full((1, 8, 96, 96), float(index)), 4)[0]


def test_data_loader_workers():
    F.group_norm(torch.randn(4, 8, 96, 96), 4)
    loader = torch.utils.data.DataLoader(_Normalized(), batch_size=2, num_workers=2, timeout=60)
    assert [batch.abs().max().item() for batch in loader] == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_is_read_and_written(dtype):
    """With a given mean of 0 and deviation of 1, a norm multiplies by the weight and rounds once."""
    x = HALVES.view(dtype).view(1, -1).repeat(3, 1)
    mean, var = torch.zeros(2**16), torch.ones(2**16)
    weight = torch.cat([torch.ones(2**15), torch.rand(2**15) * 3])
    for memory in (x, x.t().contiguous().t()):  # the kernels' row and tile walks
        y = F.batch_norm(memory, mean, var, weight, eps=0.0)
        expected = (x.float() * weight).to(dtype)
        same = (y.view(torch.int16) == expected.view(torch.int16)) | (y == expected)  # zeros may differ in sign
        assert (same | expected.isnan()).all() and torch.equal(y.isnan(), expected.isnan())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    """Activations agree with fp64 over the whole range of float32, and with torch for infinities."""
    tail = torch.logspace(-6, 30, 3000)
    z = torch.cat([torch.linspace(-30, 30, 60001), tail, -tail])[None].requires_grad_()
    mean, var = torch.zeros(z.shape[1]), torch.ones(z.shape[1])
    exact = z.detach().double().requires_grad_()
    approximate = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    by_torch = getattr(torch.nn.functional, activation.removesuffix("_tanh"))
    expected = by_torch(exact, **approximate)
    y = F.batch_norm(z, mean, var, eps=0.0, activation=activation)
    slope, expected_slope = torch.autograd.grad(y.sum(), z)[0], torch.autograd.grad(expected.sum(), exact)[0]
    assert ((y - expected).abs() <= 5e-7 * expected.abs() + 1e-12 + 4e-8 * exact.abs().clamp(max=9)).all()
    assert (slope - expected_slope).abs().max() < 2e-6
    ends = torch.tensor([[torch.inf, -torch.inf, torch.nan]])
    found = F.batch_norm(ends, torch.zeros(3), torch.ones(3), eps=0.0, activation=activation)
    assert found[0, 0] == torch.inf and found[0, 2].isnan() and (found[0, 1] == 0 if activation == "relu" else found[0, 1].isnan())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mean_far_beyond_deviation(layout):
    """torch's channels-last kernel is off by thousands here."""
    x = (torch.randn(2, 64, 32, 32, dtype=torch.float64) + 1e4).float().to(memory_format=layout)
    expected = torch.nn.functional.group_norm(x.double().contiguous(), 8)
    assert (F.group_norm(x, 8) - expected).abs().max() < 1e-2
    drifting = (x + torch.linspace(0, 1e5, 32)[:, None]).to(memory_format=layout)  # later rows are far from the mean of the first rows
    expected = torch.nn.functional.group_norm(drifting.double().contiguous(), 8)
    assert (F.group_norm(drifting, 8) - expected).abs().max() < 1e-5


def test_running_statistics_are_changed_in_place():
    norm = onepass.nn.BatchNorm2d(8).requires_grad_(False)
    other = torch.nn.BatchNorm2d(8).requires_grad_(False)
    versions = []
    for _ in range(4):  # the first call is checked, the others take the short path
        x = torch.randn(4, 8, 6, 6)
        torch.testing.assert_close(norm(x), other(x))
        versions.append(norm.running_mean._version)
    torch.testing.assert_close(norm.running_mean, other.running_mean)
    torch.testing.assert_close(norm.running_var, other.running_var)
    assert versions == sorted(set(versions))


def test_parameters_as_they_come():
    """Strided parameters are read correctly, and parameters on another device are refused."""
    x, weight = torch.randn(32, 16), torch.randn(32)[::2]
    torch.testing.assert_close(F.layer_norm(x, (16,), weight), torch.nn.functional.layer_norm(x, (16,), weight))
    with pytest.raises(RuntimeError):
        F.layer_norm(x, (16,), torch.ones(16, device="meta"))


def test_large_and_small_share_a_buffer():
    """The buffer that is kept between calls grows, and two calls never share it."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [torch.randn(n, d) for n, d in ((2, 5000), (300, 64), (64, 4096), (3, 70001))] * 6
    expected = [torch.nn.functional.layer_norm(x, x.shape[-1:]) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for y, right in zip(pool.map(lambda x: F.layer_norm(x, x.shape[-1:]), inputs), expected):
            torch.testing.assert_close(y, right)


@pytest.mark.parametrize("start", range(0, 240, 40))
def test_random_problems(monkeypatch, start, threads):
    monkeypatch.setattr(c_problem, "_small", 0)
    launchers._known.clear()
    wrong = {
        random_problems.draw(7, i).name: said
        for i in range(start, start + 40)
        if (said := random_problems.run(random_problems.draw(7, i), "c", i)) not in ("", "-")
    }
    launchers._known.clear()
    assert not wrong


def _sanitizers() -> str:
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return ":".join(found) if all(map(os.path.isabs, found)) else ""


@pytest.mark.slow  # 40 s; `make sanitize` does more
@pytest.mark.skipif(not shutil.which("gcc") or sys.platform != "linux", reason="gcc's sanitizers")
def test_sanitizers_find_nothing(tmp_path):
    libraries = _sanitizers()
    if not libraries:
        pytest.skip("gcc has no sanitizers here")
    flags = "gcc -fsanitize=address,undefined -fno-sanitize-recover=all -g"
    env = {
        **os.environ,
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",
        "CC": flags,
        "ONEPASS_CACHE": str(tmp_path),
        "ONEPASS_CPU": "c",
    }
    command = [sys.executable, "-m", "benchmarks.random_problems", "--count", "30", "--seed", "3"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_time_of_a_call(threads):
    """The host time of a call is a few microseconds."""
    threads(1)
    x, weight = torch.randn(16, 64), torch.randn(64)
    with torch.no_grad():
        for _ in range(100):
            F.layer_norm(x, (64,), weight)
        best = 1.0
        for _ in range(200):
            started = time.perf_counter()
            F.layer_norm(x, (64,), weight)
            best = min(best, time.perf_counter() - started)
    assert best < 40e-6
