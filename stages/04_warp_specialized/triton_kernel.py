"""Stage 04 in Triton: a persistent loop over tiles, with tensor descriptors for loads and, where D allows it, for the store.

``flatten=True`` fuses the loop over tiles with the loop over K, so that the pipeline runs on from one tile into the next.
Warp specialisation by annotation (``warp_specialize=True``) exists in Triton 3.6 for Blackwell only; clusters with multicast
cannot be asked for. Both are why the CUDA kernel is ahead.
"""

import torch
import triton
import triton.language as tl

from hopperlab.quantize import ScaledTensor
from hopperlab.stage import check_operands, for_tma, scale_stride
from hopperlab.triton_ops import dot_fp8, round_to

TILE = (128, 256)  # BLOCK_M, BLOCK_N
BLOCK_K = 128
SMS_OF_AN_H200 = 132
RECIPES = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))


@triton.jit
def gemm_kernel(A, B, scale_a, scale_b, D, M, N, K, scale_a_stride, scale_b_stride, STORE_BY_TMA: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    """D = A times B transposed; program p takes tiles p, p + programs, …"""
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
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            total = dot_fp8(a_map.load([m0, k]), b_map.load([n0, k]), total)
        m = m0.to(tl.int64) + tl.arange(0, BLOCK_M)
        n = n0.to(tl.int64) + tl.arange(0, BLOCK_N)
        row = tl.load(scale_a + m * scale_a_stride, mask=m < M, other=0.0)
        column = tl.load(scale_b + n * scale_b_stride, mask=n < N, other=0.0)
        value = round_to((row[:, None] * column[None, :]) * total, D.dtype.element_ty)
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
    # FP32 results pass through shared memory on their way out; beside three stages of 128 x 256 they would not fit.
    block_n = TILE[1] if out.element_size() == 2 else TILE[1] // 2
    tiles = triton.cdiv(m, TILE[0]) * triton.cdiv(n, block_n)
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else SMS_OF_AN_H200
    by_tma = out.element_size() == 2 and n % 8 == 0
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        # The descriptors are made on the GPU, in memory that Triton asks for.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=out.device))
        gemm_kernel[(min(tiles, sms),)](
            a_data, b_data, a.scale, b.scale, out, m, n, a_data.shape[1], scale_stride(a), scale_stride(b), STORE_BY_TMA=by_tma,
            BLOCK_M=TILE[0], BLOCK_N=block_n, BLOCK_K=BLOCK_K, GROUP_M=8, num_warps=8, num_stages=3)  # fmt: skip
