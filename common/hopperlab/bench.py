"""How fast, against which peers, how close to the limits.

The method, for every kernel and peer alike: random normal data; rotating input sets that together exceed the L2 cache,
so weights come from HBM as they do in a model; one CUDA graph per candidate, so that host time stays out; warm-up;
candidates interleaved round by round, each round starting with another one, because the power drawn by the one before
moves the clock (in a fixed order the last of five peers ran 15 % slower than the first would have); short rounds with a
rest before each, since half a second of FP8 at full load lowers the clock of an H200 by 12 %; the median of the rounds;
the output checked after the last timed call. Only ratios within one run mean anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hopperlab import capability, quantize, reference
from hopperlab.quantize import ScaledTensor

# The H200 SXM. Peak: NVIDIA's datasheet, dense FP8. Reading ceiling: the sum of 1 GiB of float32, measured on the card.
PEAK_FP8_FLOPS = 1979e12
READ_BYTES_PER_S = 4.27e12
# FP32 on CUDA cores: 132 SMs x 128 lanes x 2 (a fused multiply-add) x 1.98 GHz.
PEAK_FP32_FLOPS = 132 * 128 * 2 * 1.98e9

ROTATION_BYTES = 260e6  # more than four times the 60 MB L2
MAX_SETS = 64
ROUNDS = 11
SECONDS_PER_ROUND = 0.01  # an event's resolution (about 1 µs) does not matter; short enough not to heat the next candidate's round
REST_SECONDS = 0.03  # before each round: a card at its power limit needs as long to raise its clock again
SLOW_GRAPH_SECONDS = 0.5  # a candidate slower than this per rotation runs fewer sets


@dataclass
class InputSet:
    """One set of operands: A (M, K) and B (N, K) in bf16, and every quantised form a candidate asks for, made once."""

    a: torch.Tensor
    b: torch.Tensor
    _quantised: dict = field(default_factory=dict)

    def quantised(self, recipe_a: str, recipe_b: str, format_a="e4m3", format_b="e4m3") -> tuple[ScaledTensor, ScaledTensor]:
        for side, x, recipe, fmt in (("a", self.a, recipe_a, format_a), ("b", self.b, recipe_b, format_b)):
            if (side, recipe, fmt) not in self._quantised:
                self._quantised[side, recipe, fmt] = quantize.quantize(x, recipe, fmt)
        return self._quantised["a", recipe_a, format_a], self._quantised["b", recipe_b, format_b]


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median round, and all rounds."""

    seconds: float
    rounds: list[float]
    calls_per_graph: int

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the rounds. A difference below it is noise."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds


def input_sets(m: int, n: int, k: int, seed: int = 0) -> list[InputSet]:
    """Enough random normal sets that their FP8 operands and outputs exceed ROTATION_BYTES; at least two. Needs a GPU."""
    _require_gpu()
    count = max(2, min(MAX_SETS, -(-int(ROTATION_BYTES) // ((m + n) * k + 2 * m * n))))
    generator = torch.Generator("cuda").manual_seed(seed)
    normal = lambda rows: torch.randn(rows, k, generator=generator, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    return [InputSet(normal(m), normal(n)) for _ in range(count)]


def measure(candidates: dict[str, list[Callable[[], object]]], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time candidates against one another. Each is a list of calls, one per input set, that launch work and return.

    Every call runs once before anything is timed. Needs a GPU. Returns a Timing per candidate, in the order given. Raises
    ValueError where there is nothing to time, RuntimeError without a GPU.
    """
    empty = [name for name, calls in candidates.items() if not calls]
    if not candidates or empty:
        what = f"has no call for {empty[0]!r}" if empty else "is empty"
        raise ValueError(f"candidates {what}; it must map at least one name to a list of at least one call")
    _require_gpu()
    graphs = {}
    for name, calls in candidates.items():
        for call in calls[:2]:  # compile, allocate, pick algorithms
            call()
        torch.cuda.synchronize()
        single = _elapsed(calls[0])
        used = calls[: max(1, min(len(calls), int(SLOW_GRAPH_SECONDS / max(single, 1e-7))))]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in used:
                call()
        graph.replay()
        torch.cuda.synchronize()
        replays = max(1, round(SECONDS_PER_ROUND / max(_elapsed(graph.replay), 1e-7)))
        graphs[name] = (graph, replays, len(used))

    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds):
        names = list(graphs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            graph, replays, calls = graphs[name]
            time.sleep(REST_SECONDS)
            graph.replay()  # fills the caches with this candidate's data
            seconds = _elapsed(lambda: [graph.replay() for _ in range(replays)])  # noqa: B023 - used before the next turn
            samples[name].append(seconds / replays / calls)
    return {name: Timing(statistics.median(s), s, graphs[name][2]) for name, s in samples.items()}


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"kernels are timed on a GPU. {capability.hopper().sentence()}")


def _elapsed(work: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def row(name: str, timing: Timing, m: int, n: int, k: int, *, error: float, launches: int, **more) -> dict:
    """One row of a record: the time, and what it means against the machine's limits."""
    flops, moved = 2 * m * n * k, (m + n) * k + 2 * m * n
    return {
        "name": name, "m": m, "n": n, "k": k,
        "microseconds": timing.seconds * 1e6, "milliseconds": timing.seconds * 1e3, "rounds_us": [s * 1e6 for s in timing.rounds], "spread": timing.spread,
        "tflops": flops / timing.seconds / 1e12, "percent_of_peak": 100 * flops / timing.seconds / PEAK_FP8_FLOPS,
        "gbytes_per_s": moved / timing.seconds / 1e9, "percent_of_bandwidth": 100 * moved / timing.seconds / READ_BYTES_PER_S,
        "max_rel_error": error, "kernel_launches": launches, **more,
    }  # fmt: skip


def count_launches(call: Callable) -> int:
    """Kernels one call puts on the GPU, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    names = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(1 for event in names if not event.name.startswith(("Memcpy", "Memset")))


# ---- peers ----------------------------------------------------------------------------------------------------------
# Each takes an input set and an output and returns a call. What a peer needs beside FP8 data and scales (a transposed
# scale, say) is made here, outside the timed call.


def _cublas_tensor(inputs: InputSet, out: torch.Tensor) -> Callable:
    a, b = inputs.quantised("tensor", "tensor")
    return lambda: torch._scaled_mm(a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=out.dtype,
                                    use_fast_accum=True, out=out)  # fmt: skip


def _cublas_row(inputs: InputSet, out: torch.Tensor) -> Callable:
    a, b = inputs.quantised("row", "row")
    return lambda: torch._scaled_mm(a.data, b.data.t(), scale_a=a.scale[:, None], scale_b=b.scale[None, :],
                                    out_dtype=out.dtype, use_fast_accum=True, out=out)  # fmt: skip


def _cublas_block(inputs: InputSet, out: torch.Tensor) -> Callable:
    """cuBLASLt wants A's scales M-major and each row of B's padded to a multiple of four."""
    a, b = inputs.quantised("1x128", "128x128")
    scale_a = a.scale.t().contiguous().t()
    blocks_n, blocks_k = b.scale.shape
    padded = b.scale.new_zeros(blocks_n, -(-blocks_k // 4) * 4)
    padded[:, :blocks_k] = b.scale
    scale_b = padded[:, :blocks_k].t()
    return lambda: torch._scaled_mm(a.data, b.data.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out.dtype, out=out)


def _bf16(inputs: InputSet, out: torch.Tensor) -> Callable:
    return lambda: torch.matmul(inputs.a, inputs.b.t(), out=out)


def _deep_gemm(inputs: InputSet, out: torch.Tensor) -> Callable:
    import deep_gemm

    a, b = inputs.quantised("1x128", "128x128")
    scale_a = deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)
    return lambda: deep_gemm.fp8_gemm_nt((a.data, scale_a), (b.data, b.scale), out)


PEERS = {
    "cublas tensor": (_cublas_tensor, ("tensor", "tensor")),
    "cublas row": (_cublas_row, ("row", "row")),
    "cublas block": (_cublas_block, ("1x128", "128x128")),
    "deep_gemm": (_deep_gemm, ("1x128", "128x128")),
    "bf16": (_bf16, None),
}


def peers(sets: list[InputSet]) -> tuple[dict[str, tuple[list[Callable], torch.Tensor]], dict[str, str]]:
    """Every peer that runs here: name -> (a call per set, the output of the first set); and name -> why not, for the rest."""
    m, n = len(sets[0].a), len(sets[0].b)
    running, missing = {}, {}
    for name, (make, _) in PEERS.items():
        try:
            outs = [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in sets]
            calls = [make(inputs, out) for inputs, out in zip(sets, outs)]
            calls[0]()
            torch.cuda.synchronize()
        except Exception as error:  # a peer may be missing, too old, or refuse the shape: said, not hidden
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        running[name] = (calls, outs[0])
    return running, missing


def peer_error(name: str, inputs: InputSet, out: torch.Tensor) -> float:
    """Largest |D - exact| / max |exact| of a peer, against what it was given: its quantised operands, or bf16."""
    recipes = PEERS[name][1]
    if recipes is None:
        exact = inputs.a.double() @ inputs.b.double().t()
    else:
        exact = reference.matmul_exact(*inputs.quantised(*recipes))
    return float((out.double() - exact).abs().max() / exact.abs().max())
