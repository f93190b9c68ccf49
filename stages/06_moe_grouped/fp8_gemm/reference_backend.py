"""The fallback that runs everywhere: dequantise, multiply in FP32 with torch, group by group.

It reads group sizes on the host, so on a GPU it waits for the device. With exact=True it gives the bits of the Hopper kernels
instead (hopperlab.reference.matmul_hopper), slowly.
"""

from collections.abc import Iterator

import torch

from fp8_gemm.problem import Operands, Problem
from hopperlab.quantize import BLOCK, ScaledTensor, dequantize
from hopperlab.reference import matmul_hopper


def run(problem: Problem, operands: Operands, out: torch.Tensor, *, exact: bool = False, batch_invariant: bool = False) -> None:
    """Write the product into out. batch_invariant asks for exact: torch promises no order of summation that M leaves alone."""
    with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
        for a, b, part in _products(problem, operands, out):
            if exact or batch_invariant:
                c = part if problem.accumulate else None
                part.copy_(matmul_hopper(a, b, interval=problem.interval, out_dtype=problem.out_dtype, bias=operands.bias, c=c))
                continue
            product = dequantize(a) @ dequantize(b).t()
            if operands.bias is not None:
                product += operands.bias
            if problem.accumulate:
                product += part
            part.copy_(product)


def _products(
    problem: Problem, operands: Operands, out: torch.Tensor
) -> Iterator[tuple[ScaledTensor, ScaledTensor, torch.Tensor]]:
    """(a, b, the part of out that is their product), for every group that has an output."""
    a, b = operands.a, operands.b
    if problem.kind == "dense":
        yield _scaled(a, operands.a_scale, problem.recipe_a), _scaled(b, operands.b_scale, problem.recipe_b), out
        return
    if problem.kind == "masked":
        for group, rows in enumerate(operands.masked_m.tolist()):
            weight = _scaled(b[group], operands.b_scale[group], problem.recipe_b)
            yield _rows(a[group], operands.a_scale[group], problem.recipe_a, 0, rows), weight, out[group, :rows]
        return
    offsets = operands.offsets.tolist()
    ends = offsets[1:] if operands.ends is None else operands.ends.tolist()
    for group, (start, end) in enumerate(zip(offsets, ends)):
        if problem.kind == "contiguous":
            weight = _scaled(b[group], operands.b_scale[group], problem.recipe_b)
            yield _rows(a, operands.a_scale, problem.recipe_a, start, end), weight, out[start:end]
        else:
            yield _columns(a, operands.a_scale, start, end), _columns(b, operands.b_scale, start, end), out[group]


def _scaled(data, scale, recipe) -> ScaledTensor:
    """Operands may have scales in any strides, a ScaledTensor has them row-major."""
    return ScaledTensor(data, scale.contiguous(), recipe)


def _rows(data, scale, recipe, start, end) -> ScaledTensor:
    return _scaled(data[start:end], scale if recipe == "tensor" else scale[start:end], recipe)


def _columns(data, scale, start, end) -> ScaledTensor:
    return _scaled(data[:, start:end], scale[:, start // BLOCK : -(-end // BLOCK)], "1x128")
