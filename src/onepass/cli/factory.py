"""Make the model that the argument MODULE:FACTORY of a command names."""

from __future__ import annotations

import argparse
import ast
import sys
from importlib import import_module
from typing import Any

import torch


def add_arguments(parser: argparse.ArgumentParser, returns: str = "the model") -> None:
    parser.add_argument(
        "model", metavar="MODULE:FACTORY", help=f"a function that returns {returns}, or the model itself: torchvision.models:resnet50"
    )
    parser.add_argument("arguments", nargs="*", metavar="VALUE | NAME=VALUE", help="arguments for the factory")


def make(args: argparse.Namespace) -> Any:
    """Return what the factory returns, or the model itself if MODULE:FACTORY names a model."""
    module, colon, path = args.model.partition(":")
    if not colon or not path:
        raise ValueError(f"model={args.model!r} has no factory; expected MODULE:FACTORY, for example torchvision.models:resnet50")
    sys.path.insert(0, "")  # so that modules in the current folder are found
    try:
        made: Any = import_module(module)
        for name in path.split("."):
            made = getattr(made, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model={args.model!r} was not found: {error}; expected MODULE:FACTORY, importable from this folder") from error
    if isinstance(made, torch.nn.Module):
        return made
    named = [text.partition("=")[::2] for text in args.arguments if "=" in text]
    return made(*[_value(text) for text in args.arguments if "=" not in text], **{name: _value(value) for name, value in named})


def _value(text: str) -> Any:
    """Return the value of `text` as a Python literal, or `text` itself if it is not a literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
