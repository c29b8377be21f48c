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
        "model", metavar="MODULE:FACTORY", help="what makes the model, or the model: torchvision.models:resnet50, mine:model"
    )
    parser.add_argument("arguments", nargs="*", metavar="VALUE | NAME=VALUE", help="what to call the factory with")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, only say what would be done")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="replace norms, fuse none")
    parser.add_argument("--channels-last", action="store_true", help="also lay out convolutions channels-last")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    module, colon, path = args.model.partition(":")
    if not colon or not path:
        raise ValueError(f"model={args.model!r} has no factory; expected MODULE:FACTORY, for example torchvision.models:resnet50")
    sys.path.insert(0, "")  # a module of the user's, beside which the command was called
    try:
        made: Any = import_module(module)
        for name in path.split("."):
            made = getattr(made, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model={args.model!r} was not found: {error}; expected MODULE:FACTORY as Python imports it from here") from error
    if not isinstance(made, torch.nn.Module):
        named = [text.partition("=")[::2] for text in args.arguments if "=" in text]
        made = made(*[_value(text) for text in args.arguments if "=" not in text], **{name: _value(value) for name, value in named})
    print(patch(made, fuse=args.fuse, dry_run=args.dry_run, channels_last=args.channels_last))
    return 0


def _value(text: str) -> Any:
    """A literal of Python where it is one, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
