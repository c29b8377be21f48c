"""Norms whose forward depends on more than the values of x. A patched module does the same as before."""

import contextlib
import copy
import functools
import os
import random
import time
import types

import pytest
import torch
from torch import nn

import onepass
from onepass.patching.class_swap import Swapped
from tests.patching.test_patch import Rms

ROWS = torch.randn(2, 3, 24)


class Twice(Rms):
    """A norm, doubled if `when` returns true."""

    def forward(self, signal):
        return super().forward(signal) * (2 if self.when(signal) else 1)

    @property
    def asks(self):
        return False if self.gain.requires_grad else bool(self.gain.is_leaf)


def trap(when, **names):
    """A class like `Twice`, with `when` as its method."""
    return type("TrapNorm", (Twice,), {"when": when, **names})


def is_half(self, x):
    return x.dtype == torch.float16


def is_bfloat(self, x):
    return x.dtype is torch.bfloat16


def is_double(self, x):
    return x.dtype == torch.float64


def weight_is_half(self, x):
    return self.gain.dtype in (torch.float16, torch.bfloat16) and x.dtype == torch.float32


def is_flat(self, x):
    return x.dim() == 1


def has_five_dimensions(self, x):
    return x.ndim == 5


def is_one_sample(self, x):
    return x.shape[0] == 1 and x.shape[1] == 1


def is_long(self, x):
    return x.shape[-2] > 300


def is_very_long(self, x):
    return x.size(-2) > 30000


def is_large(self, x):
    return x.numel() >= 10**7


def fits_well(self, x):
    return x.shape[0] % 500 == 499


def needs_no_gradient(self, x):
    return not torch.is_grad_enabled()


def x_needs_none(self, x):
    return not x.requires_grad


def is_frozen(self, x):
    return not self.gain.requires_grad


def is_inference(self, x):
    return torch.is_inference_mode_enabled()


def is_strided(self, x):
    return not x.is_contiguous()


def in_evaluation_and_half(self, x):
    return not self.training and x.dtype == torch.bfloat16


def autocasts(self, x):
    return torch.is_autocast_enabled("cpu")


def autocasts_somewhere(self, x):
    return torch.is_autocast_enabled()


def has_large_values(self, x):
    return bool(x.abs().max() > 1e6)


def has_nan(self, x):
    return x.isnan().any()


def is_leaf(self, x):
    return not x.is_leaf


def is_parameter(self, x):
    return isinstance(x, nn.Parameter)


def is_of_a_class(self, x):
    return type(x) is not torch.Tensor


def by_a_table(self, x):
    return {torch.float16: True}.get(x.dtype, False)


def by_a_number(self, x):
    return 0 + (x.shape[0] > 3000)


def by_a_loop(self, x):
    for size in x.shape[:-1]:
        while size > 3000:
            return True
    return False


def by_a_comprehension(self, x):
    return len([size for size in x.shape if size > 3000])


def by_an_error(self, x):
    try:
        return range(1, 3000)[x.shape[0] - 1] < 0
    except IndexError:
        return True


def by_a_refusal(self, x):
    if x.shape[-1] != len(self.gain):
        raise ValueError(x.shape)
    return False


@functools.lru_cache
def remembered(dtype):
    return dtype == torch.float16


def by_a_function(self, x):
    return remembered(x.dtype)


LAMBDA = lambda x: x.shape[0] > 3000  # noqa: E731


def by_a_lambda(self, x):
    return LAMBDA(x)


NO_LEAF = ROWS.clone().requires_grad_() * 1
ONE_NAN = ROWS.masked_fill(torch.arange(24) == 3, float("nan")).where(torch.arange(3)[:, None] == 1, ROWS)
PROBES = {
    "dtype": [ROWS.half(), ROWS.bfloat16(), ROWS.double()],
    "weight": [ROWS],
    "rank": [ROWS[0, 0], ROWS[None, None], ROWS[None], ROWS[0]],
    "size": [torch.randn(1, 1, 24), torch.randn(1, 301, 24), torch.randn(30001, 24), torch.randn(499, 24), ROWS[:0]],
    "large": [torch.randn(1, 10**7 // 24 + 1, 24)],
    "gradient": [ROWS, ROWS.clone().requires_grad_()],
    "layout": [torch.randn(24, 3, 2).permute(2, 1, 0), ROWS[:, :2]],
    "value": [ROWS * 1e7, ONE_NAN, NO_LEAF, nn.Parameter(ROWS)],
}
WHEN = {
    is_half: "dtype", is_bfloat: "dtype", is_double: "dtype", weight_is_half: "weight", in_evaluation_and_half: "dtype",
    by_a_table: "dtype", by_a_function: "dtype",
    is_flat: "rank", has_five_dimensions: "rank", is_one_sample: "size", is_long: "size", is_very_long: "size",
    by_a_number: "size", by_a_loop: "size", by_a_comprehension: "size", by_a_lambda: "size", is_large: "large", fits_well: "size",
    needs_no_gradient: "gradient", x_needs_none: "gradient", is_frozen: "gradient", is_inference: "gradient", autocasts: "gradient",
    is_strided: "layout", has_large_values: "value", has_nan: "value", is_leaf: "value", is_parameter: "value", is_of_a_class: "value",
    by_an_error: "size",
}  # fmt: skip
SETTINGS = {
    "gradient": [contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
}


def same(norm, patched, x):
    """Both return the same, or both raise."""
    outcomes = []
    for module in (norm, patched):
        try:
            outcomes.append(module(x).detach())
        except Exception as error:
            outcomes.append(type(error))
    expected, found = outcomes
    if isinstance(expected, torch.Tensor):
        off = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(expected.dtype, 1e-5)
        torch.testing.assert_close(found, expected, rtol=off, atol=off, equal_nan=True)
    else:
        assert found == expected


@pytest.mark.parametrize("when", WHEN, ids=lambda when: when.__name__)
def test_a_norm_decides_as_it_did(when):
    norm = trap(when)(24)
    patched = copy.deepcopy(norm)
    report = onepass.patch(patched)
    assert report.counts["found"] == 1
    for x in PROBES[WHEN[when]]:
        for dtype in (torch.float32, x.dtype, torch.bfloat16):
            for training in (True, False):
                for setting in SETTINGS.get(WHEN[when], [contextlib.nullcontext]):
                    for module in (norm, patched):
                        module.train(training).to(dtype).requires_grad_(when is not is_frozen)
                    with setting():
                        same(norm, patched, x)


def test_what_only_refuses_is_no_branch():
    norm = trap(by_a_refusal)(24)
    assert onepass.patch(norm).counts["replaced"] == 1
    torch.testing.assert_close(norm(ROWS), nn.functional.rms_norm(ROWS, (24,), norm.gain, norm.tiny))


def is_on_a_gpu(self, x):
    return x.is_cuda


def is_on_another_device(self, x):
    return x.device.type not in ("cpu",)


def is_on_one_that_is_looked_for(self, x):
    return x.get_device() >= 0


def gain_is_on_a_gpu(self, x):
    return self.gain.is_cuda


def there_is_a_gpu(self, x):
    return torch.cuda.is_available()


def cudnn_is_off(self, x):
    return not torch.backends.cudnn.enabled


def wide_by_default(self, x):
    return torch.get_default_dtype() == torch.float64


def is_deterministic(self, x):
    return torch.are_deterministic_algorithms_enabled() is None


def is_traced(self, x):
    return torch.jit.is_tracing()


def has_threads(self, x):
    return torch.get_num_threads() > 64


def by_the_environment(self, x):
    return "TWICE" in os.environ


def by_the_clock(self, x):
    return time.time() < 0


def by_chance(self, x):
    return random.random() < 0


def by_an_attribute(self, x):
    return getattr(x, "is_cuda", False)


def by_a_device_in_a_number(self, x):
    return (0, 1)[x.is_cuda]


def by_what_is_far(self, x):
    return min(x.shape[0], 10**6) == 10**6


def by_its_own_dictionary(self, x):
    return self.__dict__.get("twice", False)


@torch.no_grad()
def inside_of_a_wrapper(self, x):
    return x.shape[0] > 3000


def by_code_that_is_handed_on(self, x):
    return torch.utils.checkpoint.checkpoint(is_very_long, self, x, use_reentrant=False)


def by_a_property_that_asks(self, x):
    return self.asks


def by_a_default(self, x, calls=[]):  # noqa: B006
    return len(calls) > 3


UNTRIED = {
    is_on_a_gpu: "is_cuda", is_on_another_device: "x.device.type", is_on_one_that_is_looked_for: "get_device", gain_is_on_a_gpu: "is_cuda",
    there_is_a_gpu: "torch.cuda.is_available", cudnn_is_off: "torch.backends", wide_by_default: "get_default_dtype",
    is_deterministic: "are_deterministic", is_traced: "is_tracing", has_threads: "get_num_threads", by_the_environment: "os.environ",
    by_the_clock: "time.time", by_chance: "random.random", by_an_attribute: "'is_cuda'", by_a_device_in_a_number: "is_cuda",
    by_what_is_far: "min", by_its_own_dictionary: "__dict__", by_a_default: "calls", autocasts_somewhere: "autocast",
    inside_of_a_wrapper: "x.shape[0] > 3000", by_code_that_is_handed_on: "checkpoint", by_a_property_that_asks: "self.gain.requires_grad",
}  # fmt: skip


@pytest.mark.parametrize("when", UNTRIED, ids=lambda when: when.__name__)
def test_what_cannot_be_tried_is_left_alone(when):
    report = onepass.patch(trap(when)(24))
    assert report.counts["left"] == 1
    assert UNTRIED[when] in report.rows[0].why
    if when is not autocasts_somewhere:
        assert "test_branches.py:" in report.rows[0].why


def test_who_registers_a_class_decides():
    cls = trap(is_on_a_gpu)
    onepass.register(cls, onepass.nn.RMSNorm, weight="gain", eps="tiny")
    assert onepass.patch(cls(24)).counts["replaced"] == 1
    cls = trap(is_half)
    onepass.register(cls, onepass.nn.RMSNorm, weight="gain", eps="tiny")
    assert onepass.patch(cls(24)).counts["left"] == 1  # trials see this one


FLAG, SETTINGS_OF_ALL, OBJECT = False, {"twice": False}, types.SimpleNamespace(twice=False)


def global_flag(self, x):
    return FLAG


def global_setting(self, x):
    return SETTINGS_OF_ALL["twice"]


def global_object(self, x):
    return OBJECT.twice


def own_flag(self, x):
    return self.twice


def flag_of_the_class(self, x):
    return type(self).twice


def flag_if_there(self, x):
    return hasattr(self, "may_be") and self.may_be


def flag_or_default(self, x):
    return getattr(self, "may_be", False)


def flag_of_an_object(self, x):
    return self.config.twice and x.dim() > 0


def flag_in_a_list(self, x):
    return self.list[0]


@property
def own_property(self):
    return self.twice


def flag_of_a_property(self, x):
    return self.flag


def scaled(self, x):
    return self.twice * 1.0


class HasChildNorm(Twice):
    def __init__(self, size):
        super().__init__(size)
        self.act = nn.Dropout(0.0)

    def forward(self, signal):
        return self.act(super().forward(signal))

    def when(self, x):
        return False


def never(x):
    return False


def always(x):
    return True


def by_its_function(self, x):
    return self.choose(x)


def set_global(norm, name="FLAG", value=True):
    globals()[name] = value


FLAGS = {
    "a global": (lambda: trap(global_flag)(24), lambda norm: set_global(norm), lambda norm: set_global(norm, value=False)),
    "a global dictionary": (
        lambda: trap(global_setting)(24),
        lambda norm: SETTINGS_OF_ALL.update(twice=True),
        lambda norm: SETTINGS_OF_ALL.update(twice=False),
    ),
    "a global object": (
        lambda: trap(global_object)(24),
        lambda norm: setattr(OBJECT, "twice", True),
        lambda norm: setattr(OBJECT, "twice", False),
    ),
    "its own": (lambda: trap(own_flag, twice=False)(24), lambda norm: setattr(norm, "twice", True), lambda norm: delattr(norm, "twice")),
    "its class's": (
        lambda: trap(own_flag, twice=False)(24),
        lambda norm: setattr(of_trap(norm), "twice", True),
        lambda norm: setattr(of_trap(norm), "twice", False),
    ),
    "its class's by type": (
        lambda: trap(flag_of_the_class, twice=False)(24),
        lambda norm: setattr(of_trap(norm), "twice", True),
        lambda norm: setattr(of_trap(norm), "twice", False),
    ),
    "one that may be there": (
        lambda: trap(flag_if_there)(24),
        lambda norm: setattr(norm, "may_be", True),
        lambda norm: delattr(norm, "may_be"),
    ),
    "one with a default": (
        lambda: trap(flag_or_default)(24),
        lambda norm: setattr(norm, "may_be", True),
        lambda norm: delattr(norm, "may_be"),
    ),
    "an object's": (
        lambda: with_attribute(trap(flag_of_an_object)(24), config=types.SimpleNamespace(twice=False)),
        lambda norm: setattr(norm.config, "twice", True),
        lambda norm: setattr(norm.config, "twice", False),
    ),
    "a list's": (
        lambda: with_attribute(trap(flag_in_a_list)(24), list=[False]),
        lambda norm: norm.list.__setitem__(0, True),
        lambda norm: norm.list.__setitem__(0, False),
    ),
    "a function": (
        lambda: with_attribute(trap(by_its_function)(24), choose=never),
        lambda norm: setattr(norm, "choose", always),
        lambda norm: setattr(norm, "choose", never),
    ),
    "a property's": (
        lambda: trap(flag_of_a_property, twice=False, flag=own_property)(24),
        lambda norm: setattr(norm, "twice", True),
        lambda norm: setattr(norm, "twice", False),
    ),
    "a factor": (
        lambda: trap(scaled, twice=False)(24),
        lambda norm: setattr(norm, "twice", True),
        lambda norm: setattr(norm, "twice", False),
    ),
    "a child's": (lambda: HasChildNorm(24), lambda norm: setattr(norm.act, "p", 1.0), lambda norm: setattr(norm.act, "p", 0.0)),
    "a child": (lambda: HasChildNorm(24), lambda norm: setattr(norm, "act", nn.Tanh()), lambda norm: setattr(norm, "act", nn.Dropout(0.0))),
}


def of_trap(norm):
    return next(cls for cls in type(norm).__mro__ if cls.__name__ == "TrapNorm" and not issubclass(cls, Swapped))


def with_attribute(norm, **attributes):
    vars(norm).update(attributes)
    return norm


@pytest.mark.parametrize("make, turn_on, turn_off", FLAGS.values(), ids=FLAGS.keys())
def test_a_flag_that_changes_later_is_seen(make, turn_on, turn_off):
    norm = make()
    patched = copy.deepcopy(norm)
    assert onepass.patch(patched).counts["replaced"] == 1
    plain = norm(ROWS)
    try:
        for module in (norm, patched):
            turn_on(module)
        assert not torch.equal(norm(ROWS), plain)
        same(norm, patched, ROWS)
        again = copy.deepcopy(norm)  # results of the first `patch` no longer hold
        onepass.patch(again)
        same(norm, again, ROWS)
    finally:
        for module in (norm, patched):
            with contextlib.suppress(AttributeError):
                turn_off(module)
    torch.testing.assert_close(patched(ROWS), plain)


def test_a_variable_around_a_class_is_not_trusted():
    twice = False

    class AroundNorm(Rms):
        def forward(self, signal):
            return super().forward(signal) * (2 if twice else 1)

    assert "twice" in onepass.patch(AroundNorm(24)).rows[0].why
    twice = True


def test_a_dropout_inside_drops_in_training():
    """Also if the model was patched in evaluation mode."""

    class Dropping(nn.BatchNorm2d):
        def __init__(self):
            super().__init__(24)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(super().forward(x))

    model = Dropping().eval()
    onepass.patch(model)
    assert (model.train()(torch.randn(2, 24, 5, 3)) == 0).any()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy * (2 if dy.shape[0] > 3000 else 1)


class OwnBackwardNorm(Rms):
    def forward(self, signal):
        return Cubed.apply(super().forward(signal))


def test_a_backward_of_its_own_is_read():
    assert "`dy.shape[0] > 3000`" in onepass.patch(OwnBackwardNorm(24)).rows[0].why


class WithoutSourceNorm(Rms):
    exec("def forward(self, signal):\n    return signal * self.scale(signal) * self.gain * (self.flag + 1)")
    exec("def scale(self, x):\n    return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.tiny)", globals(), locals())
    flag = 0


class BranchesWithoutSourceNorm(Rms):
    exec("def forward(self, x):\n    y = nn.functional.rms_norm(x, (24,), self.gain, self.tiny)\n    return y if x.is_cpu else 2 * y")


def test_without_source():
    norm = WithoutSourceNorm(24)
    assert "source" in onepass.patch(norm).rows[0].why  # it calls its own method
    assert "source" in onepass.patch(BranchesWithoutSourceNorm(24)).rows[0].why


class OtherActivation(nn.Module):
    def forward(self, x):
        return torch.relu(x) * (2 if x.dtype == torch.float64 else 1)


class OnAGpu(nn.Module):
    def forward(self, x):
        return torch.relu(x) if x.is_cpu else x


class Chosen(nn.Module):
    twice = False

    def forward(self, x):
        return torch.relu(x) * 2 if self.twice else torch.relu(x)


class Fine(nn.Module):
    def forward(self, x):
        return torch.relu(x)


@pytest.mark.parametrize("act, fused", [(OtherActivation, 0), (OnAGpu, 0), (Chosen, 0), (Fine, 1)])
def test_activations_are_read_too(act, fused):
    assert onepass.patch(nn.Sequential(nn.LayerNorm(24), act())).counts["fused"] == fused
