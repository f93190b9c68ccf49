"""Stage 05 in Triton: block scales. ``tl.dot`` of one K block starts from zero, and its result is multiplied and added in FP32.

Triton pipelines the loads by itself and gives the sum of a block to ordinary registers when it pleases: whether promotion
hides behind the next block's wgmma is the compiler's choice.
"""

import torch
import triton
import triton.language as tl

from hopperlab.quantize import ScaledTensor
from hopperlab.stage import check_operands, for_tma
from hopperlab.triton_ops import dot_fp8, round_to

TILE = (128, 128)  # BLOCK_M, BLOCK_N: one block of B's scales per tile
BLOCK_K = 128
SMS_OF_AN_H200 = 132
RECIPES = (("1x128", "128x128"),)


@triton.jit
def gemm_kernel(A, B, scale_a, scale_b, D, M, N, K, K_BLOCKS, STORE_BY_TMA: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    """D = A times B transposed; scale_a is (M, K_BLOCKS), scale_b is (N / 128, K_BLOCKS)."""
    a_map = tl.make_tensor_descriptor(A, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_map = tl.make_tensor_descriptor(B, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        group = tile // (GROUP_M * tiles_n)
        height = min(GROUP_M, tiles_m - group * GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        m0 = (group * GROUP_M + within % height) * BLOCK_M
        n0 = within // height * BLOCK_N
        m = m0.to(tl.int64) + tl.arange(0, BLOCK_M)
        n = n0.to(tl.int64) + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(0, K_BLOCKS):
            block = dot_fp8(a_map.load([m0, k_block * BLOCK_K]), b_map.load([n0, k_block * BLOCK_K]), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            row = tl.load(scale_a + m * K_BLOCKS + k_block, mask=m < M, other=0.0)
            column = tl.load(scale_b + (n0 // 128).to(tl.int64) * K_BLOCKS + k_block)
            total += block * (row * column)[:, None]
        value = round_to(total, D.dtype.element_ty)
        if STORE_BY_TMA:
            d_map = tl.make_tensor_descriptor(D, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
            d_map.store([m0, n0], value)
        else:
            tl.store(D + m[:, None] * N + n[None, :], value, mask=(m < M)[:, None] & (n < N)[None, :])


def gemm(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor) -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed."""
    m, n, k = check_operands(a, b, out, recipes=RECIPES)
    if out.numel() == 0 or k == 0:
        out.zero_()
        return
    a_data, b_data = for_tma("a", a.data), for_tma("b", b.data)
    tiles = triton.cdiv(m, TILE[0]) * triton.cdiv(n, TILE[1])
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else SMS_OF_AN_H200
    by_tma = out.element_size() == 2 and n % 8 == 0
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        # The descriptors are made on the GPU, in memory that Triton asks for.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=out.device))
        gemm_kernel[(min(tiles, sms),)](
            a_data, b_data, a.scale, b.scale, out, m, n, a_data.shape[1], a.scale.shape[1], STORE_BY_TMA=by_tma,
            BLOCK_M=TILE[0], BLOCK_N=TILE[1], BLOCK_K=BLOCK_K, GROUP_M=8, num_warps=8, num_stages=4)  # fmt: skip
