"""Read the syntax tree of a function, and compile a changed tree into a new function.

A function is read only if its source compiles to exactly the bytecode that runs. Otherwise `Unreadable` is raised, with
the reason. The new function has the globals, closure, defaults and line numbers of the original. `compile_method` also
copies the wrappers of a method: the functions that decorators put around it, which have an attribute `__wrapped__`.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import types
from collections.abc import Callable
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any, NamedTuple


class Unreadable(Exception):
    """Raised if a function cannot be read or rewritten. The report of `patch` prints the message."""


class MethodSource(NamedTuple):
    tree: ast.FunctionDef
    inner: Any  # the function without its wrappers


def method_source(function: Callable[..., Any]) -> MethodSource:
    """Return the syntax tree of a method, and the function inside its decorators. Raise Unreadable if there is no source."""
    source = _read(inspect.unwrap(function))
    if not source.tree.args.args:
        raise Unreadable("its forward has no parameter for the module itself")
    return source


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """Return the syntax tree of a function. For a wrapper, this is the tree of the wrapper, not of the function that it wraps."""
    return _read(function).tree


@cache
def _read(function: Any) -> MethodSource:
    if not isinstance(function, types.FunctionType):
        raise Unreadable("its forward is not a Python function")
    try:
        lines, _ = inspect.findsource(function)
        tree, code = _find_definition("".join(lines), function.__name__, function.__code__.co_firstlineno)
    except (OSError, SyntaxError, TypeError, StopIteration) as error:
        raise Unreadable("the source of its forward is not available") from error
    if not _same_code(code, function.__code__):
        raise Unreadable("the source of its forward differs from the code that runs")
    nodes = list(ast.walk(tree))
    if any(map(_is_mangled, nodes)) or any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in nodes):
        raise Unreadable("its forward uses names that have another meaning outside its class")
    if {"locals", "vars", "eval", "exec"} & set(function.__code__.co_names):
        raise Unreadable("its forward inspects its own variables")
    return MethodSource(tree, function)


def _find_definition(source: str, name: str, line: int) -> tuple[ast.FunctionDef, types.CodeType]:
    """Return the syntax tree and the code object of the function `name` that starts at `line` of the source."""
    module, codes = _parse_file(source)
    found = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name)
    tree = next(node for node in found if min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]]) == line)
    return tree, next(code for code in codes if (code.co_name, code.co_firstlineno) == (name, line))


@lru_cache(maxsize=32)
def _parse_file(source: str) -> tuple[ast.Module, list[types.CodeType]]:
    codes = [compile(source, "", "exec", dont_inherit=True)]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return ast.parse(source), codes


def clear_caches() -> None:
    """Free the cached syntax trees. Their many small objects slow down every run of the garbage collector."""
    _parse_file.cache_clear()
    _read.cache_clear()


def _is_mangled(node: ast.AST) -> bool:
    """Return whether a node has a name that Python changes inside a class (name mangling), such as `self.__name`."""
    name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or ""
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    """Return whether two code objects are the same, apart from file names and line numbers."""
    alike = (a.co_code, a.co_names, a.co_varnames, len(a.co_consts)) == (b.co_code, b.co_names, b.co_varnames, len(b.co_consts))
    constants = zip(a.co_consts, b.co_consts)
    return alike and all(_same_code(p, q) if isinstance(p, types.CodeType) else repr(p) == repr(q) for p, q in constants)


def resolve_global(function: Callable[..., Any], expression: str) -> Any:
    """Return the object behind a name in a function, such as "F.silu"; None if the name starts with a local variable."""
    root, *path = expression.split(".")
    inner: Any = inspect.unwrap(function)
    code = inner.__code__
    if root in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return None
    value = inner.__globals__.get(root)
    for name in path:
        value = getattr(value, name, None)
    return value


def compile_method(function: Callable[..., Any], source: MethodSource, tree: ast.FunctionDef) -> Callable[..., Any]:
    """Return a copy of a method that runs `tree`. Its wrappers (decorators) are copied, too."""
    return _rewrap(function, source.inner, compile_like(source.inner, tree, {}))


def compile_like(function: Any, tree: ast.FunctionDef, extra_names: dict[str, Any]) -> Any:
    """Return a copy of a function that runs `tree`. The tree may also read the variables `extra_names` (name to value)."""
    code = _compile_tree(function, tree, tuple(extra_names))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells |= {name: types.CellType(value) for name, value in extra_names.items()}
    return _copy_function(function, code, tuple(cells[name] for name in code.co_freevars))


def _compile_tree(inner: Any, tree: ast.FunctionDef, extra_names: tuple[str, ...] = ()) -> types.CodeType:
    """Compile `tree`, and return its code object. The tree may read the free variables of `inner`, and `extra_names`.

    To make these names free variables, the tree is compiled inside an outer function that has them as parameters.
    """
    bare = deepcopy(tree)
    bare.decorator_list, bare.returns = [], None
    for arg in ast.walk(bare.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    bare.args.defaults = [ast.Constant(None) for _ in bare.args.defaults]  # placeholders: `_copy_function` copies the values
    bare.args.kw_defaults = [None if default is None else ast.Constant(None) for default in bare.args.kw_defaults]
    free = [ast.arg(name) for name in (*inner.__code__.co_freevars, *extra_names)]
    outer = ast.FunctionDef("_outer", ast.arguments([], free, None, [], [], None, []), [bare], [], **_VERSION)
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(outer, bare)], []))
    code = compile(module, inner.__code__.co_filename, "exec", inner.__code__.co_flags & _FUTURE, dont_inherit=True)
    for name in ("_outer", tree.name):
        code = next(const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == name)
    return code


def _rewrap(function: Any, inner: Any, new_inner: Any) -> Any:
    """Copy the wrappers of `function`, with `new_inner` in place of `inner` inside them. Return the outermost copy."""
    if function is inner:
        return new_inner
    below = function.__wrapped__
    new_below = _rewrap(below, inner, new_inner)
    holding = [cell for cell in getattr(function, "__closure__", None) or () if _content(cell) is below]
    if not isinstance(function, types.FunctionType) or len(holding) != 1:
        raise Unreadable("its forward has a wrapper that cannot be copied")
    closure = tuple(types.CellType(new_below) if cell is holding[0] else cell for cell in function.__closure__ or ())
    wrapper = _copy_function(function, function.__code__, closure)
    wrapper.__wrapped__ = new_below
    return wrapper


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _copy_function(function: Any, code: types.CodeType, closure: tuple[Any, ...]) -> Any:
    """Return a copy of a function with another code object and closure."""
    copy: Any = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__annotations__, copy.__qualname__ = function.__kwdefaults__, function.__annotations__, function.__qualname__
    copy.__doc__, copy.__module__ = function.__doc__, function.__module__
    copy.__dict__.update(function.__dict__)
    return copy


_FUTURE = __future__.annotations.compiler_flag


_VERSION: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}  # Python 3.12 added it to FunctionDef
