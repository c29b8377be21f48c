"""Reads and writes records of results, one JSON object per line, and makes the fields that tell where they came from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import date
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from onepass import __version__
from onepass.core.device import describe

Record = dict[str, Any]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def machine(device: str) -> str:
    """Return the name of the GPU, or the architecture of the CPU."""
    return describe(torch.device(device)).name or platform.machine()


def origin(device: str) -> Record:
    """Return the fields that tell where a result came from: machine, versions, commit and date."""
    return {
        "device": device,
        "name": machine(device),
        "torch": torch.__version__,
        "triton": import_module("triton").__version__ if find_spec("triton") else None,
        "onepass": __version__,
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


def _commit() -> str:
    """Return the commit of these sources: the environment variable ONEPASS_COMMIT if it is set, otherwise what git says.

    The variable is for copies without git history. Return "unknown" if git fails.
    """
    if "ONEPASS_COMMIT" in os.environ:
        return os.environ["ONEPASS_COMMIT"]
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def extra_mb(record: Record) -> str:
    """Return the MB that a backward allocated besides its gradients, or "–" if they were not measured."""
    extra = record.get("extra_bytes")
    return "–" if extra is None else f"{extra / 1e6:.1f}"


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a new file and rename it. So a process that is killed while it writes leaves the old records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    part.replace(path)


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def merge(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Return old and new records in one list. A new record replaces an old one with the same row, provider and machine."""
    return list({(r["row"], r["provider"], r["name"]): r for r in (*old, *new)}.values())
