"""Launches kernels/gemm.cu: constants from the plan, tensor maps from the tensors. CUDA tensors run on the GPU, CPU tensors on the
simulator, bit for bit alike."""

import functools
from pathlib import Path

import torch

from fp8_gemm.plan import BLOCK_K, PANEL_ROWS, Plan, panel_bytes, plan, shared_bytes, stores_by_tma, vector_scales
from fp8_gemm.problem import Operands, Problem
from hopperlab.kernel import Kernel
from hopperlab.tensormap import TensorMap

SOURCE = Path(__file__).with_name("gemm.cu")
KINDS = {"dense": "Dense", "contiguous": "Contiguous", "masked": "Masked", "k_grouped": "KGrouped"}
OUTPUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}
SMS_OF_AN_H200 = 132  # what plans for the simulator are made for


@functools.cache
def kernel(constants: tuple) -> Kernel:
    """The kernel for one plan's constants. M, N and K are arguments: a new shape with the same plan compiles nothing."""
    return Kernel(SOURCE, "gemm", dict(constants))


def run(problem: Problem, operands: Operands, out: torch.Tensor, **overrides) -> None:
    """Compute the problem into out, shape problem.out_shape. overrides: options of plan()."""
    if out.numel() == 0:
        return
    if problem.k == 0:
        from fp8_gemm import reference_backend  # nothing to multiply: zeros, bias, what was there

        return reference_backend.run(problem, operands, out)
    sms = _sms(out.device.index) if out.is_cuda else SMS_OF_AN_H200
    launch(problem, plan(problem, sms, **overrides), operands, out)


@functools.cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def constants_of(problem: Problem, chosen: Plan) -> dict:
    """The macros of gemm.cu for one problem and plan."""
    x_format, y_format = (problem.format_b, problem.format_a) if chosen.swap_ab else (problem.format_a, problem.format_b)
    return {
        "KIND": KINDS[problem.kind], "SWAPPED": int(chosen.swap_ab), "CONSUMERS": chosen.consumers, "ROUNDS": chosen.rounds,
        "BLOCK_Y": chosen.block_y, "NUM_STAGES": chosen.num_stages, "GROUP_X": chosen.group, "SPLITS": chosen.splits,
        "INTERVAL": (problem.interval or 0) // BLOCK_K, "VECTOR_Y": int(vector_scales(problem, chosen.swap_ab)),
        "STORE_BY_TMA": int(stores_by_tma(chosen, problem)), "ACCUMULATE": int(problem.accumulate), "BIAS": int(problem.bias),
        "OUTPUT": OUTPUT[problem.out_dtype], "X_FORMAT": x_format, "Y_FORMAT": y_format,
    }  # fmt: skip


def launch(problem: Problem, chosen: Plan, operands: Operands, out: torch.Tensor) -> None:
    """Run one plan. Nothing here reads a tensor's values, so nothing waits for the GPU."""
    a = (problem.m, operands.a, operands.a_scale, problem.recipe_a)
    b = (problem.n, operands.b, operands.b_scale, problem.recipe_b)
    (x_rows, x, *x_scales), (y_rows, y, *y_scales) = (b, a) if chosen.swap_ab else (a, b)
    x_map = TensorMap.tiled(_for_tma(x), box=(BLOCK_K, chosen.block_x, 1), swizzle=128)
    panel = panel_bytes(chosen, problem)
    by_tma = stores_by_tma(chosen, problem)
    d_map = x_map
    if by_tma:
        d_map = TensorMap.tiled(_three_dimensions(out), box=(panel // out.element_size(), PANEL_ROWS, 1), swizzle=panel)
    begins, ends = _group_ends(problem, operands)
    nothing = operands.a_scale  # a pointer that the kernel does not follow
    partials = finished = nothing
    if chosen.splits > 1:
        # Made per call: calls on other streams, and graphs that replay this one, must not share them.
        tiles = chosen.tiles // chosen.splits * chosen.consumers
        partials = torch.empty(tiles * chosen.splits * 128 * chosen.rounds * chosen.block_y // 2, dtype=torch.float32, device=out.device)
        finished = torch.zeros(tiles, dtype=torch.int32, device=out.device)
    constants = constants_of(problem, chosen)
    run = kernel(tuple(constants.items()))[min(chosen.tiles_at_most(problem), chosen.num_sms), 128 * (1 + chosen.consumers), 1,
                                           shared_bytes(chosen, problem)]  # fmt: skip
    run(
        x_map, TensorMap.tiled(_for_tma(y), box=(BLOCK_K, chosen.block_y, 1), swizzle=128), d_map,
        x_scales[0], y_scales[0], nothing if operands.bias is None else operands.bias, begins, ends, out, partials, finished,
        x_rows, y_rows, problem.k, problem.groups, problem.m, problem.n, *_scale_strides(*x_scales), *_scale_strides(*y_scales),
    )  # fmt: skip


def _group_ends(problem: Problem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.kind == "masked":
        return operands.masked_m, operands.masked_m
    if operands.offsets is None:
        return operands.a_scale, operands.a_scale  # not followed
    return operands.offsets, operands.offsets[1:] if operands.ends is None else operands.ends


def _three_dimensions(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 3 else x[None]


def _for_tma(data: torch.Tensor) -> torch.Tensor:
    """FP8 data (rows, K) or (groups, rows, K) as TMA can read it: (groups, rows, K), every stride a multiple of 16 bytes.

    Where it is not (K or a pitch that is no multiple of 16), a copy is made, padded with zeros, which add nothing.
    """
    data = _three_dimensions(data)
    if data.stride(-1) == 1 and data.data_ptr() % 16 == 0 and not any(s % 16 for s, d in zip(data.stride()[:-1], data.shape) if d > 1):
        return data
    *leading, k = data.shape
    padded = torch.zeros(*leading, -(-k // 16) * 16, dtype=torch.uint8, device=data.device)
    padded[..., :k] = data.view(torch.uint8)
    return padded.view(data.dtype)


def _scale_strides(scale: torch.Tensor, recipe: str) -> tuple[int, int, int, int]:
    """(group stride, log2 of the rows that share a scale, row stride, K-block stride), as Scales in gemm.cu wants them."""
    dimensions = {"tensor": 1, "row": 1, "1x128": 2, "128x128": 2}[recipe]
    group = scale.stride(0) if scale.dim() > dimensions else 0
    strides = scale.stride()[scale.dim() - dimensions :]
    return {
        "tensor": (group, 0, 0, 0),
        "row": (group, 0, strides[0], 0),
        "1x128": (group, 0, *strides[-2:]),
        "128x128": (group, 7, *strides[-2:]),
    }[recipe]
