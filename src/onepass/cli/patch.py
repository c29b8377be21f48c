"""`onepass patch`: show what onepass.patch does to a model."""

from __future__ import annotations

import argparse

from torch import nn

from onepass.patching import patch

from . import factory


def run(args: argparse.Namespace) -> int:
    made = factory.make(args)
    model = made[0] if isinstance(made, tuple) and made else made  # `onepass precompile` takes (model, example inputs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{args.model} returned {made!r:.80}; expected a torch.nn.Module")
    print(patch(model, fuse=args.fuse, dry_run=args.dry_run, channels_last=args.channels_last))
    return 0
