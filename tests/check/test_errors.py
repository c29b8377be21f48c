"""Bad input raises torch's exception type, with torch's phrase and then our hint. No tensor changes."""

import pytest
import torch
import torch.nn.functional as F

import onepass
import onepass.functional as O

R = torch.randn
X = R(2, 6, 5)
INT = torch.ones(2, 6, 5, dtype=torch.long)

# (a call with torch's or our namespace, what our message adds)
BAD = {
    "groups that do not divide": (lambda m: m.group_norm(R(2, 320, 8, 8), 48), "nearest divisors of 320: 40, 64"),
    "no groups": (lambda m: m.group_norm(X, 0), "expected a divisor of the 6 channels"),
    "negative groups": (lambda m: m.group_norm(X, -1), "expected a divisor of the 6 channels"),
    "group_norm of a vector": (lambda m: m.group_norm(R(6), 2), "add a batch dimension"),
    "group_norm weight": (lambda m: m.group_norm(X, 2, R(5)), "is input (N, ..., C)? Then pass input.movedim(-1, 1)"),
    "group_norm weight rank": (lambda m: m.group_norm(X, 2, R(6, 1)), "expected shape [6]"),
    "one value per group": (lambda m: m.group_norm(R(1, 4), 4), "use fewer groups"),
    "group_norm of integers": (lambda m: m.group_norm(INT, 2), "input.float()"),
    "group_norm dtypes": (lambda m: m.group_norm(X, 2, R(6).double()), "convert with weight.to(torch.float32)"),
    "group_norm device": (lambda m: m.group_norm(X, 2, R(6, device="meta")), "weight is on meta"),
    "normalized_shape": (lambda m: m.layer_norm(X, (4,)), "pass normalized_shape=[5]"),
    "normalized_shape too long": (lambda m: m.layer_norm(R(5), (6, 5)), "the last dimensions of input are [5]"),
    "empty normalized_shape": (lambda m: m.layer_norm(X, ()), "for example [5]"),
    "normalized_shape as a number": (lambda m: m.layer_norm(X, 5), "did you mean (5,)?"),
    "layer_norm weight": (lambda m: m.layer_norm(X, (5,), R(4)), "expected one weight per normalized element"),
    "layer_norm weight to reshape": (lambda m: m.layer_norm(X, (6, 5), R(30)), "reshape it with weight.reshape([6, 5])"),
    "layer_norm bias": (lambda m: m.layer_norm(X, (5,), None, R(4)), "expected one bias per normalized element"),
    "layer_norm of integers": (lambda m: m.layer_norm(INT, (5,)), "expected float64, float32, bfloat16 or float16"),
    "layer_norm of booleans": (lambda m: m.layer_norm(INT.bool(), (5,)), "input.float()"),
    "layer_norm of complex": (lambda m: m.layer_norm(X.to(torch.complex64), (5,)), "input has dtype torch.complex64"),
    "layer_norm dtypes": (lambda m: m.layer_norm(X, (5,), R(5).half()), "weight has dtype torch.float16 and input torch.float32"),
    "layer_norm dtypes of two": (lambda m: m.layer_norm(X, (5,), R(5), R(5).half()), "bias has dtype torch.float16"),
    "layer_norm double x": (lambda m: m.layer_norm(X.double(), (5,), R(5)), "convert with weight.to(torch.float64)"),
    "half x, mixed parameters": (lambda m: m.layer_norm(X.half(), (5,), R(5), R(5).half()), "parameters must be all torch.float16 or all torch.float32"),
    "layer_norm device": (lambda m: m.layer_norm(X, (5,), R(5, device="meta")), "weight.to('cpu')"),
    "rms_norm shape": (lambda m: m.rms_norm(X, (4,)), "pass normalized_shape=[5]"),
    "rms_norm weight": (lambda m: m.rms_norm(X, (5,), R(4)), "expected one weight"),
    "rms_norm of integers": (lambda m: m.rms_norm(INT, (5,)), "input.float()"),
    "one spatial element": (lambda m: m.instance_norm(R(2, 6, 1)), "use_input_stats=False"),
    "instance_norm of (N, C)": (lambda m: m.instance_norm(R(2, 6)), "takes (N, C, L, ...)"),
    "instance_norm weight": (lambda m: m.instance_norm(X, None, None, R(5)), "expected [6]"),
    "instance_norm running": (lambda m: m.instance_norm(X, R(5), R(5)), "running_mean has shape [5], expected [6]"),
    "instance_norm one running": (lambda m: m.instance_norm(X, R(6), None), "running_var is None"),
    "instance_norm no running": (lambda m: m.instance_norm(X, use_input_stats=False), "or use_input_stats=True"),
    "instance_norm of integers": (lambda m: m.instance_norm(INT), "input.float()"),
    "one value per channel": (lambda m: m.batch_norm(R(1, 6), None, None, training=True), "use a larger batch"),
    "one value per channel, 4-D": (lambda m: m.batch_norm(R(1, 6, 1, 1), None, None, training=True), "use a larger batch"),
    "batch_norm of a vector": (lambda m: m.batch_norm(R(6), None, None, training=True), "add a batch dimension"),
    "batch_norm weight": (lambda m: m.batch_norm(X, None, None, R(5), None, True), "expected [6]"),
    "batch_norm running": (lambda m: m.batch_norm(X, R(6), R(5)), "running_var has shape [5], expected [6]"),
    "batch_norm no running": (lambda m: m.batch_norm(X, None, None), "or training=True to use the batch's"),
    "batch_norm one running": (lambda m: m.batch_norm(X, None, R(6), training=True), "running_mean is None"),
    "batch_norm of integers": (lambda m: m.batch_norm(INT, None, None, training=True), "input.float()"),
    "batch_norm momentum": (lambda m: m.batch_norm(X, None, None, training=True, momentum=None), "cumulative average"),
    "batch_norm eps": (lambda m: m.batch_norm(X, None, None, training=True, eps=0.0), "try 1e-5"),
    "batch_norm negative eps": (lambda m: m.batch_norm(X, R(6), R(6), eps=-1.0), "try 1e-5"),
    "batch_norm running dtypes": (lambda m: m.batch_norm(X, R(6).half(), R(6).half()), "running_mean has dtype torch.float16"),
    "batch_norm running device": (lambda m: m.batch_norm(X, *R(2, 6, device="meta")), "running_mean is on meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_torch_phrase_then_our_hint(name):
    call, hint = BAD[name]
    with pytest.raises(Exception) as torchs:
        call(F)
    with pytest.raises(type(torchs.value)) as ours:
        call(O)
    phrase = str(torchs.value).split("\n")[0]
    if name == "instance_norm of (N, C)" or "device" in name:
        phrase = phrase.split("!")[0]
    assert str(ours.value).startswith(phrase)
    assert hint in str(ours.value)
    assert type(ours.value) is type(torchs.value)


@pytest.mark.parametrize(
    "call, hint",
    [
        (lambda: O.layer_norm2d(R(2, 6, 5)), "for (N, L, C) use layer_norm"),
        (lambda: O.layer_norm2d(R(2, 6, 5, 7), R(7)), "is input (N, ..., C)?"),
        (lambda: O.layer_norm2d(torch.ones(2, 6, 5, 7, dtype=torch.int32)), "input.float()"),
        (lambda: O.layer_norm([1.0, 2.0], (2,)), "convert it with torch.as_tensor"),
        (lambda: O.layer_norm(R(2, 2), (2,), [1.0, 2.0]), "argument 'weight' must be Tensor, not list"),
        (lambda: O.layer_norm(R(2, 2), (2.0,)), "must be tuple of ints"),
        (lambda: O.group_norm(R(2, 2), 2.0), "must be int, not float"),
        (lambda: O.layer_norm(R(2, 2).to_sparse(), (2,)), "input.to_dense()"),
    ],
)
def test_our_own(call, hint):
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)) as error:
        call()
    assert hint in str(error.value)


N, MODULATED = R(2, 6), (R(2, 6), R(2, 6))
ILLEGAL = {
    "activation as a list": (lambda: O.layer_norm(X, (5,), activation=["silu"]), "activation=['silu'] is unknown"),
    "offset as text": (lambda: O.rms_norm(X, (5,), R(5), weight_offset="1"), "argument 'weight_offset' must be float, not str"),
    "three of two": (lambda: O.layer_norm(X, (5,), modulate=(N, N, N)), "modulate must be a pair (scale, shift), got 3 values"),
    "modulate and another mistake": (lambda: O.layer_norm(X, (4,), modulate=(R(2, 4), None)), "pass normalized_shape=[5]"),
    "channel_dim out of range": (lambda: O.group_norm(X, 2, channel_dim=7), "nor -1, for (N, *, C)"),
    "logits of integers": (lambda: O.switchable_norm(X, torch.ones(3, dtype=torch.long), R(3), training=True), "mean_weight has dtype torch.int64"),
    "activation": (lambda: O.layer_norm(X, (5,), activation="tanh"), "activation='tanh' is unknown; expected silu, relu, gelu, gelu_tanh, swish or None"),
    "granularity": (lambda: O.layer_norm(X, (5,), granularity="pixel"), "granularity='pixel' is unknown; expected one of element, channel, global"),
    "a weight per element": (lambda: O.layer_norm(X, (6, 5), R(6, 5), granularity="channel"), "Expected weight to be of shape [6], one per channel"),
    "a weight per channel, unsaid": (lambda: O.layer_norm(X, (6, 5), R(6)), "for one per channel pass granularity='channel'"),
    "groups of the wrong dimension": (lambda: O.group_norm(R(2, 5, 5, 6), 3, R(6)), "or channel_dim=-1"),
    "a weight per channel": (lambda: O.layer_norm(X, (6, 5), R(6), granularity="global"), "Expected weight to be of shape [] or [1]"),
    "offset without weight": (lambda: O.rms_norm(X, (5,), weight_offset=1.0), "weight_offset=1.0 was given without a weight"),
    "channel_dim": (lambda: O.group_norm(R(2, 3, 4, 5), 1, channel_dim=2), "channel_dim=2 of input of shape [2, 3, 4, 5] is neither 1"),
    "channel_dim of a batch norm": (lambda: O.batch_norm(R(2, 3, 4, 5), None, None, training=True, channel_dim=0), "nor -1, for (N, *, C)"),
    "weight of the first": (lambda: O.group_norm(R(2, 6, 4), 2, R(6), channel_dim=-1), "Then leave channel_dim at 1"),
    "weight of the last": (lambda: O.batch_norm(R(2, 4, 6), None, None, R(6), None, True), "or channel_dim=-1"),
    "modulate with one tensor": (lambda: O.layer_norm(X, (5,), modulate=R(2, 5)), "modulate must be a pair (scale, shift)"),
    "modulate for all samples": (lambda: O.layer_norm(X, (5,), modulate=(R(5), None)), "repeat it with .expand(2, 5)"),
    "modulate by another width": (lambda: O.group_norm(X, 2, modulate=(R(2, 5), None)), "but got [2, 5]"),
    "modulate per token": (lambda: O.layer_norm(X, (5,), modulate=(R(2, 6, 5), None)), "one per position is not supported"),
    "modulate with a dimension of one": (lambda: O.layer_norm(X, (5,), modulate=(None, R(2, 1, 5))), "but got [2, 1, 5]; reshape it with .reshape(2, 5)"),
    "modulate without samples": (lambda: O.layer_norm(R(5), (5,), modulate=(R(5), R(5))), "input.unsqueeze(0)"),
    "modulate in float64": (lambda: O.group_norm(X, 2, modulate=(R(2, 6).double(), None)), "scale has dtype torch.float64 and input torch.float32"),
    "modulate elsewhere": (lambda: O.group_norm(X, 2, modulate=(R(2, 6, device="meta"), None)), "scale is on meta"),
    "modulate with a list": (lambda: O.group_norm(X, 2, modulate=([1.0], None)), "scale' must be Tensor, not list"),
    "residual shape": (lambda: O.add_layer_norm(X, R(6, 5), (5,)), "residual.expand_as(input)"),
    "residual of integers": (lambda: O.add_rms_norm(X, INT, (5,)), "residual has dtype torch.int64"),
    "residual elsewhere": (lambda: O.add_group_norm(X, X.to("meta"), 2), "residual is on meta"),
    "residual a number": (lambda: O.add_rms_norm(X, 1.0, (5,)), "argument 'residual' must be Tensor, not float"),
    "two logits": (lambda: O.switchable_norm(X, R(2), R(3), training=True), "mean_weight to have 3 elements, for InstanceNorm, LayerNorm, BatchNorm"),
    "three logits without BatchNorm": (lambda: O.switchable_norm(X, R(2), R(3), using_bn=False), "var_weight to have 2 elements"),
    "running statistics without BatchNorm": (lambda: O.switchable_norm(X, R(2), R(2), R(6), R(6), using_bn=False), "pass None, or using_bn=True"),
    "evaluation without running statistics": (lambda: O.switchable_norm(X, R(3), R(3)), "or training=True to use the batch's"),
    "one value per channel": (lambda: O.switchable_norm(N[:1], R(3), R(3), training=True), "use a larger batch"),
    "switchable_norm of a vector": (lambda: O.switchable_norm(R(6), R(3), R(3), training=True), "add a batch dimension"),
    "switchable_norm weight": (lambda: O.switchable_norm(X, R(3), R(3), None, None, R(5), training=True), "expected [6]"),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_extras_that_do_not_fit(name):
    call, hint = ILLEGAL[name]
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)) as error:
        call()
    assert hint in str(error.value)


def test_extras_that_do_not_fit_leave_running_statistics_alone():
    mean, var = torch.zeros(6), torch.ones(6)
    for bad in ({"activation": "tanh"}, {"modulate": (R(2, 5), None)}, {"out": R(2, 6, 4)}, {"channel_dim": 0}):
        for call in (
            lambda **k: O.batch_norm(X, mean, var, training=True, **k),
            lambda **k: O.instance_norm(X, mean, var, **k),
            lambda **k: O.switchable_norm(X, R(3), R(3), mean, var, training=True, **k),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                call(**bad)
    assert not mean.any() and (var == 1).all()


@pytest.mark.parametrize(
    "running, momentum, message",
    [
        ((torch.zeros(6), torch.ones(1).expand(6)), 0.1, "running_var has strides"),
        ((torch.zeros(6), torch.ones(6, requires_grad=True)), 0.1, "running_var requires grad"),
        ((torch.zeros(6), torch.ones(6)), "0.1", "momentum='0.1'"),
    ],
)
def test_running_statistics_that_cannot_be_updated(running, momentum, message):
    out = torch.zeros(X.shape)
    for call in (
        lambda **k: O.batch_norm(X, *running, training=True, **k),
        lambda **k: O.instance_norm(X, *running, **k),
        lambda **k: O.switchable_norm(X, R(3), R(3), *running, training=True, **k),
    ):
        with pytest.raises((RuntimeError, TypeError), match=message), torch.enable_grad():
            call(momentum=momentum, out=None if running[1].requires_grad else out)
    assert not running[0].any() and not out.any()


def test_running_statistics_under_vmap():
    mean, var = torch.zeros(6), torch.ones(6)
    for call in (lambda x: O.batch_norm(x, mean, var, training=True), lambda x: O.instance_norm(x, mean, var)):
        with pytest.raises(RuntimeError, match="Batch norm got a batched tensor as input while"):
            torch.vmap(call)(R(3, 2, 6, 5))
    assert not mean.any()


def test_nothing_is_touched():
    mean, var = torch.zeros(6), torch.ones(6)
    for bad in ({"weight": R(5)}, {"bias": R(6).double()}, {"weight": R(6, device="meta")}):
        with pytest.raises(RuntimeError):
            O.batch_norm(X, mean, var, training=True, **bad)
        with pytest.raises(RuntimeError):
            O.instance_norm(X, mean, var, **bad)
    assert not mean.any() and (var == 1).all()


def test_a_good_call_does_not_hide_a_bad_one():
    """Launchers are cached by the kind of call. Everything that an error depends on is part of the kind."""
    x, w = R(4, 6), R(6)
    for family in ("aten", "blockwise"):
        with onepass.force(family):
            O.layer_norm(x, (6,), w)
            for bad, hint in ((R(3, 2), "reshape it"), (R(6).double(), "convert with"), (R(6, device="meta"), "move it")):
                with pytest.raises(RuntimeError, match=hint):
                    O.layer_norm(x, (6,), bad)
                with pytest.raises(RuntimeError, match=hint):
                    O.layer_norm(x.clone().requires_grad_(), (6,), bad)
            with pytest.raises(RuntimeError, match="pass normalized_shape"):
                O.layer_norm(x, (3,), w)


ARRAY = X.numpy()
# (a call, what the message says: the argument, the value, and the fix)
NOT_TENSORS = {
    "eps": (lambda: O.layer_norm(X, (5,), eps="a"), ["'eps'", "got eps='a'", "such as eps=1e-05"]),
    "an array": (lambda: O.group_norm(ARRAY, 2), ["input", "not ndarray", "shape [2, 6, 5]", "torch.as_tensor(input)"]),
    "an array for a module": (lambda: onepass.nn.BatchNorm1d(6)(ARRAY), ["input", "not ndarray", "torch.as_tensor(input)"]),
    "None": (lambda: O.rms_norm(None, (5,)), ["input", "not NoneType", "return nothing?"]),
    "None for a module": (lambda: onepass.nn.InstanceNorm1d(6)(None), ["input", "not NoneType", "return nothing?"]),
    "a class": (lambda: onepass.patch(torch.nn.LayerNorm), ["LayerNorm", "not an instance", "create the model first"]),
    "batch_invariant": (lambda: onepass.batch_invariant("x"), ["'on'", "got on='x'", "True or False"]),
    "explain": (lambda: onepass.explain(3), ["'norm'", "got 3", "onepass.functional"]),
}


@pytest.mark.parametrize("name", NOT_TENSORS)
def test_arguments_of_the_wrong_type(name):
    call, words = NOT_TENSORS[name]
    with pytest.raises(TypeError) as raised:
        call()
    assert all(word in str(raised.value) for word in words), raised.value
    assert onepass.batch_invariant.on is False
