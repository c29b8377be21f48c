"""`onepass precompile`: compile the kernels of a model ahead of time, for example while a container image is built."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from onepass import __version__
from onepass.bench import record
from onepass.patching import patch
from onepass.precompiling import precompile

from . import factory


def run(args: argparse.Namespace) -> int:
    model, inputs, kwargs = _made(factory.make(args), args)
    if args.patch:
        patch(model, channels_last=args.channels_last)
    print(f"onepass {__version__}, torch {torch.__version__}, {args.device} {record.machine(args.device)}")
    failed = False
    for training in (False, True) if args.training else (False,):
        report = precompile(model, *inputs, training=training, **kwargs)
        print(f"\n{'training' if training else 'evaluation'}\n{report}")
        failed |= bool(report.failure)
    return 1 if failed else 0


def _made(made: Any, args: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the model and its arguments, on the device and in the dtype of the command line."""
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{args.model} returned {made!r:.80}, expected a torch.nn.Module, or a tuple of one and its example inputs")
    if (given is None) == (args.shape is None):
        problem = "returned no example inputs" if given is None else "returned example inputs, and --shape was given too"
        raise ValueError(f"{args.model} {problem}; expected either (model, inputs) from the factory, or --shape, for example 1,3,224,224")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = model.to(args.device, dtype)
    if given is None:
        kept = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        given = tuple(torch.randn(size, dtype=kept, device=args.device) for size in args.shape)
    given = _moved(given, args)
    if isinstance(given, dict):
        return model, (), given
    return model, given if isinstance(given, tuple) else (given,), {}


def _moved(value: Any, args: argparse.Namespace) -> Any:
    """Return example inputs on the device, in the dtype and in the memory format of the command line."""
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, args) for item in value)
    if isinstance(value, dict):
        return {name: _moved(item, args) for name, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    value = value.to(args.device, getattr(torch, args.dtype) if args.dtype and value.is_floating_point() else None)
    return value.to(memory_format=torch.channels_last) if args.channels_last and value.dim() == 4 else value
