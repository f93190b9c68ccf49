"""Stage 05: scales per block and two-level accumulation. The host side of its four steps."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from hopperlab import reference
from hopperlab.kernel import MAX_SHARED_BYTES, Kernel
from hopperlab.quantize import ScaledTensor, scale_to_m_major
from hopperlab.stage import OUTPUT_TYPE, Step, check_operands, for_tma, load_module, scale_stride, shared_bytes
from hopperlab.tensormap import TensorMap

FOLDER = Path(__file__).parent
TITLE = "Scales per block and two-level accumulation"

PLAIN = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))
BLOCK_K, CONSUMERS = 128, 2  # as in the kernels
THREADS = 128 * (1 + CONSUMERS)
ROUND_ROWS = 128  # of wgrad's tiles: loaded one by one, because some tiles have one round only
SMS_OF_AN_H200 = 132  # what the simulator plans for
EXERCISE_CONSTANTS = {"BLOCK_N": 96, "NUM_STAGES": 4, "ROUNDS": 2, "GROUP_M": 4, "STORE_BY_TMA": 1, "OUTPUT": "bf16",
                      "A_FORMAT": "e4m3", "B_FORMAT": "e4m3"}  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """What one CTA works on: 128 · rounds rows by block_n columns; rows of tiles worked on together."""

    rounds: int = 1
    block_n: int = 128
    group_m: int = 8

    def __post_init__(self):
        if self.rounds not in (1, 2):
            raise ValueError(f"rounds: got {self.rounds}; allowed are 1 and 2, tiles of 128 or 256 rows")
        widest = 192 if self.rounds == 1 else 128  # registers: (rounds + 1) * block_n / 2 FP32 sums beside everything else
        if self.block_n % 16 or not 16 <= self.block_n <= widest:
            raise ValueError(f"block_n: got {self.block_n}; with rounds = {self.rounds} multiples of 16 from 16 to {widest} are allowed")

    @property
    def block_m(self) -> int:
        return 128 * self.rounds


@functools.cache
def kernel(source: Path, entry: str, constants: tuple, dense_ffma: bool = False) -> Kernel:
    """The kernel for one tile's constants. M, N and K are arguments: a new shape with the same tile compiles nothing."""
    return Kernel(source, entry, dict(constants), dense_ffma)


def promoted(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, interval: int | None = 128, threshold: float = 0.0,
             tile: Tile = Tile(), source: Path = FOLDER / "promoted.cu"):  # fmt: skip
    """out (M, N) = A (M, K) times B (N, K) transposed, unscaled sums promoted to FP32 and scaled at the end.

    interval   promote every so much of K, a multiple of 128; None: never
    threshold  promote 64 rows of a tile also as soon as one of their sums exceeds it in magnitude; 0: no such rule
    """
    if interval is not None and (interval <= 0 or interval % BLOCK_K):
        raise ValueError(f"interval: got {interval}; a positive multiple of {BLOCK_K}, or None for never, is allowed")
    if not 0 <= threshold < float("inf"):
        raise ValueError(f"threshold: got {threshold}; a finite number from 0, which means no threshold, is allowed")
    return _launch(source, "promoted", a, b, out, PLAIN, tile, {"INTERVAL": (interval or 0) // BLOCK_K, "THRESHOLD": f"{float(threshold)}f"})


def block_scaled(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, tile: Tile = Tile(), scale_a: torch.Tensor | None = None,
                 source: Path = FOLDER / "block_scaled.cu"):  # fmt: skip
    """out (M, N) = A (M, K) times B (N, K) transposed; scales per 1x128 of A and per 128x128 of B.

    scale_a   A's scales as scale_to_m_major gives them, if the caller has them; else they are made here, in every call
    """
    return _launch(source, "block_scaled", a, b, out, (("1x128", "128x128"),), tile, scales=(scale_a,))


def overlapped(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, tile: Tile = Tile(2, 128, 8), scale_a: torch.Tensor | None = None,
               dense_ffma: bool = True, source: Path = FOLDER / "kernel.cu"):  # fmt: skip
    """The same; 256 rows per tile, and everything but promotion is done while a wgmma runs.

    dense_ffma   promotion's FFMAs are issued more densely than the compiler would (hopperlab.sass)
    """
    more = {"ROUNDS": tile.rounds}
    return _launch(source, "overlapped", a, b, out, (("1x128", "128x128"),), tile, more, scales=(scale_a,), dense_ffma=dense_ffma)


def wgrad(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, accumulate: bool = False, tile: Tile = Tile(2, 128, 4),
          scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None, dense_ffma: bool = True,
          source: Path = FOLDER / "wgrad.cu"):  # fmt: skip
    """out (M, N), FP32, = or += A (M, K) times B (N, K) transposed; scales per 1x128 of both. dense_ffma: as for overlapped."""
    return _launch(source, "wgrad", a, b, out, (("1x128", "1x128"),), tile, {"ROUNDS": tile.rounds, "ACCUMULATE": int(accumulate)},
                   scales=(scale_a, scale_b), dense_ffma=dense_ffma)  # fmt: skip


def m_major(a: ScaledTensor, b: ScaledTensor) -> dict[str, torch.Tensor]:
    """The scales per 1x128 as TMA wants them, as arguments of the steps. The quantisation kernels write that layout directly."""
    return {f"scale_{name}": scale_to_m_major(x.scale) for name, x in (("a", a), ("b", b)) if x.recipe == "1x128"}


def _launch(source, entry, a, b, out, recipes, tile, more=(), scales=(), dense_ffma=False):
    """Check, choose constants, map the tensors, launch. The four steps differ in their scales and constants only."""
    m, n, k = check_operands(a, b, out, recipes=recipes)
    constants = dict(more)
    if entry == "wgrad" and out.dtype != torch.float32:
        raise TypeError(f"out: dtype {out.dtype}; a weight gradient is accumulated, so it is float32")
    if out.numel() == 0 or k == 0:
        if not constants.get("ACCUMULATE"):
            out.zero_()
        return None
    row_bytes = tile.block_n * out.element_size()
    panel = next(span for span in (128, 64, 32) if row_bytes % span == 0)  # of a row of D, stored together: one swizzle span
    by_tma = n * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
    chunk = min(tile.block_n & -tile.block_n, 128)  # columns that surely share a scale of B: Chunk in kernel.cu
    blocks = (128 - chunk + tile.block_n - 1) // 128 + 1  # of B's scales that a tile can touch: ScaleBlocks
    scale_bytes = {"promoted": 0, "wgrad": 4 * (tile.block_m + -(-tile.block_n // 32) * 32),
                   "overlapped": 4 * tile.block_m + -(-blocks // 4) * 16}.get(entry, 4 * tile.block_m)  # fmt: skip
    slot, staging = (tile.block_m + tile.block_n) * BLOCK_K + scale_bytes + 16, 4 * CONSUMERS * 16 * panel
    slots = min(6, (MAX_SHARED_BYTES - staging) // slot)
    constants |= {"BLOCK_N": tile.block_n, "NUM_STAGES": slots, "GROUP_M": tile.group_m, "STORE_BY_TMA": int(by_tma),
                  "A_FORMAT": a.format.name, "B_FORMAT": b.format.name}  # fmt: skip
    if entry != "wgrad":
        constants["OUTPUT"] = OUTPUT_TYPE[out.dtype]
    rows_of_a = ROUND_ROWS if entry == "wgrad" else tile.block_m  # of one copy
    maps = [
        TensorMap.tiled(for_tma("a", a.data), box=(BLOCK_K, rows_of_a), swizzle=128),
        TensorMap.tiled(for_tma("b", b.data), box=(BLOCK_K, tile.block_n), swizzle=128),
    ]
    for given, x, height in zip(scales, (a, b), (rows_of_a, tile.block_n)):
        scale = scale_to_m_major(x.scale) if given is None else given
        maps.append(TensorMap.tiled(scale, box=(height, 1)))
    maps.append(TensorMap.tiled(out, box=(panel // out.element_size(), 16), swizzle=panel) if by_tma else maps[0])
    arguments = {"promoted": (a.scale, b.scale, out, m, n, k, scale_stride(a), scale_stride(b)), "wgrad": (out, m, n, k)}
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else SMS_OF_AN_H200
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    grid = min(tiles * (tile.rounds if entry == "wgrad" else 1), sms)  # wgrad can cut tiles in two
    run = kernel(source, entry, tuple(sorted(constants.items())), dense_ffma)[grid, THREADS, 1, shared_bytes(slots * slot, staging)]
    return run(*maps, *arguments.get(entry, (b.scale, out, m, n, k)))


def unscaled_then_scaled(a: ScaledTensor, b: ScaledTensor, out_dtype: torch.dtype, interval: int | None = 128) -> torch.Tensor:
    """Every bit of ``promoted``: unscaled sums, promoted by an FP32 addition, scaled once at the end."""
    if interval is None:
        return reference.matmul_hopper(a, b, interval=None, out_dtype=out_dtype)
    one = torch.ones(1, device=a.device)
    plain = (ScaledTensor(x.data, one, "tensor") for x in (a, b))
    total = reference.matmul_hopper(*plain, interval=interval, out_dtype=torch.float32)
    scale = [x.scale.expand(x.rows) if x.recipe == "tensor" else x.scale for x in (a, b)]
    out = (total * (scale[0][:, None] * scale[1][None, :])).to(out_dtype)
    return torch.where(out.isnan(), torch.full_like(out, torch.nan), out)


def _blocks(a, b, out_dtype):
    return reference.matmul_hopper(a, b, interval=128, out_dtype=out_dtype)


def _bound(a, b, out_dtype):
    return reference.error_bound(a, b, out_dtype, interval=128)


triton_kernel = load_module(FOLDER / "triton_kernel.py", "stage_05_block_scaled_triton_kernel")
BLOCKS, GRADIENT = (("1x128", "128x128"),), (("1x128", "1x128"),)
STEPS = [
    Step("promoted", "sums leave the 14-bit accumulator every 128 of K", "promoted.cu", "cuda", promoted,
         expected=unscaled_then_scaled, recipes=PLAIN),
    Step("block scaled", "a scale per 1x128 of A and 128x128 of B", "block_scaled.cu", "cuda", block_scaled, expected=_blocks, recipes=BLOCKS,
         prepare=m_major),
    Step("overlapped", "256 rows per tile; scales, waits and stores under wgmma", "kernel.cu", "cuda", overlapped, expected=_blocks,
         tile=(256, 128), recipes=BLOCKS, prepare=m_major),
    Step("wgrad", "both operands with 1x128 scales, FP32 result, accumulated", "wgrad.cu", "cuda", wgrad, expected=_blocks,
         tile=(256, 128), recipes=GRADIENT, prepare=m_major, out_dtypes=(torch.float32,)),
    Step("block scaled (Triton)", "a dot per block of K, scaled and added in FP32", "triton_kernel.py", "triton", triton_kernel.gemm,
         bound=_bound, tile=triton_kernel.TILE, recipes=BLOCKS),
]  # fmt: skip
