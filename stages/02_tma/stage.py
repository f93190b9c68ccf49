"""Stage 02: tiles by the copy engine (TMA), multiplied with mma.sync. The host side of its two kernels."""

import functools
from pathlib import Path

import torch

from hopperlab import reference
from hopperlab.kernel import Kernel
from hopperlab.quantize import ScaledTensor
from hopperlab.stage import OUTPUT_TYPE, Step, check_operands, for_tma, load_module, scale_stride, shared_bytes
from hopperlab.tensormap import TensorMap

FOLDER = Path(__file__).parent
TITLE = "TMA: one thread asks for a tile"

RECIPES = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 128  # as in the kernels; BLOCK_K bytes are one span of the 128-byte swizzle
THREADS = 256
EXERCISE_CONSTANTS = {"OUTPUT": "bf16", "A_FORMAT": "e4m3", "B_FORMAT": "e4m3"}


@functools.cache
def kernel(source: Path, entry: str, format_a: str, format_b: str, out_dtype: torch.dtype) -> Kernel:
    """The kernel for a pair of formats and an output type. M, N and K are arguments: a new shape compiles nothing."""
    return Kernel(source, entry, {"A_FORMAT": format_a, "B_FORMAT": format_b, "OUTPUT": OUTPUT_TYPE[out_dtype]})


def one_buffer(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "one_buffer.cu") -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed; load a tile, wait, multiply."""
    _launch(source, "one_buffer", a, b, out, buffers=1)


def two_buffers(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "kernel.cu") -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed; the next tile arrives while one is multiplied."""
    _launch(source, "two_buffers", a, b, out, buffers=2)


def _launch(source, entry, a, b, out, buffers):
    m, n, k = check_operands(a, b, out, recipes=RECIPES)
    if out.numel() == 0 or k == 0:
        out.zero_()
        return
    # A box is one tile: 128 bytes along K, 128 rows. What reaches past the tensor arrives as zeros.
    map_a = TensorMap.tiled(for_tma("a", a.data), box=(BLOCK_K, BLOCK_M), swizzle=128)
    map_b = TensorMap.tiled(for_tma("b", b.data), box=(BLOCK_K, BLOCK_N), swizzle=128)
    tiles = -(-m // BLOCK_M) * -(-n // BLOCK_N)
    shared = shared_bytes(buffers * (BLOCK_M + BLOCK_N) * BLOCK_K, 8 * buffers)
    run = kernel(source, entry, a.format.name, b.format.name, out.dtype)[tiles, THREADS, 1, shared]
    run(map_a, map_b, a.scale, b.scale, out, m, n, k, scale_stride(a), scale_stride(b))


def _bound(a, b, out_dtype):
    return reference.error_bound(a, b, out_dtype)


triton_kernel = load_module(FOLDER / "triton_kernel.py", "stage_02_tma_triton_kernel")

STEPS = [
    Step("one buffer", "TMA, ldmatrix, mma.sync; load, wait, multiply", "one_buffer.cu", "cuda", one_buffer,
         expected=reference.matmul_mma_sync, tile=(BLOCK_M, BLOCK_N), recipes=RECIPES),
    Step("two buffers", "the next tile arrives while one is multiplied", "kernel.cu", "cuda", two_buffers,
         expected=reference.matmul_mma_sync, tile=(BLOCK_M, BLOCK_N), recipes=RECIPES),
    Step("TMA (Triton)", "tensor descriptors and tl.dot", "triton_kernel.py", "triton", triton_kernel.gemm,
         bound=_bound, tile=triton_kernel.TILE, recipes=RECIPES),
]  # fmt: skip
