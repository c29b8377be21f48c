"""Imports timm from the folder where the Makefile installs it. Its torchvision may be built for another torch."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch


@cache
def load_timm() -> ModuleType:
    sys.path.append(str(Path(sys.prefix) / "timm"))
    spec = importlib.util.find_spec("torchvision")
    assert spec and spec.origin, "`make test` installs timm and torchvision"
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:  # torchvision needs these two operators at import
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    timm = importlib.import_module("timm")
    sys.path.remove(str(Path(sys.prefix) / "timm"))  # child processes inherit this path, and must not see that torchvision
    return timm
