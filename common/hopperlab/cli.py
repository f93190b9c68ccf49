"""The command line: ``hopperlab run | check | bench | profile | trace | exercises | hint | report | doctor``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hopperlab import bench as benchmark
from hopperlab import capability, check as checker, counters, exercise, report, telemetry
from hopperlab import stage as stages
from hopperlab.kernel import simulation
from hopperlab.quantize import ScaledTensor
from hopperlab.sim import trace as tracing

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
# A log (a pipe, CI) has no width; give it one that fits the ladder.
console = Console(width=None if sys.stdout.isatty() else 130)

StageOption = Annotated[str, typer.Option("--stage", help='Only stages whose folder starts with this, e.g. "01".')]
MAX_CHECKERS = 8  # processes; each holds half a GiB, on a GPU too
RecordOption = Annotated[Path, typer.Option("--record", help="Where the JSON record goes.")]
ShapeOption = Annotated[str, typer.Option("--shape", help="Shape that is timed, MxNxK.")]


def _stages(selector: str) -> list[stages.Stage]:
    try:
        return stages.find(selector)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None


def _folders(selector: str, single: bool = False) -> list[Path]:
    try:
        return stages.matching(selector, single)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"--shape: got {text!r}, allowed is MxNxK, three positive integers, e.g. 4096x4096x4096")
    return tuple(map(int, parts))


def _progress(unit: str) -> Progress:
    # Disabled where no one watches (a pipe, CI): a bar would only clutter the log.
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn(),
                    console=console, transient=True, disable=not console.is_terminal)  # fmt: skip


def check_step(stage: stages.Stage, step: stages.Step, cases: list[stages.Case]) -> dict:
    """Check one step on some cases; returns its row of a record."""
    rows = []
    for case in cases:
        a, b = checker.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats, device=capability.device())
        start = time.perf_counter()
        try:
            # Cases with a K that no TMA map can have are here on purpose; the advice to pad it is for users.
            warnings.filterwarnings("ignore", message=".*which TMA needs")
            verdict = checker.run(step.gemm, a, b, case.out_dtype, expected=step.expected, bound=step.bound, tile=step.tile)
            row = {"ok": verdict.ok, "message": verdict.message, "max_rel_error": verdict.max_rel_error, "diff": verdict.diff,
                   "modelled": verdict.modelled, "digest": verdict.digest}  # fmt: skip
        except Exception as error:  # one broken kernel must not hide the others; it fails the run below
            row = {"ok": False, "message": f"{type(error).__name__}: {error}", "max_rel_error": float("nan"), "diff": float("nan"),
                   "modelled": step.expected is not None, "digest": ""}  # fmt: skip
        rows.append({"case": str(case), **row, "seconds": time.perf_counter() - start})
    machine = capability.machine()
    if step.language == "triton" and machine == "simulator":
        machine = "Triton interpreter"
    return {"stage": stage.name, "step": step.name, "title": step.title, "language": step.language, "machine": machine,
            "ok": all(row["ok"] for row in rows), "cases": rows}  # fmt: skip


def _compare_bits(row: dict, recorded: dict | None) -> None:
    """Set row["same_bits"]: whether outputs equal the H200's recorded ones, for arithmetic that is modelled to the bit."""
    theirs = {case["case"]: case for case in (report.published_step(recorded, row["stage"], row["step"]) or {}).get("cases", [])}
    pairs = [(case, theirs[case["case"]]) for case in row["cases"] if case["modelled"] and case["case"] in theirs]
    row["same_bits"] = all(mine["digest"] == other["digest"] for mine, other in pairs) if pairs else None
    row["ok"] = row["ok"] and row["same_bits"] is not False


def _check_all(selector: str) -> list[dict]:
    found = _stages(selector)
    work = [(stage, step) for stage in found for step in stage.steps]
    recorded, rows = report.published(), []
    processes = min(os.cpu_count() or 1, len(work), MAX_CHECKERS)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(_progress("steps"))
        task = progress.add_task("checking", total=len(work))
        if processes > 1:  # the simulator, and compiling for a GPU, are one thread of Python; steps do not depend on one another
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)))
            made = pool.map(_check_by_name, *zip(*((stage.name, step.name) for stage, step in work)))
        else:
            made = (_check_by_name(stage.name, step.name) for stage, step in work)
        for stage, step in work:
            progress.update(task, description=f"{stage.name} {step.name}")
            row = next(made)
            if not capability.has_hopper():
                _compare_bits(row, recorded)
            rows.append(row)
            progress.advance(task)
    return rows


def _check_by_name(stage_name: str, step_name: str) -> dict:
    """check_step on all shapes this machine is for, maybe in a process of its own."""
    stage = stages.find(stage_name)[0]
    step = next(step for step in stage.steps if step.name == step_name)
    shapes = stages.SHARED_SHAPES + (stages.GPU_SHAPES if capability.has_hopper() else ())
    return check_step(stage, step, list(stages.cases(step, shapes)))


MODELLED_PRODUCTS = 4096**3  # that the model multiplies for one check: seconds on a GPU. Larger outputs are checked in part


def every_row(a: ScaledTensor, step: int) -> ScaledTensor:
    """Every ``step``-th row of A: rows of a product do not depend on one another. For recipes with a scale per tensor or per row."""
    if step == 1:
        return a
    if a.recipe == "128x128":
        raise ValueError(f"a: recipe {a.recipe!r} shares scales between rows; allowed are 'tensor', 'row', '1x128'")
    scale = a.scale if a.recipe == "tensor" else a.scale[::step].contiguous()
    return ScaledTensor(a.data[::step].contiguous(), scale, a.recipe)


def _time_all(selector: str, rows: list[dict], shape: tuple[int, int, int]) -> dict:
    """Time every correct step beside every peer, on the GPU; fills row["timing"]. Returns the rest of the record."""
    m, n, k = shape
    sets = benchmark.input_sets(m, n, k)
    running, missing = benchmark.peers(sets)
    steps = {(stage.name, step.name): step for stage in _stages(selector) for step in stage.steps}
    ours, outputs = {}, {}
    for row in rows:
        if not row["ok"]:
            continue
        step = steps[row["stage"], row["step"]]
        recipes = step.recipes[0]
        operands = [inputs.quantised(*recipes) for inputs in sets]
        outs = [torch.empty(m, n, dtype=step.out_dtypes[0], device="cuda") for _ in sets]
        made = [step.prepare(a, b) if step.prepare else {} for a, b in operands]
        name = f"{row['stage']} {row['step']}"
        ours[name] = [lambda a=a, b=b, out=out, more=more, step=step: step.gemm(a, b, out, **more)
                      for (a, b), out, more in zip(operands, outs, made)]  # fmt: skip
        outputs[name] = (row, step, operands[0], outs[0])
    calls = {**ours, **{name: entry[0] for name, entry in running.items()}}
    with console.status(f"timing {len(calls)} candidates at {m}x{n}x{k}"), telemetry.Recorder() as recorder:
        timings = benchmark.measure(calls)
    known = {}  # steps of equal arithmetic share an expected output: at this size the model takes seconds
    for name, (row, step, (a, b), out) in outputs.items():
        out.fill_(float("nan"))
        ours[name][0]()
        every = max(1, m * n * k // MODELLED_PRODUCTS)
        a, out = every_row(a, every), out[::every].contiguous()
        model = (step.expected or step.bound, step.recipes[0], out.dtype)
        if model not in known:
            known[model] = model[0](a, b, out.dtype)
        expected, bound = (known[model], None) if step.expected else (None, known[model])
        verdict = checker.compare(out, a, b, expected=expected, bound=bound, tile=step.tile)
        row["ok"] = row["ok"] and verdict.ok
        sample = f", 1 of {every} rows checked" if every > 1 else ""
        row["cases"].append({"case": f"timed: {m}x{n}x{k}{sample}", "ok": verdict.ok, "message": verdict.message, "modelled": verdict.modelled,
                             "max_rel_error": verdict.max_rel_error, "diff": verdict.diff, "digest": verdict.digest, "seconds": 0.0})  # fmt: skip
        row["timing"] = benchmark.row(name, timings[name], m, n, k, error=verdict.max_rel_error,
                                      launches=benchmark.count_launches(ours[name][0]))  # fmt: skip
    peer_rows = []
    for name, (peer_calls, out) in running.items():
        out.fill_(float("nan"))
        peer_calls[0]()
        peer_rows.append(benchmark.row(name, timings[name], m, n, k, error=benchmark.peer_error(name, sets[0], out),
                                       launches=benchmark.count_launches(peer_calls[0])))  # fmt: skip
    return {"shape": {"m": m, "n": n, "k": k}, "telemetry": recorder.summary(), "peers": peer_rows, "peers_missing": missing}


def _print_failures(rows: list[dict]) -> None:
    for row in rows:
        for case in row["cases"]:
            if not case["ok"]:
                console.print(f"[bold red]{row['stage']} {row['step']}, {case['case']}[/]")
                console.print(case["message"], markup=False, highlight=False)
        if row.get("same_bits") is False:
            console.print(f"[bold red]{row['stage']} {row['step']}: outputs differ from the bits an H200 wrote[/] (docs/results/{report.LADDER})")


@app.command()
def run(stage: StageOption = "", record: RecordOption = Path("results/ladder.json"), shape: ShapeOption = "4096x4096x4096"):
    """Check every step found under stages/, time it where there is a Hopper GPU, and print the ladder."""
    shape = _shape(shape)
    rows = _check_all(stage)
    result = {"kind": "ladder", **report.environment(), "steps": rows, "peers": [], "peers_missing": {}}
    if capability.has_hopper():
        result |= _time_all(stage, rows, shape)
    console.print(report.ladder_table(result))
    if result["peers"]:
        console.print(report.peers_table(result))
    _print_failures(rows)
    console.print(f"record: {report.save(result, record)}")
    raise typer.Exit(0 if all(row["ok"] for row in rows) else 1)


@app.command()
def check(stage: StageOption = ""):
    """Check every step on several shapes and say where a wrong one goes wrong."""
    rows = _check_all(stage)
    for row in rows:
        for case in row["cases"]:
            mark = "[green]ok[/]  " if case["ok"] else "[bold red]FAIL[/]"
            console.print(f"{mark} {row['stage']} {row['step']:15} {case['case']:55} ", end="")
            console.print(case["message"], markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(row["ok"] for row in rows) else 1)


@app.command()
def bench(stage: StageOption = "", record: RecordOption = Path("results/bench.json"), shape: ShapeOption = "4096x4096x4096"):
    """Time the steps and their peers at one shape. Needs a Hopper GPU: the simulator models no time."""
    size = _shape(shape)
    if not capability.has_hopper():
        console.print(f"bench: {capability.hopper().sentence()}")
        raise typer.Exit(2)
    rows = [
        {"stage": found.name, "step": step.name, "title": step.title, "language": step.language, "machine": capability.machine(),
         "ok": True, "cases": []}
        for found in _stages(stage) for step in found.steps
    ]  # fmt: skip
    result = {"kind": "bench", **report.environment(), "steps": rows} | _time_all(stage, rows, size)
    console.print(report.ladder_table(result))
    console.print(report.peers_table(result))
    _print_failures(rows)
    console.print(f"record: {report.save(result, record)}")
    raise typer.Exit(0 if all(row["ok"] for row in rows) else 1)


@app.command()
def profile(stage: StageOption = "", record: RecordOption = Path("results/counters.json"), shape: ShapeOption = "2048x2048x2048"):
    """Read the steps' hardware counters with Nsight Compute. Needs a Hopper GPU and ncu."""
    size = _shape(shape)
    if not capability.has_hopper():
        console.print(f"profile: {capability.hopper().sentence()}")
        raise typer.Exit(2)
    result = counters.record(stage, size)
    table = Table("counter", *(f"{row['stage'][:2]} {row['step']}" for row in result["steps"]))
    for key, meaning in result["meaning"].items():
        table.add_row(f"{key}: {meaning}", *(f"{row.get('counters', {}).get(key, float('nan')):,.4g}" for row in result["steps"]))
    console.print(table)
    refused = [row for row in result["steps"] if "error" in row]
    for row in refused:
        console.print(f"{row['stage']} {row['step']}: {row['error']}", markup=False)
    console.print(f"record: {report.save(result, record)}")
    raise typer.Exit(1 if refused else 0)


@app.command()
def trace(stage: Annotated[str, typer.Option("--stage", help='The stage: the beginning of its folder\'s name, e.g. "04".')],
          step: Annotated[str, typer.Option("--step", help="Name of the step, as `run` prints it; the stage's last one if not given.")] = "",
          shape: Annotated[str, typer.Option("--shape", help="Shape that is traced, MxNxK.")] = "128x128x512",
          record: Annotated[Path, typer.Option("--record", help="Chrome trace to write; open it at ui.perfetto.dev.")] = Path("results/trace.json"),
          draw: Annotated[Path | None, typer.Option("--draw", help="Also draw it into this PNG.")] = None):  # fmt: skip
    """Run one step on the simulator and show its pipeline: who did what in which order. It shows order, not time."""
    m, n, k = _shape(shape)
    (folder,) = _folders(stage, single=True)
    steps = [found for found in stages.load(folder).steps if found.language == "cuda"]
    chosen = [found for found in steps if found.name == step] if step else steps[-1:]
    if not chosen:
        raise typer.BadParameter(f"--step: got {step!r}, there are {[found.name for found in steps]}")
    a, b = checker.problem(m, n, k, recipes=chosen[0].recipes[0], formats=chosen[0].formats[0])
    with simulation(trace=True) as reports:
        chosen[0].gemm(a, b, torch.zeros(m, n, dtype=chosen[0].out_dtypes[0]))
    spans = reports[-1].trace
    if not spans:
        raise typer.BadParameter(f"--step: {chosen[0].name} of {folder.name} has nothing to draw: no copy, no mbarrier and no wgmma "
                                 "works beside its threads")  # fmt: skip
    record.parent.mkdir(parents=True, exist_ok=True)
    tracing.save(spans, record)
    console.print(str(reports[-1]), markup=False, highlight=False)
    console.print(f"trace: {record} (open it at ui.perfetto.dev)")
    if draw is not None:
        tracing.draw(spans).figure.savefig(draw, dpi=130, bbox_inches="tight")
        console.print(f"drawing: {draw}")


@app.command()
def exercises(write: Annotated[bool, typer.Option(help="Write missing exercise files from the finished kernels.")] = False,
              reset: Annotated[bool, typer.Option(help="With --write: replace files that hold answers too.")] = False,
              stage: StageOption = ""):  # fmt: skip
    """List the exercises and what is solved, or write their files."""
    folders = _folders(stage)
    if reset and not write:
        raise typer.BadParameter("--reset: it replaces what --write writes; give both")
    if write:
        for folder in folders:
            if (folder / "hints.md").exists():
                console.print(f"{folder.name}: {exercise.write(folder, reset)}")
    table = Table("stage", "blank", "lines", "state", "what to do")
    for name, found in exercise.progress(stage):
        for blank in found:
            state = "empty" if blank.empty else "[green]filled in[/]"
            table.add_row(name, str(blank.number), str(blank.lines), state, blank.task)
    console.print(table)
    console.print("Edit stages/NN_name/exercise.cu, then run: pytest stages/NN*", markup=False)


@app.command()
def hint(stage: str, blank: int, level: Annotated[int, typer.Argument(help="1 is the gentlest.")] = 1):
    """Print one hint for a blank of a stage's exercise: hopperlab hint 01 3, then hopperlab hint 01 3 2 for the next."""
    (folder,) = _folders(stage, single=True)
    found = exercise.hints(folder)
    if blank not in found:
        raise typer.BadParameter(f"blank: got {blank}, {folder.name} has {sorted(found)}")
    if not 1 <= level <= len(found[blank]):
        raise typer.BadParameter(f"level: got {level}, blank {blank} has hints 1 to {len(found[blank])}")
    console.print(found[blank][level - 1], markup=False)
    if level < len(found[blank]):
        console.print(f"\n({len(found[blank]) - level} more: hopperlab hint {stage} {blank} {level + 1})", markup=False)


@app.command("report")
def report_command(lessons: Annotated[bool, typer.Option("--lessons", help="Execute the lessons here and keep their outputs.")] = False,
                   stage: StageOption = ""):  # fmt: skip
    """Rewrite the README's table and the plots from docs/results."""
    folders = _folders(stage)
    if lessons:
        for folder in folders:
            if (folder / "lesson.ipynb").exists():
                report.execute_lesson(folder / "lesson.ipynb")
                console.print(f"executed {folder.name}/lesson.ipynb", markup=False)
    for line in report.write_docs():
        console.print(line, markup=False)


@app.command()
def doctor():
    """Say in one screen what this machine can run, and for each thing that is wrong, the fix."""
    table = Table("", "what", "found", "for", title="What this machine can run", title_justify="left")
    missing = []
    for item in capability.table():
        mark = "[green]ok[/]" if item.ok else "[bold red]missing[/]" if item.required else "[yellow]none[/]"
        table.add_row(mark, item.name, item.found, item.what_for)
        if not item.ok and item.fix:
            missing.append((item, "[bold red]fix[/]" if item.required else "[yellow]note[/]"))
    console.print(table)
    for item, mark in missing:
        console.print(f"{mark} {item.name}: ", end="")
        console.print(item.fix, markup=False, highlight=False)
    console.print(f"CUDA kernels run on: {capability.machine()}.  Triton kernels run on: "
                  f"{capability.machine() if capability.has_hopper() else 'Triton interpreter'}.", markup=False, highlight=False)  # fmt: skip
    raise typer.Exit(1 if any(item.required and not item.ok for item in capability.table()) else 0)
