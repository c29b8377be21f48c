"""FSDP (`fully_shard`) on two processes: a patched model trains as the unpatched one does, patched before or after sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import onepass
from tests.ranks import leave

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")
RANKS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.group, self.act = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()
        self.linear, self.layer, self.rms, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.act(self.group(self.conv(x))).mean((2, 3))
        return self.last(self.rms(self.layer(self.linear(x))))


def trained(order: tuple[str, ...], rank: int, mesh) -> list[torch.Tensor]:
    """The parameters after three steps. `order` says what is done with the model first: "patch", "shard"."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    for what in order:
        if what == "patch":
            assert onepass.patch(model).counts["replaced"] == 3
        else:
            for child in [*model.children(), model]:
                fully_shard(child, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank + 1)
    x = torch.randn(4, 3, 6, 6)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [param.full_tensor() for param in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]


def work(rank: int, store: str, results: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {order: trained(order, rank, mesh) for order in (("shard",), ("patch", "shard"), ("shard", "patch"))}
    if rank == 0:
        torch.save(found, results)
    leave()


def test_training(tmp_path: Path):
    torch.multiprocessing.spawn(work, (str(tmp_path / "store"), str(tmp_path / "results")), nprocs=RANKS)
    plain, *others = torch.load(tmp_path / "results").values()
    for patched in others:
        for expected, param in zip(plain, patched, strict=True):
            torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)
