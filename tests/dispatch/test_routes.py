"""Every route gives the same norm: direct, registered op and reference.

Also under compile, export, functorch, forward-mode AD and autocast.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.testing import assert_close

import onepass
import onepass.functional as O
from onepass.core import norms
from onepass.core.operands import NO_OPTIONAL, OptionalOperands
from onepass.dispatch import launchers, route
from onepass.verify import torch_norms
from onepass.verify.tensors import lay_out

C = 8


def _calls(m):
    mean, var = torch.linspace(-1, 1, C), torch.linspace(0.5, 2, C)
    return {
        "layer_norm": lambda x, w, b: m.layer_norm(x.movedim(1, -1), (C,), w, b),
        "rms_norm": lambda x, w, b: m.rms_norm(x.movedim(1, -1), (C,), w, 1e-6) + b,
        "group_norm": lambda x, w, b: m.group_norm(x, 4, w, b),
        "instance_norm": lambda x, w, b: m.instance_norm(x, None, None, w, b),
        "batch_norm": lambda x, w, b: m.batch_norm(x, None, None, w, b, True),
        "evaluation": lambda x, w, b: m.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), w, b, False),
    }


def _modulation(x):
    return x.mean((2, 3)), x[:, :, 0, 0]


def _add(x, w, b):
    y, total = O.add_group_norm(x, x.flip(-1), 4, w, b, activation="gelu")
    return y + 2 * total


def _composed_add(x, w, b):
    total = x + x.flip(-1)
    return F.gelu(F.group_norm(total, 4, w, b)) + 2 * total


def _adaptive(x, w, b):
    scale, shift = _modulation(x)
    return F.silu(F.layer_norm(x.movedim(1, -1), (C,), w, b) * (1 + scale)[:, None, None] + shift[:, None, None])


# Our functions that torch does not have, and the same in torch's operations.
EXTRAS = {
    "silu": (lambda x, w, b: O.group_norm(x, 4, w, b, activation="silu"), lambda x, w, b: F.silu(F.group_norm(x, 4, w, b))),
    "modulated": (lambda x, w, b: O.layer_norm(x.movedim(1, -1), (C,), w, b, modulate=_modulation(x), activation="silu"), _adaptive),
    "added": (_add, _composed_add),
    "offset": (
        lambda x, w, b: O.rms_norm(x.movedim(1, -1), (C,), w, 1e-6, weight_offset=1.0) + b,
        lambda x, w, b: F.rms_norm(x.movedim(1, -1), (C,), w + 1, 1e-6) + b,
    ),
    "granular": (
        lambda x, w, b: O.layer_norm(x, x.shape[1:], w, b, granularity="channel"),
        lambda x, w, b: F.layer_norm(x, x.shape[1:]) * w[:, None, None] + b[:, None, None],
    ),
    "last": (
        lambda x, w, b: O.group_norm(x.movedim(1, -1), 4, w, b, channel_dim=-1),
        lambda x, w, b: F.group_norm(x, 4, w, b).movedim(1, -1),
    ),
    "switchable": (
        lambda x, w, b: O.switchable_norm(x, w[:3], b[:3], None, None, w, b, True),
        lambda x, w, b: torch_norms.switchable_norm(x, w[:3], b[:3], None, None, w, b, True, 0.1, 1e-5, True),
    ),
}
CALLS = [pytest.param(ours, _calls(F)[name], id=name) for name, ours in _calls(O).items()]
CALLS += [pytest.param(*both, id=name) for name, both in EXTRAS.items()]
ours_and_torchs = pytest.mark.parametrize("ours, torchs", CALLS)


def _inputs(n=4, width=6, dtype=torch.float64):
    return torch.randn(n, C, 5, width, dtype=dtype), torch.randn(C, dtype=dtype), torch.randn(C, dtype=dtype)


def _gradients(f, *inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = f(*inputs)
    return y, torch.autograd.grad(y, inputs, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))


@ours_and_torchs
def test_compile_whole_with_dynamic_shapes(ours, torchs):
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, width in ((4, 6), (5, 7), (3, 9)):
        inputs = _inputs(n, width)
        assert_close(_gradients(compiled, *inputs), _gradients(torchs, *inputs))


@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_compile_with_inductor(name):
    torch._dynamo.reset()
    inputs = _inputs(dtype=torch.float32)
    assert_close(_gradients(torch.compile(_calls(O)[name], fullgraph=True), *inputs), _gradients(_calls(F)[name], *inputs))


def test_compiled_graph_holds_our_ops():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(_calls(O)["group_norm"], fullgraph=True, backend=backend)(*_inputs())
    assert "onepass.norm" in graphs[0].code


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_module_compiles_whole(momentum):
    torch._dynamo.reset()
    ours, torchs = onepass.nn.BatchNorm2d(C, momentum=momentum), torch.nn.BatchNorm2d(C, momentum=momentum)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, C, 5, 6)
        assert_close(compiled(x), torchs(x))
    assert_close(dict(ours.state_dict()), dict(torchs.state_dict()))


@ours_and_torchs
def test_export(ours, torchs):
    class Model(torch.nn.Module):
        def forward(self, x, w, b):
            return ours(x, w, b)

    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Model(), _inputs(), dynamic_shapes=({0: batch}, None, None))
    inputs = _inputs(n=7)
    assert_close(program.module()(*inputs), torchs(*inputs))
    assert any("onepass.norm" in str(node.target) for node in program.graph.nodes)


@ours_and_torchs
def test_func_grad(ours, torchs):
    inputs = _inputs()

    def loss(f):
        return torch.func.grad(lambda *t: f(*t).pow(3).sum(), argnums=(0, 1, 2))

    assert_close(loss(ours)(*inputs), loss(torchs)(*inputs))
    torch._dynamo.reset()
    assert_close(torch.compile(loss(ours), fullgraph=True, backend="aot_eager")(*inputs), loss(torchs)(*inputs))


@ours_and_torchs
def test_vmap(ours, torchs):
    x, w, b = torch.randn(3, 4, C, 5, 6), torch.randn(3, C), torch.randn(C)
    assert_close(torch.vmap(ours, in_dims=(0, 0, None))(x, w, b), torch.stack([torchs(*t, b) for t in zip(x, w)]))
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: ours(x, w, b).square().sum()), in_dims=(None, 0))
    expected = torch.stack([torch.func.grad(lambda w, x: torchs(x, w, b).square().sum())(w[0], t) for t in x])
    assert_close(per_sample(w[0], x), expected, rtol=1e-4, atol=1e-4)


@ours_and_torchs
def test_jvp_against_differences(ours, torchs):
    inputs, tangents = _inputs(), _inputs()
    _, tangent = torch.func.jvp(ours, inputs, tangents)
    h = 1e-6
    ahead, behind = (torchs(*(t + s * h * v for t, v in zip(inputs, tangents))) for s in (1, -1))
    assert_close(tangent, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, v) for t, v in zip(inputs, tangents)]
        assert_close(forward_ad.unpack_dual(ours(*duals)).tangent, tangent)


@ours_and_torchs
def test_batched_gradients(ours, torchs):
    results = []
    for f in (ours, torchs):
        inputs = [t.requires_grad_() for t in copy.deepcopy(_inputs_fixed())]
        y = f(*inputs)
        dys = torch.linspace(-1, 1, 3 * y.numel(), dtype=y.dtype).view(3, *y.shape)
        results.append(torch.autograd.grad(y, inputs, dys, is_grads_batched=True))
    assert_close(*results)


def _inputs_fixed():
    torch.manual_seed(7)
    return _inputs()


SPECS = [
    (norms.layer_norm(2, granularity="channel", weight_offset=1.0, activation="gelu"), (5,)),
    (norms.group_norm(2, channel_dim=-1, activation="silu"), (6,)),
    (norms.layer_norm(2), (5, 6)),
    (norms.rms_norm(1, 1e-6), (6,)),
    (norms.group_norm(2), (C,)),
    (norms.instance_norm(), (C,)),
    (norms.batch_norm(), (C,)),
    (norms.layer_norm2d(), (C,)),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("definition, params", SPECS, ids=lambda s: str(s)[:30])
def test_opcheck_every_op_and_dtype(definition, params, dtype):
    _opcheck(definition, params, dtype, "contiguous", given=False)


@pytest.mark.parametrize("layout, given", [("channels_last", False), ("strided", False), ("contiguous", True)])
def test_opcheck_layouts_and_given_statistics(layout, given):
    _opcheck(norms.batch_norm(), (C,), torch.bfloat16, layout, given)


def _opcheck(definition, params, dtype, layout, given):
    x = lay_out(torch.randn(4, C, 5, 6, dtype=dtype), layout).requires_grad_()
    weight = torch.randn(params, dtype=dtype, requires_grad=True)
    bias = torch.randn(params, dtype=dtype, requires_grad=True) if definition.centered else None
    stats = [torch.rand(definition.kept_shape(x.shape), dtype=dtype) + 1 for _ in range(2)] if given else [None, None]
    packed = definition.pack()
    track = definition.centered and not given
    torch.library.opcheck(torch.ops.onepass.norm.default, (x, weight, bias, *stats, *packed, track, *NO_OPTIONAL))
    with torch.no_grad():
        y, mean, rstd, *_ = torch.ops.onepass.norm(x, weight, bias, *stats, *packed, False, *NO_OPTIONAL)
    mean = stats[0] if given else mean if definition.centered else None
    operands = [None if t is None else t.detach() for t in (torch.randn_like(y), x, weight, bias, mean, rstd)]
    arguments = (*operands, *packed, given, [True, True, bias is not None], None, *NO_OPTIONAL)
    torch.library.opcheck(torch.ops.onepass.norm_backward.default, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_opcheck_residual_modulation_and_mixture(dtype, layout):
    x, residual = (lay_out(torch.randn(4, C, 5, 6, dtype=dtype), layout).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(C, dtype=dtype, requires_grad=True) for _ in range(2))
    scale, shift = (torch.randn(4, C, dtype=dtype, requires_grad=True) for _ in range(2))
    shares = [torch.rand(3, requires_grad=True) for _ in range(2)]
    running = torch.randn(C), torch.rand(C) + 1
    modulated = norms.group_norm(4, modulated=True, activation="silu"), OptionalOperands(residual, scale, shift)
    mixed = norms.switchable_norm(True), OptionalOperands(None, None, None, *shares)
    evaluated = norms.switchable_norm(True, modulated=True), OptionalOperands(None, scale, shift, *shares, *running)
    for definition, extras in (modulated, mixed, evaluated):
        torch.library.opcheck(torch.ops.onepass.norm.default, (x, weight, bias, None, None, *definition.pack(), True, *extras))
        with torch.no_grad():
            y, mean, rstd, var, total = torch.ops.onepass.norm(x, weight, bias, None, None, *definition.pack(), True, *extras)
        normalized, dsum = (x, None) if extras.residual is None else (total, torch.randn_like(total))
        operands = torch.randn_like(y), normalized, weight, bias, mean, rstd, *definition.pack(), False, [True] * 7, var
        arguments = [t.detach() if isinstance(t, torch.Tensor) else t for t in (*operands, dsum, *extras[1:])]
        torch.library.opcheck(torch.ops.onepass.norm_backward.default, arguments, test_utils=["test_schema", "test_faketensor"])


def test_opcheck_plain_operator():
    out, x = torch.empty(6, 8), torch.randn(6, 8)
    torch.library.opcheck(torch.ops.onepass.layer_norm_out.default, (out, x, torch.randn(8), None, 6, 8, 1e-5))


def test_plain_operator_and_out_compile_whole():
    x, weight, expected = torch.randn(6, 8), torch.randn(8), None

    def plain(x, weight):
        out = torch.empty_like(x)
        O.layer_norm_out(out, x, weight, None, 6, 8, 1e-5)
        return out, O.layer_norm(x, (8,), weight, out=torch.empty_like(x)), *O.layer_norm(x, (8,), weight, return_stats=True)

    torch._dynamo.reset()
    expected = plain(x, weight)
    assert_close(torch.compile(plain, fullgraph=True, backend="aot_eager")(x, weight), expected)
    assert_close(expected[0], F.layer_norm(x, (8,), weight))


@pytest.mark.parametrize(
    "make",
    [
        lambda: onepass.nn.BatchNorm2d(C),
        lambda: onepass.nn.InstanceNorm2d(C, track_running_stats=True),
        lambda: onepass.nn.SwitchableNorm2d(C),
    ],
)
def test_compiled_training_goes_on(make):
    """Running statistics are not part of the autograd graph, so one step does not depend on the one before."""
    torch._dynamo.reset()
    module, twin = make(), make()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, C, 5, 6, requires_grad=True)
        grads = [torch.autograd.grad(m(x).pow(3).sum(), x) for m in (compiled, twin)]
        assert_close(*grads)
    assert_close(dict(module.state_dict()), dict(twin.state_dict()))
    assert not any(buffer.requires_grad for buffer in module.buffers())
    copy.deepcopy(module)


def test_statistics_by_every_route():
    x = torch.randn(4, C, 5)
    expected = O.group_norm(x, 2, return_stats=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: O.group_norm(x, 2, return_stats=True), fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), expected)
    mapped = torch.vmap(lambda x: tuple(O.group_norm(x, 2, return_stats=True)))(torch.stack((x, x + 1)))
    assert_close([t[0] for t in mapped], list(expected))
    grads, stats = torch.func.grad(
        lambda x: (lambda s: (s.output.pow(3).sum() + s.rstd.sum(), s.rstd))(O.group_norm(x, 2, return_stats=True)), has_aux=True
    )(x)
    assert_close(stats, expected.rstd)
    assert_close(grads, torch.func.grad(lambda x: F.group_norm(x, 2).pow(3).sum())(x))


def test_double_backward_through_the_op():
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    calls: list[str] = []

    def through_the_op(x, w, b):
        with Seen():
            return O.group_norm(x, 4, w, b)

    inputs = [t.requires_grad_() for t in (torch.randn(2, C, 3, dtype=torch.float64), *_inputs()[1:])]
    assert torch.autograd.gradgradcheck(through_the_op, inputs)
    assert "onepass.norm.default" in calls


def test_subclasses_and_modes_see_the_op():
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(4, C, 5)
    tagged = O.group_norm(x.as_subclass(Tagged), 4)
    assert type(tagged) is Tagged
    assert_close(tagged.as_subclass(torch.Tensor), O.group_norm(x, 4))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = O.group_norm(mode.from_tensor(x), 4)
        assert fake.shape == x.shape
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: O.group_norm(x, 4))(x)
    assert "onepass.norm" in traced.code


def test_fx_proxies():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(onepass.nn.LayerNorm(C), onepass.nn.GroupNorm(2, C), onepass.nn.RMSNorm(C))

        def forward(self, x):
            return self.layers(x)

    block, x = Block().eval(), torch.randn(4, C)
    assert_close(torch.fx.symbolic_trace(block)(x), block(x))


def test_routes_are_the_ones_decided():
    x = torch.randn(2, C)
    assert route.route(x) is route.DIRECT
    seen = []
    torch.func.grad(lambda x: (seen.append(route.route(x)), x.sum())[1])(x)
    with forward_ad.dual_level():
        seen.append(route.route(x))
    assert seen == [route.REFERENCE, route.REFERENCE]


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_as_torch_does_it(dtype, autocast):
    x = torch.randn(4, C, 5, 6).to(dtype)
    w, b = torch.randn(C), torch.randn(C)
    for name, ours in _calls(O).items():
        if name == "evaluation":
            continue
        with torch.autocast("cpu", dtype=autocast):
            y, expected = ours(x, w, b), _calls(F)[name](x, w, b)
        assert y.dtype == expected.dtype, name
        assert_close(y, expected, rtol=2e-2, atol=2e-2)


@ours_and_torchs
def test_backward_saves_x_and_statistics_alone(ours, torchs):
    saved = []
    x = torch.randn(4, C, 16, 16)
    inputs = [x.requires_grad_(), torch.randn(C, requires_grad=True), torch.randn(C, requires_grad=True)]
    sums = ours is _add  # the sum is normalized and saved
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        ours(*inputs)
    large = {t.data_ptr() for t in saved if t.numel() >= x.numel()}
    assert len(large) == 1 and (large == {x.data_ptr()}) != sums


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm"])
def test_meta_tensors(name):
    x, w, b = (t.to("meta") for t in _inputs())
    y = _calls(O)[name](x, w, b)
    assert y.device.type == "meta" and y.numel() == x.numel()


def test_shapes_do_not_pile_up():
    for n in range(launchers.MAX_KINDS + 10):
        O.layer_norm(torch.empty(1, n + 1), (n + 1,))
    assert len(launchers._known) <= launchers.MAX_KINDS


def test_threads_and_nested_force():
    import threading

    x, found = torch.randn(4, C), []
    planned = str(onepass.explain(O.layer_norm, x, (C,)).forward)

    def other():
        found.append(str(onepass.explain(O.layer_norm, x, (C,)).forward))

    with onepass.force("blockwise"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with onepass.force(None):
            other()
        other()
    assert found == [planned, planned, "blockwise"] and planned != "blockwise"


@pytest.mark.parametrize("family", [None, "aten", "blockwise", "reference"])
def test_a_weight_that_moved_after_a_good_call_is_named(family):
    """The device of a weight is not part of the key. The error still says which argument is wrong."""
    x, scale = torch.randn(4, 1, 8), torch.zeros(4, 8)
    with onepass.force(family):
        onepass.functional.layer_norm(x, (8,), torch.ones(8), modulate=(scale, scale))
        with pytest.raises(RuntimeError, match="weight is on meta and input on cpu"):
            onepass.functional.layer_norm(x, (8,), torch.ones(8, device="meta"), modulate=(scale, scale))
