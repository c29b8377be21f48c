"""Make the model that the argument MODULE:FACTORY of a command names."""

from __future__ import annotations

import argparse
import ast
import sys
from importlib import import_module
from typing import Any

import torch

NEEDS_INSTALLING = ("diffusers", "monai", "timm", "torchvision", "transformers")


def make(args: argparse.Namespace) -> Any:
    """Return what the factory returns, or the model itself if MODULE:FACTORY names a model."""
    made = _find(args.model)
    if isinstance(made, torch.nn.Module):
        return made
    if not callable(made):
        raise TypeError(f"model={args.model!r} is {made!r:.80}; expected a function that makes a model, or the model itself")
    named = [text.partition("=")[::2] for text in args.arguments if "=" in text]
    values = [_value(text) for text in args.arguments if "=" not in text]
    try:
        return made(*values, **{name: _value(value) for name, value in named})
    except Exception as error:  # the factory is the user's code, and may raise anything
        given = f"check the arguments {' '.join(args.arguments)}" if args.arguments else "it got no arguments: add them after its name"
        raise ValueError(f"{args.model} raised {type(error).__name__}: {error}; {given}") from error


def _find(name: str) -> Any:
    """Import the object that MODULE:FACTORY names."""
    module, colon, path = name.partition(":")
    if not module or not colon or not path:
        raise ValueError(f"model={name!r} has no factory; expected MODULE:FACTORY, for example torch.nn:Transformer")
    sys.path.insert(0, "")  # so that modules in the current folder are found
    try:
        found: Any = import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model={name!r} was not found: {error}; {_fix(module, error)}") from error
    except Exception as error:  # importing runs code, which may raise anything
        raise ValueError(f"model={name!r}: importing {module} raised {type(error).__name__}: {error}; {_fix(module, error)}") from error


def _fix(module: str, error: Exception) -> str:
    package = module.partition(".")[0]
    if package not in NEEDS_INSTALLING:
        return "expected MODULE:FACTORY, importable from this folder"
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return f"install it with `pip install {package}`"
    if isinstance(error, AttributeError):
        return f"check the name in the documentation of {package}"
    return f"this {package} may be built for another torch: install one for torch {torch.__version__}"


def _value(text: str) -> Any:
    """Return the value of `text` as a Python literal, or `text` itself if it is not a literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
