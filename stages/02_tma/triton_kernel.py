"""Stage 02 in Triton: tiles through tensor descriptors, which become TMA copies on Hopper.

Triton chooses the swizzle, the barriers and the number of buffers (num_stages) itself. And tl.dot on FP8 becomes wgmma, not
mma.sync, so this kernel is already where stage 03 is. What it cannot say is which thread issues a copy and what waits where.
"""

import torch
import triton
import triton.language as tl

from hopperlab.quantize import ScaledTensor
from hopperlab.stage import check_operands, for_tma, scale_stride
from hopperlab.triton_ops import dot_fp8, round_to

TILE = (128, 128)  # BLOCK_M, BLOCK_N
BLOCK_K = 128
RECIPES = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))


@triton.jit
def gemm_kernel(A, B, scale_a, scale_b, D, M, N, K, scale_a_stride, scale_b_stride,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """D = A times B transposed. A descriptor holds what a tensor map holds: address, shape, strides, box."""
    a_map = tl.make_tensor_descriptor(A, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_map = tl.make_tensor_descriptor(B, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    tiles_n = tl.cdiv(N, BLOCK_N)
    m0 = tl.program_id(0) // tiles_n * BLOCK_M
    n0 = tl.program_id(0) % tiles_n * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        # Out of bounds reads are zero, as with TMA.
        total = dot_fp8(a_map.load([m0, k]), b_map.load([n0, k]), total)
    m = m0.to(tl.int64) + tl.arange(0, BLOCK_M)
    n = n0.to(tl.int64) + tl.arange(0, BLOCK_N)
    row = tl.load(scale_a + m * scale_a_stride, mask=m < M, other=0.0)
    column = tl.load(scale_b + n * scale_b_stride, mask=n < N, other=0.0)
    value = (row[:, None] * column[None, :]) * total
    tl.store(D + m[:, None] * N + n[None, :], round_to(value, D.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def gemm(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor) -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed."""
    m, n, k = check_operands(a, b, out, recipes=RECIPES)
    if out.numel() == 0 or k == 0:
        out.zero_()
        return
    a_data, b_data = for_tma("a", a.data), for_tma("b", b.data)
    tiles = triton.cdiv(m, TILE[0]) * triton.cdiv(n, TILE[1])
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        # The descriptors are made on the GPU, in memory that Triton asks for.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=out.device))
        gemm_kernel[(tiles,)](a_data, b_data, a.scale, b.scale, out, m, n, a_data.shape[1], scale_stride(a), scale_stride(b),
                              BLOCK_M=TILE[0], BLOCK_N=TILE[1], BLOCK_K=BLOCK_K, num_warps=8, num_stages=3)  # fmt: skip
