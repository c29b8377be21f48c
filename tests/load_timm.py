"""timm, from beside the other packages, where the Makefile put it, with a torchvision that may be built for another torch."""

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
    assert spec and spec.origin, "make sets timm and torchvision up"
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:  # it asks for two of its operators at import, and gives up without them
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    timm = importlib.import_module("timm")
    sys.path.remove(str(Path(sys.prefix) / "timm"))  # other processes are started with this path, and see no such torchvision
    return timm
