"""Compile and load the front door, a Python module in C++ (src/front_door). dispatch/front_door.py decides when."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import sysconfig
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from onepass.backends.compilation import need

from .build import SOURCES, Recipe, load_or_compile
from .cache import Unavailable
from .compiler import CPP, find_compiler

FOLDER = SOURCES / "front_door"
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
STANDARDS = ("-std=c++20", "-std=c++17")  # torch's headers need C++20 since version 2.13 or so; older compilers know C++17 only
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")


def load(may_compile: bool) -> Any:
    """Return the module, from the cache or compiled now. Raise `Unavailable` if it is in no cache and cannot be compiled.

    With `may_compile=False` nothing is compiled.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unavailable("the C++ code relies on Python's global lock, which this Python does not have")
    library = load_or_compile(RECIPE, may_compile)
    need("front door")  # not earlier: a front door that cannot be compiled does not count
    make = ctypes.PyDLL(library._name, handle=library._handle).onepass_front_door
    make.restype = ctypes.py_object
    module = make()
    torch.autograd.graph.Node.register(module.node_type)
    return module


def check_compilable() -> None:
    """Raise `Unavailable` if the C++ compiler or Python's headers are missing. This takes little time."""
    find_compiler(CPP)
    _attempts()


def compile_only() -> None:
    """Compile the module into the cache, at low priority. If this fails, print the reason and exit.

    This is for a separate process: it changes the priority of the process.
    """
    os.nice(10)
    try:
        load_or_compile(RECIPE)
    except Unavailable as reason:
        sys.exit(str(reason))


def _key() -> str:
    """Return a hash of the sources and of what the compiled code depends on: the versions of torch and Python, and the machine."""
    try:
        sources = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    except OSError as error:
        raise Unavailable(f"the C++ sources cannot be read: {error}") from None
    versions = torch.__version__, torch.version.git_version, sys.version, sysconfig.get_config_var("SOABI")
    words = [*sources, *FLAGS, *STANDARDS, *versions, platform.system(), platform.machine(), *os.environ.get("CXX", "").split()[1:]]
    return sha256("\n".join(map(str, words)).encode(errors="surrogateescape")).hexdigest()[:24]


def _attempts() -> list[list[str]]:
    folder = Path(torch.__file__).parent
    headers = [folder / "include", folder / "include" / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    if not (Path(headers[-1]) / "Python.h").is_file():
        raise Unavailable(f"Python's headers are missing from {headers[-1]}: install them (python3-dev)")
    strings = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"  # the kind of std::string that torch was compiled with
    before, after = [strings, *(f"-I{path}" for path in headers)], [str(FOLDER / "front_door.cpp"), f"-L{folder / 'lib'}", *LIBRARIES]
    return [[*FLAGS, standard, *before, *after] for standard in STANDARDS]


RECIPE = Recipe("front-door", "front-door-lock", "the C++ front door", 25, CPP, ("onepass_front_door",), _key, _attempts)
