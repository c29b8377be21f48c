"""The launchers of the C kernels: functions that run them on tensors.

The problem is packed into a C structure once. The addresses of the tensors are packed into another one in each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.backends.family import Backward, Forward
from onepass.core.allocate import on_cpu
from onepass.core.operands import Gradients, Needs, OptionalOperands, Result, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .problem import (
    NO_GRADIENTS,
    Call,
    addresses,
    check_status,
    dense,
    mixed_statistics,
    new_gradient,
    out_of_memory,
    pack_tensors,
    require_cpu,
)


def forward(problem: NormProblem) -> Forward:
    call, spec = Call(problem), problem.spec
    run, copies, track = call.library.forward, call.walk.copies, problem.track or bool(spec.mix)
    plain, adding = call.packed(problem.given, False), call.packed(problem.given, True)
    mixing = call.packed(True, False) if spec.mix else b""

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
    ) -> Result:
        packed, residual, total = plain, optional.residual, None
        if residual is not None:
            require_cpu(residual)
            total = on_cpu(problem.shape, problem.stride, problem.dtype)
            if x.stride() == residual.stride() == problem.stride:
                packed = adding
            else:
                x, residual = torch.add(x, residual, out=total), None
        elif copies:
            x = laid_out(x, problem.y_stride)
        y = on_cpu(problem.shape, problem.y_stride, problem.dtype)
        if problem.given:
            mean, var, rstd = call.stat(mean), call.stat(var), call.new_stat()
        else:
            mean, rstd = call.new_stat() if spec.centered else None, call.new_stat()
            var = call.new_stat() if track else None
        params = [t if t is None else dense(t) for t in (weight, bias, optional.scale, optional.shift)]
        operands, threads = addresses(x, residual, *params), call.threads()
        stats, outs = addresses(mean, rstd, var), (y.data_ptr(), 0 if residual is None or total is None else total.data_ptr())
        if not mixing:
            if run(packed, pack_tensors(*operands, *stats, *outs, *NO_GRADIENTS), threads):
                out_of_memory()
            return Result(y, mean, rstd, var, total)
        check_status(run(packed, pack_tensors(*operands, *stats, 0, outs[1], *NO_GRADIENTS), threads))
        mixed = mixed_statistics(call, mean, var, optional)
        stats = [laid_out(t, problem.stat_stride) for t in (mixed.mean, mixed.var)]
        operands[0] = (x if residual is None else total).data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        pointers = stats[0].data_ptr(), rstd.data_ptr(), stats[1].data_ptr(), y.data_ptr(), 0
        check_status(run(mixing, pack_tensors(operands[0], 0, *operands[2:], *pointers, *NO_GRADIENTS), threads))
        return Result(y, mean, rstd, var, total)

    return launch


def backward(problem: NormProblem) -> Backward:
    call, spec = Call(problem), problem.spec
    run, packed = call.library.backward, call.packed(problem.given, False)

    def launch(dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients:
        needs, mixed = Needs(*needs), None
        x, weight, bias, mean, rstd, var = saved[:6]
        x = laid_out(x, problem.y_stride) if call.walk.copies else x
        dy = laid_out(dy, problem.y_stride)
        dsum = None if dsum is None else laid_out(dsum.to(problem.dtype), problem.y_stride)
        mean, own_rstd = call.stat(mean), call.stat(rstd)
        if spec.mix:
            mixed = mixed_statistics(call, mean, call.stat(var), saved)
            mean = laid_out(mixed.mean, problem.stat_stride)
        params = [dense(t) for t in (weight, bias, saved.scale, saved.shift)]
        dx = on_cpu(problem.shape, problem.y_stride, problem.dtype) if needs.x else None
        grads = [new_gradient(t) if t is not None and n else None for t, n in zip(params, needs[1:5])]
        operands, threads = (*addresses(x, None, *params, mean, own_rstd), 0, 0, 0), call.threads()
        into = addresses(dy, dsum, dx, *grads)
        if mixed is None:
            check_status(run(packed, pack_tensors(*operands, *into, 0, 0), threads, 1))
            return Gradients(dx, *grads[:4])
        c1, c2 = call.new_stat(), call.new_stat()
        check_status(run(packed, pack_tensors(*operands, *into[:2], 0, *into[3:], c1.data_ptr(), c2.data_ptr()), threads, 1))
        c1, c2, *weights = mixed.gradient(c1, c2, rstd)
        if dx is not None:
            c1, c2 = laid_out(c1, problem.stat_stride), laid_out(c2, problem.stat_stride)
            check_status(run(packed, pack_tensors(*operands, *into[:3], 0, 0, 0, 0, c1.data_ptr(), c2.data_ptr()), threads, 0))
        dweight, dbias, dscale, dshift = grads
        return Gradients(dx, dweight, dbias, dscale, dshift, *weights)

    return launch
