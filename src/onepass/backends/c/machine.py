"""Which CPUs the C kernels are compiled for: this one, or all CPUs of the level in $ONEPASS_MARCH."""

from __future__ import annotations

import os
import platform

from .cache import Unavailable

NATIVE_FLAGS = ("-march=native", "-mcpu=native", "")  # tried in this order until the compiler succeeds


# The levels of the x86-64 psABI, and the lowest level of 64-bit Arm. For each level: the features that a CPU needs, under the names
# that Linux uses.
_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = {"x86-64": (), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4, "armv8-a": ()}


def level() -> str:
    """Return the level in $ONEPASS_MARCH, or "" if the kernels are for this CPU only."""
    value, machine = os.environ.get("ONEPASS_MARCH", ""), platform.machine()
    fitting = [name for name in LEVELS if name.startswith("arm") == (machine in ("aarch64", "arm64"))]
    if value and value not in fitting:
        raise Unavailable(f"ONEPASS_MARCH={value!r}, expected one of {', '.join(fitting)}, or nothing for the CPU of this machine")
    return value


def check_level(name: str, cpu: str) -> None:
    """Raise unless a CPU has the features of a level. `cpu` is its description in /proc/cpuinfo.

    Without this check, the first call of a kernel could end the process by an unknown instruction.
    """
    missing = sorted(set(LEVELS[name]) - set(cpu.split()))
    if missing:
        raise Unavailable(f"ONEPASS_MARCH={name}, but this CPU lacks {', '.join(missing)}: set a lower level, and compile again")
