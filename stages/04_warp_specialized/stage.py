"""Stage 04: warp specialisation, a persistent grid, clusters. The host side: a plan for each problem, from a wave model."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from hopperlab import reference
from hopperlab.kernel import MAX_SHARED_BYTES, Kernel
from hopperlab.quantize import ScaledTensor
from hopperlab.stage import OUTPUT_TYPE, Step, check_operands, for_tma, load_module, scale_stride, shared_bytes
from hopperlab.tensormap import TensorMap

FOLDER = Path(__file__).parent
TITLE = "Warp specialisation, a persistent grid, clusters"

RECIPES = (("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"))
BLOCK_M, BLOCK_K, CONSUMERS = 128, 128, 2  # as in the kernels
THREADS = 128 * (1 + CONSUMERS)
PANEL_ROWS, PANEL_COLUMNS, PANELS_HELD = 64, 64, 2  # the epilogue's staging in kernel.cu
SMS_OF_AN_H200 = 132  # what the simulator plans for
HAND_OVER_CYCLES, FILL_CYCLES = 700, 1500  # see predict()
EXERCISE_CONSTANTS = {"BLOCK_N": 128, "NUM_STAGES": 4, "CLUSTER": 2, "GROUP_M": 8, "STORE_BY_TMA": 1, "OUTPUT": "bf16",
                      "STAGED": "bf16", "A_FORMAT": "e4m3", "B_FORMAT": "e4m3"}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How one problem is cut: tile width, CTAs per cluster, slots of the ring, rows of tiles per group, CTAs launched."""

    block_n: int
    cluster: int
    num_stages: int
    group_m: int
    ctas: int
    tiles: int
    waves: int
    cycles: float  # predicted, of one SM


def ring_slots(block_n: int, staging: bool) -> int:
    """Slots of the ring that fit into shared memory beside the epilogue's staging, at most 6: more hide nothing further."""
    fixed = CONSUMERS * PANELS_HELD * PANEL_ROWS * PANEL_COLUMNS * 2 + 4 * CONSUMERS * block_n if staging else 0
    slots = 6
    while shared_bytes(slots * ((BLOCK_M + block_n) * BLOCK_K + 16), fixed) > MAX_SHARED_BYTES:
        slots -= 1
    return slots


def predict(m: int, n: int, k: int, block_n: int, cluster: int, sms: int) -> tuple[int, int, float]:
    """(tiles, waves, cycles of one SM) for one way to cut a problem: the wave model.

    The tensor cores of an SM do 4096 multiply-adds a cycle, so a tile takes 128 · block_n · K / 4096. SMs work in waves:
    ceil(tiles / SMs) tiles one after another, and the last wave takes as long when it is nearly empty. HAND_OVER_CYCLES are
    lost between tiles, FILL_CYCLES once, before the first bytes arrive. Both are estimates; they decide between cuts whose
    tensor-core time is equal, in favour of fewer, wider tiles.
    """
    rows, columns = -(-m // (BLOCK_M * cluster)), -(-n // block_n)
    waves = -(-rows * columns // (sms // cluster))
    per_tile = BLOCK_M * block_n * -(-k // BLOCK_K) * BLOCK_K / 4096
    return rows * columns * cluster, waves, waves * (per_tile + HAND_OVER_CYCLES) + FILL_CYCLES


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, sms: int = SMS_OF_AN_H200, block_n: int | None = None, cluster: int | None = None,
         group_m: int = 8) -> Plan:  # fmt: skip
    """The cut with the fewest predicted cycles. ``block_n`` (128, 192 or 256) and ``cluster`` (1 or 2) can be forced.

    At equal cycles the wider tile wins: it reads fewer bytes from L2; and so does the single CTA over a cluster of two, which
    halves the traffic of B but was not faster on an H200 (docs/results/04_waves.json).
    """
    best = None
    for width in (256, 192, 128) if block_n is None else (block_n,):
        for size in (1, 2) if cluster is None else (cluster,):
            tiles, waves, cycles = predict(m, n, k, width, size, sms)
            if best is None or cycles < best.cycles:
                ctas = min(tiles // size, sms // size) * size
                best = Plan(width, size, ring_slots(width, staging=True), group_m, ctas, tiles, waves, cycles)
    return best


@functools.cache
def kernel(source: Path, entry: str, constants: tuple) -> Kernel:
    """The kernel for one plan's constants. M, N and K are arguments: a new shape with the same plan compiles nothing."""
    return Kernel(source, entry, dict(constants))


def specialized(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "specialized.cu", **simulator_options):
    """out (M, N) = A (M, K) times B (N, K) transposed; a producer and two consumer warpgroups, one tile per CTA."""
    return _launch(source, "specialized", a, b, out, persistent=False, cluster=1, **simulator_options)


def persistent(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "persistent.cu", **options):
    """out (M, N) = A (M, K) times B (N, K) transposed; one CTA per SM works through tiles."""
    return _launch(source, "persistent", a, b, out, cluster=1, **options)


def overlapped(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, source: Path = FOLDER / "kernel.cu", **options):
    """out (M, N) = A (M, K) times B (N, K) transposed; clusters with multicast, results stored by TMA beside the next tile.

    Options of plan() (block_n, cluster, group_m, sms) override the wave model; others go to the simulator.
    """
    return _launch(source, "overlapped", a, b, out, staging=True, **options)


def _launch(source, entry, a, b, out, persistent=True, staging=False, sms=None, block_n=None, cluster=None, group_m=8, **simulator_options):
    m, n, k = check_operands(a, b, out, recipes=RECIPES)
    if out.numel() == 0 or k == 0:
        out.zero_()
        return None
    if sms is None:
        sms = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else SMS_OF_AN_H200
    chosen = plan(m, n, k, sms, block_n, cluster, group_m)
    slots = ring_slots(chosen.block_n, staging)
    constants = {"BLOCK_N": chosen.block_n, "NUM_STAGES": slots, "OUTPUT": OUTPUT_TYPE[out.dtype],
                 "A_FORMAT": a.format.name, "B_FORMAT": b.format.name}  # fmt: skip
    if persistent:
        constants["GROUP_M"] = chosen.group_m
    arguments = [
        TensorMap.tiled(for_tma("a", a.data), box=(BLOCK_K, BLOCK_M), swizzle=128),
        # A CTA of a cluster loads its share of B's rows and sends it to all of them.
        TensorMap.tiled(for_tma("b", b.data), box=(BLOCK_K, chosen.block_n // chosen.cluster), swizzle=128),
    ]
    sizes = [slots * ((BLOCK_M + chosen.block_n) * BLOCK_K + 16)]
    if staging:
        # TMA stores 16-bit outputs whose rows are a multiple of 16 bytes. Others are stored by the threads.
        by_tma = out.element_size() == 2 and n % 8 == 0
        constants |= {"CLUSTER": chosen.cluster, "STORE_BY_TMA": int(by_tma), "STAGED": OUTPUT_TYPE[out.dtype] if by_tma else "bf16"}
        arguments.append(TensorMap.tiled(out, box=(PANEL_COLUMNS, PANEL_ROWS), swizzle=128) if by_tma else arguments[0])
        sizes += [CONSUMERS * PANELS_HELD * PANEL_ROWS * PANEL_COLUMNS * 2, 4 * CONSUMERS * chosen.block_n]
    grid = chosen.ctas if persistent else chosen.tiles
    run = kernel(source, entry, tuple(sorted(constants.items())))[grid, THREADS, chosen.cluster, shared_bytes(*sizes)]
    return run(*arguments, a.scale, b.scale, out, m, n, k, scale_stride(a), scale_stride(b), **simulator_options)


def _expected(a, b, out_dtype):
    return reference.matmul_hopper(a, b, interval=None, out_dtype=out_dtype)


def _bound(a, b, out_dtype):
    return reference.error_bound(a, b, out_dtype)


triton_kernel = load_module(FOLDER / "triton_kernel.py", "stage_04_warp_specialized_triton_kernel")

STEPS = [
    Step("specialized", "a producer warpgroup and two consumers", "specialized.cu", "cuda", specialized, expected=_expected, recipes=RECIPES),
    Step("persistent", "one CTA per SM works through tiles", "persistent.cu", "cuda", persistent, expected=_expected, recipes=RECIPES),
    Step("overlapped", "clusters with multicast, results stored by TMA beside the next tile", "kernel.cu", "cuda", overlapped,
         expected=_expected, recipes=RECIPES),
    Step("persistent (Triton)", "a persistent loop over tiles", "triton_kernel.py", "triton", triton_kernel.gemm,
         bound=_bound, tile=triton_kernel.TILE, recipes=RECIPES),
]  # fmt: skip
