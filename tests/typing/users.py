"""What a type checker knows of our functions. pyright checks this file (`make lint`); it is not run."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import onepass.functional as F
from onepass.functional.extras import Stats

x = torch.randn(2, 8)
weights = torch.ones(3)

assert_type(F.layer_norm(x, (8,)), Tensor)
assert_type(F.layer_norm(x, (8,), return_stats=True), Stats)
assert_type(F.layer_norm(x, (8,), return_stats=True).rstd, Tensor)
assert_type(F.rms_norm(x, (8,), return_stats=True), Stats)
assert_type(F.group_norm(x, 2, activation="silu"), Tensor)
assert_type(F.group_norm(x, 2, return_stats=True), Stats)
assert_type(F.instance_norm(x[..., None], return_stats=True), Stats)
assert_type(F.batch_norm(x, None, None, training=True, return_stats=True), Stats)
assert_type(F.layer_norm2d(x[..., None, None], return_stats=True), Stats)
assert_type(F.switchable_norm(x, weights, weights, training=True, return_stats=True), Stats)
assert_type(F.add_rms_norm(x, x, (8,)), tuple[Tensor, Tensor])
