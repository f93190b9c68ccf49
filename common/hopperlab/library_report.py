"""What the library's records say: the tables of docs/performance.md, the short one of the README, and three plots.

The records are those of ``python -m fp8_gemm.bench`` (shapes, plans, host time) and of the experiment on groups. A table whose
record does not exist says so. A *speed* is a peer's time over the library's, both from one run: above 1 the library is faster.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hopperlab import bench, report, stage

LIBRARY, HOST, MOE, SEARCH, LAYER, WAVES = "07_library.json", "07_host.json", "06_moe.json", "07_search.json", "07_layer.json", "04_waves.json"
COUNTERS = "07_counters.json"
PAGE = Path("docs/performance.md")
MISSING = "Not recorded yet."

OURS, FROM_BF16, INVARIANT, TRITON = "library", "library, quantising A", "library, batch invariant", "library, Triton"
PEERS = {"deep_gemm": "DeepGEMM", "cublas block": "cuBLAS block", "cublas tensor": "cuBLAS tensor"}
FEW, MANY = 128, 4096  # rows of A: at most so many when decoding, so many in a prefill
HEAVY_BYTES = 100e6  # weights that no cache holds: reading them is all the time there is
HEAVY_PERCENT = 85  # of the reading ceiling
DESCRIBING = ("routing", "layout", "tokens", "groups", "n", "k")  # what makes rows of a grouped record one case
FASTER, SLOWER = report.COLORS["cuda"], "#d1495b"


# ---- reading records ------------------------------------------------------------------------------------------------


def by_name(entry: dict) -> dict[str, dict]:
    """The rows of one shape: name -> row."""
    return {row["name"]: row for row in entry["rows"]}


def entries(record: dict | None) -> list[dict]:
    """The shapes of a library or search record, few rows first, in the record's order otherwise."""
    return sorted((record or {}).get("shapes", []), key=lambda entry: entry["shape"]["m"])


def cases(record: dict | None, part: str) -> list[tuple[dict, dict[str, dict]]]:
    """The cases of one part of the grouped record: (what describes it, name -> row)."""
    described = lambda row: {key: row[key] for key in DESCRIBING if key in row}  # noqa: E731
    grouped = itertools.groupby((record or {}).get(part, []), key=described)
    return [(description, {row["name"]: row for row in rows}) for description, rows in grouped]


def shape_name(m: int, n: int, k: int) -> str:
    return f"{m}³" if m == n == k else f"{m}×{n}×{k}"


def is_heavy(entry: dict) -> bool:
    """Few tokens on weights of 100 MB and more (a byte each)."""
    return entry["shape"]["m"] <= FEW and entry["shape"]["n"] * entry["shape"]["k"] >= HEAVY_BYTES


class Speed(NamedTuple):
    """A peer's time over the library's, in one case. spread: the larger one of both rows; a difference below it is noise."""

    where: str
    value: float
    spread: float


def speed(rows: dict[str, dict], peer: str, ours: str, where: str) -> list[Speed]:
    """One speed, or none where a row is missing: not every peer takes every shape."""
    if not {peer, ours} <= rows.keys():
        return []
    theirs, own = rows[peer], rows[ours]
    return [Speed(where, theirs["microseconds"] / own["microseconds"], max(theirs["spread"], own["spread"]))]


def dense_speeds(record: dict | None, peer: str, least: int = 0, most: float = float("inf")) -> list[Speed]:
    """Against one peer, for all shapes with ``least`` <= M <= ``most``."""
    chosen = [entry for entry in entries(record) if least <= entry["shape"]["m"] <= most]
    return [found for entry in chosen for found in speed(by_name(entry), peer, OURS, shape_name(**entry["shape"]))]


def grouped_speeds(record: dict | None, part: str, ours: str, peer: str = "deep_gemm") -> list[Speed]:
    """Against one row of the same case, for all cases of a part that have both."""
    return [found for description, rows in cases(record, part) for found in speed(rows, peer, ours, case_name(description))]


def case_name(description: dict) -> str:
    prefix = f"{description['routing']} routing, " if "routing" in description else ""
    sizes = f"{description['groups']} groups" + (f" of {description['tokens']}" if "tokens" in description else "")
    return f"{prefix}{sizes}, {description['n']}×{description['k']}"


def geomean(speeds: Iterable[Speed]) -> float:
    return statistics.geometric_mean(found.value for found in speeds)


# ---- targets --------------------------------------------------------------------------------------------------------


def towards_a_miss(value: float, digits: int, at_most: bool = False) -> str:
    """Rounded so that what misses a goal by little does not look as if it reached it: down, or up where less is better."""
    return f"{(math.ceil if at_most else math.floor)(round(value * 10**digits, 6)) / 10**digits:.{digits}f}"


class Target(NamedTuple):
    """What was aimed at, and what the records say. value is None where nothing is recorded."""

    what: str
    goal: float
    value: float | None
    where: str
    unit: str = ""
    at_most: bool = False  # the goal is an upper bound
    noise: float = 0.0  # relative: a miss by less, in every case that misses, is none that this record can show

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not recorded"
        if self.value <= self.goal if self.at_most else self.value >= self.goal:
            return "met"
        within = abs(self.value / self.goal - 1) < self.noise
        return f"**missed**, by less than the spread of its rounds ({self.noise:.1%})" if within else "**missed**"

    def __str__(self):
        unit = f" {self.unit}" if self.unit else ""
        measured = "-" if self.value is None else towards_a_miss(self.value, 1 if self.unit else 3, self.at_most) + unit
        goal = f"{'≤' if self.at_most else '≥'} {self.goal:.{2 if not self.unit else 0}f}{unit}"
        return f"| {self.what} | {goal} | {measured} | {self.where} | {self.verdict} |"


def each(what: str, goal: float, speeds: list[Speed]) -> Target:
    """Every case has to reach the goal: the slowest one decides."""
    if not speeds:
        return Target(f"{what}, each", goal, None, "-")
    slowest = min(speeds, key=lambda found: found.value)
    below = [found for found in speeds if found.value < goal]
    noise = slowest.spread if all(1 - found.value / goal < found.spread for found in below) else 0.0
    return Target(f"{what}, each", goal, slowest.value, f"{slowest.where}; {len(below)} of {len(speeds)} below", noise=noise)


def mean(what: str, goal: float, speeds: list[Speed]) -> Target:
    name = f"{what}, geometric mean"
    return Target(name, goal, geomean(speeds), f"all {len(speeds)}") if speeds else Target(name, goal, None, "-")


def targets(library: dict | None, moe: dict | None, host: dict | None, waves: dict | None = None) -> list[Target]:
    """The targets that these records decide."""
    heavy = [(by_name(entry)[OURS]["percent_of_bandwidth"], shape_name(**entry["shape"])) for entry in entries(library)
             if is_heavy(entry)]  # fmt: skip
    decode, where = min(heavy, default=(None, "-"))
    call = {row["name"]: row["microseconds"] for row in (host or {"rows": []})["rows"]}.get("gemm, out given")
    first = max(((row["milliseconds"], shape_name(**row["shape"])) for row in (host or {}).get("first_calls", [])), default=(None, "-"))
    cubes = [found for size in sorted({row["size"] for row in (waves or {"cubes": []})["cubes"]})
             for found in speed({row["name"]: row for row in waves["cubes"] if row["size"] == size}, "cublas tensor", "plan", f"{size}³")]  # fmt: skip
    triton = [found for entry in entries(library) for found in speed(by_name(entry), OURS, TRITON, shape_name(**entry["shape"]))]
    unpadded, masked = grouped_speeds(moe, "contiguous", "unpadded"), grouped_speeds(moe, "masked", "masked")
    padding = [found for part in ("contiguous", "skew") for found in grouped_speeds(moe, part, "unpadded", "padded")]
    return [
        each("dense kernel of stage 04 against cuBLAS tensor", 1.0, cubes),
        each("against DeepGEMM", 1.0, dense_speeds(library, "deep_gemm")),
        mean(f"against DeepGEMM, M = {MANY}", 1.03, dense_speeds(library, "deep_gemm", MANY, MANY)),
        mean(f"against DeepGEMM, M ≤ {FEW}", 1.3, dense_speeds(library, "deep_gemm", most=FEW)),
        each("against cuBLAS block", 1.05, dense_speeds(library, "cublas block")),
        mean(f"against cuBLAS tensor, M = {MANY} and cubes", 0.96, dense_speeds(library, "cublas tensor", MANY)),
        Target(f"share of the reading ceiling, M ≤ {FEW}, weights of {HEAVY_BYTES / 1e6:.0f} MB and more, each", HEAVY_PERCENT,
               decode, where, "%"),
        each("against DeepGEMM, contiguous groups", 1.0, unpadded),
        mean("against DeepGEMM, contiguous groups", 1.03, unpadded),
        each("unpadded groups against padded ones", 1.0, padding),
        each("against DeepGEMM, masked groups", 1.0, masked),
        mean("against DeepGEMM, masked groups", 1.1, masked),
        Target("host time of `gemm`, output given", 10, call, "shape of the host table" if call else "-", "µs", at_most=True),
        Target("first call of new weights, nothing compiled yet", 500, *first, "ms", at_most=True),
        each(f"Triton path against the CUDA path, M = {MANY} and cubes", 0.7, triton),
    ]


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(header: str, rows: Iterable[Iterable], texts: int = 0) -> list[str]:
    """Markdown lines: ``header`` holds the names, separated by |. Columns are numbers, but for the last ``texts``."""
    rows = list(rows)
    if not rows:
        return [MISSING]
    names = header.split("|")
    rule = ["---:"] * (len(names) - texts) + ["---"] * texts
    line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"  # noqa: E731
    return [line(name.strip() for name in names), line(rule), *(line(row) for row in rows)]


def written_from(record: dict, name: str, more: str = "") -> list[str]:
    return ["", f"*{more}{report.origin(record)}. Written by `make docs` from docs/results/{name}.*"]


def time_of(rows: dict[str, dict], name: str) -> str:
    return f"{rows[name]['microseconds']:.1f}" if name in rows else "-"


def ratio_of(rows: dict[str, dict], peer: str, ours: str) -> str:
    return "".join(towards_a_miss(found.value, 3) for found in speed(rows, peer, ours, "")) or "-"


def without_figure(missing: dict[str, str]) -> list[str]:
    """Why a peer has no figure somewhere: name -> reason, one reason for each."""
    # Up to where torch begins to quote the call that failed.
    reasons = "; ".join(f"{name}, `{reason.partition(' when calling')[0]}`" for name, reason in missing.items())
    return ["", f"Where a peer has no figure: {reasons}"] if missing else []


def rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.1f}"


def short(plan: str) -> str:
    """A plan without what it predicts and what is the same everywhere."""
    cut = re.sub(r" on \d+ SMs$", "", plan.partition("; predicted")[0])
    for long, brief in (("tiles of ", ""), ("A and B swapped", "swapped"), ("pipeline stages", "stages"), (" x ", "×")):
        cut = cut.replace(long, brief)
    return cut


def targets_markdown(library: dict | None, moe: dict | None, host: dict | None, waves: dict | None = None) -> str:
    """What was aimed at, beside what was measured."""
    if library is moe is host is None:
        return MISSING
    lines = ["| speed | goal | measured | where | |", "| --- | ---: | ---: | --- | --- |"]
    return "\n".join([*lines, *map(str, targets(library, moe, host, waves))])


def dense_markdown(record: dict | None) -> str:
    """Every shape beside its peers."""
    if record is None:
        return MISSING
    rows = []
    for entry in entries(record):
        found = by_name(entry)
        ours = found[OURS]
        ratios = [ratio_of(found, peer, OURS) for peer in PEERS]
        rows.append((*entry["shape"].values(), time_of(found, OURS), time_of(found, FROM_BF16), rate(ours["tflops"]),
                     f"{ours['gbytes_per_s']:.0f}", *ratios, short(entry["plan"])))  # fmt: skip
    against = " | ".join(f"× {peer}" for peer in PEERS.values())
    header = f"M | N | K | µs | µs, A quantised too | TFLOP/s | GB/s | {against} | plan"
    error = max(by_name(entry)[OURS]["max_rel_error"] for entry in entries(record))
    spread = statistics.median(by_name(entry)[OURS]["spread"] for entry in entries(record))
    checked = f"Largest error of any shape: {error:.1e} of its largest output. Spread of the rounds: {spread:.1%} (median). "
    missing = {name: reason for entry in entries(record) for name, reason in entry["missing"].items()}
    images = [f"![Speed beside DeepGEMM](plots/{SPEED_PLOT})", "", f"![Roofline](plots/{ROOFLINE_PLOT})", ""]
    return "\n".join([*images, *table(header, rows, texts=1), *without_figure(missing), *written_from(record, LIBRARY, checked)])


def decode_markdown(record: dict | None) -> str:
    """Few tokens on large weights: how close to the rate at which this GPU reads its memory."""
    heavy = [entry for entry in entries(record) if is_heavy(entry)]
    if not heavy:
        return MISSING
    percent = lambda rows, name: f"{rows[name]['percent_of_bandwidth']:.1f} %" if name in rows else "-"  # noqa: E731
    rows = [(*entry["shape"].values(), f"{entry['shape']['n'] * entry['shape']['k'] / 1e6:.0f}",
             *(percent(by_name(entry), name) for name in (OURS, *PEERS))) for entry in heavy]  # fmt: skip
    image = [f"![Share of the reading ceiling](plots/{READING_PLOT})", ""]
    ceiling = f"100 % is {bench.READ_BYTES_PER_S / 1e12:.2f} TB/s. "
    header = f"M | N | K | weights, MB | library | {' | '.join(PEERS.values())}"
    return "\n".join([*image, *table(header, rows), *written_from(record, LIBRARY, ceiling)])


def moe_markdown(record: dict | None) -> str:
    """Groups one after another, groups in buffers, and routings that are not even."""
    if record is None:
        return MISSING
    lines = ["**Contiguous groups**", ""]
    rows = [(d["groups"], d["tokens"], d["n"], d["k"], time_of(r, "unpadded"), time_of(r, "padded"), time_of(r, "deep_gemm"),
             rate(r["unpadded"]["tflops"]), ratio_of(r, "padded", "unpadded"), ratio_of(r, "deep_gemm", "unpadded"))
            for d, r in cases(record, "contiguous")]  # fmt: skip
    lines += table("groups | tokens of each | N | K | unpadded, µs | padded, µs | DeepGEMM, padded, µs | TFLOP/s | "
                   "× own padded | × DeepGEMM", rows)  # fmt: skip
    lines += ["", "**Masked groups**", ""]
    rows = [(d["groups"], d["tokens"], d["n"], d["k"], time_of(r, "masked"), time_of(r, "deep_gemm"), rate(r["masked"]["tflops"]),
             f"{r['masked']['gbytes_per_s']:.0f}", ratio_of(r, "deep_gemm", "masked"))
            for d, r in cases(record, "masked")]  # fmt: skip
    lines += table("groups | tokens of each | N | K | µs | DeepGEMM, µs | TFLOP/s | GB/s | × DeepGEMM", rows)
    lines += ["", "**Skewed routing**", ""]
    even, rows = {}, []
    for d, r in cases(record, "skew"):
        ours = "unpadded" if d["layout"] == "contiguous" else "masked"
        if d["routing"] == "uniform":
            even[d["layout"]] = r[ours]["microseconds"]
        slower = f"{r[ours]['microseconds'] / even[d['layout']]:.2f}" if d["layout"] in even else "-"
        rows.append((r[ours]["rows"], r[ours].get("rows_padded", "-"), time_of(r, ours), slower, ratio_of(r, "padded", ours),
                     ratio_of(r, "deep_gemm", ours), d["layout"], d["routing"]))  # fmt: skip
    lines += table("rows | padded rows | µs | time of uniform | × own padded | × DeepGEMM | layout | routing", rows, texts=2)
    lines += without_figure(record["missing"])
    bits = [same for part in ("contiguous", "masked", "skew") for _, found in cases(record, part)
            for name, same in next(iter(found.values())).items() if name.startswith("same_bits")]  # fmt: skip
    checked = f"Bits of the library's first rows are those of the model of the hardware in {sum(bits)} of {len(bits)} outputs. "
    return "\n".join([*lines, *written_from(record, MOE, checked)])


def host_markdown(record: dict | None) -> str:
    """What a call costs on the CPU."""
    if record is None:
        return MISSING
    rows = [(f"{row['microseconds']:.1f}", f"{min(row['rounds_us']):.1f}", f"{row['name']}") for row in record["rows"]]
    versions = f"Python {record['versions']['python']}, torch {record['versions']['torch']}"
    setting = f"{shape_name(**record['shape'])}, {record['processor']}, {versions}. "
    first = [f"{row['milliseconds']:.0f} ms for {shape_name(**row['shape'])}" for row in record.get("first_calls", [])]
    calls = ["", f"First calls of new weights with an empty cache, to the end of their kernel: {', '.join(first)}."] if first else []
    return "\n".join([*table("µs (median) | fastest round | call", rows, texts=1), *calls, *written_from(record, HOST, setting)])


WITHIN = 0.03  # what a planner may lose


def search_markdown(record: dict | None) -> str:
    """The planner's choice beside the fastest of the most promising plans."""
    if record is None:
        return MISSING
    rows, losses = [], {False: [], True: []}
    for entry in entries(record):
        chosen, best = entry["rows"][0], min(entry["rows"], key=lambda row: row["microseconds"])
        loss = chosen["microseconds"] / best["microseconds"]
        losses[entry.get("unseen", False)].append(loss)
        rows.append((*entry["shape"].values(), f"{chosen['microseconds']:.1f}", f"{best['microseconds']:.1f}",
                     f"{loss - 1:.1%}", f"{max(chosen['spread'], best['spread']):.1%}", short(entry["plan"]),
                     "the same" if best is chosen else short(best["name"])))  # fmt: skip
    summary = [f"{name}: the planner's choice takes {statistics.geometric_mean(found) - 1:.1%} longer than the fastest plan (geometric mean "
               f"of {len(found)} shapes), at most {WITHIN:.0%} longer for {sum(loss <= 1 + WITHIN for loss in found)} of them, "
               f"at worst {max(found) - 1:.1%}."
               for name, found in (("Shapes of the tables above", losses[False]), ("Shapes drawn at random", losses[True])) if found]  # fmt: skip
    header = "M | N | K | planner's, µs | fastest, µs | loss | spread | planner's | fastest"
    return "\n".join(["\n\n".join(summary), "", *table(header, rows, texts=2), *written_from(record, SEARCH)])


def invariant_markdown(record: dict | None) -> str:
    """What a plan that does not depend on M costs: its time over that of the plan for this M, a column for each M."""
    found = {(e["shape"]["n"], e["shape"]["k"], e["shape"]["m"]): by_name(e) for e in entries(record) if INVARIANT in by_name(e)}
    if not found:
        return MISSING
    sizes = sorted({m for _, _, m in found})
    ratio = lambda rows: f"{rows[INVARIANT]['microseconds'] / rows[OURS]['microseconds']:.2f}"  # noqa: E731
    rows = [(n, k, *(ratio(found[n, k, m]) if (n, k, m) in found else "-" for m in sizes))
            for n, k in dict.fromkeys((n, k) for n, k, _ in found)]  # fmt: skip
    header = f"N | K | {' | '.join(f'M = {m}' for m in sizes)}"
    return "\n".join([*table(header, rows), *written_from(record, LIBRARY)])


def layer_markdown(record: dict | None) -> str:
    """A decoder layer end to end, by the way its linears are computed."""
    if record is None:
        return MISSING
    described = lambda row: {key: row[key] for key in ("phase", "tokens")}  # noqa: E731
    rows = []
    for case, found in itertools.groupby(record["rows"], key=described):
        ways = {row["name"]: row for row in found}
        error = ways[OURS]["difference_from_bf16"]
        rows.append((case["tokens"], *(time_of(ways, name) for name in ("bf16", OURS, "deep_gemm")), ratio_of(ways, "bf16", OURS),
                     ratio_of(ways, "deep_gemm", OURS), f"{error:.1e}", case["phase"]))  # fmt: skip
    header = "tokens | BF16, µs | library, µs | DeepGEMM, µs | × BF16 | × DeepGEMM | largest difference from BF16 | phase"
    size = record["layer"]
    setting = f"Hidden size {size['hidden']}, intermediate {size['intermediate']}, {size['heads']} heads, {size['kv_heads']} of them keys'. "
    return "\n".join([*table(header, rows, texts=1), *without_figure(record["missing"]), *written_from(record, LAYER, setting)])


def readme_markdown(library: dict | None, moe: dict | None) -> str:
    """Geometric means, for the README."""
    if library is None:
        return MISSING
    figure = lambda speeds: towards_a_miss(geomean(speeds), 2) if speeds else "-"  # noqa: E731
    lines = [f"| speed of the library against | M ≤ {FEW} | M = {MANY} | slowest of all shapes |", "| --- | ---: | ---: | ---: |"]
    for peer, shown in PEERS.items():
        slowest = sorted(dense_speeds(library, peer), key=lambda found: found.value)[:1]
        chosen = (dense_speeds(library, peer, most=FEW), dense_speeds(library, peer, MANY, MANY), slowest)
        lines.append(" | ".join([f"| {shown}", *map(figure, chosen)]) + " |")
    groups = [(kind, grouped_speeds(moe, kind, ours)) for kind, ours in (("contiguous", "unpadded"), ("masked", "masked"))]
    means = " and ".join(f"{figure(speeds)} with {kind} groups" for kind, speeds in groups if speeds)
    lines += ["", f"Against DeepGEMM {means}."] if means else []
    meaning = f"Geometric means of peer's time over the library's, {len(entries(library))} shapes. "
    return "\n".join([*lines, *written_from(library, LIBRARY, meaning)])


# ---- plots ----------------------------------------------------------------------------------------------------------

SPEED_PLOT, ROOFLINE_PLOT, READING_PLOT = "library_speed.png", "library_roofline.png", "library_reading.png"


def plot_speed(record: dict):
    """Speed against DeepGEMM, a bar for each shape and a panel for each M; where cuBLAS stands, as marks. Returns the figure."""
    import matplotlib.pyplot as plt

    panel = lambda entry: min(entry["shape"]["m"], MANY)  # noqa: E731
    panels = [(m, list(found)) for m, found in itertools.groupby(entries(record), key=panel)]
    lines, columns = -(-len(panels) // 3), min(3, len(panels))
    tallest = max(len(found) for _, found in panels)
    figure, grid = plt.subplots(lines, columns, figsize=(4.4 * columns, lines * (0.27 * tallest + 0.9) + 0.7), sharex=True,
                                squeeze=False, layout="constrained")  # fmt: skip
    for axes, (m, found) in zip(grid.flat, panels):
        for place, entry in enumerate(found):
            rows = by_name(entry)
            for ours in speed(rows, "deep_gemm", OURS, ""):
                axes.barh(place, ours.value, height=0.68, color=FASTER if ours.value >= 1 else SLOWER)
                axes.text(0.04, place, towards_a_miss(ours.value, 2), va="center", fontsize=8, color="white", weight="bold")
            for peer, mark in (("cublas block", "|"), ("cublas tensor", "D")):
                for other in speed(rows, "deep_gemm", peer, ""):
                    axes.plot(other.value, place, mark, color="black", markersize=4 if mark == "D" else 9, markeredgewidth=1.5)
        sizes = [tuple(entry["shape"].values()) for entry in found]
        names = [shape_name(*size) if len(set(size)) == 1 else f"{size[1]}×{size[2]}" for size in sizes]
        axes.set(yticks=range(len(found)), title=f"M = {m}" if found[-1]["shape"]["m"] == m else f"M ≥ {m}")
        axes.set_yticklabels(names, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=FASTER), plt.Rectangle((0, 0), 1, 1, color=SLOWER),
               plt.Line2D([], [], marker="|", color="black", linestyle="", markersize=9, markeredgewidth=1.5),
               plt.Line2D([], [], marker="D", color="black", linestyle="", markersize=4)]  # fmt: skip
    meanings = ["library, faster than DeepGEMM", "library, slower", "cuBLAS, same block scales", "cuBLAS, one scale per tensor"]
    figure.legend(handles, meanings, loc="outside lower center", ncols=min(4, 2 * columns), frameon=False)
    figure.suptitle("Speed, DeepGEMM = 1.00; N×K, one H200")
    return figure


def plot_roofline(record: dict):
    """Every shape on the roofline of an H200: FLOP per byte against TFLOP/s, DeepGEMM's beside it. Returns the figure."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    intensity = np.logspace(0, 4, 200)
    peak, reading = bench.PEAK_FP8_FLOPS / 1e12, bench.READ_BYTES_PER_S / 1e12
    axes.plot(intensity, np.minimum(intensity * reading, peak), color="black", linewidth=1.2)
    axes.text(9e3, peak * 1.08, f"FP8 tensor cores: {peak:.0f} TFLOP/s", ha="right", fontsize=9)
    axes.text(1.15, 7.2, f"HBM: {reading:.2f} TB/s", fontsize=9, rotation=37)
    sizes = sorted({entry["shape"]["m"] for entry in entries(record)})
    colors = dict(zip(sizes, plt.get_cmap("viridis")(np.linspace(0, 0.92, len(sizes)))))
    hollow = {"markersize": 6, "markerfacecolor": "none", "markeredgecolor": report.COLORS["peer"]}
    for entry in entries(record):
        m, n, k = entry["shape"].values()
        rows, of_byte = by_name(entry), 2 * m * n * k / ((m + n) * k + 2 * m * n)
        if "deep_gemm" in rows:
            axes.plot(of_byte, rows["deep_gemm"]["tflops"], "o", **hollow)
        axes.plot(of_byte, rows[OURS]["tflops"], "o", markersize=4, color=colors[m])
    handles = [plt.Line2D([], [], marker="o", markersize=5, linestyle="", color=color) for color in colors.values()]
    handles.append(plt.Line2D([], [], marker="o", linestyle="", **hollow))
    axes.legend(handles, [f"M = {m}" for m in sizes] + ["DeepGEMM"], fontsize=8, frameon=False, ncols=2, loc="lower right")
    axes.set(xscale="log", yscale="log", xlim=(1, 1e4), ylim=(0.8, 4e3), xlabel="FLOP per byte, each operand moved once",
             ylabel="TFLOP/s", title="The library on the roofline of an H200")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_reading(record: dict):
    """Share of the reading ceiling with few tokens: a line over M for each weight, heavy ones thick. Returns the figure."""
    import matplotlib.pyplot as plt

    def shares(found, name):
        """M of the shapes that have such a row, and its per cent of the ceiling."""
        rows = [by_name(entry)[name] for entry in found if name in by_name(entry)]
        return [row["m"] for row in rows], [row["percent_of_bandwidth"] for row in rows]

    few = [entry for entry in entries(record) if entry["shape"]["m"] <= FEW]
    weights = sorted({(e["shape"]["n"], e["shape"]["k"]) for e in few}, key=lambda size: -size[0] * size[1])
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    for place, (n, k) in enumerate(weights):
        found = [entry for entry in few if (entry["shape"]["n"], entry["shape"]["k"]) == (n, k)]
        heavy = n * k >= HEAVY_BYTES
        axes.plot(*shares(found, OURS), "o-", linewidth=3 if heavy else 1.2, markersize=6 if heavy else 3,
                  color=colors[place % 10], label=f"{n}×{k}, {n * k / 1e6:.1f} MB")  # fmt: skip
        if heavy and any("deep_gemm" in by_name(entry) for entry in found):
            axes.plot(*shares(found, "deep_gemm"), "o--", linewidth=1.2, markersize=3, color=colors[place % 10],
                      label=f"{n}×{k}, DeepGEMM")  # fmt: skip
    axes.axhline(HEAVY_PERCENT, color="black", linewidth=1, linestyle="--", label=f"goal from {HEAVY_BYTES / 1e6:.0f} MB on")
    sizes = sorted({entry["shape"]["m"] for entry in few})
    axes.set(xscale="log", xticks=sizes, ylim=(0, 105), xlabel="M, rows of A", title="Decoding: bytes of all operands over time",
             ylabel=f"% of {bench.READ_BYTES_PER_S / 1e12:.2f} TB/s")  # fmt: skip
    axes.set_xticklabels(map(str, sizes))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", fontsize=8, frameon=False, title="weights N×K")
    return figure


PLOTS = {SPEED_PLOT: plot_speed, ROOFLINE_PLOT: plot_roofline, READING_PLOT: plot_reading}


def slower_markdown(record: dict | None) -> str:
    """Where DeepGEMM is faster: the counters of both, one row for each kernel. Padded groups, and plans without the library's tools for few
    tokens, are left out: the record has them, for comparison."""
    if record is None:
        return MISSING
    if not record["cases"]:
        return "\n".join(["In none of them.", *written_from(record, COUNTERS)])
    rows, refused = [], {}
    for entry in record["cases"]:
        if "error" in entry:
            refused[entry["case"]] = entry["error"]
        for row in entry["rows"]:
            if row["name"] in ("unpadded", "masked", "plan", "deep_gemm"):
                found = row["counters"]
                ours = row["name"] != "deep_gemm"
                rows.append((f"{entry['speed_of_deep_gemm']:.3f}" if ours else "", f"{found['cycles'] / 1e3:.1f}", f"{found['tensor_pipe']:.1f}",
                             f"{found['issue']:.1f}", f"{found['l2_bytes'] / 1e9:.2f}", f"{found['hbm_bytes'] / 1e9:.2f}", f"{found['hbm']:.0f}",
                             "library" if ours else "DeepGEMM", entry["case"] if ours else ""))  # fmt: skip
    header = ("speed, DeepGEMM = 1 | 1000 cycles of the busiest SM | tensor cores busy, % | issue slots used, % | GB through L2 | "
              "GB from and to HBM | HBM, % of its peak | kernel | case")  # fmt: skip
    without = ["", "No counters: " + "; ".join(f"{case}, `{error}`" for case, error in refused.items())] if refused else []
    return "\n".join([*table(header, rows, texts=2), *without, *written_from(record, COUNTERS)])


# ---- writing --------------------------------------------------------------------------------------------------------


def generated() -> dict[tuple[str, str], str]:
    """All that is written from the records: (file, mark) -> text."""
    library, moe, host, search, layer, counters = (report.published(name) for name in (LIBRARY, MOE, HOST, SEARCH, LAYER, COUNTERS))
    parts = {"targets": targets_markdown(library, moe, host, report.published(WAVES)), "dense": dense_markdown(library),
             "decode": decode_markdown(library), "moe": moe_markdown(moe), "host": host_markdown(host),
             "search": search_markdown(search), "invariant": invariant_markdown(library), "layer": layer_markdown(layer),
             "slower": slower_markdown(counters)}  # fmt: skip
    return {("README.md", "library"): readme_markdown(library, moe)} | {(str(PAGE), mark): text for mark, text in parts.items()}


def write_docs() -> list[str]:
    """Rewrite the page, the README's table, and the plots where there is a record to draw. Returns what was written."""
    root, record, written = stage.root(), report.published(LIBRARY), []
    for (file, mark), text in generated().items():
        report.write_between(root / file, mark, text)
        written += [file] * (file not in written)
    for name, plot in PLOTS.items() if record else ():
        path = root / "docs" / "plots" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        plot(record).savefig(path, dpi=130, metadata={"Software": None})
        written.append(str(path.relative_to(root)))
    return written
