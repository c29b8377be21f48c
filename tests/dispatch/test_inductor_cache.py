"""Inductor's cache works with our graph pass."""

import os
import pickle
import shutil
import subprocess
import sys

import pytest

# Without this, inductor compiles four programs in a new cache, to find the vector instructions of the CPU, and a header
QUICK = """
from torch._inductor import config, cpu_vec_isa
cpu_vec_isa.supported_vec_isa_list.clear()
config.cpp_cache_precompile_headers = False
"""

COMPILE = f"""
import torch, onepass
{QUICK}
from torch._dynamo.utils import counters
model, x = torch.nn.Sequential(onepass.nn.GroupNorm(4, 16), torch.nn.SiLU()), torch.randn(2, 16, 8, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model)(x), model(x))
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_second_process_compiles_from_the_cache(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    assert [run.stdout.split() for run in runs] == [["0", "1"], ["1", "0"]]
    assert not any("pickle" in run.stderr for run in runs)


def test_the_pass_pickles_with_the_pass_before_it():
    from onepass.dispatch.inductor_pass import NormPass

    both = NormPass(NormPass())
    copy = pickle.loads(pickle.dumps(both))
    assert copy.uuid() == both.uuid() is not None and isinstance(copy.before, NormPass)
    assert NormPass(print).uuid() is None  # a pass without a uuid: inductor must not cache what it compiles
