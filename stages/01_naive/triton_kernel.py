"""Stage 01 in Triton: the two steps of this stage, with what Triton decides for us named in comments.

Triton has no threads. A program computes a tile of D; how its elements are spread over threads, what goes through
shared memory and when to synchronise is the compiler's business. FP8 needs no decoding by hand, a cast does it.
"""

import torch
import triton
import triton.language as tl

from hopperlab.quantize import ScaledTensor
from hopperlab.stage import check_operands
from hopperlab.triton_ops import round_to, to_float32

TILE = (64, 64)  # BLOCK_M, BLOCK_N of both kernels
RECIPES = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))


@triton.jit
def naive_kernel(A, B, scale_a, scale_b, D, M, N, K, scale_a_stride, scale_b_stride,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """One k at a time: a column of A times a row of B^T, added to the tile. The same additions in the same order as naive.cu."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(K):
        a = to_float32(tl.load(A + m * K + k, mask=m < M, other=0.0))
        b = to_float32(tl.load(B + n * K + k, mask=n < N, other=0.0))
        total += a[:, None] * b[None, :]  # the product of two FP8 values is exact: one rounding, as in fmaf
    store_scaled(total, m, n, scale_a, scale_b, D, M, N, scale_a_stride, scale_b_stride)


@triton.jit
def tiled_kernel(A, B, scale_a, scale_b, D, M, N, K, scale_a_stride, scale_b_stride,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Tiles of BLOCK_K, multiplied by tl.dot. "ieee" asks for FP32 products on CUDA cores, as in kernel.cu.

    Triton puts the tiles in shared memory and picks the order of additions, so bits are not promised, an error bound is.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(A + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(B + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(to_float32(a), tl.trans(to_float32(b)), total, input_precision="ieee")
    store_scaled(total, m, n, scale_a, scale_b, D, M, N, scale_a_stride, scale_b_stride)


@triton.jit
def store_scaled(total, m, n, scale_a, scale_b, D, M, N, scale_a_stride, scale_b_stride):
    """D[m][n] = (scale_a[m] * scale_b[n]) * total, rounded to nearest even into D's type."""
    row = tl.load(scale_a + m * scale_a_stride, mask=m < M, other=0.0)
    column = tl.load(scale_b + n * scale_b_stride, mask=n < N, other=0.0)
    value = (row[:, None] * column[None, :]) * total
    tl.store(D + m[:, None] * N + n[None, :], round_to(value, D.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def naive(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor) -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed."""
    _launch(naive_kernel, a, b, out)


def tiled(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor) -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed."""
    _launch(tiled_kernel, a, b, out, BLOCK_K=32)


def _launch(kernel, a, b, out, **constants):
    m, n, k = check_operands(a, b, out, recipes=RECIPES)
    if out.numel() == 0:
        return
    tiles = triton.cdiv(m, TILE[0]) * triton.cdiv(n, TILE[1])
    strides = [0 if x.recipe == "tensor" else 1 for x in (a, b)]
    with torch.cuda.device(out.device) if out.is_cuda else torch.no_grad():
        kernel[(tiles,)](a.data, b.data, a.scale, b.scale, out, m, n, k, *strides, BLOCK_M=TILE[0], BLOCK_N=TILE[1], **constants)
