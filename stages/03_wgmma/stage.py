"""Stage 03: wgmma, first with one buffer, then with a ring of them. The host side of its two kernels."""

import functools
from pathlib import Path

import torch

from hopperlab import reference
from hopperlab.kernel import Kernel
from hopperlab.quantize import ScaledTensor
from hopperlab.stage import OUTPUT_TYPE, Step, check_operands, for_tma, load_module, scale_stride, shared_bytes
from hopperlab.tensormap import TensorMap

FOLDER = Path(__file__).parent
TITLE = "wgmma, and a ring of tiles"

RECIPES = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))
BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 128  # BLOCK_M and BLOCK_K as in the kernels; BLOCK_N is wgmma's N
NUM_STAGES = 3  # 96 KB: two CTAs fit an SM, and one multiplies while the other writes its results (the lesson sweeps it)
THREADS = 256
EXERCISE_CONSTANTS = {"BLOCK_N": BLOCK_N, "NUM_STAGES": NUM_STAGES, "OUTPUT": "bf16", "A_FORMAT": "e4m3", "B_FORMAT": "e4m3"}


@functools.cache
def kernel(source: Path, entry: str, num_stages: int, format_a: str, format_b: str, out_dtype: torch.dtype) -> Kernel:
    """The kernel for a number of slots, a pair of formats and an output type. A new M, N or K compiles nothing."""
    return Kernel(source, entry, {"BLOCK_N": BLOCK_N, "NUM_STAGES": num_stages, "A_FORMAT": format_a, "B_FORMAT": format_b,
                                  "OUTPUT": OUTPUT_TYPE[out_dtype]})  # fmt: skip


def one_buffer(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "one_buffer.cu") -> None:
    """out (M, N) = A (M, K) times B (N, K) transposed; load a tile, wait, multiply, wait."""
    _launch(source, "one_buffer", a, b, out, num_stages=1)


def ring(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "kernel.cu", num_stages: int = NUM_STAGES,
         **simulator_options):  # fmt: skip
    """out (M, N) = A (M, K) times B (N, K) transposed; ``num_stages`` tiles on their way or in use at once.

    Returns the simulator's report on CPU tensors (``simulator_options`` go to it), None on a GPU.
    """
    return _launch(source, "ring", a, b, out, num_stages, **simulator_options)


def _launch(source, entry, a, b, out, num_stages, **simulator_options):
    m, n, k = check_operands(a, b, out, recipes=RECIPES)
    if out.numel() == 0 or k == 0:
        out.zero_()
        return None
    map_a = TensorMap.tiled(for_tma("a", a.data), box=(BLOCK_K, BLOCK_M), swizzle=128)
    map_b = TensorMap.tiled(for_tma("b", b.data), box=(BLOCK_K, BLOCK_N), swizzle=128)
    tiles = -(-m // BLOCK_M) * -(-n // BLOCK_N)
    shared = shared_bytes(num_stages * (BLOCK_M + BLOCK_N) * BLOCK_K, 16 * num_stages)
    run = kernel(source, entry, num_stages, a.format.name, b.format.name, out.dtype)[tiles, THREADS, 1, shared]
    return run(map_a, map_b, a.scale, b.scale, out, m, n, k, scale_stride(a), scale_stride(b), **simulator_options)


def _expected(a, b, out_dtype):
    return reference.matmul_hopper(a, b, interval=None, out_dtype=out_dtype)


def _bound(a, b, out_dtype):
    return reference.error_bound(a, b, out_dtype)


triton_kernel = load_module(FOLDER / "triton_kernel.py", "stage_03_wgmma_triton_kernel")

STEPS = [
    Step("one buffer", "wgmma straight from shared memory; load, wait, multiply, wait", "one_buffer.cu", "cuda", one_buffer,
         expected=_expected, tile=(BLOCK_M, BLOCK_N), recipes=RECIPES),
    Step("ring", "several tiles on their way while one is multiplied", "kernel.cu", "cuda", ring,
         expected=_expected, tile=(BLOCK_M, BLOCK_N), recipes=RECIPES),
    Step("ring (Triton)", "num_stages", "triton_kernel.py", "triton", triton_kernel.gemm,
         bound=_bound, tile=triton_kernel.TILE, recipes=RECIPES),
]  # fmt: skip
