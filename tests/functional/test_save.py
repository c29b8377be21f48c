"""`save="y"` keeps the output for the backward instead of the input. docs/theory.md predicts the error, (36)-(38).

`python -m tests.functional.test_save` prints the table of docs/accuracy.md.
"""

import gc
import inspect
import operator
import weakref
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
import onepass.functional as O
from onepass import nn
from onepass.core import norms, spec
from onepass.core.operands import NO_OPTIONAL
from onepass.core.problem import bind
from onepass.dispatch import launchers
from onepass.verify import matrix, oracle, tensors
from onepass.verify.cases import Case
from tests.conftest import compiled

BASE = {
    "layer_norm": {"shape": (3, 4, 2, 6)},
    "rms_norm": {"shape": (3, 4, 2, 6), "eps": 1e-3},
    "group_norm": {"shape": (3, 4, 5, 4), "groups": 2},
    "instance_norm": {"shape": (3, 4, 4, 5)},
    "batch_norm": {"shape": (3, 4, 4, 5)},
    "layer_norm2d": {"shape": (3, 4, 4, 5)},
}
CHANNELS = {"group_norm", "instance_norm", "batch_norm"}
LAYOUTS = ("contiguous", "channels_last", "strided", "transposed", "reversed", "sliced")
MEASURED = (Case("layer_norm", (1024, 512)), Case("rms_norm", (1024, 512)), Case("group_norm", (8, 64, 32, 32), groups=8))
X = torch.randn(2, 6, 5, 4)


def _norm(x, weight, bias, **keywords):
    return O.group_norm(x, 3, weight, bias, **keywords)


def _operands(dtype=torch.float32, memory_format=torch.contiguous_format):
    torch.manual_seed(1)
    x = X.to(dtype).contiguous(memory_format=memory_format)
    return [t.to(dtype).requires_grad_() for t in (x, torch.randn(6), torch.randn(6))]


class _Watch(TorchDispatchMode):
    """Sees every op and changes nothing. In this mode, calls use the registered ops."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", BASE)
def test_gradients_keep_the_predicted_error(op, layout):
    """Every gradient is within the budget on every family and dtype: plain, modulated and with float32 parameters."""
    base = Case(op, **BASE[op], layout=layout, save="y")
    which = [base, replace(base, modulate=True, wide=True), replace(base, affine="weight", modulate=True), replace(base, affine="none")]
    which += [replace(base, last=True, wide=True)] if op in CHANNELS else []
    which += [replace(base, evaluate=True), replace(base, running=True)] if op in ("instance_norm", "batch_norm") else []
    which += [replace(base, offset=1.0, wide=True), replace(base, rank=3)] if op in ("layer_norm", "rms_norm") else []
    which += [replace(base, rank=3, granularity=g) for g in ("channel", "global")] if op == "layer_norm" else []
    cells = list(matrix.verify(which))
    assert [cell for cell in cells if not cell.ok] == []
    ran = {cell.family for cell in cells if cell.backward is not None}
    viewed = {"c", "blockwise", "reference"} if compiled() else {"blockwise", "reference"}
    if (op, layout) == ("group_norm", "reversed"):  # it has no view
        assert ran == {"reference"}
    else:
        assert ran >= viewed


def test_a_backward_from_y_takes_the_direct_route():
    """y is dense where x is not. The launchers are prepared for the strides of y, so the backward does not bind again."""
    launchers.forget_all()
    x = torch.randn(4, 32, requires_grad=True)
    y = O.layer_norm(x[:, ::2], (16,), torch.rand(16) + 1, save="y")
    torch.autograd.grad(y, x, torch.randn(4, 16))
    assert len(launchers._known) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_types_need_more_than_the_ordinary_budget(dtype):
    """The larger budget is needed: float16 and bfloat16 exceed the ordinary one. float32 does not."""
    errors = _errors(Case("layer_norm", (256, 64)), dtype, 0.0)
    assert all((budget <= 1) == (dtype == torch.float32) for budget, _ in errors.values())
    assert all(relative < 16 * torch.finfo(dtype).eps for _, relative in errors.values())


def test_who_offers_it():
    takes = {name for name in O.__all__ if name != "Stats" and "save" in inspect.signature(getattr(O, name)).parameters}
    assert takes == set(BASE)
    assert all(inspect.signature(getattr(O, name)).parameters["save"].default == "x" for name in takes)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("save", ["x", "y"])
def test_the_input_is_freed(save, routed):
    x, weight, bias = _operands()

    def forward():
        hidden = x * 2
        return _norm(hidden, weight, bias, save=save), weakref.ref(hidden)

    if routed:
        with _Watch():
            y, hidden = forward()
    else:
        y, hidden = forward()
    gc.collect()
    assert (hidden() is None) == (save == "y")
    y.sum().backward()


def _saved(call):
    """The tensors that a call saves, and what it returns."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = call()
    return kept, result


@pytest.mark.parametrize("given", [False, True])
def test_what_is_saved(given):
    x, weight, bias = _operands()
    running = torch.zeros(6), torch.ones(6)
    kept, y = _saved(lambda: O.batch_norm(x, *running, weight, bias, training=not given, save="y"))
    assert [t.data_ptr() for t in kept] == [y.data_ptr(), weight.data_ptr(), bias.data_ptr(), kept[3].data_ptr()]
    assert kept[3].shape == (6,)  # rstd, and no mean


@pytest.mark.parametrize("save", ["x", "y"])
def test_hooks_may_lay_out_anew(save):
    """A hook on saved tensors may return other strides, for example after a trip to another device."""
    for x in (X.to(memory_format=torch.channels_last), X.transpose(0, 2)[..., ::2], X[:, :, :2], X[:1].expand_as(X)):
        x, weight = x.detach().requires_grad_(), torch.randn(x.shape[1], requires_grad=True)
        dy, groups = torch.randn(x.shape), 1 if x.shape[1] % 2 else 2
        expected = torch.autograd.grad(O.group_norm(x, groups, weight, save=save), (x, weight), dy)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
            y = O.group_norm(x, groups, weight, save=save)
        assert_close(torch.autograd.grad(y, (x, weight), dy), expected)


def test_a_module_saves_y_and_shows_it():
    make = {
        "LayerNorm": ((4,), {}),
        "RMSNorm": ((4,), {}),
        "LayerNorm2d": ((6,), {}),
        "GroupNorm": ((3, 6), {}),
        "BatchNorm2d": ((6,), {}),
        "InstanceNorm2d": ((6,), {"affine": True}),
    }
    for name, (args, keywords) in make.items():
        plain, module = (getattr(nn, name)(*args, **keywords, **more) for more in ({}, {"save": "y"}))
        assert "save='y'" in repr(module) and "save" not in repr(plain)
        assert module.state_dict().keys() == plain.state_dict().keys()
        x = X.clone().requires_grad_()
        kept, y = _saved(lambda: module(x))  # noqa: B023
        assert kept[0].data_ptr() == y.data_ptr() and all(t.data_ptr() != x.data_ptr() for t in kept)
        expected = torch.autograd.grad(plain(x).square().sum(), (x, *plain.parameters()))
        assert_close(torch.autograd.grad(y.square().sum(), (x, *module.parameters())), expected, rtol=1e-4, atol=1e-4)


def test_hooks_may_lay_out_a_sum_anew():
    """A saved sum is dense, but what a hook returns may not be."""
    x, residual, dy = torch.randn(3, 4, 6).unbind()
    x, weight = x.requires_grad_(), torch.randn(6, requires_grad=True)

    def gradients():
        y, total = O.add_layer_norm(x, residual, (6,), weight)
        return torch.autograd.grad([y, total], [x, weight], [dy, torch.ones(4, 6)])

    expected = gradients()
    spaced = lambda t: torch.stack((t, t + 7), -1).flatten(-2)[..., ::2] if t.dim() == 2 else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, spaced):
        assert_close(gradients(), expected)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("family", ["blockwise", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_zero_weight_gives_nan(dtype, family, routed):
    """A zero weight loses x: its gradients are NaN, and so are those of its set. All others are unchanged."""
    x, _, bias = (t.detach() for t in _operands())  # float32 parameters: y is rounded, so it differs from the bias
    weight = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5, -1.0])  # all others far from zero
    operands = [t.requires_grad_() for t in (x.to(dtype), weight, bias)]
    grads, dy = {}, X.to(dtype).abs()  # of one sign, so that an infinite x_hat would make dweight infinite
    for save in ("x", "y"):
        with onepass.force(family):
            if routed:
                with _Watch():
                    grads[save] = torch.autograd.grad(_norm(*operands, save=save), operands, dy)
            else:
                grads[save] = torch.autograd.grad(_norm(*operands, save=save), operands, dy)
    dx, dweight, dbias = grads["y"]
    assert dx[:, 2:4].isnan().all() and dweight[3].isnan()  # the group, and the channel
    sound = [True, True, True, False, True, True]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    assert_close(dx[:, [0, 1, 4, 5]], grads["x"][0][:, [0, 1, 4, 5]], **tolerance)
    assert_close(dweight[sound], grads["x"][1][sound], **tolerance)
    assert_close(dbias, grads["x"][2])


def test_a_scale_of_minus_one_gives_nan():
    x, weight, bias = _operands()
    scale = torch.randn(2, 6)
    scale[1, 0] = -1
    scale.requires_grad_()
    dx, dweight, dbias, dscale = torch.autograd.grad(
        _norm(x, weight, bias, modulate=(scale, None), save="y").sum(), (x, weight, bias, scale)
    )
    assert dx[1, :2].isnan().all() and not dx[0].isnan().any() and not dx[1, 2:].isnan().any()
    assert dscale.isnan().nonzero().tolist() == [[1, 0]] and dweight.isnan().nonzero().tolist() == [[0]] and not dbias.isnan().any()


def test_given_statistics_need_no_input_for_dx():
    x, weight, _ = _operands()
    with torch.no_grad():
        weight[3] = 0
    dx, dweight = torch.autograd.grad(O.batch_norm(x, torch.zeros(6), torch.ones(6), weight, save="y").sum(), (x, weight))
    assert_close(dx, weight.detach().view(1, 6, 1, 1).expand_as(dx) / (1 + 1e-5) ** 0.5)
    assert dweight.isnan().tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    "make", [lambda **k: _norm(*_operands(), **k), lambda **k: nn.GroupNorm(3, 6, **k), lambda **k: nn.RMSNorm(4, **k)]
)
def test_refused(make):
    with pytest.raises(ValueError, match=r'save="y" was given with activation=\'silu\'.*expected no activation: apply it to the output'):
        make(save="y", activation="silu")
    for save in ("z", None, 1, True):
        with pytest.raises(ValueError, match=rf'save={save!r} is unknown; expected "x", the input, or "y", the output'):
            make(save=save)


def test_a_spec_refuses_what_has_no_way_back():
    for clauses in ({"activation": "silu"}, {"mix": "n"}):
        with pytest.raises(ValueError, match="from_y=True has no way back"):
            norms.instance_norm(from_y=True, **clauses)


@pytest.mark.parametrize("routed", [False, True])
def test_create_graph_is_refused(routed):
    operands = _operands()
    if routed:
        with _Watch():
            y = _norm(*operands, save="y")
    else:
        y = _norm(*operands, save="y")
    with pytest.raises(RuntimeError, match=r'save="y".*cannot be differentiated again \(create_graph=True\).*leave save at "x"'):
        torch.autograd.grad(y.sum(), operands, create_graph=True)


@pytest.mark.parametrize("routed", [False, True])
def test_a_changed_output_is_noticed(routed):
    x, weight, bias = _operands()
    if routed:
        with _Watch():
            y = _norm(x, weight, bias, save="y")
    else:
        y = _norm(x, weight, bias, save="y")
    y.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_transforms_run_the_definition_from_x():
    """functorch and forward-mode AD differentiate the forward to any order.

    Nothing is saved, so `save` has no effect.
    """
    x, weight, bias = (t.detach() for t in _operands(torch.float64))

    def loss(save):
        return lambda x: _norm(x, weight, bias, save=save).square().sum()

    for transform in (
        torch.func.grad,
        lambda f: torch.func.jvp(f, (x,), (x,)),
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()),
    ):
        results = [result(x) if callable(result) else result for result in (transform(loss(save)) for save in ("x", "y"))]
        assert_close(*results)


def test_batched_gradients():
    operands, v = _operands(torch.float64), torch.randn(3, *X.shape, dtype=torch.float64)
    expected = [torch.autograd.grad(_norm(*operands), operands, dy) for dy in v]
    y = _norm(*operands, save="y")
    batched = torch.autograd.grad(y, operands, v, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda dy: torch.autograd.grad(y, operands, dy, retain_graph=True))(v)
    for i, grads in enumerate(expected):
        assert_close([g[i] for g in batched], list(grads))
        assert_close([g[i] for g in mapped], list(grads))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compile_whole_and_save_y(memory_format):
    torch._dynamo.reset()
    operands = _operands(memory_format=memory_format)
    scale = torch.randn(2, 6, requires_grad=True)

    def call(x, weight, bias, scale, save="y"):
        return _norm(x, weight, bias, modulate=(scale, None), save=save)

    graphs = []

    def backend(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    y = compiled(*operands, scale)
    grads = torch.autograd.grad(y.square().sum(), (*operands, scale))
    expected = call(*operands, scale, save="x")
    assert_close(y, expected)
    assert_close(grads, torch.autograd.grad(expected.square().sum(), (*operands, scale)), rtol=1e-4, atol=1e-4)
    forward, backward = graphs
    (norm,) = [node for node in forward.nodes if "onepass.norm" in str(node.target)]
    (back,) = [node for node in backward.nodes if "onepass.norm_backward" in str(node.target)]
    handed = {node.name: node for node in forward.output_node().args[0]}
    assert norm.args[0].name not in handed
    saved = back.args[1]
    while saved.op != "placeholder":  # skip detach
        saved = saved.args[0]
    saved = handed[saved.name]
    while saved.target is not operator.getitem:
        saved = saved.args[0]
    assert saved.args == (norm, 0) and back.args[4] is None  # it saves y, and no mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_opcheck(layout, dtype):
    x = tensors.lay_out(X.to(dtype), layout).requires_grad_()
    weight, bias = (torch.randn(6, dtype=dtype, requires_grad=True) for _ in range(2))
    definition = norms.group_norm(3, modulated=True, from_y=True)
    extras = NO_OPTIONAL._replace(scale=torch.randn(2, 6, dtype=dtype, requires_grad=True))
    assert spec.NormSpec.unpack(*definition.pack()) == definition
    torch.library.opcheck(torch.ops.onepass.norm.default, (x, weight, bias, None, None, *definition.pack(), False, *extras))
    y, _, rstd, *_ = torch.ops.onepass.norm(x, weight, bias, None, None, *definition.pack(), False, *extras)
    operands = torch.randn_like(y), y, weight, bias, None, rstd, *definition.pack(), False, [True] * 7, None, *extras
    arguments = [t.detach() if isinstance(t, torch.Tensor) else t for t in operands]
    torch.library.opcheck(torch.ops.onepass.norm_backward.default, arguments, test_utils=["test_schema", "test_faketensor"])


def test_a_backward_sees_y_where_x_was():
    """x is a slice of a wider tensor. The backward reads y, which is dense."""
    x = torch.randn(4, 3, 16)[..., :8]
    problem = bind(norms.layer_norm(1, from_y=True), x)
    back = problem.for_direction("backward")
    assert problem.from_y and back.from_y and problem.for_direction("forward") is problem
    assert back.x == back.y == problem.y != problem.x and back.stride == back.y_stride == (24, 8, 1)
    copied = bind(norms.group_norm(2, from_y=True), torch.randn(2, 4, 3, 10)[..., ::2])
    assert copied.copied and not copied.for_direction("backward").copied
    assert not bind(norms.layer_norm(1), x).from_y


def test_explain_says_so():
    x, weight, bias = _operands()
    words = str(onepass.explain(_norm, x, weight, bias, modulate=(torch.zeros(2, 6), torch.zeros(2, 6)), save="y"))
    assert "y and dy read, dx written" in words and "x_hat = ((y - shift)/(1 + scale) - bias)/weight" in words
    assert "not aten: torch's backward takes x, and y is what is saved" in words
    assert 'save="y"' not in str(onepass.explain(_norm, x, weight, bias))
    offset = onepass.explain(O.rms_norm, x, (4,), torch.ones(4), weight_offset=1.0, save="y")
    assert "x_hat = y/(weight + 1)" in str(offset)


def _errors(case, dtype, mean, save="y"):
    """For dx and dweight, the largest error relative to the budget of save="x", and to the RMS of the gradient."""
    operands = tensors.make(replace(case, save="y"), dtype)
    operands = operands._replace(x=(operands.x.double() + mean).to(dtype))
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    outcome = oracle.evaluate(replace(case, save=save), operands, dy)
    budgets = oracle.worst(outcome, exact.value, exact.allowed).parts
    found = {}
    for name, actual, value, budget in zip(oracle.Outcome._fields, outcome, exact.value, budgets):
        if name in ("dx", "dweight"):
            found[name] = budget, ((actual.double() - value).abs().max() / value.square().mean().sqrt()).item()
    return found


if __name__ == "__main__":
    print("| x of mean 0 and 10³, std 1 | dx, save=x | dx, save=y | dweight, save=x | dweight, save=y |\n|---|---|---|---|---|")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for mean in (0.0, 1e3):
            rows = [[_errors(case, dtype, mean, save) for case in MEASURED] for save in ("x", "y")]
            cells = [
                " / ".join(f"{max(row[name][i] for row in which):.2g}" for i in (0, 1)) for name in ("dx", "dweight") for which in rows
            ]
            print(f"| {str(dtype)[6:]}, mean {mean:g} |", " | ".join(cells), "|")
