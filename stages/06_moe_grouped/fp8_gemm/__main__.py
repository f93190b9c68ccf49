"""python -m fp8_gemm smoke | warmup | tune | explain | bench

smoke    is this machine set up right: versions, architecture, numbers, speed, and the fix for what is wrong; under 20 s
warmup   compile ahead of time for a list of shapes (NxK: for every M); without a GPU for an H200, into the cache alone
tune     time the most promising plans of a list of shapes on this GPU, and keep the fastest for later runs
explain  what a shape would run, and why
bench    time the library beside its peers into a record: bench RECORD.json [--only 4096x] [--search] [--host]; see bench --help
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fp8_gemm import dispatch, gemm, grouped_gemm, k_grouped_gemm, masked_gemm
from fp8_gemm.problem import KINDS, RECIPE_PAIRS, Problem
from fp8_gemm.quantize import ScaledTensor, quantize, quantize_grouped
from fp8_gemm.tune import tune
from hopperlab import capability
from hopperlab.reference import error_bound, matmul_exact


@dataclass(frozen=True)
class Finding:
    """One line of the smoke test. ok is None for what is worth knowing but neither right nor wrong."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""

    def __str__(self):
        mark = {True: "ok  ", False: "FAIL", None: "    "}[self.ok]
        return f"{mark}  {self.name}: {self.found}" + (f"\n      fix: {self.fix}" if self.fix and self.ok is False else "")


# ---------------------------------------------------------------- smoke: the machine


def environment() -> Iterator[Finding]:
    """Versions and architecture. A machine without a Hopper GPU is no fault: other backends run there."""
    checks = (capability.python(), capability.torch_version(), capability.triton(), capability.nvrtc(), capability.cuda_python(),
              capability.hopper())  # fmt: skip
    for item in checks:
        ok = True if item.ok else (False if item.required else None)
        yield Finding(item.name, ok, item.found + (f". {item.fix}" if ok is None else ""), item.fix)
    if torch.cuda.is_available():
        yield cuda_versions(*installed_cuda())


def installed_cuda() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(major, minor) of CUDA that the driver, NVRTC and torch are of."""
    from cuda.bindings import driver

    from hopperlab.compile import nvrtc_version

    status, number = driver.cuDriverGetVersion()
    if status.value:
        raise RuntimeError(f"cuDriverGetVersion failed: {status.name}")
    major, minor = map(int, torch.version.cuda.split(".")[:2])
    return (number // 1000, number % 1000 // 10), tuple(nvrtc_version()), (major, minor)


def cuda_versions(driver: tuple[int, int], nvrtc: tuple[int, int], torch_cuda: tuple[int, int]) -> Finding:
    """Whether they fit together: a driver runs code of its own CUDA major version and of older ones."""
    found = f"driver {driver[0]}.{driver[1]}, NVRTC {nvrtc[0]}.{nvrtc[1]}, torch built for {torch_cuda[0]}.{torch_cuda[1]}"
    for name, version in (("NVRTC", nvrtc), ("torch", torch_cuda)):
        if version[0] > driver[0]:
            fix = f"the driver is too old for {name}: install one for CUDA {version[0]} (580 or later for CUDA 13)"
            return Finding("CUDA versions", False, found, fix)
    return Finding("CUDA versions", True, found)


# ---------------------------------------------------------------- smoke: numbers and speed


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device)


def _within_bound(got: torch.Tensor, a: ScaledTensor, b: ScaledTensor, tensor_core: bool, bias=None) -> bool:
    exact = matmul_exact(a, b, bias=bias)
    if tensor_core:
        bound = error_bound(a, b, got.dtype, 128, bias=bias)
    else:  # operands rounded to FP32 when dequantised, K added in any order
        bound = error_bound(a, b, got.dtype, arithmetic="fp32", bias=bias)
        bound += a.dequantize().double().abs() @ b.dequantize().double().abs().t() * max(a.k, 1) * 2.0**-23
    return bool(((got.double() - exact).abs() <= bound).all())


def numbers(device: torch.device, backend: str | None) -> Iterator[Finding]:
    """Each kind of call on ragged shapes, every element against its error bound."""
    m, n, k = 37, 40, 300
    x, w, bias = _random(m, k, device=device), _random(n, k, device=device), _random(n, device=device)
    for recipe in RECIPE_PAIRS[:3] + (("row", "row"),):
        a, b = quantize(x, recipe[0]), quantize(w, recipe[1])
        yield from _checked(f"dense {recipe[0]} x {recipe[1]}", device, backend, lambda a=a, b=b: (
            [(gemm(a, b, bias=bias, backend=backend, out_dtype=torch.float32), a, b, bias)]))  # fmt: skip
    experts = quantize_grouped(_random(3, n, k, device=device))
    counts = torch.tensor([30, 0, 7], dtype=torch.int32, device=device)

    def contiguous():
        got = grouped_gemm(x, experts, counts=counts, backend=backend)
        return [(got[:30], quantize(x[:30]), experts[0], None), (got[30:], quantize(x[30:]), experts[2], None)]

    def masked():
        rows = torch.tensor([12, 0, 5], dtype=torch.int32, device=device)
        got = masked_gemm(x[:36].view(3, 12, k), experts, rows, backend=backend)
        return [(got[0], quantize(x[:12]), experts[0], None), (got[2, :5], quantize(x[24:29]), experts[2], None)]

    def k_grouped():
        offsets = torch.tensor([0, 100, 100, k], dtype=torch.int32, device=device)
        got = k_grouped_gemm(x, w, offsets, backend=backend)
        return [(got[g], quantize(x[:, s]), quantize(w[:, s]), None) for g, s in ((0, slice(0, 100)), (2, slice(100, k)))]

    for name, call in (("contiguous groups", contiguous), ("masked groups", masked), ("K groups", k_grouped)):
        yield from _checked(name, device, backend, call)


def _checked(name: str, device: torch.device, backend: str | None, call) -> Iterator[Finding]:
    try:
        parts = call()
    except Exception as error:  # the smoke test reports whatever goes wrong and goes on
        yield Finding(name, False, f"{type(error).__name__}: {error}", "FP8_GEMM_BACKEND=reference avoids the kernels")
        return
    tensor_core = (backend or dispatch.choose(Problem("dense", 1, 1, 1), device)[0]) in dispatch.PLANNED + ("triton",)
    right = all(_within_bound(got, a, b, tensor_core, bias) for got, a, b, bias in parts)
    yield Finding(name, right, "every element within its error bound" if right else "elements beyond their error bound",
                  "report it with this output; FP8_GEMM_BACKEND=reference avoids the kernels")  # fmt: skip


def speed(device: torch.device, backend: str | None, size: int = 4096) -> Finding:
    """TFLOP/s of one cube beside torch's bf16, on a GPU."""
    if device.type != "cuda":
        return Finding("speed", None, "not measured without a GPU")
    fp8, bf16 = (2 * size**3 / seconds / 1e12 for seconds in _seconds(device, backend, size))
    ok = fp8 > bf16 if capability.has_hopper() and backend in (None, "cuda") else None
    return Finding("speed", ok, f"{size}³: FP8 {fp8:.0f} TFLOP/s, bf16 through torch {bf16:.0f}",
                   "another process may use the GPU: nvidia-smi; or print(fp8_gemm.explain(...)) to see what ran")  # fmt: skip


def _seconds(device: torch.device, backend: str | None, size: int) -> tuple[float, float]:
    """Seconds of one FP8 call and of one bf16 call, by the benchmarks' method: in a few calls one after another after a pause
    the clock of the GPU still rises, and a call of 100 µs waits for the host."""
    from hopperlab import bench

    x, w = (_random(size, size, device=device).bfloat16() for _ in range(2))
    a, b, out = quantize(x), quantize(w, "128x128"), torch.empty_like(x)
    calls = {"fp8": [lambda: gemm(a, b, out=out, backend=backend)], "bf16": [lambda: torch.matmul(x, w.t(), out=out)]}
    with torch.cuda.device(device):
        timings = bench.measure(calls, rounds=5)
    return timings["fp8"].seconds, timings["bf16"].seconds


def smoke(device: torch.device, backend: str | None) -> bool:
    """Print every finding; whether none is wrong."""
    start, wrong = time.perf_counter(), 0

    def show(finding: Finding):
        nonlocal wrong
        wrong += finding.ok is False
        print(finding)

    for finding in environment():
        show(finding)
    try:
        print(f"\n{dispatch.explain(Problem('dense', 4096, 4096, 4096), device=device, backend=backend)}\n")
    except (RuntimeError, ValueError) as error:
        variable = f"unset {dispatch.BACKEND_VARIABLE}" if backend is None else "drop --backend"
        show(Finding("backend", False, str(error), f"{variable}, or choose one that runs on {device}"))
    else:
        for finding in numbers(device, backend):
            show(finding)
        show(speed(device, backend))
    print(f"\n{f'{wrong} failed' if wrong else 'all is well'}, {time.perf_counter() - start:.1f} s")
    return not wrong


# ---------------------------------------------------------------- command line


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) not in (2, 3):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write M x N x K as 128x4096x7168, or N x K as 4096x7168")
    return sizes


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: write cuda, cuda:1 or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is no device with FP8 kernels: write cuda, cuda:1 or cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise argparse.ArgumentTypeError(f"{text!r} is not there: PyTorch sees {count} CUDA GPUs; python -m fp8_gemm smoke says why")
    return device


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:  # its options are its own
        from fp8_gemm import bench  # which needs what no other command does: hopperlab.report

        bench.command_line(arguments[1:])
        return 0
    parser = argparse.ArgumentParser("python -m fp8_gemm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("smoke", "warmup", "tune", "explain"):
        command = commands.add_parser(name)
        if name != "tune":
            command.add_argument("--backend", choices=dispatch.BACKENDS)
        command.add_argument("--device", type=_device, help="cuda, cuda:1, cpu; by default the GPU if there is one")
        if name != "smoke":
            command.add_argument("shapes", nargs="+", type=_shape, help="MxNxK, or NxK for the usual M; warmup: for every M")
            command.add_argument("--kind", choices=KINDS, default="dense")
            command.add_argument("--groups", type=int, default=1)
            command.add_argument("--recipe", nargs=2, metavar=("A", "B"), default=None, help="1x128 128x128, row row, …")
        if name == "tune":
            command.add_argument("--expected-m", type=int, help="rows of a group that count, for --kind masked; by default all M")
    commands.add_parser("bench")  # for the usage line: handled above
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except (RuntimeError, ValueError) as error:
        print(f"python -m fp8_gemm {options.command}: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.command == "smoke":
        return 0 if smoke(device, options.backend) else 1
    recipe = options.recipe or (("1x128", "1x128") if options.kind == "k_grouped" else ("1x128", "128x128"))
    described = {"kind": options.kind, "groups": options.groups, "recipe_a": recipe[0], "recipe_b": recipe[1],
                 "interval": 128 if recipe[0] == "1x128" else None}  # fmt: skip
    if options.kind == "k_grouped":
        described["out_dtype"] = torch.float32
    if options.command == "tune":
        for problem in dispatch.problems_of(options.shapes, **described):  # one by one: each takes seconds
            print(tune([problem], device=options.device, expected_m=options.expected_m)[0], flush=True)
        return 0
    if options.command == "warmup":
        explanations = dispatch.warmup(options.shapes, device=options.device, backend=options.backend, **described)
    else:
        problems = dispatch.problems_of(options.shapes, **described)
        explanations = [dispatch.explain(problem, device=device, backend=options.backend) for problem in problems]
    print("\n\n".join(map(str, explanations)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
