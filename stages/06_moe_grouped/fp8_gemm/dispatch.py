"""Which backend runs a problem, why not the others, and what it will cost.

A backend is a function run(problem, operands, out, **overrides) that writes out. There are four:

    cuda       the library's kernels on a Hopper GPU
    simulator  the same kernels, bit for bit, on CPU tensors (slow; only when asked for)
    triton     Triton kernels, on GPUs of compute capability 8.9 and later
    reference  torch, anywhere

The device of the tensors decides; backend= or the environment variable FP8_GEMM_BACKEND forces one.
"""

import functools
import importlib.util
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from fp8_gemm.plan import OVERRIDES, check_overrides, with_tokens
from fp8_gemm.problem import FP8_DTYPES, VALIDATE_VARIABLE, Operands, Problem, check_group_values, check_how
from fp8_gemm.quantize import GroupedTensor, ScaledTensor, format_of, on_hopper, quantize
from hopperlab import capability
from hopperlab.quantize import BLOCK, scale_shape

BACKENDS = ("cuda", "simulator", "triton", "reference")
PLANNED = ("cuda", "simulator")  # backends that follow a Plan and take overrides of it
SMS_OF_AN_H200 = 132  # what plans on a CPU are made for
WARMUP_ROWS = (1, 16, 64, 128, 512, 4096)  # a decoding step to a prefill
BACKEND_VARIABLE = "FP8_GEMM_BACKEND"


@dataclass(frozen=True)
class Explanation:
    """What was chosen for one problem. print() it.

    reasons  for each backend that was not chosen, why
    plan     the Plan of the kernels, if the chosen backend follows one; seconds its predicted time
    note     that the plan comes from the table of tuned plans, or that kernels were only compiled
    """

    problem: Problem
    device: torch.device
    backend: str
    forced: str | None  # who forced it: "backend=" or the environment variable
    reasons: dict[str, str] = field(default_factory=dict)
    plan: object | None = None
    seconds: float | None = None
    note: str = ""

    def __str__(self) -> str:
        p = self.problem
        groups = "" if p.kind == "dense" else f", {p.groups} groups"
        lines = [
            f"{p.kind} GEMM, M = {p.m}, N = {p.n}, K = {p.k}{groups}: {p.format_a} {p.recipe_a} x {p.format_b} {p.recipe_b} -> "
            f"{str(p.out_dtype).removeprefix('torch.')}, on {self.device}",
            f"backend: {self.backend}" + (f" (forced by {self.forced})" if self.forced else ""),
        ]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        if self.plan is not None:
            lines.append(f"plan: {self.plan}")
        if self.seconds is not None:
            lines.append(f"predicted: {self.seconds * 1e6:.1f} µs, {p.flops / self.seconds / 1e12:.0f} TFLOP/s")
        return "\n".join(lines + [self.note] * bool(self.note))

    __repr__ = __str__


def choose(problem: Problem, device: torch.device, backend: str | None = None) -> tuple[str, str | None, dict[str, str]]:
    """(backend, who forced it, why not the others). ValueError for an unknown backend, RuntimeError for one that cannot."""
    forced = "backend=" if backend else None
    if not backend and os.environ.get(BACKEND_VARIABLE):
        backend, forced = os.environ[BACKEND_VARIABLE], BACKEND_VARIABLE
    if backend and backend not in BACKENDS:
        raise ValueError(f"{forced.rstrip('=')} is {backend!r}; allowed are {', '.join(map(repr, BACKENDS))}")
    obstacles = {name: _obstacle(name, problem, device) for name in BACKENDS}
    if backend:
        if obstacles[backend]:
            raise RuntimeError(f"{forced.rstrip('=')} is {backend!r}, which cannot run this: {obstacles[backend]}")
        chosen = backend
    else:
        # The simulator is thousands of times slower than torch: it runs only for those who ask.
        chosen = next(name for name in ("cuda", "triton", "reference") if not obstacles[name] and _default(name, device))
    reasons = {}
    for name in BACKENDS:
        if name != chosen:
            reasons[name] = obstacles[name] or (f"{forced} asks for {chosen}" if forced else _preference(name, chosen))
    return chosen, forced, reasons


def _default(name: str, device: torch.device) -> bool:
    return device.type != "cpu" or name == "reference"


def _preference(name: str, chosen: str) -> str:
    if name in ("simulator", "triton") and chosen == "reference":
        return f"it runs here only when asked for: backend={name!r}"
    return f"{chosen} is faster here"


@functools.lru_cache(maxsize=4096)
def _chosen(problem: Problem, device: torch.device, backend: str | None, variable: str | None) -> str:
    return choose(problem, device, backend)[0]  # which reads the variable: it is here as part of the key


def _obstacle(name: str, problem: Problem, device: torch.device) -> str | None:
    """Why the backend cannot run the problem on this device; None if it can."""
    if name == "reference":
        return None
    if name == "triton":
        return _triton_obstacle(device)
    wanted = "cuda" if name == "cuda" else "cpu"
    if device.type != wanted:
        return f"the tensors are on {device}, it takes {'CUDA' if name == 'cuda' else 'CPU'} tensors: pass x.to('{wanted}')"
    if name == "cuda" and _capability(device) != (9, 0):
        major, minor = _capability(device)
        return f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}, and sm_90a code runs on compute capability 9.0 alone"
    if importlib.util.find_spec("fp8_gemm.kernels") is None:
        return "this installation has no fp8_gemm.kernels: install the distribution again"
    return None


def _triton_obstacle(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'triton>=3.6'"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "on the CPU Triton has only its interpreter: set TRITON_INTERPRET=1 before the first call"
    elif device.type != "cuda":
        return f"the tensors are on {device}; Triton takes CUDA tensors"
    elif _capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no FP8 instructions; compute capability 8.9 is the first that has"
    found = capability.triton()
    return None if found.ok else found.sentence()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _run_function(backend: str):
    if backend == "reference":
        from fp8_gemm.reference_backend import run
    elif backend == "triton":
        from fp8_gemm.triton_backend import run
    else:
        from fp8_gemm.kernels import run
    return run


def run(problem: Problem, operands: Operands, out: torch.Tensor, backend: str | None = None, **overrides) -> None:
    """Compute the problem into out. overrides change the plan (cuda, simulator), never what is computed beyond rounding.

    Raises ValueError or RuntimeError where the backend is unknown or cannot run the problem, and ValueError for overrides
    that the backend does not have.
    """
    name = _chosen(problem, operands.a.device, backend, os.environ.get(BACKEND_VARIABLE))
    if os.environ.get(VALIDATE_VARIABLE) == "1":
        check_group_values(problem, operands.offsets, operands.ends, operands.masked_m)
    if overrides:
        _check_overrides(name, overrides)
    _run_function(name)(problem, operands, out, **overrides)


def launch_for(problem: Problem, operands: Operands, out: torch.Tensor, backend: str | None, **overrides):
    """The kernels.Launch that runs other operands of these layouts just as run() would; None where run() does more than launch."""
    chosen = _chosen(problem, operands.a.device, backend, os.environ.get(BACKEND_VARIABLE))
    if chosen != "cuda" or os.environ.get(VALIDATE_VARIABLE) == "1":
        return None
    from fp8_gemm import kernels

    return kernels.launch_for(problem, operands, out, **overrides)


def _check_overrides(backend: str, overrides: dict) -> None:
    if backend in PLANNED:
        return check_overrides(overrides)
    allowed = {"reference": ("exact", "batch_invariant"), "triton": ("batch_invariant",)}[backend]
    for name in overrides:
        if name not in allowed and name not in OVERRIDES:
            raise ValueError(f"{name} is given, which is no argument of this function and no option of backend {backend!r}; allowed there: "
                             f"{', '.join(allowed)}")  # fmt: skip
        if name not in allowed:
            raise ValueError(f"{name} is given, but backend {backend!r} follows no plan; allowed there: {', '.join(allowed)}. "
                             f"Drop {name}, or choose backend='cuda' (Hopper) or 'simulator' (CPU)")  # fmt: skip


def explain(
    a, b=None, *, offsets=None, counts=None, indices=None, masked_m=None, k_offsets=None, bias=None,
    accumulate: bool = False, c=None, out=None, out_dtype: torch.dtype = torch.bfloat16, layout: str = "nt",
    recipe: tuple[str, str] = ("1x128", "128x128"), interval: int | None = 128, backend: str | None = None, grad_format: str = "e4m3",
    device: torch.device | str | None = None, **overrides,
) -> Explanation:  # fmt: skip
    """What a call with these arguments would run, why not something else, and the predicted time. Nothing runs.

    a, b  operands as gemm, grouped_gemm (with one of offsets, counts, indices), masked_gemm (with masked_m) or k_grouped_gemm
          (with k_offsets) take them; or a alone, a Problem

    device overrides that of a: explain(problem, device="cuda"). Print the result. An FP8 out_dtype is computed in float32 and quantised
    by another kernel: shown is the first. Raises TypeError or ValueError for operands, recipes and options that the call would refuse;
    values and other tensors are left to the call.
    """
    if isinstance(a, Problem):
        problem, where = a, torch.device(device or "cpu")
    else:
        groups = {"contiguous": offsets is not None or counts is not None or indices is not None,
                  "masked": masked_m is not None, "k_grouped": k_offsets is not None}  # fmt: skip
        kinds = [kind for kind, given in groups.items() if given] or ["dense"]
        if len(kinds) > 1:
            raise ValueError(f"group tensors of {' and '.join(kinds)} problems are given; pass those of one call")
        problem = _problem_of(kinds[0], a, b, k_offsets, layout, bias, accumulate or c is not None, out_dtype, recipe, interval)
        check_how(problem.recipe_a, problem.recipe_b, out_dtype, interval, grad_format)
        where = torch.device(device or a.device)
    problem = as_the_kernel_sees(problem)
    chosen, forced, reasons = choose(problem, where, backend)
    plan = seconds = None
    note = ""
    if chosen in PLANNED:
        from fp8_gemm.plan import plan as make_plan
        from fp8_gemm.tune import found

        entry = None if overrides else found(problem, where)
        if entry is not None:
            overrides = entry.overrides
            note = f"from the table of tuned plans: {entry.seconds * 1e6:.1f} µs measured"
        sms = torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else SMS_OF_AN_H200
        plan = make_plan(problem, sms, **overrides)
        seconds = plan.seconds
    if overrides:
        _check_overrides(chosen, overrides)
    return Explanation(problem, where, chosen, forced, reasons, plan, seconds, note)


def _problem_of(kind, a, b, k_offsets, layout, bias, accumulate, out_dtype, recipe, interval) -> Problem:
    """The problem of operands that may not be quantised yet: from their shapes."""
    from fp8_gemm import grouped
    from fp8_gemm.gemm import matrices

    if kind == "dense":
        (a, recipe_a), (b, recipe_b) = matrices(a, b, layout, recipe)
    else:
        pair = ("1x128", "1x128") if kind == "k_grouped" else recipe
        a, recipe_a = (grouped.stack if kind == "masked" else grouped.matrix)("a", a, pair, 0)
        b, recipe_b = (grouped.matrix if kind == "k_grouped" else grouped.stack)("b", b, pair, 1)
    recipes, formats, shapes = (recipe_a, recipe_b), [], []
    for operand in (a, b):
        scaled = isinstance(operand, (ScaledTensor, GroupedTensor))
        formats.append(operand.format.name if scaled else "e4m3")
        shapes.append(operand.data.shape if scaled else operand.shape)
    (*leading, k), (n, k_of_b) = shapes[0], shapes[1][-2:]
    if k != k_of_b:
        raise ValueError(f"b has shape {tuple(shapes[1])} and a {tuple(shapes[0])}; their last dimension, K, must be equal")
    groups = {"dense": 1, "k_grouped": 0 if k_offsets is None else k_offsets.shape[0] - 1}.get(kind, shapes[1][0])
    m = leading[-1] if kind == "masked" else math.prod(leading)
    return Problem(kind, m, n, k, groups, *recipes, *formats, out_dtype, bias is not None, accumulate, interval)


def warmup(shapes, *, device: torch.device | str | None = None, backend: str | None = None, **description) -> list[Explanation]:
    """Make ready whatever calls of these shapes compile or tune (and keep it on disk) before it matters.

    shapes       (N, K): for every M, which takes up to two dozen kernels (k_grouped problems: M = 1, 16, 64, 128, 512 and 4096);
                 or, for one M alone, (M, N, K) or Problems
    device       where; by default the current GPU. Without a GPU the kernels are compiled as for an H200 (132 SMs) and nothing
                 runs, so that an image can be built with a filled cache; device="cpu" runs the CPU's backend instead
    description  fields of Problem for shapes given as numbers: out_dtype, recipe_a, kind, groups, …

    Kernels are compiled side by side, then each runs once: for (N, K), with the smallest M that it serves. Afterwards no M
    compiles, unless a call overrides its plan. The kernels that quantise bfloat16 operands in the same formats are made ready too. Returns
    what was chosen for each. Raises ValueError or TypeError for a shape that is none.
    """
    wanted = backend or os.environ.get(BACKEND_VARIABLE) or "cuda"
    compile_only = device is None and not torch.cuda.is_available() and wanted == "cuda"
    device = torch.device("cpu" if compile_only else device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())

    def on_hopper_kernels(problem):
        return compile_only or choose(problem, device, backend)[0] == "cuda"

    problems = []
    for shape in shapes:
        made = [as_the_kernel_sees(problem) for problem in problems_of([shape], **description)]
        if len(made) > 1 and made[0].kind != "k_grouped" and on_hopper_kernels(made[0]):  # (N, K)
            from fp8_gemm import kernels

            made = list(kernels.for_every_size(made[0], device).values())
        problems += made
    needed = [kernel for problem in problems if on_hopper_kernels(problem) for kernel in _kernels_of(problem, device)]
    compile_all(needed)
    if compile_only:
        return [_compiled_only(problem) for problem in problems]
    quantised = set()
    for problem in problems:
        operands, out = synthetic(problem, device)
        run(problem, operands, out, backend)
        if on_hopper(operands.a) and with_tokens(problem, 0) not in quantised:  # the same kernels for every M
            quantised.add(with_tokens(problem, 0))
            for data, recipe in ((operands.a, problem.recipe_a), (operands.b, problem.recipe_b)):
                quantize(data.flatten(0, -2).bfloat16(), recipe, format_of(data.dtype))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [explain(problem, device=device, backend=backend) for problem in problems]


def problems_of(shapes, *, kind: str = "dense", **description) -> list[Problem]:
    """Problems of shapes, (N, K) with the usual M."""
    problems = []
    for shape in shapes:
        if isinstance(shape, Problem):
            problems.append(shape)
        elif len(shape) == 3:
            problems.append(Problem(kind, *shape, **description))
        elif len(shape) == 2:
            problems += [Problem(kind, m, *shape, **description) for m in WARMUP_ROWS]
        else:
            raise ValueError(f"shapes holds {shape!r}; allowed are Problems, (M, N, K) and (N, K)")
    return problems


def as_the_kernel_sees(problem: Problem) -> Problem:
    """FP8 results are computed in float32 and quantised afterwards, by another kernel."""
    return replace(problem, out_dtype=torch.float32) if problem.out_dtype in FP8_DTYPES else problem


def _kernels_of(problem: Problem, device: torch.device) -> list:
    """What a call with bfloat16 operands compiles for the GPU: on a CPU, for an H200."""
    from fp8_gemm import kernels
    from fp8_gemm.kernels import quantize as quantisers

    if not math.prod(problem.out_shape) or not problem.k:
        return []
    needed = [kernels.kernel_of(problem, kernels.plan_for(problem, device))]
    for recipe, format in ((problem.recipe_a, problem.format_a), (problem.recipe_b, problem.format_b)):
        needed += quantisers.kernels_for(torch.bfloat16, recipe, format, problem.k)
    return needed


def _compiled_only(problem: Problem) -> Explanation:
    from fp8_gemm import kernels

    plan = kernels.plan_for(problem, torch.device("cpu"))
    note = f"compiled for an H200 ({SMS_OF_AN_H200} SMs), not run: this machine has no GPU"
    return Explanation(problem, torch.device("cuda"), "cuda", None, {}, plan, plan.seconds, note)


def compile_all(kernels: list) -> None:
    """Compile hopperlab Kernels side by side: NVRTC takes a second for each and does not hold Python's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(getattr, kernel, "compiled") for kernel in dict.fromkeys(kernels)]:
            done.result()


def synthetic(problem: Problem, device: torch.device) -> tuple[Operands, torch.Tensor]:
    """Operands of a problem, all zero, and an output."""
    leading = (problem.groups,) if problem.kind == "masked" else ()
    weights = (problem.groups,) if problem.kind in ("contiguous", "masked") else ()

    def data(groups, rows, format):
        return torch.zeros(*groups, rows, problem.k, dtype=format_of(format).dtype, device=device)

    def scale(groups, rows, recipe):
        return torch.ones(*groups, *scale_shape(recipe, rows, problem.k), device=device)

    even = torch.arange(problem.groups + 1, dtype=torch.int64, device=device)
    unit = BLOCK if problem.kind == "k_grouped" else 1
    total = problem.k if problem.kind == "k_grouped" else problem.m
    offsets = (even * (total // unit) // problem.groups * unit).int() if problem.kind in ("contiguous", "k_grouped") else None
    masked_m = torch.full((problem.groups,), problem.m, dtype=torch.int32, device=device) if problem.kind == "masked" else None
    operands = Operands(
        data(leading, problem.m, problem.format_a), data(weights, problem.n, problem.format_b),
        scale(leading, problem.m, problem.recipe_a), scale(weights, problem.n, problem.recipe_b),
        torch.zeros(problem.n, device=device) if problem.bias else None, offsets, None, masked_m,
    )  # fmt: skip
    return operands, torch.zeros(problem.out_shape, dtype=problem.out_dtype, device=device)
