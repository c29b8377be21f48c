"""Analyze the forward of a module, or a function of one tensor.

To follow a function is to interpret its source without running it. Trials are comparisons on random input
(recognition/trials.py), which record the outcomes of conditions.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from onepass.patching.function_source import Unreadable, tree_of

from .bytecode import check_bytecode
from .statements import Statements
from .trust import is_trusted
from .values import TENSOR, VARIES, Analysis, Known, NotAnalyzable

MAX_DEPTH = 20  # calls that are nested deeper are not followed


def analyze_forward(module: nn.Module, analysis: Analysis) -> Analysis:
    """Follow the forward of a module, add all findings to `analysis`, and return `analysis`.

    Raise NotAnalyzable, with the reason, if the forward cannot be followed.
    """
    forward, owner = type(module).forward, Known(module, "self")
    inner = inspect.unwrap(forward)
    if not is_trusted(forward):
        _follow(analysis, forward, [owner, TENSOR], {}, (), True)
    elif not is_trusted(inner):  # a forward inside a wrapper of torch, such as no_grad
        _follow(analysis, inner, [owner, TENSOR], {}, (), False)
    else:  # a forward of torch, which may call methods of the user's class
        for name in inner.__code__.co_names:
            found = inspect.getattr_static(type(module), name, None)
            method = found.fget if isinstance(found, property) else found
            if isinstance(method, types.FunctionType) and not is_trusted(method):
                _follow(analysis, method, [owner, *[VARIES] * (method.__code__.co_argcount - 1)], {}, (), False)
    return analysis


def analyze_function(function: Callable[..., Any]) -> Analysis:
    """Follow a function of one tensor, and return all findings. Raise NotAnalyzable, with the reason, if that fails."""
    analysis = Analysis()
    if not is_trusted(function):
        _follow(analysis, function, [TENSOR], {}, (), True)
    elif not is_trusted(inspect.unwrap(function)):
        _follow(analysis, inspect.unwrap(function), [TENSOR], {}, (), False)
    return analysis


def _follow(analysis: Analysis, function: Any, args: list[Any], keywords: dict[str, Any], stack: tuple[Any, ...], is_recorded: bool) -> Any:
    """Follow a function, and return its result as an object of values.py, such as `Known(3)` or VARIES.

    `stack` holds the functions that called this one. `is_recorded` tells whether trials will record the conditions of the
    function. If not, the function may branch only to raise an error.
    """
    if isinstance(function, functools._lru_cache_wrapper):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        raise NotAnalyzable(f"it calls {getattr(function, '__name__', function)!r:.60}, which is not written in Python")
    if is_trusted(function) or function in stack or len(stack) > MAX_DEPTH:
        return VARIES
    try:
        tree = tree_of(function)
    except Unreadable as reason:
        check_bytecode(analysis, function, args, str(reason))
        return VARIES
    analysis.functions.add(function)
    before = set(analysis.conditions)

    def follow(called: Any, args: list[Any], keywords: dict[str, Any], is_recorded: bool) -> Any:
        return _follow(analysis, called, args, keywords, (*stack, function), is_recorded)

    result = Statements(analysis, function, tree, follow).run(args, keywords)
    added = [condition.text for key, condition in analysis.conditions.items() if key not in before and not condition.optional_outcomes]
    if added and not is_recorded:
        raise NotAnalyzable(f"it branches on {added[0]}, where trials cannot record the outcome")
    return result
