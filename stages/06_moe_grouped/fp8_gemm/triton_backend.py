"""All kinds of GEMM in one Triton kernel, for GPUs with FP8 tensor cores that are not Hopper (compute capability 8.9 and later).

One program computes one tile. Loads go through tensor descriptors that the host makes: TMA where the GPU has it, masked loads
elsewhere; rows of a tile that belong to another group are computed and not stored. Promotion is every 128 of K, or never: an interval of 256 is
promoted every 128 as well, which is more exact.
"""

import contextlib

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8_gemm.problem import Operands, Problem
from hopperlab.triton_ops import dot_fp8, round_to

# Tiles of 64 rows leave room for three programs on an SM: while one promotes, another multiplies. 128 rows were 3 to 15 % slower, 8 rows
# of tiles together instead of 32 up to 8 %.
BLOCK_N, BLOCK_K, GROUP_M = 128, 128, 32
BLOCK_M, FEWER_ROWS = 64, (16, 32)
KINDS = {"dense": tl.constexpr(0), "contiguous": tl.constexpr(1), "masked": tl.constexpr(2), "k_grouped": tl.constexpr(3)}
CONTIGUOUS, MASKED, K_GROUPED = KINDS["contiguous"], KINDS["masked"], KINDS["k_grouped"]


@triton.jit
def gemm_kernel(a_map, b_map, scale_a, scale_b, bias, D, begins, ends, M, N, K, groups, pitch_d, group_of_d, row_of_scale_a, k_of_scale_a, group_of_scale_a, row_of_scale_b, k_of_scale_b, group_of_scale_b,
                KIND: tl.constexpr, PROMOTE: tl.constexpr, B_SHARED: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
                GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                GROUP_M: tl.constexpr):  # fmt: skip
    """D = A times B transposed, for tile program_id(0) of group program_id(1).

    a_map and b_map describe A (rows, K) and B (rows, K): the groups of masked and weight tensors one under another. B_SHARED: 128
    rows of B share a scale. begins, ends: of the rows (contiguous) or the K (k_grouped) of each group; masked: ends counts its rows.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    if KIND == CONTIGUOUS:
        tiles_m += groups  # each group may begin a tile of its own
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile, group = tl.program_id(0), tl.program_id(1)
    band = tile // (GROUP_M * tiles_n)  # of GROUP_M rows of tiles, so that neighbours share A and B in L2
    height = min(GROUP_M, tiles_m - band * GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    m_tile = band * GROUP_M + within % height
    n0 = within // height * BLOCK_N

    m0, m_end = m_tile * BLOCK_M, M
    k_begin, k_end = 0, tl.cdiv(K, BLOCK_K)
    if KIND == CONTIGUOUS:
        index = tl.arange(0, GROUPS)
        begin = tl.load(begins + index, mask=index < groups, other=0)
        end = tl.load(ends + index, mask=index < groups, other=0)
        tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M)
        tiles_so_far = tl.cumsum(tiles, 0)
        group = tl.sum((tiles_so_far <= m_tile).to(tl.int32), 0)
        mine = index == group  # none of them: a tile that no group needs
        m0 = tl.sum(tl.where(mine, begin + (m_tile - tiles_so_far + tiles) * BLOCK_M, 0), 0)
        m_end = tl.sum(tl.where(mine, end, 0), 0)
    if KIND == MASKED:
        m_end = min(tl.load(ends + group), M)
    if KIND == K_GROUPED:
        k_begin = tl.load(begins + group) // BLOCK_K
        k_end = tl.cdiv(tl.load(ends + group), BLOCK_K)

    if m0 < m_end:
        a_row, b_row = m0, n0
        if KIND == MASKED:
            a_row += group * M
        if KIND == CONTIGUOUS or KIND == MASKED:
            b_row += group * N
        m = m0.to(tl.int64) + tl.arange(0, BLOCK_M)
        n = n0.to(tl.int64) + tl.arange(0, BLOCK_N)
        row_scales = scale_a + group.to(tl.int64) * group_of_scale_a + m * row_of_scale_a
        if B_SHARED:
            column_scales = scale_b + group.to(tl.int64) * group_of_scale_b + (n0 // BLOCK_N).to(tl.int64) * row_of_scale_b
        else:
            column_scales = scale_b + group.to(tl.int64) * group_of_scale_b + n * row_of_scale_b
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(k_begin, k_end):
            a, b = a_map.load([a_row, k_block * BLOCK_K]), b_map.load([b_row, k_block * BLOCK_K])
            if PROMOTE:
                block = dot_fp8(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
                row = tl.load(row_scales + k_block * k_of_scale_a, mask=m < m_end, other=0.0)
                if B_SHARED:
                    total += block * (row * tl.load(column_scales + k_block * k_of_scale_b))[:, None]
                else:
                    column = tl.load(column_scales + k_block * k_of_scale_b, mask=n < N, other=0.0)
                    total += block * (row[:, None] * column[None, :])
            else:
                total = dot_fp8(a, b, total)
        if not PROMOTE:
            row = tl.load(row_scales, mask=m < m_end, other=0.0)
            column = tl.load(column_scales, mask=n < N, other=0.0)
            total = total * (row[:, None] * column[None, :])
        inside = (m < m_end)[:, None] & (n < N)[None, :]
        out = D + group.to(tl.int64) * group_of_d + m[:, None] * pitch_d + n[None, :]
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
        if ACCUMULATE:
            total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, round_to(total, D.dtype.element_ty), mask=inside)


def run(problem: Problem, operands: Operands, out: torch.Tensor, *, batch_invariant: bool = False) -> None:
    """Compute the problem into out. batch_invariant: one tile height for every M, so that a row's bits do not depend on M."""
    if out.numel() == 0:
        return
    if problem.k == 0:
        from fp8_gemm import reference_backend  # nothing to multiply: zeros, bias, what was there

        return reference_backend.run(problem, operands, out)
    rows = triton.cdiv(problem.m, problem.groups) if problem.kind == "contiguous" else problem.m  # that a group has, about
    block_m = next((size for size in FEWER_ROWS if rows <= size and not batch_invariant), BLOCK_M)
    a, b = _for_descriptor(operands.a), _for_descriptor(operands.b)
    begins, ends = _group_bounds(problem, operands)
    tiles_m = triton.cdiv(problem.m, block_m) + (problem.groups if problem.kind == "contiguous" else 0)
    grid = (tiles_m * triton.cdiv(problem.n, BLOCK_N), problem.groups if problem.kind in ("masked", "k_grouped") else 1)
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        gemm_kernel[grid](
            TensorDescriptor.from_tensor(a, [block_m, BLOCK_K]), TensorDescriptor.from_tensor(b, [BLOCK_N, BLOCK_K]), operands.a_scale,
            operands.b_scale, operands.a_scale if operands.bias is None else operands.bias, out, begins, ends, problem.m, problem.n,
            a.shape[1], problem.groups, out.stride(-2), out.stride(0) if out.dim() == 3 else 0,
            *_scale_strides(operands.a_scale, problem.recipe_a), *_scale_strides(operands.b_scale, problem.recipe_b),
            KIND=KINDS[problem.kind], PROMOTE=problem.interval is not None, B_SHARED=problem.recipe_b == "128x128",
            BIAS=problem.bias, ACCUMULATE=problem.accumulate, GROUPS=triton.next_power_of_2(problem.groups),
            BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M,
            num_warps=4, num_stages=_stages(block_m),
        )  # fmt: skip


def _stages(block_m: int) -> int:
    """Pipeline stages: 72 or 80 KB of the 99 KB that a CTA has on the smallest of these GPUs, and a third of a Hopper SM's."""
    return 3 if block_m == BLOCK_M else 4


def _for_descriptor(data: torch.Tensor) -> torch.Tensor:
    """FP8 data as (rows of all groups, K), address and pitch multiples of 16 bytes; a padded copy where they are not."""
    *leading, k = data.shape
    rows = data.numel() // k
    one_pitch = data.dim() == 2 or data.shape[0] == 1 or data.stride(0) == data.shape[1] * data.stride(1)
    # A single row's stride is arbitrary, so it says nothing about alignment.
    if one_pitch and data.stride(-1) == 1 and data.stride(-2) % 16 == 0 and data.stride(-2) >= k and data.data_ptr() % 16 == 0:
        return data.as_strided((rows, k), (data.stride(-2), 1))
    padded = torch.zeros(*leading, -(-k // 16) * 16, dtype=torch.uint8, device=data.device)
    padded[..., :k] = data.view(torch.uint8)
    return padded.view(data.dtype).view(rows, -1)


def _group_bounds(problem: Problem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.kind == "dense":
        return operands.a_scale, operands.a_scale  # not followed
    if problem.kind == "masked":
        return operands.masked_m, operands.masked_m
    return operands.offsets, operands.offsets[1:] if operands.ends is None else operands.ends


def _scale_strides(scale: torch.Tensor, recipe: str) -> tuple[int, int, int]:
    """Steps to the next row (or block of rows), K block and group."""
    dimensions = 2 if recipe in ("1x128", "128x128") else 1
    group = scale.stride(0) if scale.dim() > dimensions else 0
    return {"tensor": (0, 0), "row": (1, 0)}.get(recipe, scale.stride()[-2:]) + (group,)
