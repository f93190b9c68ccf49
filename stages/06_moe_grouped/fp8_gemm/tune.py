"""Plans measured on this machine, in a table that outlives the process.

    fp8_gemm.tune([(4096, 7168), (128, 24576, 1536)])       # or: python -m fp8_gemm tune 4096x7168 128x24576x1536

times the plans that the cost model (plan.py) finds most promising and keeps the fastest. From then on calls of such a problem
take it, in this process and in every later one on such a GPU, unless they override the plan themselves. explain() says so.
FP8_GEMM_TUNED=0 leaves the table unread. A plan with another split of K sums in another order, so a tuned call may round
differently from an untuned one; batch_invariant=True is an override, which the table never touches.

The table is a folder beside the compiled kernels, tuned/<GPU, SMs, hash of the kernels' source>/, with one JSON file a problem:
each is replaced atomically, so processes that tune at the same time need no lock and lose nothing. It can be copied into an
image. A file that cannot be read is a warning and a miss.
"""

import functools
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8_gemm.dispatch import as_the_kernel_sees, compile_all, problems_of, synthetic
from fp8_gemm.plan import Plan, bucketed, plan, promising
from fp8_gemm.problem import Operands, Problem
from hopperlab import capability
from hopperlab.compile import INCLUDE_DIRECTORY, cache_directory

TABLE_VARIABLE = "FP8_GEMM_TUNED"  # "0": plans come from the model alone
CANDIDATES, SEARCH_ROUNDS = 24, 3  # plans that are timed, and how often each in a first pass
FINALISTS, FINAL_ROUNDS = 3, 11  # the fastest of these are timed again beside the model's plan
LEAST_GAIN = 0.01  # of the time; less is noise, and the model's plan stays
MOST_SETS = 16  # sets of operands, used in turn so that weights come from memory and not from L2
LARGEST_DIFFERENCE = 2.0**-7  # of two plans' outputs, as part of the largest: twice the rounding of bfloat16, the coarsest

# The options of plan() that an entry may hold: what tells the model's candidates for one problem apart.
OVERRIDES = {"swap_ab": bool, "block_m": int, "block_n": int, "split_k": int, "multicast": int, "ctas_per_sm": int}


@dataclass(frozen=True)
class Tuned:
    """What tune found for one problem. print() it.

    plan, seconds              the fastest, and its time for one call
    model_plan, model_seconds  what the cost model chooses, timed beside it; the same plan where none was 1 % faster
    timed                      how many plans were timed
    path                       the table's file; None if it could not be written: then the plan holds for this process
    """

    problem: Problem
    plan: Plan
    seconds: float
    model_plan: Plan
    model_seconds: float
    timed: int
    path: Path | None = None

    def __str__(self) -> str:
        p = self.problem
        groups = "" if p.kind == "dense" else f", {p.groups} groups"
        shape = f"{p.kind} GEMM, M = {p.m}, N = {p.n}, K = {p.k}{groups}"
        lines = [f"{shape}: {self.seconds * 1e6:.1f} µs, the best of {self.timed} plans"]
        if self.plan == self.model_plan:
            lines.append(f"  the model's own: {cut(self.plan)}")
        else:
            lines.append(f"  {cut(self.plan)}")
            lines.append(f"  the model's takes {self.model_seconds * 1e6:.1f} µs: {cut(self.model_plan)}")
        lines.append(f"  kept in {self.path}" if self.path else "  kept for this process only")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Entry:
    """One line of the table: options of plan(), and the measured seconds of one call with them."""

    overrides: dict
    seconds: float


def cut(chosen: Plan) -> str:
    """A plan in words, without what the model predicts of it."""
    return str(chosen).split("; predicted")[0]


def tune(
    shapes: Iterable, *, device: torch.device | str | None = None, expected_m: int | None = None, **description
) -> list[Tuned]:
    """Time the most promising plans of each shape on this GPU, and keep the fastest for later calls and later processes.

    shapes       Problems, or (M, N, K), or (N, K): then M = 1, 16, 64, 128, 512 and 4096
    device       a Hopper GPU; by default the current one
    expected_m   masked problems: rows of each group that count while timing; by default all M
    description  fields of Problem for shapes given as numbers: out_dtype, recipe_a, kind, groups, …

    One measurement serves neighbours too: all M of one ``plan.bucket``, who share a plan anyway (for k_grouped problems K instead,
    the dimension that tokens lie along). Groups are timed with equal sizes. The method is
    hopperlab.bench's: random operands, more than L2 holds, in CUDA graphs, interleaved in short rounds; the first pass also
    compiles what is new. The GPU must have nothing else to do.

    Returns a Tuned for each problem. Raises ValueError for a shape that cannot be tuned, RuntimeError without a Hopper GPU or
    where a plan computes something else than the model's plan does (then nothing is kept).
    """
    problems = [as_the_kernel_sees(problem) for problem in problems_of(shapes, **description)]
    for problem in problems:
        _check_tunable(problem, expected_m)
    device = _hopper(device)
    return [_tune(problem, device, expected_m) for problem in problems]


def _check_tunable(problem: Problem, expected_m: int | None) -> None:
    if 0 in (problem.m, problem.n, problem.k):
        raise ValueError(f"shapes holds {problem.m} x {problem.n} x {problem.k}: nothing is multiplied, so nothing can be tuned")
    if expected_m is not None and (problem.kind != "masked" or not 1 <= expected_m <= problem.m):
        raise ValueError(f"expected_m is {expected_m} for a {problem.kind} problem with M = {problem.m}; only masked problems "
                         "take it, 1 to M")  # fmt: skip


def _hopper(device: torch.device | str | None) -> torch.device:
    """The GPU to time on, with its index. RuntimeError if there is none."""
    if not capability.has_hopper():
        raise RuntimeError(f"plans are timed on a Hopper GPU. {capability.hopper().sentence()}")
    device = torch.device(device or "cuda")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _tune(problem: Problem, device: torch.device, expected_m: int | None) -> Tuned:
    _, sms = machine(device.index)
    model = plan(problem, sms)
    with torch.cuda.device(device):
        sets = operand_sets(problem, device, expected_m)
        fastest, seconds, timed = search(problem, sms, lambda plans, rounds: _measure(problem, plans, sets, rounds))
        _check_same_result(problem, model, fastest, sets[0])
    path = _store(problem, device, Entry(overrides_of(fastest), seconds[fastest]))
    return Tuned(problem, fastest, seconds[fastest], model, seconds[model], timed, path)


def search(
    problem: Problem, sms: int, measure: Callable[[list[Plan], int], dict[Plan, float]]
) -> tuple[Plan, dict[Plan, float], int]:
    """(the fastest plan, seconds of the finalists, plans timed). measure(plans, rounds) gives the seconds of each.

    Two passes: all candidates a few times, then the fastest of them and the model's plan as often as a benchmark does. The
    fastest of many short measurements owes part of its lead to luck, which the second pass takes away.
    """
    model = plan(problem, sms)
    candidates = list(dict.fromkeys([model, *promising(problem, sms, CANDIDATES)]))
    first = measure(candidates, SEARCH_ROUNDS)
    finalists = list(dict.fromkeys([model, *sorted(candidates, key=first.__getitem__)[:FINALISTS]]))
    last = measure(finalists, FINAL_ROUNDS)
    fastest = min(finalists, key=last.__getitem__)
    if last[fastest] > last[model] * (1 - LEAST_GAIN):
        fastest = model
    return fastest, last, len(candidates)


# ---------------------------------------------------------------- timing


def operand_sets(problem: Problem, device: torch.device, expected_m: int | None = None) -> list[tuple[Operands, torch.Tensor]]:
    """Random operands and an output, as many times as exceed L2; at least two."""
    from hopperlab import bench

    made: list[tuple[Operands, torch.Tensor]] = []
    generator = torch.Generator(device).manual_seed(0)
    wanted = 2
    while len(made) < wanted:
        operands, out = synthetic(problem, device)
        for data in (operands.a, operands.b):
            for matrix in data.unbind() if data.dim() == 3 else (data,):  # one at a time: the wide copy of all experts is large
                matrix.copy_(torch.randn(matrix.shape, generator=generator, dtype=torch.bfloat16, device=device))
        if expected_m is not None:
            operands.masked_m.fill_(expected_m)
        made.append((operands, out))
        wanted = max(2, min(MOST_SETS, math.ceil(bench.ROTATION_BYTES / (operands.a.nbytes + operands.b.nbytes + out.nbytes))))
    return made


def _calls(problem: Problem, chosen: Plan, sets) -> list[Callable]:
    from fp8_gemm import kernels

    overrides = overrides_of(chosen)
    return [functools.partial(kernels.run, problem, operands, out, **overrides) for operands, out in sets]


def _measure(problem: Problem, plans: list[Plan], sets, rounds: int) -> dict[Plan, float]:
    from fp8_gemm import kernels
    from hopperlab import bench

    compile_all([kernels.kernel(tuple(kernels.constants_of(problem, chosen).items())) for chosen in plans])
    timings = bench.measure({str(index): _calls(problem, chosen, sets) for index, chosen in enumerate(plans)}, rounds)
    return {chosen: timings[str(index)].seconds for index, chosen in enumerate(plans)}


def _check_same_result(problem: Problem, model: Plan, fastest: Plan, operand_set) -> None:
    """A fast plan that is wrong must not be kept."""
    results = []
    for chosen in (model, fastest):
        operand_set[1].zero_()
        _calls(problem, chosen, [operand_set])[0]()
        results.append(operand_set[1].to(torch.float32, copy=True))  # the next call writes over it
    difference = float((results[0] - results[1]).abs().max() / results[0].abs().max())
    if not difference <= LARGEST_DIFFERENCE:  # NaN included
        raise RuntimeError(f"the outputs of the fastest plan and of the model's differ by {difference:.1e} of the largest, more "
                           f"than rounding explains; nothing is kept. Please report it.\nfastest: {fastest}\n"
                           f"model:   {model}")  # fmt: skip


# ---------------------------------------------------------------- the table


def overrides_of(chosen: Plan) -> dict:
    """The options with which plan() makes this plan again."""
    return {"swap_ab": chosen.swap_ab, "block_m": chosen.block_m, "block_n": chosen.block_n, "split_k": chosen.splits,
            "multicast": chosen.multicast, "ctas_per_sm": chosen.ctas_per_sm}  # fmt: skip


def name_of(problem: Problem) -> str:
    """The name of a problem in the table: all that decides its plan, with the dimension of tokens rounded up."""
    known = bucketed(problem)
    parts = [problem.kind, f"{known.m}x{known.n}x{known.k}", f"{problem.groups}groups", problem.recipe_a, problem.recipe_b,
             problem.format_a, problem.format_b, str(problem.out_dtype).removeprefix("torch."),
             f"interval{problem.interval or 0}"]  # fmt: skip
    return "_".join(parts + ["bias"] * problem.bias + ["accumulate"] * problem.accumulate)


def lookup(problem: Problem, device: torch.device) -> dict | None:
    """The options of plan() that were fastest for this problem on this device; None where it was not tuned.

    Reads the disk once per process, then it is a look-up in a dict; callers cache the plan that comes of it.
    """
    entry = found(problem, device)
    return None if entry is None else entry.overrides


def found(problem: Problem, device: torch.device) -> Entry | None:
    """The table's entry for a problem; None where there is none, or no plan is like it any more."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    folder = table_folder(index)
    entry = _table(folder).get(name_of(problem))
    if entry is None:
        return None
    try:
        plan(problem, machine(index)[1], **entry.overrides)
    except ValueError as error:
        _warn(folder / f"{name_of(problem)}.json", f"holds a plan that cannot be made ({error})")
        return None
    return entry


@functools.cache
def machine(index: int) -> tuple[str, int]:
    """(name, SMs) of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.multi_processor_count


def table_folder(index: int) -> Path:
    """Where the table for a GPU is. Another GPU, or other kernels, have another."""
    name, sms = machine(index)
    return cache_directory() / "tuned" / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}_{sms}sms_{_sources()}"


@functools.cache
def _sources() -> str:
    """A hash of all that a GEMM kernel is compiled from, its constants excepted."""
    digest = hashlib.sha256()
    for path in (Path(__file__).parent / "kernels" / "gemm.cu", *sorted(INCLUDE_DIRECTORY.glob("*.cuh"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _table(folder: Path) -> dict[str, Entry]:
    """Every entry in a folder, by its problem's name. Empty where there is none, or FP8_GEMM_TUNED=0."""
    if os.environ.get(TABLE_VARIABLE) == "0":
        return {}
    entries = {}
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        warnings.warn(f"the table of tuned plans {folder} cannot be read ({error}); plans come from the model", stacklevel=2)
        return {}
    for path in paths:
        try:
            entries[path.stem] = _parse(json.loads(path.read_text()))
        except (OSError, ValueError, RecursionError) as error:  # the last of JSON that is nested too deeply
            _warn(path, f"cannot be used ({error})")
    return entries


def _parse(content) -> Entry:
    """An entry from a file's content. Raises ValueError for what tune did not write."""
    if not isinstance(content, dict) or not isinstance(content.get("overrides"), dict):
        raise ValueError("it has no overrides")
    overrides, seconds = content["overrides"], content.get("seconds")
    if set(overrides) != set(OVERRIDES) or any(type(overrides[name]) is not kind for name, kind in OVERRIDES.items()):
        wanted = ", ".join(f"{name}: {kind.__name__}" for name, kind in OVERRIDES.items())
        raise ValueError(f"overrides is {overrides}; it must hold {wanted}")
    if type(seconds) not in (int, float) or not 0 < seconds <= sys.float_info.max:
        raise ValueError(f"seconds is {seconds!r}; it must be a positive, finite number")
    return Entry(overrides, float(seconds))


def _warn(path: Path, what: str) -> None:
    warnings.warn(f"the tuned plan {path} {what}; the model's plan is used. Delete the file, or tune the shape again",
                  stacklevel=2)  # fmt: skip


def plan_anew() -> None:
    """Drop the plans that this process has made: the table has changed."""
    from fp8_gemm import kernels, ops

    kernels.plan_for.cache_clear()
    ops.forget()


def _store(problem: Problem, device: torch.device, entry: Entry) -> Path | None:
    """Put an entry into this process's table and onto the disk. Returns the file; None, with a warning, if it cannot be."""
    folder, name = table_folder(device.index), name_of(problem)
    _table(folder)[name] = entry
    plan_anew()
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"overrides": entry.overrides, "seconds": entry.seconds}, file)
            os.chmod(temporary, 0o644)  # mkstemp's files are for their owner alone
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(f"the tuned plan could not be stored in {folder} ({error}); it holds for this process only. Set "
                      "HOPPERLAB_CACHE to a directory that can be written", stacklevel=2)  # fmt: skip
        return None
    return path
