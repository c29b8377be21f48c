"""The input of Triton's compiler, and compiled kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onepass.backends.compilation import LOGGER, Compilation

from .signature import Path, runtime_types

INTERPRETED = bool(knobs.runtime.interpret)


class Source(NamedTuple):
    """The input of Triton's compiler. Many problems may have the same Source, and then share a compiled kernel."""

    function: Any
    types: tuple[tuple[str, Any], ...]  # for each argument, its type or a NamedTuple of types
    constants: tuple[tuple[Path, Any], ...]
    divisors: tuple[tuple[Path, int], ...]
    warps: int
    cooperative: bool = False  # all programs must run at the same time
    max_registers: int = 0  # the most registers per thread; 0 means no limit
    pdl: bool = False  # programmatic dependent launch: the kernel starts while the previous one runs, and waits for its results

    def compile(self, target: GPUTarget | None = None, begin: Callable[[], None] = lambda: None) -> Any:
        """Return the kernel, compiled for `target`, or for the current GPU if that is None.

        `begin` is called before the compiler starts. If Triton's cache has the kernel, it is not called.

        The kernel's launcher takes all values that are not constants in one flat list, not in NamedTuples.
        """
        attributes = {path: [["tt.divisibility", divisor]] for path, divisor in self.divisors}
        language = ASTSource
        if self.function.is_gluon():
            from onepass.backends.gpu.ring.gluon import GluonASTSource as language
        source = language(self.function, dict(self.types), dict(self.constants), attributes)
        make_ir = source.make_ir  # the first step of Triton's compiler, after it has looked into its cache

        def begin_and_make_ir(*args: Any, **kwargs: Any) -> Any:
            begin()
            return make_ir(*args, **kwargs)

        source.make_ir = begin_and_make_ir
        kernel: Any = triton.compile(source, target=target, options=self._options())
        # Triton makes the launcher from kernel.src. With nested arguments, a launch takes 14 us of CPU time, with a flat
        # list less than 3 us.
        flat = [leaf for _, type_ in self.types for leaf in runtime_types(type_)]
        kernel.src = SimpleNamespace(signature={str(at): leaf for at, leaf in enumerate(flat)}, constants={}, fn=source.fn)
        return kernel

    def _options(self) -> dict[str, Any]:
        # enable_fp_fusion is always set, because its default depends on the version of Triton.
        options: dict[str, Any] = {"num_warps": self.warps, "enable_fp_fusion": True}
        if self.pdl:  # Triton for AMD does not know this option
            options["launch_pdl"] = True
        if self.cooperative:
            options["launch_cooperative_grid"] = True
        if self.max_registers:
            options["maxnreg"] = self.max_registers
        return options


_hashed: set[int] = set()  # the ids of functions that `hash_in_order` has seen


def hash_in_order(function: Any) -> None:
    """Let Triton hash a function, after all functions that it calls. Do this before a Source is hashed, which hashes its function.

    Triton finds a compiled kernel in its cache on disk by this hash. It contains the global constants of a called function only if that one
    was hashed before. So the hash would depend on the kernels that the process compiled before, and another process would compile again.
    """
    if id(function) in _hashed:
        return
    _hashed.add(id(function))
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITFunction):
            hash_in_order(called)
    function.cache_key  # noqa: B018 (a property, which hashes)


@cache
def loaded(source: Source, device: int) -> Any:
    """Return the compiled kernel of a source, loaded on the current device. `device` is the number of that device."""
    try:
        return _load(source)
    except OSError as error:
        with _temporary_cache(error):
            return _load(source)


def _load(source: Source) -> Any:
    line = "compiling GPU kernels, once per machine (some seconds each)"
    with Compilation(f"the GPU kernel {source.function.__name__}", line) as compilation:
        kernel = source.compile(begin=compilation.begin)
        kernel._init_handles()  # Triton 3.6 compiles a launcher in C here, unless its cache has one
    return kernel


@contextmanager
def _temporary_cache(error: OSError) -> Iterator[None]:
    """Let Triton write to a temporary folder, since its cache lacks a kernel and cannot be written. Loaded kernels need no files."""
    _warn_once(
        f"Triton's cache {knobs.cache.dir} lacks a kernel and cannot be written ({error.strerror}), so every process compiles it again"
    )
    with knobs.cache.scope(), tempfile.TemporaryDirectory(prefix="onepass-") as folder:
        knobs.cache.dir = folder
        yield


@cache
def _warn_once(message: str) -> None:
    LOGGER.warning("%s; run onepass.precompile where TRITON_CACHE_DIR can be written, or set it to another folder", message)
