"""`onepass patch`: show what onepass.patch does to a model."""

from __future__ import annotations

import argparse
import ast
import sys
from importlib import import_module
from typing import Any

import torch

from onepass.patching import patch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODULE:FACTORY", help="a function that returns the model, or the model itself: torchvision.models:resnet50"
    )
    parser.add_argument("arguments", nargs="*", metavar="VALUE | NAME=VALUE", help="arguments for the factory")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, and print what would change")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="replace norms but fuse none")
    parser.add_argument("--channels-last", action="store_true", help="also convert convolutions to channels_last")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
    if not isinstance(made, torch.nn.Module):
        named = [text.partition("=")[::2] for text in args.arguments if "=" in text]
        made = made(*[_value(text) for text in args.arguments if "=" not in text], **{name: _value(value) for name, value in named})
    print(patch(made, fuse=args.fuse, dry_run=args.dry_run, channels_last=args.channels_last))
    return 0


def _value(text: str) -> Any:
    """Return the value of `text` as a Python literal, or `text` itself if it is not a literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
