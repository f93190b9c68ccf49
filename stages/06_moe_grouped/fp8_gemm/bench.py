"""How fast the library is beside its peers, shape by shape; and how good its plans are.

    python -m fp8_gemm.bench RECORD.json                    all shapes, peers in the same run
    python -m fp8_gemm.bench RECORD.json --search           every shape, and random ones, with the most promising plans instead of the peers
    python -m fp8_gemm.bench RECORD.json --only 4096x       shapes whose name begins so
    python -m fp8_gemm.bench RECORD.json --host             what a call costs on the CPU, part by part, beside torch's calls; first calls
    python -m fp8_gemm.bench RECORD.json --layer            a decoder layer end to end, beside BF16 and DeepGEMM

Needs a Hopper GPU. The method is hopperlab.bench's: rotating inputs larger than L2, CUDA graphs, interleaved short rounds.
"""

import argparse
import gc
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from fp8_gemm import gemm, grouped_gemm, kernels, masked_gemm, quantize, quantize_grouped
from fp8_gemm.dispatch import compile_all
from fp8_gemm.kernels import ahead
from fp8_gemm.plan import Plan, plan, promising
from fp8_gemm.problem import Operands, Problem
from hopperlab import bench, capability, reference, report, telemetry
from hopperlab.quantize import scale_to_m_major

# (N, K) of DeepSeek-V3's linears, which DeepGEMM's own tables use, and two odd ones.
WEIGHTS = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (576, 7168), (3072, 1024))
ROWS = (4096, 1, 16, 64, 128, 2, 4, 8, 32)
CUBES = (4096, 8192)  # and every M for which the Triton path is timed, too
PEERS = ("deep_gemm", "cublas block", "cublas tensor")
ROUNDS = 5
MOST_SETS = 16  # input sets: more than L2 holds for all but the smallest shapes
# A search times so many plans of a shape a few times; then the planner's and the fastest again, without the luck of the first time.
SEARCHED, SEARCH_ROUNDS, FINALISTS = 24, 2, 4
UNSEEN = 50  # shapes drawn at random for a search, which nobody tuned a plan for


def shapes() -> list[tuple[int, int, int]]:
    """Every (M, N, K) that is timed."""
    return [(size,) * 3 for size in CUBES] + [(m, n, k) for m in ROWS for n, k in WEIGHTS]


def unseen() -> list[tuple[int, int, int]]:
    """Random (M, N, K), always the same, M and N of any magnitude alike."""
    draw = random.Random(2030)  # another number whenever the planner was fitted to a search: shapes that it was fitted to are seen
    between = lambda low, high, step: round(low * (high / low) ** draw.random() / step) * step  # noqa: E731
    return [(between(1, 8192, 1), between(256, 32768, 64), between(512, 16384, 128)) for _ in range(UNSEEN)]


def candidates(problem: Problem, sms: int, search: bool) -> dict[str, Plan]:
    """The plan, and in a search the most promising others: name -> plan."""
    chosen = plan(problem, sms)
    if not search:
        return {"library": chosen}
    return {"plan": chosen} | {str(other): other for other in promising(problem, sms, SEARCHED) if other != chosen}


def calls_of(problem: Problem, chosen: Plan, sets, outs) -> list:
    """One call per input set, operands quantised beforehand, A's scales laid out as quantize does."""
    operands = []
    for a, b in (inputs.quantised(problem.recipe_a, problem.recipe_b) for inputs in sets):
        operands.append(Operands(a.data, b.data, scale_to_m_major(a.scale)[:, : a.rows].t(), b.scale))
    return [lambda o=o, out=out: kernels.launch(problem, chosen, o, out) for o, out in zip(operands, outs)]


def quantised_calls(problem: Problem, chosen: Plan, sets, outs) -> list:
    """The same from bf16 activations: quantised in the timed call. Weights are quantised once, as in a model."""
    weights = [inputs.quantised(problem.recipe_a, problem.recipe_b)[1] for inputs in sets]

    def call(inputs, b, out):
        a = quantize(inputs.a, problem.recipe_a)
        kernels.launch(problem, chosen, Operands(a.data, b.data, a.scale, b.scale), out)

    return [lambda inputs=inputs, b=b, out=out: call(inputs, b, out) for inputs, b, out in zip(sets, weights, outs)]


def triton_calls(problem: Problem, sets, outs) -> list:
    """The same operands through the Triton path."""
    from fp8_gemm import triton_backend

    operands = [Operands(a.data, b.data, a.scale, b.scale) for a, b in (inputs.quantised(problem.recipe_a, problem.recipe_b) for inputs in sets)]
    return [lambda o=o, out=out: triton_backend.run(problem, o, out) for o, out in zip(operands, outs)]


def measure_shape(shape: tuple[int, int, int], plans: dict[str, Plan], sms: int, search: bool, rounds: int) -> dict:
    """One entry of the record: the shape, its plan, and one row for each of its :func:`candidates` and, unless in a search, its peers."""
    m, n, k = shape
    problem = Problem("dense", m, n, k)
    sets = bench.input_sets(m, n, k)[:MOST_SETS]
    outs = [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in sets]
    calls, missing = {name: calls_of(problem, chosen, sets, outs) for name, chosen in plans.items()}, {}
    if not search:
        calls["library, quantising A"] = quantised_calls(problem, plans["library"], sets, outs)
        calls["library, batch invariant"] = calls_of(problem, plan(problem, sms, batch_invariant=True), sets, outs)
        if m in CUBES:
            calls["library, Triton"] = triton_calls(problem, sets, outs)
        running, absent = bench.peers(sets)
        calls |= {name: running[name][0] for name in PEERS if name in running}
        missing = {name: absent[name] for name in PEERS if name in absent}
    first, losers = next(iter(plans)), []
    outs[0].fill_(float("nan"))
    calls[first][0]()
    a, b = sets[0].quantised(problem.recipe_a, problem.recipe_b)
    exact = reference.matmul_exact(a, b)
    error = float((outs[0].double() - exact).abs().max() / exact.abs().max())
    if search:
        timings = bench.measure(calls, rounds=SEARCH_ROUNDS)
        fastest = sorted(timings, key=lambda name: timings[name].seconds)[:FINALISTS]
        losers = [{"name": name, "microseconds": timings[name].seconds * 1e6} for name in timings if name not in (first, *fastest)]
        calls = {name: calls[name] for name in dict.fromkeys((first, *fastest))}
    timings = bench.measure(calls, rounds=rounds)
    rows = [bench.row(name, timing, m, n, k, error=error if name == first else float("nan"), launches=0) for name, timing in timings.items()]
    for row in rows:
        del row["kernel_launches"]  # counted on the ladder
        if row["name"] != first:
            del row["max_rel_error"]
    return {"shape": dict(zip("mnk", shape)), "plan": str(plans[first]), "predicted_us": plans[first].seconds * 1e6, "rows": rows,
            "missing": missing, **({"losers": losers} if search else {})}  # fmt: skip


def line(entry: dict) -> str:
    """One shape in one line: our time, and each other's time over ours."""
    ours, *others = entry["rows"]
    ratios = "  ".join(f"{row['name'][:60]} {row['microseconds'] / ours['microseconds']:.3f}" for row in others)
    return f"{'x'.join(map(str, entry['shape'].values())):18} {ours['microseconds']:8.1f} µs  {ratios}"


# ---- host time ------------------------------------------------------------------------------------------------------

HOST_CALLS = 200  # launches that fit into the stream's queue: the host never waits for the GPU
HOST_ROUNDS = 31
HOST_SHAPE = (16, 512, 512)  # kernels of a few microseconds


def host_calls(m: int, n: int, k: int, device: torch.device | str = "cuda") -> dict[str, Callable]:
    """The library's call, what it is made of from the outside to the inside, and torch's: name -> call."""
    normal = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)
    x, weight = normal(m, k), normal(n, k)
    a, b, out = quantize(x), quantize(weight, "128x128"), normal(m, n)
    problem, operands = Problem("dense", m, n, k), Operands(a.data, b.data, a.scale, b.scale)
    experts, rows, sizes = quantize_grouped(normal(4, n, k)), quantize_grouped(normal(4, m, k), "1x128"), [m // 4] * 4
    counts, stacked = torch.tensor(sizes, dtype=torch.int32, device=device), normal(4, m, n)
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0).int()
    launch = kernels.prepare(problem, kernels.plan_for(problem, out.device), operands, out)
    tensors = (a.data, a.scale, b.data, b.scale, None, None, None, out)
    packed = kernels.packed(launch, *(tensor if tensor is None else tensor.data_ptr() for tensor in tensors))
    one, wide = torch.ones(1, device=device), weight.t()
    fast = (quantize(x, "tensor"), quantize(weight, "tensor"))
    return {
        "gemm": lambda: gemm(a, b),
        "gemm, out given": lambda: gemm(a, b, out=out),
        "gemm, quantising A": lambda: gemm(x, b),
        "quantize": lambda: quantize(x),
        "grouped_gemm, out given": lambda: grouped_gemm(a, experts, offsets=offsets, out=out),
        "masked_gemm, out given": lambda: masked_gemm(rows, experts, counts, out=stacked),
        "kernels.run": lambda: kernels.run(problem, operands, out),
        "prepared launch": lambda: launch(*tensors),
        "launch alone": lambda: launch.gpu(packed),
        "torch: x.zero_()": one.zero_,
        "torch: matmul, bf16": lambda: torch.matmul(x, wide),
        "torch: matmul, bf16, out given": lambda: torch.matmul(x, wide, out=out),
        "torch: _scaled_mm, out given": lambda: torch._scaled_mm(
            fast[0].data, fast[1].data.t(), scale_a=fast[0].scale, scale_b=fast[1].scale, out_dtype=out.dtype, out=out
        ),
    }


def measure_host(calls: dict[str, Callable]) -> list[dict]:
    """Microseconds of CPU per call, from first to last instruction of a run of calls that nothing waits in: median and all rounds."""
    samples = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(HOST_CALLS):
            call()
    gc.collect()
    gc.disable()  # as timeit does
    try:
        for _ in range(HOST_ROUNDS):
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call()
                samples[name].append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    finally:
        gc.enable()
    return [{"name": name, "microseconds": statistics.median(rounds), "rounds_us": rounds} for name, rounds in samples.items()]


FIRST_CALLS = ((4096, 1472, 2816), (64, 5248, 1920), (8, 3392, 2560))  # of weights that nothing was compiled for


def measure_first_calls() -> list[dict]:
    """Milliseconds from the first call with new weights to its end: planning, compiling, loading, running."""
    rows = []
    for m, n, k in FIRST_CALLS:
        a, b = quantize(torch.randn(m, k, device="cuda")), quantize(torch.randn(n, k, device="cuda"), "128x128")
        kernels.kernel.cache_clear()
        torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as empty:
            before = os.environ.get("HOPPERLAB_CACHE")
            os.environ["HOPPERLAB_CACHE"] = empty
            try:
                start = time.perf_counter()
                gemm(a, b, backend="cuda")
                torch.cuda.synchronize()
                rows.append({"shape": {"m": m, "n": n, "k": k}, "milliseconds": (time.perf_counter() - start) * 1e3})
            finally:
                if before is None:
                    del os.environ["HOPPERLAB_CACHE"]
                else:
                    os.environ["HOPPERLAB_CACHE"] = before
    return rows


def host_entry(shape: tuple[int, int, int] = HOST_SHAPE) -> dict:
    rows = measure_host(host_calls(*shape))
    return {"shape": dict(zip("mnk", shape)), "processor": processor(), "calls_per_round": HOST_CALLS, "rows": rows, "first_calls": measure_first_calls()}


def layer_record(rounds: int) -> dict:
    """A decoder layer, decoding and in a prefill."""
    from fp8_gemm import bench_layer

    layer, device = bench_layer.Layer(), torch.device("cuda")
    record = {"kind": "layer", **report.environment(), "layer": asdict(layer), "rows": [], "missing": {}}
    with telemetry.Recorder() as recorder:
        for decode, sizes in ((True, bench_layer.DECODE), (False, bench_layer.PREFILL)):
            for tokens in sizes:
                rows, missing = bench_layer.measure(layer, tokens, decode, device, rounds)
                record["rows"] += rows
                record["missing"] |= missing
                print("  ".join(f"{row['name']} {row['microseconds']:.1f} µs" for row in rows), f"({rows[0]['phase']}, {tokens} tokens)", flush=True)
    return record | {"telemetry": recorder.summary()}


def processor() -> str:
    """The CPU's name, which host times depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(path: Path, search: bool = False, only: str = "", host: bool = False, layer: bool = False, rounds: int = ROUNDS) -> None:
    if not capability.has_hopper():
        sys.exit(f"{capability.hopper().sentence()} Without one nothing is timed: `make run` checks the kernels, and "
                 "docs/performance.md shows what an H200 recorded.")  # fmt: skip
    os.environ[ahead.VARIABLE] = "0"  # nothing else is to take the CPU's time
    if host:
        entry = host_entry()
        for row in entry["rows"]:
            print(f"{row['microseconds']:8.2f} µs  {row['name']}")
        for row in entry["first_calls"]:
            print(f"{row['milliseconds']:8.0f} ms  first call of {'x'.join(map(str, row['shape'].values()))}")
        print(report.save({"kind": "host", **report.environment(), **entry}, path))
        return
    if layer:
        print(report.save(layer_record(rounds), path))
        return
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    record = {"kind": "search" if search else "library", **report.environment(), "rounds": rounds, "shapes": []}
    timed = [shape for shape in shapes() + (unseen() if search else []) if "x".join(map(str, shape)).startswith(only)]
    plans = {shape: candidates(Problem("dense", *shape), sms, search) for shape in timed}
    needed = {kernels.kernel_of(Problem("dense", *shape), chosen) for shape, named in plans.items() for chosen in named.values()}
    print(f"compiling {len(needed)} kernels", flush=True)
    compile_all(list(needed))  # of all shapes at once: that keeps every core busy
    with telemetry.Recorder() as recorder:
        for shape in timed:
            record["shapes"].append(measure_shape(shape, plans[shape], sms, search, rounds) | ({"unseen": True} if shape not in shapes() else {}))
            record["telemetry"] = recorder.summary()
            report.save(record, path)  # a run that is cut short leaves what it has measured
            print(line(record["shapes"][-1]), flush=True)
            torch.cuda.empty_cache()
    print(path)


def command_line(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times that each candidate is timed, in a search each finalist")
    parser.add_argument("--only", default="", help="beginning of MxNxK")
    main(**{"path" if name == "record" else name: value for name, value in vars(parser.parse_args(arguments)).items()})


if __name__ == "__main__":
    command_line()
