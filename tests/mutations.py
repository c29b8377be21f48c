"""Planted faults. Each must make its tests fail.

`make mutations` runs all of them. The usual test run includes the quick ones.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "onepass"


class Mutation(NamedTuple):
    name: str
    file: str
    before: str
    after: str
    tests: str  # pytest arguments
    quick: bool = False  # part of the usual test run


VIEW = "tests/core/test_view.py -k the_table or every_norm"
CASES = "tests/functional/test_numerics.py -k every_case and float32"
MODULATED = "tests/functional/test_numerics.py -k every_case and modulated and float32"
MIXED = "tests/functional/test_numerics.py -k every_case and switchable and float32"
C_KERNELS = "tests/backends/c/test_launch.py -k random_problems or every_half or far_beyond or threads_do_not"
SAVED = "tests/functional/test_save.py -k gradients_keep and layer_norm-sliced"
BLOCKS = "tests/functional/test_numerics.py -k blocks"
LIMITS = "tests/functional/test_extreme_values.py -k "
KERNELS = "tests/backends/gpu/test_interpreter.py -k within_the_budget and "  # in Triton's interpreter
RING = "tests/backends/gpu/test_ring_in_python.py -k "

MUTATIONS = [
    Mutation("K and L swapped", "backends/torch_ops/blockwise.py", "p.d if step >= p.channel_run else 0", "p.d if step < p.channel_run else 0", CASES),
    Mutation("the parameter index by the wrong remainder", "core/view.py", "t // self.channel_run * self.d", "t % self.channel_run * self.d", VIEW),
    Mutation("a reduced axis taken for a kept one", "core/view.py", "any(axis.reduced for axis in outer + sets)", "any(axis.reduced for axis in sets)", VIEW),
    Mutation("axes merged that are not evenly spaced", "core/view.py", "if any(stride != size * below", "if any(stride < size * below", VIEW),
    Mutation("strides of groups ignore their width", "core/spec.py", "at, prod(sizes[i + 1 :])", "at, 1", VIEW),
    Mutation("one Chan term skipped", "core/moments.py", "p.m2 + q.m2 + delta.square() * (p.count * q.count / count)", "p.m2 + q.m2", BLOCKS),
    Mutation("the merged mean unweighted", "core/moments.py", "delta * (q.count / count)", "delta * 0.5", BLOCKS),
    Mutation("E[x²] - E[x]²", "core/moments.py", "total((x if mean is None else x - spread(mean, x)).square(), dims))",
             "total(x.square(), dims) - (0 if mean is None else count * mean.square()))", "tests/functional/test_numerics.py -k shifted or far_from_zero"),
    Mutation("c1 dropped", "core/arithmetic.py", "wdy if c1 is None else wdy - c1, x_hat", "wdy, x_hat", CASES),
    Mutation("c2 of the wrong sign", "core/arithmetic.py", "x_hat, c2, value=-1", "x_hat, c2, value=1", CASES),
    Mutation("the last block dropped", "backends/torch_ops/blockwise.py", "for i in range(start, stop, step)]", "for i in range(start, stop - step, step)]", BLOCKS, True),
    Mutation("gradients of a block overwrite the last", "backends/torch_ops/blockwise.py", "_at(sums, part).add_(", "_at(sums, part).copy_(", BLOCKS),
    Mutation("statistics rounded to x's dtype", "backends/torch_ops/blockwise.py", "x, y, problem.acc", "x, y, problem.dtype",
             "tests/functional/test_numerics.py -k every_case and bfloat16"),
    Mutation("dy read as if laid out like y", "backends/torch_ops/blockwise.py", "self._split(laid_out(y, self.problem.y_stride), self.y_view)", "self._split(y, self.y_view)", CASES),
    Mutation("eps forgotten in the op", "dispatch/library.py", "NormSpec.unpack(words, sizes, eps, offset)", "NormSpec.unpack(words, sizes, 0.0, offset)",
             "tests/dispatch/test_routes.py -k dynamic_shapes"),
    Mutation("what a backward unpacks is not compared", "dispatch/autograd.py", "unpacked)\n        tensors = unpacked if signatures(unpacked) == launchers.saved else", "unpacked)\n        tensors = unpacked if True else",
             "tests/dispatch/test_memory_safety.py -k hooks_on_saved"),
    Mutation("what a packed backward unpacks is not compared", "dispatch/packed.py", "tensors = unpacked if signatures(unpacked) == launchers.packed else", "tensors = unpacked if True else",
             "tests/dispatch/test_memory_safety.py -k hooks_on_saved"),
    Mutation("a gradient is not compared", "dispatch/autograd.py", '        check_gradient("dy", dy, problem, launchers.device)\n        check_gradient("dsum"', '        check_gradient("dsum"',
             "tests/dispatch/test_memory_safety.py -k called_directly"),
    Mutation("a gradient of a packed backward is not compared", "dispatch/packed.py", '    check_gradient("dy", dy, problem, launchers.device)\n', "",
             "tests/dispatch/test_memory_safety.py -k called_directly"),
    Mutation("a recent call recognized under a dispatch mode", "dispatch/call.py", "functorch_active() or dispatch_modes() or jit_tracing()", "functorch_active() or jit_tracing()",
             "tests/dispatch/test_recent.py -k tracing"),
    Mutation("a backward recognized though it is differentiated", "dispatch/packed.py", "grad_enabled() or compiling()", "compiling()", "tests/dispatch/test_recent.py -k differentiated"),
    Mutation("freed memory not noticed by prepared functions", "backends/gpu/launch/prepared.py", "{name}_at < {LOWEST}", "{name}_at < 0", "tests/backends/gpu/test_prepared.py -k freed"),
    Mutation("all addresses taken for aligned", "backends/gpu/launch/prepared.py", "% {ALIGNMENT}: ", "% 1: ", "tests/backends/gpu/test_prepared.py -k unusual"),
    Mutation("the biased variance in a GPU's running_var", "backends/gpu/arguments.py", "unbiased=n / max(n - 1, 1)", "unbiased=1.0", "tests/backends/gpu/test_prepared.py -k running"),
    Mutation("raw ops check nothing", "dispatch/library.py", "check_forward(problem, x, weight, bias, mean, var, optional)", "pass", "tests/dispatch/test_memory_safety.py -k raw", True),
    Mutation("raw backward ops check nothing", "dispatch/library.py", "check_backward(problem, dy, dsum, saved)", "pass", "tests/dispatch/test_memory_safety.py -k raw"),
    Mutation("the negative bit ignored", "dispatch/route.py", "return True in [t.is_neg() for t in operands if t is not None]", "return False",
             "tests/dispatch/test_memory_safety.py -k negative_bit"),
    Mutation("freed memory not noticed", "core/memory.py", "if t is not None and t.data_ptr() < LOWEST:", "if False:", "tests/dispatch/test_memory_safety.py -k freed_storage"),
    Mutation("the biased variance in running_var", "functional/statistics.py", "var * (count / max(count - 1, 1))", "var * 1", "tests/nn/test_modules.py -k same_as_torch"),
    Mutation("launchers kept whatever the weight", "dispatch/launchers.py", "weight is None or weight.shape, weight is None or weight.dtype", "weight is None",
             "tests/check/test_errors.py -k good_call"),
    Mutation("a half-type row backward left to torch", "backends/torch_ops/aten_support.py", 'kernel == "rows" and half', 'kernel == "none" and half',
             "tests/functional/test_numerics.py -k every_case and bfloat16 and layer_norm"),
    Mutation("modulation the same for every sample", "core/spec.py", "_strides(named, self.modulated)", "_strides(named, self.modulated[1:])", MODULATED, True),
    Mutation("scale without the one", "backends/torch_ops/blockwise.py", "self.modulation.spread(scale, self.acc, 1.0)", "self.modulation.spread(scale, self.acc, 0.0)", MODULATED),
    Mutation("an activation's gradient at u, not z", "core/arithmetic.py", "(dy, affine(u, self.gain, self.shift)) if", "(dy, u) if", MODULATED),
    Mutation("the shift not taken off again", "core/arithmetic.py", "affine_inverse(y, self.gain, self.shift)", "affine_inverse(y, self.gain, None)", SAVED),
    Mutation("y read as if laid out like x", "core/problem.py", 'return replace(self, x=self.y, stride=self.y_stride, copied="")', "return self", "tests/functional/test_save.py -k direct_route"),
    Mutation("y divided by a zero weight", "core/arithmetic.py", "weight.masked_fill(weight == 0, torch.nan)", "weight", "tests/functional/test_save.py -k zero_weight"),
    Mutation("an offset forgotten", "backends/torch_ops/blockwise.py", "self.acc, self.problem.spec.weight_offset)", "self.acc)", "tests/functional/test_numerics.py -k every_case and offset"),
    Mutation("the gradient of the sum dropped", "backends/torch_ops/blockwise.py", "dx_ if dsum_all is None else dx_ + _at(dsum_all, part)", "dx_",
             "tests/functional/test_numerics.py -k every_case and add_"),
    Mutation("sets taken together without their distance", "core/moments.py", "torch.addcmul(p.m2, away, away, value=p.count)", "p.m2", MIXED),
    Mutation("a mixture's gradient without its means", "core/mixing.py", " + 2 * shared * (self.sets.mean - self.means[i])", "", MIXED),
    Mutation("last channels taken for the first", "backends/torch_ops/aten.py", "problem.shape[:2] == sizes[:2]", "problem.shape[1:2] == sizes[1:2]",
             "tests/functional/test_numerics.py -k every_case and last and evaluation"),
    Mutation("an activation written where torch does not write", "core/arithmetic.py", " and y.is_contiguous()", "", BLOCKS),
    Mutation("statistics in the graph of a compiled call", "dispatch/call.py", "var.detach() if track else None", "var if track else None",
             "tests/dispatch/test_routes.py -k compiled_training"),
    Mutation("out copied before it is checked", "functional/extras.py", "        check_out(out, input, weight, bias, *running, *optional)\n", "        pass\n",
             "tests/functional/test_extras.py -k out"),
    Mutation("a lane takes in what is not there", "backends/gpu/device/moments.py", "delta = tl.where(inside, x - mean, 0.0)", "delta = x - mean", KERNELS + "66001"),
    Mutation("lanes merged without their distance", "backends/gpu/device/moments.py", "mean, m2 = merged, m2 + delta * delta * n", "mean = merged", KERNELS + "12x5x7"),
    Mutation("a remainder without its variance", "backends/gpu/row/kernel.py", "        var += tl.sum(x_rest * x_rest, 1, keep_dims=True)\n", "        var += 0.0\n", KERNELS + "9001"),
    Mutation("elements before the first vector taken for those after the last", "backends/gpu/row/kernel.py", "tl.where(end < before, end, end + n_whole)", "end + n_whole",
             "tests/backends/gpu/test_interpreter.py -k peeled"),
    Mutation("ends of a row without their mean", "backends/gpu/row/kernel.py", "x_end = tl.where(is_end, x_end - mean, 0.0)", "x_end = tl.where(is_end, x_end, 0.0)",
             "tests/backends/gpu/test_interpreter.py -k rows_whose"),
    Mutation("channels cut at the wrong stride", "backends/gpu/walk.py", "(v.strides[0], channel_run, v.strides[2])", "(v.strides[0], 1, v.strides[2])", KERNELS + "12x5x7"),
    Mutation("the last part counted as a whole one", "backends/gpu/partials/combine_kernel.py", "tl.minimum(sizes.run - t * split.chunk_t, split.chunk_t)", "split.chunk_t", KERNELS + "66001"),
    Mutation("parameters of a row taken for a column's", "backends/gpu/device/affine.py", "at += place.r * index_map.r", "at += place.r", KERNELS + "batch_norm and modulated"),
    Mutation("a gradient without its mean", "backends/gpu/device/gradients.py", "dx = (wdy - c1 - x_hat * c2) * rstd", "dx = (wdy - x_hat * c2) * rstd", KERNELS + "5x33"),
    Mutation("the other block's sums left out", "backends/gpu/row/kernel_backward.py", "sum1 += tl.sum(wdy_other, 1, keep_dims=True)", "pass", KERNELS + "15001"),
    Mutation("gradients of parameters without the modulation", "backends/gpu/device/gradients.py", "tl.store(cells.dweight_ptr + at, a * gain, mask=mask)", "tl.store(cells.dweight_ptr + at, a, mask=mask)",
             KERNELS + "add_group_norm and modulated"),
    Mutation("cells of a period inside out", "backends/gpu/partials/sums.py", "return [(size * unit // (p.every * p.period), 0), (p.period, p.a), (p.every // unit, 0)]",
             "return [(p.every // unit, 0), (p.period, p.a), (size * unit // (p.every * p.period), 0)]", KERNELS + "12x5x7"),
    Mutation("a mix takes sets together without their distance", "backends/gpu/mix/kernel.py", " + delta * delta, 0.0)", ", 0.0)", KERNELS + "switchable"),
    Mutation("a mixture's gradient without its means", "backends/gpu/mix/kernel_backward.py", " + 2.0 * shared * (mean - mean_k)", "", KERNELS + "switchable"),
    Mutation("rows of another phase", "backends/gpu/row/kernel_backward.py", "q = q * mode.phases + share % mode.phases", "q = q * mode.phases", "tests/backends/gpu/test_interpreter.py -k peels_off"),
    Mutation("cells added up twice", "backends/gpu/partials/sums_kernel.py", "mask = (n < sizes.reduced) & here", "mask = here", KERNELS + "layer_norm2d"),
    Mutation("a dz that does not know z", "backends/gpu/device/gradients.py", "dz = activate_back(dy, x_hat * factor + term, ACTIVATION)", "dz = activate_back(dy, x_hat, ACTIVATION)", KERNELS + "silu"),
    Mutation("a set's columns without their distance", "backends/gpu/team/kernel.py", "mean, m2 = of_set, m2 + delta * delta * rows", "mean = of_set", KERNELS + "channels_last"),
    Mutation("a member takes rows of the next", "backends/gpu/team/kernel.py", "inside = r < end\n            if mode.even", "inside = r < view.reps + 1\n            if mode.even", KERNELS + "channels_last"),
    Mutation("vectors that are not there have a distance", "backends/gpu/whole_set/kernel.py", "away = tl.where(inside, away - own, 0.0)", "away = away - own", KERNELS + "channels_last"),
    Mutation("a row's vectors in the next row", "backends/gpu/whole_set/kernel.py", "r = start + vector // (mode.run // mode.vector)", "r = start + vector // mode.run", KERNELS + "channels_last"),
    Mutation("a stretch taken for a channel", "backends/gpu/whole_set/kernel_backward.py", "t=stretch // split.of_channel", "t=stretch", KERNELS + "48x96"),
    Mutation("members that take their own sums for those of all", "backends/gpu/whole_set/kernel_backward.py",
             "sum1, sum2 = _add_members(parts + s, view, split, norm, mode)", "pass",
             "tests/backends/gpu/test_interpreter.py -k several_members and 24x24"),
    Mutation("C: moments that meet without the distance of their means", "backends/c/src/moments.h", "p.m2 + q.m2 + delta * delta * p.count * share", "p.m2 + q.m2", C_KERNELS),
    Mutation("C: a known mean is not corrected", "backends/c/src/loops.h", "means[k] = mean + left, m2[k] = deviations.second - deviations.first * left;", "means[k] = mean, m2[k] = deviations.second;", C_KERNELS),
    Mutation("C: halves are cut, not rounded", "backends/c/src/numbers.h", "return (bits >> 16 & 1u) + 0x7fffu;", "return bits ^ bits;", C_KERNELS),
    Mutation("C: the partial sums of one part alone", "backends/c/src/parameter_gradients.h", "for (int64_t part = 0; part < reduction->parts; part++) {", "for (int64_t part = 0; part < 1; part++) {", C_KERNELS),
    Mutation("C: folded rows counted once", "backends/c/src/tiles.h", "columns = (double)(problem->fold * problem->run);", "columns = (double)problem->run;", C_KERNELS),
    Mutation("C: rows of another sample's parameters", "backends/c/src/problem.h", "slot->param == param && slot->modulation == modulation) return slot;", "slot->param == param) return slot;", C_KERNELS),
    Mutation("C: x_hat of later blocks cleared", "backends/c/src/packs_backward.h", "int64_t length = min(block, problem->run - i);",
             "int64_t length = min(block, problem->run - i); if (i && problem->given_statistics && problem->from_y) fill(buffers->other, 0.0f, n);", LIMITS + "from_y"),
    Mutation("C: sums that overflow are kept", "backends/c/src/loop_table.h", "return m2 < (double)INFINITY &&", "return 1 ||", LIMITS + "[c- and (large or infinity)"),
    Mutation("torch's row groups about zero", "backends/torch_ops/aten.py", "(x.view(len(mean), -1) - mean[:, None]).view(x.shape), torch.zeros_like(mean)", "x, mean",
             LIMITS + "mean_is_large"),
    Mutation("a sum of means that overflows", "backends/gpu/device/moments.py", "tl.sum(mean * (n * DOWN), axis, keep_dims=KEEP) / total * UP",
             "tl.sum(mean * n, axis, keep_dims=KEEP) / total", "tests/backends/gpu/test_interpreter.py -k large_numbers"),
    Mutation("few rows cut to fill the GPU where batches must not matter", "backends/gpu/row/schedule.py", "    if not invariant:  # few rows", "    if True:  # few rows",
             "tests/planning/test_choose.py -k do_not_know_the_batch"),
    Mutation("a member without elements divides by 0", "backends/gpu/ring/reduce.py", "gl.maximum(gl.sum(n, 0), 1.0)", "gl.sum(n, 0)", RING + "without_elements"),
    Mutation("a slot refilled before it is empty", "backends/gpu/ring/channel.py", "mbarrier.wait(channel.empty.index(slot), phase ^ 1)", "pass", RING + "few_slots"),
    Mutation("the counter of a unit not reset", "backends/gpu/ring/exchange.py", "gl.store(exchange.counters_ptr + unit, 0)", "pass", RING + "as_planned and 20x20"),
]  # fmt: skip


def survives(mutation: Mutation) -> str:
    """Plant the fault in a copy of the sources and run its tests. Returns "" if they fail, otherwise their output."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "onepass"
        shutil.copytree(SOURCE, source)
        path = source / mutation.file
        text = path.read_text()
        assert text.count(mutation.before) == 1, f"{mutation.name}: {mutation.before!r} occurs {text.count(mutation.before)} times"
        path.write_text(text.replace(mutation.before, mutation.after))
        file, _, words = mutation.tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file, *(["-k", words] if words else [])]
        interpreter = {"TRITON_INTERPRET": "1"} if mutation.tests.startswith(KERNELS.split(" -k ")[0]) else {}
        environment = {**os.environ, "PYTHONPATH": folder, **interpreter}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = result.returncode == 1 or result.returncode < 0  # a test failed, or the process crashed
    return "" if found else f"exit code {result.returncode}\n{result.stdout[-2000:]}"


if __name__ == "__main__":
    alive = 0
    for number, mutation in enumerate(MUTATIONS, 1):
        output = survives(mutation)
        alive += bool(output)
        print(f"{number}/{len(MUTATIONS)} {'SURVIVES' if output else 'killed  '} {mutation.name}", flush=True)
        if output:
            print(output)
    sys.exit(1 if alive else 0)
