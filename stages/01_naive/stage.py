"""Stage 01: FP8 GEMM on CUDA cores. The host side of its two kernels, and of the same two in Triton."""

import functools
from pathlib import Path

import torch

from hopperlab import reference
from hopperlab.kernel import Kernel
from hopperlab.quantize import ScaledTensor
from hopperlab.stage import OUTPUT_TYPE, Step, check_operands, load_module, scale_stride

FOLDER = Path(__file__).parent
TITLE = "FP8, scales, and a GEMM on CUDA cores"

RECIPES = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))
# A warp of the naive kernel covers 2 rows x 16 columns of D.
NAIVE = {"BLOCK_M": 16, "BLOCK_N": 16}
# 256 threads with 4 x 4 outputs each; two 32 x (64 + 1) float tiles take 16.6 KB of shared memory.
TILED = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "THREAD_M": 4, "THREAD_N": 4}
# What the exercise's tests compile with: one format of each kind.
EXERCISE_CONSTANTS = TILED | {"A_MANTISSA_BITS": 3, "B_MANTISSA_BITS": 2, "OUTPUT": "float"}


@functools.cache
def kernel(source: Path, entry: str, mantissa_a: int, mantissa_b: int, out_dtype: torch.dtype) -> Kernel:
    """The kernel for a pair of formats and an output type. M, N and K are arguments: a new shape compiles nothing."""
    constants = TILED if entry == "tiled" else NAIVE
    formats = {"A_MANTISSA_BITS": mantissa_a, "B_MANTISSA_BITS": mantissa_b, "OUTPUT": OUTPUT_TYPE[out_dtype]}
    return Kernel(source, entry, constants | formats)


def naive(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "naive.cu") -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed; one thread per output, 16 x 16 outputs per block."""
    _launch(source, "naive", a, b, out, block=(NAIVE["BLOCK_N"], NAIVE["BLOCK_M"]), tile=(NAIVE["BLOCK_M"], NAIVE["BLOCK_N"]))


def tiled(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "kernel.cu") -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed; 64 x 64 outputs per block, through shared memory."""
    threads = TILED["BLOCK_M"] // TILED["THREAD_M"] * (TILED["BLOCK_N"] // TILED["THREAD_N"])
    _launch(source, "tiled", a, b, out, block=threads, tile=(TILED["BLOCK_M"], TILED["BLOCK_N"]))


def _launch(source, entry, a, b, out, block, tile):
    m, n, k = check_operands(a, b, out, recipes=RECIPES)
    if out.numel() == 0:
        return
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    run = kernel(source, entry, a.format.mantissa_bits, b.format.mantissa_bits, out.dtype)
    run[tiles, block](a.data, b.data, a.scale, b.scale, out, m, n, k, scale_stride(a), scale_stride(b))


def _fp32_bound(a, b, out_dtype):
    return reference.error_bound(a, b, out_dtype, arithmetic="fp32")


triton_kernel = load_module(FOLDER / "triton_kernel.py", "stage_01_naive_triton_kernel")

STEPS = [
    Step("naive", "one thread, one output", "naive.cu", "cuda", naive,
         expected=reference.matmul_fp32, tile=(NAIVE["BLOCK_M"], NAIVE["BLOCK_N"]), recipes=RECIPES),
    Step("naive (Triton)", "the same sum, a tile of outputs per program", "triton_kernel.py", "triton", triton_kernel.naive,
         expected=reference.matmul_fp32, tile=triton_kernel.TILE, recipes=RECIPES),
    Step("tiled", "tiles decoded once into shared memory, 4x4 outputs per thread", "kernel.cu", "cuda", tiled,
         expected=reference.matmul_fp32, tile=(TILED["BLOCK_M"], TILED["BLOCK_N"]), recipes=RECIPES),
    Step("tiled (Triton)", "tl.dot in FP32", "triton_kernel.py", "triton", triton_kernel.tiled,
         bound=_fp32_bound, tile=triton_kernel.TILE, recipes=RECIPES),
]  # fmt: skip
