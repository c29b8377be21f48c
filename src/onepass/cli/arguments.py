"""The commands and their arguments. This file imports neither torch nor the library, so that help and errors come at once.

The names that torch or the library define are repeated here. tests/cli/test_usage.py compares them with the library's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from onepass import __version__
from onepass.core.spec import ACTIVATIONS, GRANULARITIES
from onepass.verify import cases

OPS = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "layer_norm2d", "switchable_norm")
DTYPES = ("float64", "float32", "bfloat16", "float16")
FAMILIES = (
    "c", "aten", "row", "tile", "whole_set", "ring", "team", "apply", "row_reread", "tile_reread", "blockwise", "reference",
)  # fmt: skip
PROVIDERS = ("onepass", "torch", "torch.compile")
LAYOUTS = {"nchw": "contiguous", "nhwc": "channels_last"}

MODELS = """\
examples of MODULE:FACTORY:
  torch.nn:Transformer d_model=256       a class of torch
  torchvision.models:resnet50            a function of torchvision (`pip install torchvision` first)
  my_models:make_unet 3 width=64         your own function in my_models.py, in this folder
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence. argparse would print the usage first, which fills the screen."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message.removesuffix('.')}. See `{self.prog} --help`.", file=sys.stderr)
        raise SystemExit(2)


def parser() -> Parser:
    """Return the parser of the whole command line. `args.command` is the name of the file in cli/ that runs the command."""
    top = Parser(prog="onepass", description="Normalization layers for PyTorch, for every memory layout.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add, help in (
        ("demo", _demo, "compare speed and accuracy with torch on this machine, and draw what each norm averages over"),
        ("doctor", _doctor, "check every norm on every device, and print versions and the kernels they use"),
        ("verify", _verify, "check every case on every kernel family against two float64 oracles; run this on new hardware"),
        ("run", _run, "run one problem of your choice"),
        ("patch", _patch, "show what onepass.patch does to your model"),
        ("precompile", _precompile, "compile the kernels of your model ahead of time"),
        ("bench", _bench, "measure every row of the suite, and compare with torch and with the speed of a copy"),
    ):
        add(commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}."))
    return top


def shape(text: str) -> tuple[int, ...]:
    """Read a shape.

    Example: `shape("2,64,8,8")` is `(2, 64, 8, 8)`.
    """
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = (-1,)
    if min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; expected sizes with commas between them, for example 32,512,64,64")
    return sizes


def _demo(parser: Parser) -> None:
    parser.add_argument("--picture", type=Path, default=Path("norms.png"), help="file for the picture (default: norms.png)")


def _doctor(parser: Parser) -> None:
    parser.add_argument("--verbose", action="store_true", help="also print the route of every call, and why not another kernel")


def _verify(parser: Parser) -> None:
    _device(parser)
    _op(parser, "check only this norm")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="check only cases whose name contains this")
    parser.add_argument("--dtype", choices=DTYPES, help="check only this dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix", action="store_true", help="print the errors of every case, family and dtype")
    parser.add_argument("--reasons", action="store_true", help="print why a family does not support a case")
    parser.add_argument("--out", type=Path, help="also write the results to this file, one JSON object per line")


def _run(parser: Parser) -> None:
    parser.add_argument("op", choices=OPS, metavar="NORM", help=", ".join(OPS))
    parser.add_argument("--shape", required=True, type=shape, help="shape of the input, for example 32,512,64,64")
    parser.add_argument("--layout", default="contiguous", choices=[*LAYOUTS, *cases.LAYOUTS])
    parser.add_argument("--groups", type=int, default=32, help="group_norm: number of groups (default: 32)")
    parser.add_argument("--rank", type=int, default=1, help="layer_norm, rms_norm: number of normalized dimensions (default: 1)")
    parser.add_argument("--affine", default="both", choices=cases.AFFINES, help="which parameters the norm has")
    parser.add_argument("--wide", action="store_true", help="float32 parameters for a float16 or bfloat16 input")
    parser.add_argument("--init", default="normal", choices=cases.INITS, help="how the input is filled")
    parser.add_argument("--eps", type=float, default=1e-5)
    parser.add_argument("--running", action="store_true", help="batch_norm, instance_norm: update running statistics")
    parser.add_argument("--evaluate", action="store_true", help="batch_norm, instance_norm: use running statistics")
    parser.add_argument("--momentum", type=float, default=0.1)
    parser.add_argument("--activation", default="", choices=ACTIVATIONS, help="activation after the norm")
    parser.add_argument("--modulate", action="store_true", help="modulate with a scale and shift per sample and channel")
    parser.add_argument("--residual", action="store_true", help="layer_norm, rms_norm, group_norm: add a residual first")
    parser.add_argument("--save", choices=("x", "y"), default="x", help="tensor to save for the backward (default: x)")
    parser.add_argument("--offset", type=float, default=0.0, help="layer_norm, rms_norm: weight_offset")
    parser.add_argument("--granularity", default="element", choices=GRANULARITIES, help="layer_norm: shape of weight and bias")
    parser.add_argument("--last", action="store_true", help="group, instance, batch and switchable norm: the input is (N, *, C)")
    parser.add_argument("--no-bn", dest="using_bn", action="store_false", help="switchable_norm: leave out BatchNorm")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    _device(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, help="force this kernel family")
    parser.add_argument("--verify", action="store_true", help="check output and gradients against two float64 oracles")
    parser.add_argument("--time", action="store_true", help="compare the time with torch's")


def _patch(parser: Parser) -> None:
    _model(parser, "the model")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, and print what would change")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="replace norms but fuse none")
    parser.add_argument("--channels-last", action="store_true", help="also convert convolutions to channels_last")


def _precompile(parser: Parser) -> None:
    # The inputs are a tensor, a tuple of arguments, or a dictionary of keyword arguments.
    _model(parser, "the model, or (model, example inputs)")
    parser.add_argument(
        "--shape", action="append", type=shape, help="shape of an input, if the factory returns none; repeat it for more inputs"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="convert the model to this dtype")
    _device(parser)
    parser.add_argument("--training", action="store_true", help="compile also what a training step needs")
    parser.add_argument("--no-patch", dest="patch", action="store_false", help="do not call onepass.patch first")
    parser.add_argument("--channels-last", action="store_true", help="convert convolutions and inputs to channels_last")


def _bench(parser: Parser) -> None:
    _device(parser)
    _op(parser, "measure only this norm")
    parser.add_argument("--direction", choices=["forward", "backward"], help="measure only this direction")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="measure only rows whose name contains this")
    parser.add_argument("--provider", action="append", choices=PROVIDERS, help="measure only this provider; can be repeated")
    parser.add_argument("--limit", type=float, metavar="MB", help="skip rows with a larger input (default: 64 on a CPU, else no limit)")
    parser.add_argument("--list", action="store_true", help="print the rows and measure nothing")
    parser.add_argument("--out", type=Path, help="merge the results into this file, one JSON object per line")


def _device(parser: Parser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")


def _op(parser: Parser, help: str) -> None:
    parser.add_argument("--op", choices=OPS, metavar="NORM", help=f"{help}: {', '.join(OPS)}")


def _model(parser: Parser, returns: str) -> None:
    parser.add_argument("model", metavar="MODULE:FACTORY", help=f"a function or class that returns {returns}, or the model itself")
    parser.add_argument("arguments", nargs="*", metavar="VALUE | NAME=VALUE", help="arguments for the factory")
    parser.epilog, parser.formatter_class = MODELS, argparse.RawDescriptionHelpFormatter
