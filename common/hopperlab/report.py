"""Records, and the tables and plots made from them. Numbers in the README, docs and lessons come from here, never by hand.

A record is one JSON file: what was measured, on which card at which clocks, with which versions, from which commit.
Records of an H200 that the project publishes lie in ``docs/results/``; what a run writes by itself goes to ``results/``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path


from hopperlab import bench, capability, stage, telemetry

PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-ml-py", "numpy", "sgl-deep-gemm")
LADDER = "ladder.json"
PARALLEL, PARALLEL_PLOT = "08_parallel.json", "parallel.png"
COLORS = {"cuda": "#76b900", "triton": "#7a5cc4", "peer": "#9aa0a6"}


# ---- records --------------------------------------------------------------------------------------------------------


def environment() -> dict:
    """Machine, versions, commit and date: the part every record shares."""
    from hopperlab.compile import nvrtc_version

    versions = {"python": platform.python_version(), "nvrtc": "{}.{}".format(*nvrtc_version())}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {"machine": capability.machine(), "cpu_count": os.cpu_count()}
    if capability.has_hopper():
        machine |= telemetry.card()
    return {"date": telemetry.now(), "commit": _commit(), "machine": machine, "versions": versions}


def _commit() -> str:
    if "HOPPERLAB_COMMIT" in os.environ:  # a copy of the tree without its history
        return os.environ["HOPPERLAB_COMMIT"]
    git = lambda *words: subprocess.run(["git", "-C", str(stage.root()), *words], capture_output=True, text=True)  # noqa: E731
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    except OSError:
        return "unknown"
    return head.stdout.strip() + (" with uncommitted changes" if changed else "") if head.returncode == 0 else "unknown"


def save(record: dict, path: Path) -> Path:
    """Write a record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return path


def published(name: str = LADDER) -> dict | None:
    """A record the project publishes, or None when there is none yet."""
    path = stage.root() / "docs" / "results" / name
    return json.loads(path.read_text()) if path.exists() else None


def published_step(record: dict | None, stage_name: str, step_name: str) -> dict | None:
    """The row of one step in a published ladder, or None."""
    for row in (record or {}).get("steps", []):
        if (row["stage"], row["step"]) == (stage_name, step_name):
            return row
    return None


def last_step(rows: list[dict], row: dict) -> dict | None:
    """The timed step before this one on the ladder in the same language and with the same kind of output, for the speed-up."""
    kind = lambda r: (r["language"], r["cases"][0]["case"].rpartition(" -> ")[2])  # noqa: E731
    earlier = [r for r in rows[: rows.index(row)] if r.get("timing") and kind(r) == kind(row)]
    return earlier[-1] if earlier else None


# ---- tables ---------------------------------------------------------------------------------------------------------


def ladder_table(record: dict):
    """The ladder as a rich table: one line per step, with the recorded H200 figure where this machine is no Hopper GPU."""
    from rich.table import Table

    on_gpu = record["machine"]["machine"] != "simulator"
    recorded = None if on_gpu else published()
    table = Table(title=_title(record), title_justify="left", header_style="bold")
    for name in ("stage", "step", "machine", "correct", "error", "time"):
        table.add_column(name, justify="right" if name in ("error", "time") else "left")
    prefix = "" if on_gpu else "H200: "
    for name in ("TFLOP/s", "% of peak", "x last step"):
        table.add_column(prefix + name, justify="right")
    for row in record["steps"]:
        passed = sum(case["ok"] for case in row["cases"])
        correct = f"[green]yes[/] {passed}/{len(row['cases'])}" if row["ok"] else f"[bold red]NO[/] {passed}/{len(row['cases'])}"
        if row.get("same_bits") is not None:
            correct += ", H200's bits" if row["same_bits"] else ", [bold red]not H200's bits[/]"
        error = max((case["max_rel_error"] for case in row["cases"]), default=0.0)
        rows, source = (record["steps"], row) if on_gpu else ((recorded or {}).get("steps", []), None)
        source = source or published_step(recorded, row["stage"], row["step"])
        timing = (source or {}).get("timing")
        time = _duration(timing["microseconds"] / 1e6) if on_gpu and timing else _duration(sum(c["seconds"] for c in row["cases"]))
        shown = _figures(rows, source) if timing else ("-", "-", "-")
        table.add_row(row["stage"][:2], row["step"], row["machine"], correct, f"{error:.0e}", time, *shown)
    if on_gpu:
        table.caption = "time: one {m}x{n}x{k} call; ".format(**record["shape"]) + f"peak: {bench.PEAK_FP8_FLOPS / 1e12:.0f} TFLOP/s dense FP8"
    else:
        table.caption = ("time: all checks of the step on this machine, which says nothing about a GPU; " + (
            "H200 figures: {m}x{n}x{k}, ".format(**recorded["shape"]) + origin(recorded) if recorded else "no H200 record yet"))  # fmt: skip
    return table


def peers_table(record: dict):
    """What the peers measured in the same run."""
    from rich.table import Table

    table = Table(title="Peers, same run, same data", title_justify="left", header_style="bold")
    for name in ("peer", "error", "time", "TFLOP/s", "% of peak"):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for row in record["peers"]:
        table.add_row(row["name"], f"{row['max_rel_error']:.0e}", _duration(row["microseconds"] / 1e6),
                      f"{row['tflops']:.1f}", f"{row['percent_of_peak']:.1f}")  # fmt: skip
    for name, reason in record["peers_missing"].items():
        table.add_row(name, "-", "not run", reason, "")
    return table


def _figures(rows: list[dict], row: dict) -> tuple[str, str, str]:
    timing, last = row["timing"], last_step(rows, row)
    gain = f"{last['timing']['microseconds'] / timing['microseconds']:.1f}" if last else "-"
    return f"{timing['tflops']:.2f}", f"{timing['percent_of_peak']:.2f}", gain


def _duration(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def _title(record: dict) -> str:
    return f"The ladder, on {record['machine'].get('name') or 'the simulator (no Hopper GPU)'}, commit {record['commit']}"


def origin(record: dict) -> str:
    """Card, driver, what it did during the run where that was recorded, date and commit: one line beside every published table."""
    seen = record.get("telemetry")
    run = f"SM clock {seen['sm_clock_mhz']['median']} MHz (median), {seen['power_w']['max']:.0f} W (max), " if seen else ""
    return f"{record['machine']['name']}, driver {record['machine']['driver']}, {run}{record['date'][:10]}, commit {record['commit']}"


def ladder_markdown(record: dict) -> str:
    """The published ladder for the README."""
    lines = ["| stage | step | ms | TFLOP/s | % of FP8 peak | × last step |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in record["steps"]:
        if row.get("timing"):
            tflops, percent, gain = _figures(record["steps"], row)
            lines.append(f"| {row['stage']} | {row['step']} | {row['timing']['microseconds'] / 1e3:.3f} | {tflops} | {percent} | {gain} |")
    for row in record["peers"]:
        lines.append(f"| peer | {row['name']} | {row['microseconds'] / 1e3:.3f} | {row['tflops']:.1f} | {row['percent_of_peak']:.1f} | |")
    shape = "{m}×{n}×{k}".format(**record["shape"])
    return "\n".join([*lines, "", f"*{shape}, bf16 out. {origin(record)}. Written by `make docs` from docs/results/{LADDER}.*"])


def sent_bytes(row: dict) -> int:
    """What all ranks together send in one call of a layer of a parallel record."""
    return sum(count for name, count in row["bytes_moved"].items() if name != "dispatch_in_bf16")


def parallel_markdown(record: dict | None) -> str:
    """Layers on one GPU and on several, for docs/parallel.md."""
    if record is None:
        return "Not recorded yet."
    lines = [f"![Milliseconds of each layer on one GPU and on all, and of the collectives alone](plots/{PARALLEL_PLOT})", "",
             "| layer | one GPU, ms | all, ms | times faster | collectives alone | MB sent | bits |",
             "| --- | ---: | ---: | ---: | ---: | ---: | --- |"]  # fmt: skip
    for row in record["layers"]:
        bits = "equal" if row["bit_equal"] else f"worst row off by {row['worst_row_error']:.0e}"
        lines.append(f"| {row['name']} | {row['seconds_one_rank'] * 1e3:.3f} | {row['seconds'] * 1e3:.3f} | {row['speedup']:.2f} | "
                     f"{row['communication_seconds'] / row['seconds']:.0%} | {sent_bytes(row) / 1e6:.1f} | {bits} |")  # fmt: skip
    sizes = ", ".join(f"{name} {value}" for name, value in record["sizes"].items() if name != "rounds")
    lines += ["", f"*{record['ranks']} GPU{'s' * (record['ranks'] > 1)}, {record['collectives']}; {sizes}. {origin(record)}. Written by `make docs` from "
              f"docs/results/{PARALLEL}.*"]  # fmt: skip
    if "failure" in record:
        seen = record["failure"]
        lines += ["", f"With a timeout of {seen['timeout_seconds']:.0f} s, a rank that failed made the first one raise {seen['raised']} "
                  f"after {seen['seconds']:.1f} s."]  # fmt: skip
    return "\n".join(lines)


def update_readme(path: Path, record: dict) -> bool:
    """Replace the table between the ladder marks of a Markdown file. Returns whether the file changed."""
    return write_between(path, "ladder", ladder_markdown(record))


def write_between(path: Path, mark: str, content: str) -> bool:
    """Replace what lies between <!-- mark:begin --> and <!-- mark:end --> in a Markdown file. Returns whether it changed.

    Raises ValueError for a file without these lines.
    """
    text = path.read_text()
    pattern = re.compile(rf"(<!-- {mark}:begin -->\n).*?(<!-- {mark}:end -->)", re.S)
    if not pattern.search(text):
        raise ValueError(f"{path} has no <!-- {mark}:begin --> and <!-- {mark}:end --> lines to write between")
    new = pattern.sub(lambda match: match[1] + content + "\n" + match[2], text)
    path.write_text(new)
    return new != text


# ---- plots ----------------------------------------------------------------------------------------------------------


def plot_ladder(record: dict):
    """TFLOP/s of every step and peer, one bar each, on a logarithmic axis. Returns the matplotlib figure."""
    import matplotlib.pyplot as plt

    entries = [(f"{row['stage'][:2]} {row['step']}", row["timing"]["tflops"], row["language"]) for row in record["steps"] if row.get("timing")]
    entries += [(row["name"], row["tflops"], "peer") for row in record["peers"]]
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(entries) + 1.7), layout="constrained")
    names, values, kinds = zip(*entries[::-1])
    bars = axes.barh(names, values, color=[COLORS[kind] for kind in kinds])
    axes.axvline(bench.PEAK_FP8_FLOPS / 1e12, color="black", linewidth=1, linestyle="--")
    labels = axes.bar_label(bars, [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values], padding=4)
    for label in labels:
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.text(bench.PEAK_FP8_FLOPS / 1e12, len(entries) - 0.4, "FP8 peak ", ha="right", va="bottom", fontsize=8)
    axes.set(xscale="log", xlim=(min(values) / 2, 6e3), xlabel="TFLOP/s (logarithmic)",
             title="{m}×{n}×{k}, e4m3 × e4m3 → bf16, one H200".format(**record["shape"]))  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, ["CUDA", "Triton", "peer"], loc="outside lower center", ncols=3, frameon=False)
    return figure


def plot_roofline(record: dict):
    """The roofline of an H200 with the ladder's steps on it: arithmetic intensity against TFLOP/s."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    intensity = np.logspace(0, 4, 200)
    memory = intensity * bench.READ_BYTES_PER_S / 1e12
    roofs = ((bench.PEAK_FP8_FLOPS, "FP8 tensor cores", "-"), (bench.PEAK_FP32_FLOPS, "FP32 on CUDA cores", "--"))
    for peak, name, style in roofs:
        axes.plot(intensity, np.minimum(memory, peak / 1e12), style, color="black", linewidth=1.2)
        axes.text(9e3, peak / 1e12 * 1.08, f"{name}: {peak / 1e12:.0f} TFLOP/s", ha="right", va="bottom", fontsize=9)
    axes.text(2.2, 13, f"HBM: {bench.READ_BYTES_PER_S / 1e12:.2f} TB/s", rotation=33, fontsize=9)
    shape = record["shape"]
    flops = 2 * shape["m"] * shape["n"] * shape["k"]
    moved = (shape["m"] + shape["n"]) * shape["k"] + 2 * shape["m"] * shape["n"]
    for row in record["steps"]:
        if row.get("timing"):
            axes.plot(flops / moved, row["timing"]["tflops"], "o", color=COLORS[row["language"]])
            axes.annotate(f" {row['stage'][:2]} {row['step']}", (flops / moved, row["timing"]["tflops"]), fontsize=8, va="center",
                          xytext=(6, 0), textcoords="offset points")  # fmt: skip
    for row in record["peers"]:
        if row["name"] == "cublas tensor":
            axes.plot(flops / moved, row["tflops"], "s", color=COLORS["peer"])
            axes.annotate("  cublas tensor", (flops / moved, row["tflops"]), fontsize=8, va="top")
    axes.set(xscale="log", yscale="log", xlim=(1, 1e4), ylim=(0.5, 4e3), xlabel="FLOP per byte of HBM traffic, each operand moved once",
             ylabel="TFLOP/s", title="Roofline of an H200, {m}×{n}×{k}".format(**shape))  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_parallel(record: dict):
    """Each layer's milliseconds on one GPU and on all of them, and of the collectives alone. Returns the matplotlib figure."""
    import matplotlib.pyplot as plt

    rows, ranks = record["layers"][::-1], record["ranks"]  # from the bottom up
    figure, axes = plt.subplots(figsize=(8.5, 0.6 * len(rows) + 1.6), layout="constrained")
    bars = ((0.25, "seconds_one_rank", COLORS["peer"], "one GPU, all weights and tokens"),
            (-0.05, "seconds", COLORS["cuda"], "all GPUs" if ranks > 1 else "one GPU, as one rank of one"),
            (-0.3, "communication_seconds", COLORS["triton"], "collectives alone"))  # fmt: skip
    for offset, key, color, label in bars:
        height = 0.2 if key == "communication_seconds" else 0.3
        axes.barh([place + offset for place in range(len(rows))], [row[key] * 1e3 for row in rows], height, color=color, label=label)
    for place, row in enumerate(rows):
        axes.text(row["seconds"] * 1e3, place - 0.05, f" {row['speedup']:.2f}×", va="center", fontsize=8)
    axes.set(yticks=range(len(rows)), yticklabels=[row["name"] for row in rows], xlabel="ms",
             title=f"{ranks} rank{'s' * (ranks > 1)}, {record['collectives']}, {record['sizes']['tokens']} tokens")  # fmt: skip
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def write_docs() -> list[str]:
    """Rewrite everything generated from docs/results. Returns what was written."""
    import matplotlib

    from hopperlab import library_report

    matplotlib.use("Agg")
    root, record, parallel = stage.root(), published(), published(PARALLEL)
    if record is None:
        return [f"nothing to write: docs/results/{LADDER} does not exist. Run `hopperlab run --record docs/results/{LADDER}` on a Hopper GPU."]
    update_readme(root / "README.md", record)
    write_between(root / "docs" / "parallel.md", "parallel", parallel_markdown(parallel))
    written = list(dict.fromkeys(["README.md", "docs/parallel.md", *library_report.write_docs()]))
    path = root / "docs" / "plots" / "ladder.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    plot_ladder(record).savefig(path, dpi=130, metadata={"Software": None})
    if parallel is not None:
        plot_parallel(parallel).savefig(path.with_name(PARALLEL_PLOT), dpi=130, metadata={"Software": None})
        written.append(f"docs/plots/{PARALLEL_PLOT}")
    return [*written, str(path.relative_to(root))]


def execute_lesson(path: Path, save_to: Path | None = None) -> None:
    """Run a notebook top to bottom in a fresh kernel, from its own folder, and save it with its outputs.

    ``save_to`` keeps the original and writes elsewhere. Raises nbclient's CellExecutionError with the failing cell.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    package = str(Path(__file__).resolve().parents[1])  # found also when nothing is installed
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])})
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)  # times of day: a diff on every run
    nbformat.write(notebook, save_to or path)
