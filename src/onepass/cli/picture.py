"""The picture of `onepass demo`: which elements each norm averages over.

It shows x as a cube of samples, channels and positions (N×C×HW), like the GroupNorm paper. Blue elements
share one mean and variance. In the kernels' view of memory, x[outer, reps, sets, run], these differ only in reps and run.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.core import norms
from onepass.core.problem import NormProblem, bind
from onepass.core.spec import NormSpec

SIZES = {"N": 4, "C": 6, "H": 2, "W": 2}
GROUPS = 2

# For each norm: its title, its definition, and the order of the dimensions of x.
PANELS: list[tuple[str, NormSpec, str]] = [
    ("BatchNorm", norms.batch_norm(), "NCHW"),
    ("InstanceNorm", norms.instance_norm(), "NCHW"),
    (f"GroupNorm, {GROUPS} groups", norms.group_norm(GROUPS), "NCHW"),
    ("LayerNorm over C", norms.layer_norm(1), "NHWC"),
    ("LayerNorm2d", norms.layer_norm2d(), "NCHW"),
    ("LayerNorm over (C, H, W)", norms.layer_norm(3), "NCHW"),
]

# For each title: which elements share a mean.
CAPTIONS = {
    "BatchNorm": "one mean for each channel,\nof all samples and positions",
    "InstanceNorm": "one mean for each channel of each sample,\nof all its positions",
    f"GroupNorm, {GROUPS} groups": "one mean for each half of the channels of a sample,\nof all their positions",
    "LayerNorm over C": "one mean for each position of each sample,\nof all channels there (channels last)",
    "LayerNorm2d": "one mean for each position of each sample,\nof all channels there (channels first)",
    "LayerNorm over (C, H, W)": "one mean for each sample,\nof all its channels and positions",
}

BLUE, GREY, EDGE = "#4a8de8", "#f2f4f7", "#8a97a6"


def problem_of(definition: NormSpec, order: str) -> NormProblem:
    return bind(definition, torch.empty([SIZES[axis] for axis in order]))


def members(problem: NormProblem, order: str, n: int, c: int, position: int) -> Tensor:
    """Return which elements share mean and variance with element (n, c, position), as booleans of shape (N, C, H·W).

    It is computed from `problem.x`, the kernels' view of memory.

    Example: `members(problem_of(norms.batch_norm(), "NCHW"), "NCHW", 0, 0, 0).sum()` is N·H·W = 16.
    """
    view = problem.x
    assert view is not None
    for o, s in product(range(view.outer), range(view.sets)):
        memory = torch.zeros(problem.shape, dtype=torch.bool).view(-1)
        for r, t in product(range(view.reps), range(view.run)):
            memory[sum(i * stride for i, stride in zip((o, r, s, t), view.strides))] = True
        cube = memory.view(problem.shape).permute([order.index(axis) for axis in "NCHW"]).flatten(2)
        if cube[n, c, position]:
            return cube
    raise AssertionError("the view does not contain the element")


def draw(path: Path) -> None:
    """Draw the picture with matplotlib, and save it as a PNG.

    Example: `draw(Path("norms.png"))`
    """
    from matplotlib.colors import LightSource
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9.2), layout="constrained")
    figure.suptitle("What each norm averages over: the blue elements of the input share one mean and one variance\n", fontsize=15)
    for place, (title, definition, order) in enumerate(PANELS, 1):
        problem = problem_of(definition, order)
        # In the picture, C goes to the right, N to the back and H·W up.
        cube = members(problem, order, 0, SIZES["C"] - 1, SIZES["H"] * SIZES["W"] - 1).permute(1, 0, 2)
        axes: Any = figure.add_subplot(2, 3, place, projection="3d")
        light = LightSource(azdeg=145, altdeg=50)
        for filled, color in ((cube, BLUE), (~cube, GREY)):
            axes.voxels(filled.numpy(), facecolors=color, edgecolor=EDGE, linewidth=0.7, lightsource=light)
        axes.set_box_aspect(cube.shape, zoom=0.95)
        axes.view_init(elev=22, azim=-58)
        axes.set_axis_off()
        c, n, positions = cube.shape
        labels = {"channels": (c / 2, -1.1, -0.2), "samples": (c + 1.7, n / 2, -0.2), "positions": (-1.5, 0, positions / 2)}
        for name, where in labels.items():
            axes.text(*where, name, ha="center", va="center", fontsize=10)
        axes.patch.set_visible(False)  # without a background, it does not cover the labels of the next picture
        axes.set_title(f"{title}:\n{CAPTIONS[title]}", fontsize=12)
    figure.savefig(path, dpi=100)
