"""The lesson's measurements: the library beside DeepGEMM for groups and for few tokens, and what skewed routing costs.

    python stages/06_moe_grouped/experiment.py RECORD.json             needs a Hopper GPU
    python stages/06_moe_grouped/experiment.py RECORD.json --small     tiny shapes, any machine, times nothing
    python stages/06_moe_grouped/experiment.py RECORD.json --counters  hardware counters of the cases in which DeepGEMM is faster

The published records are docs/results/06_moe.json and 07_counters.json. The latter takes its cases from the former and from
07_library.json, so those come first.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hopperlab import bench, capability, counters, reference, report, stage, telemetry
from hopperlab.quantize import ScaledTensor

STAGE = stage.load(Path(__file__).resolve().parent)  # which makes the library importable, installed or not

import fp8_gemm  # noqa: E402

ALIGNMENT = 128  # rows to which DeepGEMM's callers pad each group
CHECKED_ROWS = 16  # of the first group that has tokens, against the model of the tensor core
ROUTINGS = ("uniform", "zipf", "hot", "empty")


@dataclass(frozen=True)
class Sizes:
    """What is run. Groups: (groups, tokens of each, N, K); dense: (M, N, K)."""

    contiguous: tuple[tuple[int, int, int, int], ...] = (
        (4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 4096, 7168), (8, 4096, 7168, 2048),
        (32, 256, 4096, 7168), (32, 256, 7168, 2048),
    )  # fmt: skip
    uneven: tuple[tuple[int, int, int, int], ...] = ((8, 4096, 4096, 7168), (32, 256, 7168, 2048))  # tokens of each on average
    masked: tuple[tuple[int, int, int, int], ...] = tuple(
        (groups, tokens, n, k)
        for groups, tokens in ((1, 1024), (2, 512), (4, 256), (16, 64), (32, 16), (64, 4))
        for n, k in ((4096, 7168), (7168, 2048))
    )  # fmt: skip
    masked_room: int = 2  # rows of a masked buffer, in tokens of a group
    dense: tuple[tuple[int, int, int], ...] = tuple(
        (m, n, k) for m in (1, 16, 64, 128) for n, k in ((2112, 7168), (24576, 1536), (4096, 7168), (7168, 2048))
    )  # fmt: skip
    routed: tuple[int, int, int, int, int] = (4096, 8, 64, 4096, 2048)  # tokens, experts of each token, experts, N, K
    timed: bool = True
    profiled: bool = False  # untimed: each candidate's call lies between profiler marks


SMALL = Sizes(contiguous=((2, 5, 40, 130),), uneven=((3, 9, 40, 128),), masked=((3, 4, 40, 128),), dense=((3, 40, 256),), routed=(6, 2, 16, 40, 128),
              timed=False)  # fmt: skip


def routing(kind: str, tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """(tokens, top_k) expert ids, those of a token all different, drawn by each expert's popularity.

    uniform  all alike.  zipf  expert e is 1 / (e + 1) as popular as the first.  hot  nearly every token wants expert 0.
    empty    only an eighth of the experts is ever chosen
    """
    popularity = {
        "uniform": torch.ones(experts),
        "zipf": 1 / torch.arange(1, experts + 1),
        "hot": torch.ones(experts).index_fill(0, torch.tensor([0]), 100.0 * experts),
        "empty": (torch.arange(experts) < max(top_k, experts // 8)).float(),
    }[kind]
    uniform = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    # The largest of log(popularity) + Gumbel noise: a draw without replacement.
    return (popularity.log() - (-uniform.log()).log()).topk(top_k).indices


def counts_of(ids: torch.Tensor, experts: int) -> list[int]:
    return torch.bincount(ids.flatten(), minlength=experts).tolist()


def uneven(groups: int, tokens: int) -> list[int]:
    """Sizes around ``tokens`` by up to an eighth, none of which needs to be a multiple of anything."""
    spread = max(1, tokens // 8)
    return [tokens + group * 397 % (2 * spread + 1) - spread for group in range(groups)]


def padded(counts: list[int]) -> list[int]:
    return [-(-count // ALIGNMENT) * ALIGNMENT for count in counts]


def backend(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "simulator"


def normal(device: torch.device, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=torch.bfloat16)


def weights(device: torch.device, seed: int, groups: int, n: int, k: int) -> fp8_gemm.GroupedWeight:
    """Random weights, made one after another: all at once they would not fit beside their bf16 form."""
    each = [fp8_gemm.quantize(normal(device, 1000 * seed + group, n, k), "128x128") for group in range(groups)]
    data = torch.stack([b.data.view(torch.uint8) for b in each]).view(each[0].data.dtype)
    return fp8_gemm.GroupedWeight(data, torch.stack([b.scale for b in each]), "128x128")


def offsets_of(device: torch.device, counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


def sets_for(sizes: Sizes, nbytes: int) -> int:
    """Input sets that together exceed what L2 could keep."""
    return max(2, min(bench.MAX_SETS, -(-int(bench.ROTATION_BYTES) // nbytes))) if sizes.timed else 1


def same_bits(out: torch.Tensor, a: ScaledTensor, b: ScaledTensor) -> bool:
    """Whether the first rows of out are the model's, for the rows of a that they belong to."""
    rows = min(CHECKED_ROWS, a.rows)
    part = ScaledTensor(a.data[:rows], a.scale[:rows].contiguous(), a.recipe)
    return torch.equal(out[:rows].view(torch.int16), reference.matmul_hopper(part, b, out_dtype=out.dtype).view(torch.int16))


def peer_calls(make) -> tuple[list, str | None]:
    """DeepGEMM's calls, or why there are none: it may be missing, too old, or refuse the shape. Recorded, not hidden."""
    try:
        import deep_gemm

        calls = make(deep_gemm)
        calls[0]()
    except Exception as error:
        return [], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return calls, None


@contextlib.contextmanager
def between_marks():
    """What is launched inside is what Nsight Compute looks at."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def timed(sizes: Sizes, calls: dict[str, list], flops: int, moved: int, **description) -> list[dict]:
    """One row per candidate. Untimed, each candidate runs once and has no time."""
    calls = {name: made for name, made in calls.items() if made}
    rows = [{**description, "name": name} for name in calls]
    if not sizes.timed:
        for made in calls.values():
            with between_marks() if sizes.profiled else contextlib.nullcontext():
                made[0]()
        return rows
    timings = bench.measure(calls, rounds=3)
    for row, timing in zip(rows, timings.values()):
        row |= {"microseconds": timing.seconds * 1e6, "spread": timing.spread, "tflops": flops / timing.seconds / 1e12,
                "gbytes_per_s": moved / timing.seconds / 1e9}  # fmt: skip
        if "deep_gemm" in timings:
            row["speed_of_deep_gemm"] = timings["deep_gemm"].seconds / timing.seconds
        described = " ".join(f"{key}={value}" for key, value in description.items())
        print(described, "{name:16} {microseconds:9.1f} µs {tflops:6.0f} TFLOP/s".format(**row))
    return rows


# ---- groups one after another, and in buffers ------------------------------------------------------------------------


def contiguous(sizes: Sizes, device: torch.device, counts: list[int], n: int, k: int, pad: bool,
               **description) -> tuple[list[dict], dict]:  # fmt: skip
    """The library on groups of these sizes; the same if no two CTAs share rows of A; if pad, on groups padded to 128 rows, where
    DeepGEMM runs as well."""
    groups, rows, moved = len(counts), sum(counts), sum(counts) * (k + 2 * n) + sum(count > 0 for count in counts) * n * k
    layouts = {"unpadded": counts} | ({"padded": padded(counts)} if pad else {})
    calls, missing = {}, {}
    made = [weights(device, seed, groups, n, k) for seed in range(sets_for(sizes, groups * n * k))]
    for name, lengths in layouts.items():
        tokens = [fp8_gemm.quantize(normal(device, seed, sum(lengths), k)) for seed in range(len(made))]
        outs = [torch.zeros(sum(lengths), n, dtype=torch.bfloat16, device=device) for _ in made]
        offsets = offsets_of(device, lengths)
        options = {"offsets": offsets, "backend": backend(device)}
        calls[name] = [lambda a=a, b=b, out=out, o=options: fp8_gemm.grouped_gemm(a, b, out=out, **o)
                       for a, b, out in zip(tokens, made, outs)]  # fmt: skip
        if name == "unpadded" and "layout" not in description and not sizes.profiled:
            calls["A not shared"] = [lambda a=a, b=b, out=out, o=options: fp8_gemm.grouped_gemm(a, b, out=out, multicast=1, **o)
                                     for a, b, out in zip(tokens, made, outs)]  # fmt: skip
        calls[name][0]()
        first = next(group for group, count in enumerate(counts) if count)
        begin, end = int(offsets[first]), int(offsets[first + 1])
        a = ScaledTensor(tokens[0].data[begin:end], tokens[0].scale[begin:end].contiguous(), "1x128")
        description[f"same_bits_{name}"] = same_bits(outs[0][begin:end], a, made[0][first])
        if name == "padded":
            indices = torch.repeat_interleave(torch.arange(groups), torch.tensor(lengths)).to(device, torch.int32)

            def peer(deep_gemm):
                laid_out = [(a.data, deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)) for a in tokens]
                return [lambda a=a, b=b, out=out: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, (b.data, b.scale), out, indices)
                        for a, b, out in zip(laid_out, made, outs)]  # fmt: skip

            calls["deep_gemm"], reason = peer_calls(peer)
            missing = {"deep_gemm, contiguous": reason} if reason else {}
    description |= {"n": n, "k": k, "groups": groups, "rows": rows, "rows_padded": sum(padded(counts))}
    return timed(sizes, calls, 2 * rows * n * k, moved, **description), missing


def masked(sizes: Sizes, device: torch.device, counts: list[int], max_m: int, n: int, k: int,
           **description) -> tuple[list[dict], dict]:  # fmt: skip
    """The library and DeepGEMM on a buffer with room for max_m tokens of each group."""
    groups, rows, moved = len(counts), sum(counts), sum(counts) * (k + 2 * n) + sum(count > 0 for count in counts) * n * k
    made = [weights(device, seed, groups, n, k) for seed in range(sets_for(sizes, groups * n * k))]
    tokens = [fp8_gemm.quantize_grouped(normal(device, seed, groups, max_m, k), "1x128") for seed in range(len(made))]
    outs = [torch.zeros(groups, max_m, n, dtype=torch.bfloat16, device=device) for _ in made]
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    calls = {"masked": [lambda a=a, b=b, out=out: fp8_gemm.masked_gemm(a, b, masked_m, out=out, backend=backend(device))
                        for a, b, out in zip(tokens, made, outs)]}  # fmt: skip
    calls["masked"][0]()
    first = next(group for group, count in enumerate(counts) if count)
    a = ScaledTensor(tokens[0].data[first, : counts[first]], tokens[0].scale[first, : counts[first]].contiguous(), "1x128")
    description["same_bits_masked"] = same_bits(outs[0][first], a, made[0][first])

    def peer(deep_gemm):
        run = getattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked", None) or deep_gemm.fp8_m_grouped_gemm_nt_masked
        laid_out = [(a.data, deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)) for a in tokens]
        expected = -(-rows // groups)
        return [lambda a=a, b=b, out=out: run(a, (b.data, b.scale), out, masked_m, expected)
                for a, b, out in zip(laid_out, made, outs)]  # fmt: skip

    calls["deep_gemm"], reason = peer_calls(peer)
    row = timed(sizes, calls, 2 * rows * n * k, moved, n=n, k=k, groups=groups, rows=rows, max_m=max_m, **description)
    return row, {"deep_gemm, masked": reason} if reason else {}


# ---- few tokens ------------------------------------------------------------------------------------------------------


def dense(sizes: Sizes, device: torch.device, m: int, n: int, k: int) -> tuple[list[dict], dict]:
    """The plan's choice, the same without swapped operands and split K, and DeepGEMM."""
    count = sets_for(sizes, (m + n) * k + 2 * m * n)
    operands = [(fp8_gemm.quantize(normal(device, seed, m, k)), fp8_gemm.quantize(normal(device, seed + 500, n, k), "128x128"))
                for seed in range(count)]  # fmt: skip
    outs = [torch.zeros(m, n, dtype=torch.bfloat16, device=device) for _ in operands]
    calls = {}
    for name, options in (("plan", {}), ("not swapped, not split", {"swap_ab": False, "split_k": 1})):
        calls[name] = [lambda a=a, b=b, out=out, o=options: fp8_gemm.gemm(a, b, out=out, backend=backend(device), **o)
                       for (a, b), out in zip(operands, outs)]  # fmt: skip
    chosen = fp8_gemm.explain(*operands[0], backend=backend(device)).plan

    def peer(deep_gemm):
        laid_out = [(a.data, deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)) for a, _ in operands]
        return [lambda a=a, b=b, out=out: deep_gemm.fp8_gemm_nt(a, (b.data, b.scale), out)
                for a, (_, b), out in zip(laid_out, operands, outs)]  # fmt: skip

    calls["deep_gemm"], reason = peer_calls(peer)
    row = timed(sizes, calls, 2 * m * n * k, (m + n) * k + 2 * m * n, m=m, n=n, k=k, plan=str(chosen))
    return row, {"deep_gemm, dense": reason} if reason else {}


# ---- the record ------------------------------------------------------------------------------------------------------


Found = tuple[list[dict], dict]  # rows, and why a peer is missing


def cases(sizes: Sizes, device: torch.device) -> dict[str, tuple[str, Callable[[], Found]]]:
    """Every measurement: its name -> (the family of rows it belongs to, what makes them)."""
    found = {}
    for groups, tokens, n, k in sizes.contiguous:
        found[f"contiguous, {groups} groups of {tokens}, {n}×{k}"] = "contiguous", lambda g=groups, t=tokens, n=n, k=k: contiguous(
            sizes, device, [t] * g, n, k, pad=True, tokens=t)  # fmt: skip
    for groups, tokens, n, k in sizes.uneven:
        found[f"contiguous, {groups} groups of about {tokens}, {n}×{k}"] = "contiguous", lambda c=uneven(groups, tokens), n=n, k=k: contiguous(
            sizes, device, c, n, k, pad=True, tokens=f"{min(c)} to {max(c)}")  # fmt: skip
    for groups, tokens, n, k in sizes.masked:
        found[f"masked, {groups} groups of {tokens}, {n}×{k}"] = "masked", lambda g=groups, t=tokens, n=n, k=k: masked(
            sizes, device, [t] * g, sizes.masked_room * t, n, k, tokens=t)  # fmt: skip
    for shape in sizes.dense:
        found["dense, " + "×".join(map(str, shape))] = "dense", lambda shape=shape: dense(sizes, device, *shape)
    tokens, top_k, experts, n, k = sizes.routed
    for kind in ROUTINGS:
        counts = counts_of(routing(kind, tokens, top_k, experts), experts)
        found[f"contiguous, {kind} routing"] = "skew", lambda c=counts, kind=kind: contiguous(
            sizes, device, c, n, k, pad=True, routing=kind, layout="contiguous")  # fmt: skip
        found[f"masked, {kind} routing"] = "skew", lambda c=counts, kind=kind: masked(
            sizes, device, c, max(c), n, k, routing=kind, layout="masked")  # fmt: skip
    return found


def record_of(sizes: Sizes, device: torch.device, keep=lambda record: None) -> dict:
    """All measurements. keep is called with what is there after each: a run that is cut short loses nothing."""
    record = {"kind": "sweep", **report.environment(), "contiguous": [], "masked": [], "dense": [], "skew": [], "missing": {}}
    with telemetry.Recorder() if sizes.timed else contextlib.nullcontext() as recorder:
        for name, (family, make) in cases(sizes, device).items():
            rows, missing = make()
            record[family] += [{"case": name, **row} for row in rows]
            record["missing"] |= missing
            keep(record)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return record | ({"telemetry": recorder.summary()} if recorder else {})


# ---- where DeepGEMM is faster ------------------------------------------------------------------------------------------


def slower(moe: dict, library: dict) -> dict[str, float]:
    """The cases of two records in which the library takes longer than DeepGEMM: name -> DeepGEMM's time over the library's."""
    found = {}
    for entry in library["shapes"]:
        times = {row["name"]: row["microseconds"] for row in entry["rows"]}
        if "deep_gemm" in times:
            found["dense, " + "×".join(map(str, entry["shape"].values()))] = times["deep_gemm"] / times["library"]
    for row in (row for family in ("contiguous", "masked", "skew") for row in moe[family]):
        if row["name"] in ("unpadded", "masked") and "speed_of_deep_gemm" in row:
            found[row["case"]] = row["speed_of_deep_gemm"]
    return {name: speed for name, speed in found.items() if speed < 1}


def run_case(name: str) -> None:
    """One case between profiler marks: the program that counters_of puts under Nsight Compute."""
    sizes, device = replace(Sizes(), timed=False, profiled=True), capability.device()
    if name.startswith("dense, "):  # those of 07_library.json, too
        dense(sizes, device, *map(int, name.removeprefix("dense, ").split("×")))
    else:
        cases(sizes, device)[name][1]()


def counters_of(name: str) -> list[dict]:
    """The counters of the library's kernels of one case and of DeepGEMM's, in the order of their calls."""
    calls = {"contiguous": ["unpadded", "padded", "deep_gemm"], "masked": ["masked", "deep_gemm"],
             "dense": ["plan", "not swapped, not split", "deep_gemm"]}[name.partition(",")[0]]  # fmt: skip
    read = counters.read([sys.executable, str(Path(__file__).resolve()), "-", "--case", name], calls)
    return [{"name": call, "counters": found} for call, found in zip(calls, read)]


def counters_record(keep=lambda record: None) -> dict:
    """The counters of every case in which DeepGEMM is faster, by the published records. Exits if those do not say."""
    moe, library = report.published("06_moe.json"), report.published("07_library.json")
    if not moe or not library or any("case" not in row for family in ("contiguous", "masked", "skew") for row in moe[family]):
        sys.exit("docs/results/06_moe.json and 07_library.json must be there, the former with the name of each row's case: write both anew "
                 "with this program and with `python -m fp8_gemm.bench`, then read the counters.")  # fmt: skip
    os.environ["FP8_GEMM_BACKGROUND"] = "0"  # of the programs under Nsight Compute: nothing else is to run
    meaning = {key: text for key, text in counters.METRICS.values()}
    record = {"kind": "slower", **report.environment(), "meaning": meaning, "cases": []}
    for name, speed in slower(moe, library).items():
        entry = {"case": name, "speed_of_deep_gemm": speed, "rows": []}
        try:
            entry["rows"] = counters_of(name)
        except RuntimeError as error:
            entry["error"] = str(error)
        record["cases"].append(entry)
        keep(record)
        print(f"{speed:.3f}  {name}  {entry.get('error', '')}", flush=True)
    return record


def main(path: Path, small: bool = False, slow: bool = False, case: str = "") -> None:
    if not small:
        capability.require_hopper("Without one, --small runs every measurement on tiny shapes, untimed.")
    if case:
        return run_case(case)
    keep = lambda record: report.save(record, path)  # noqa: E731
    print(keep(counters_record(keep) if slow else record_of(SMALL if small else Sizes(), capability.device(), keep)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, metavar="RECORD.json")
    parser.add_argument("--small", action="store_true", help="tiny shapes on any machine; nothing is timed")
    parser.add_argument("--counters", action="store_true", help="hardware counters of the cases in which DeepGEMM is faster; needs ncu")
    parser.add_argument("--case", default="", help="run one case between profiler marks, as --counters does; writes nothing")
    arguments = parser.parse_args()
    main(arguments.record, arguments.small, arguments.counters, arguments.case)
