"""The node of the front door: several outputs, errors, lifetime, threads, processes, and compiled autograd."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import compiled_autograd

import onepass.functional as O
from onepass.backends.front_door import FrontDoor
from onepass.dispatch import launchers
from onepass.dispatch.node import Node
from tests.dispatch.test_front_door import C, operands

pytestmark = pytest.mark.usefixtures("opened")


def two_outputs(state, x, other):
    """Toy norms: y = x², and a second output that has a gradient if `state.second`."""
    y, total = x * x, x + other
    return (y, total), 2 if state.second else 1, (x, total)


def two_gradients(state, needs, dy, dtotal, *saved):
    state.seen.append((needs, dy is None, dtotal is None, len(saved)))
    dx = torch.zeros(3) if dy is None else 2 * dy * saved[0]
    dother = None if dtotal is None else dtotal
    return dx if dother is None else dx + dother, dother


@pytest.mark.parametrize("second", [True, False])
def test_nodes_with_two_outputs(second, door):
    state = SimpleNamespace(second=second, seen=[], remembered=FrontDoor.memory() if FrontDoor.memory else None)
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    y, total = Node.apply(two_outputs, two_gradients, state, x, other)
    assert y.requires_grad and total.requires_grad == second
    y.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, 2 * x.detach())
    if second:
        x.grad = None
        with torch.no_grad():
            x.add_(1)  # is not noticed: without a gradient of y nothing that was saved is needed
        total.sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(3))
        assert state.seen[1] == ((True, False), True, False, 0)
    assert state.seen[0] == ((True, False), False, True, 2)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_errors_of_a_repeated_backward(error):
    state = SimpleNamespace(remembered=FrontDoor.memory(), python=0)

    def launch(dy, x, last):
        assert last == "last"
        raise error("stop")

    def backward(state, needs, dy, x):
        state.python += 1
        FrontDoor.remember(state.remembered, needs, (dy, x), launch, (0, 1), "last", (0,))
        return (dy * 2,)

    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        y = Node.apply(lambda state, x: (x * 2, 1, (x,)), backward, state, x)
        if state.python and error is not RuntimeError:
            with pytest.raises(error):
                y.sum().backward()
        else:
            y.sum().backward()
    assert state.python == (2 if error is RuntimeError else 1)


def test_wrong_forwards_and_backwards_raise():
    state, x = SimpleNamespace(remembered=None), torch.randn(3, requires_grad=True)
    y = Node.apply(lambda state, x: (x * 2, 1, (x,)), lambda *given: "abc", state, x)
    with pytest.raises((TypeError, RuntimeError)):
        y.sum().backward()
    for forward in (lambda state, x: x, lambda state, x: ("y", 1, ()), lambda state, x: (x * 2, 1, ("saved",))):
        with pytest.raises((TypeError, ValueError)):
            Node.apply(forward, lambda *given: (None,), state, x)


def train(number: int) -> None:
    given = operands()
    mean, var = torch.zeros(6), torch.ones(6)
    for _ in range(number):
        O.layer_norm(given[0], (C,), *given[1:]).sum().backward()
        O.batch_norm(given[0].view(2, 6, 8), mean, var, training=True).sum().backward()


def test_nothing_leaks():
    train(10)
    gc.collect()
    alive = [sum(isinstance(o, torch.Tensor) for o in gc.get_objects()), *(sys.getrefcount(o) for o in (None, True, False, ()))]
    train(300)
    gc.collect()
    after = [sum(isinstance(o, torch.Tensor) for o in gc.get_objects()), *(sys.getrefcount(o) for o in (None, True, False, ()))]
    assert max(b - a for a, b in zip(alive, after)) < 100, (alive, after)


def test_tensors_and_launchers_die():
    x, weight, bias = operands()
    launchers.forget_all()
    for _ in range(3):
        h = x * 1
        y = O.layer_norm(h, (C,), weight, bias)
        y.sum().backward()
    y = O.layer_norm(h, (C,), weight, bias)
    (known,) = launchers.known()
    watched = [weakref.ref(t) for t in (h, known, known.train_backward)]
    del h, y, known
    launchers.forget_all()
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_a_deep_graph_is_freed_without_recursion():
    y = torch.randn(2, 4, requires_grad=True)
    for _ in range(30_000):
        y = O.layer_norm(y, (4,))
    del y


# A forked child trains. Threads share a graph, and the first to finish frees it. The process ends while a graph is alive.
IN_A_PROCESS = """
import os, sys, threading, time, torch
import onepass.functional as O
from onepass.dispatch import front_door
assert not front_door.open_now()
x, weight = torch.randn(6, 256, requires_grad=True), torch.randn(256, requires_grad=True)

def step():
    y = O.layer_norm(x, (256,), weight)
    return y, torch.autograd.grad(y.square().sum(), (x, weight), retain_graph=True)

y, expected = step()
child = os.fork()
if not child:
    for _ in range(20):
        found = step()[1]
    torch.autograd.grad(y.sum(), x)
    os._exit(0 if all(map(torch.equal, found, expected)) else 1)
assert os.waitpid(child, 0)[1] == 0

sys.setswitchinterval(1e-5)
until, outcomes = time.monotonic() + 3, set()
while time.monotonic() < until:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (sum(range(30)), t)[1]):
        hooked = O.layer_norm(x, (256,), weight)
    for shared in (O.layer_norm(x, (256,), weight), hooked):
        def backward():
            try:
                outcomes.add(len(torch.autograd.grad(shared, (x, weight), torch.ones_like(x))))
            except RuntimeError as error:
                outcomes.add("a second time" in str(error))
        threads = [threading.Thread(target=backward) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
assert outcomes == {2, True}, outcomes
sys.modules["a name that is freed late"] = step()[0]
print(y.grad_fn.name())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_threads_that_share_a_graph_and_exit():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "OnepassNormBackward\n"), done.stderr[:2000]


def test_threads_with_graphs_of_their_own():
    """More kinds of backwards than are remembered, in several threads at once."""
    failures = []

    def steps_of_a_thread(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(60):
            given = [torch.randn(s, generator=generator).requires_grad_() for s in ((4, 8), (8,), (8,))]
            wanted = [t for k, t in enumerate(given) if (1 + (i + seed) % 7) >> k & 1]
            found = [torch.autograd.grad(m.layer_norm(given[0], (8,), *given[1:]).square().sum(), wanted) for m in (O, F)]
            failures.extend(abs(a - b).max().item() for a, b in zip(*found) if not torch.allclose(a, b, atol=1e-4))

    threads = [threading.Thread(target=steps_of_a_thread, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


COMPILED = {
    "layer_norm": (lambda m, x, w: m.layer_norm(x, (C,), w), (6, C)),
    "rms_norm": (lambda m, x, w: m.rms_norm(x, (C,), w), (6, C)),
    "batch_norm": (lambda m, x, w: m.batch_norm(x, torch.zeros(C), torch.ones(C), w, training=True), (6, C)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_autograd(name):
    run, shape = COMPILED[name]
    for wanted in ((0, 1), (0,), (1,)):
        for _ in range(2):
            given = torch.randn(shape, requires_grad=True), torch.randn(C, requires_grad=True)
            expected = torch.autograd.grad(run(F, *given).square().sum(), [given[i] for i in wanted])
            loss = run(O, *given).square().sum()
            with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager", fullgraph=True)):
                ours = torch.autograd.grad(loss, [given[i] for i in wanted])
            torch.testing.assert_close(ours, expected)


def test_compiled_autograd_tells_launchers_apart():
    """Launchers of another norm may get the address of forgotten ones."""
    x = torch.randn(2, 8, 6, requires_grad=True)
    for step in range(6):
        launchers.forget_all()
        gc.collect()
        name = ("relu", "silu")[step % 2]
        expected = torch.autograd.grad(getattr(F, name)(F.group_norm(x, 2)).sum(), x)
        loss = O.group_norm(x, 2, activation=name).sum()
        with compiled_autograd._enable(lambda graph: graph):
            ours = torch.autograd.grad(loss, x)
        torch.testing.assert_close(ours, expected)
