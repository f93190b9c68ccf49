"""One table of what this machine can run, and the sentence that says what is missing.

Skips in tests, messages of the command line and ``hopperlab doctor`` all read it, so they cannot disagree.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Capability:
    """One thing a machine may have."""

    name: str
    what_for: str
    ok: bool
    found: str
    fix: str = ""  # what to do when it is missing; empty when nothing is wrong
    required: bool = True  # whether its absence breaks something the course promises on this machine

    def sentence(self) -> str:
        """Why something that needs it is skipped."""
        return f"{self.name} is needed for {self.what_for}; found: {self.found}. {self.fix}".strip()


def has_hopper() -> bool:
    """Whether torch can use a GPU of compute capability 9.0, the one that runs sm_90a code."""
    return hopper().ok


def require_hopper(otherwise: str = "") -> None:
    """End the program with a sentence where there is no Hopper GPU; otherwise: what can be done without one."""
    if not has_hopper():
        sys.exit(f"{hopper().sentence()} {otherwise}".rstrip())


def machine() -> str:
    """Where CUDA kernels run here: the card's name, or "simulator"."""
    return torch.cuda.get_device_name(0).removeprefix("NVIDIA ") if has_hopper() else "simulator"


def device() -> torch.device:
    """The device whose tensors run kernels on the best machine there is: the Hopper GPU, else the CPU (simulator)."""
    return torch.device("cuda", 0) if has_hopper() else torch.device("cpu")


def use_triton_interpreter_without_gpu() -> None:
    """Let Triton kernels run on the CPU. Triton reads the variable when a kernel is decorated, so call this first."""
    if not has_hopper():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def table() -> list[Capability]:
    """Every capability, in the order ``hopperlab doctor`` prints them."""
    return [python(), torch_version(), nvrtc(), cuda_python(), hopper(), triton(), nvml(), plots(), notebooks(), deep_gemm()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _at_least(version: str | None, minimum: tuple[int, ...]) -> bool:
    return version is not None and tuple(map(int, re.findall(r"\d+", version)[: len(minimum)])) >= minimum


def python() -> Capability:
    return Capability(
        "Python", "everything", (3, 11) <= sys.version_info[:2] <= (3, 12), ".".join(map(str, sys.version_info[:3])),
        "The course is tested on Python 3.11 and 3.12: make run PYTHON=python3.12",
    )  # fmt: skip


def torch_version() -> Capability:
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return Capability(
        "torch", "tensors and peers", _at_least(torch.__version__, (2, 11)), f"{torch.__version__.split('+')[0]}, {build}",
        "Run: pip install 'torch>=2.11'",
    )  # fmt: skip


def nvrtc() -> Capability:
    from hopperlab import compile as compiler

    try:
        major, minor = compiler.nvrtc_version()
    except (RuntimeError, ImportError) as error:
        return Capability("NVRTC", "compiling kernels", False, str(error), "Run: pip install 'nvidia-cuda-nvrtc>=13.0'")
    return Capability("NVRTC", "compiling kernels", True, f"{major}.{minor}")


def cuda_python() -> Capability:
    core, bindings = _version("cuda-core"), _version("cuda-bindings")
    return Capability(
        "cuda-python", "compiling, loading and launching", _at_least(core, (1, 2)) and _at_least(bindings, (13, 0)),
        f"cuda-core {core}, cuda-bindings {bindings}", "Run: pip install 'cuda-core>=1.2' 'cuda-bindings>=13.0'",
    )  # fmt: skip


@functools.cache
def hopper() -> Capability:
    """A Hopper GPU that torch can use. On a machine that has none this is no fault: kernels run on the simulator."""
    name, purpose = "Hopper GPU", "running kernels on hardware"
    if torch.version.cuda is None:
        return Capability(name, purpose, False, "torch is a CPU build",
                          "Kernels run on the simulator. With a Hopper GPU: install a CUDA 13 build of torch.", False)  # fmt: skip
    if not torch.cuda.is_available():
        return Capability(name, purpose, False, "torch sees no GPU",
                          "Kernels run on the simulator. With a Hopper GPU: its driver must support CUDA 13 (580 or later).", False)  # fmt: skip
    major, minor = torch.cuda.get_device_capability(0)
    found = f"{torch.cuda.get_device_name(0)}, sm_{major}{minor}"
    if (major, minor) != (9, 0):
        return Capability(name, purpose, False, found,
                          "sm_90a code runs on compute capability 9.0 alone (H100, H200, H20, GH200): "
                          "kernels run on the simulator.", False)  # fmt: skip
    return Capability(name, purpose, True, f"{found}, {torch.cuda.get_device_properties(0).multi_processor_count} SMs")


def triton() -> Capability:
    version = _version("triton")
    where = "on the GPU" if has_hopper() else "on Triton's interpreter"
    return Capability("Triton", "the Triton steps", _at_least(version, (3, 6)), f"{version}, runs {where}",
                      "Run: pip install 'triton>=3.6'")  # fmt: skip


def nvml() -> Capability:
    from hopperlab import telemetry

    if not has_hopper():
        return Capability("NVML", "clocks, power and temperature beside timings", False, "no GPU to read", "", False)
    try:
        found = telemetry.card()
    except RuntimeError as error:
        return Capability("NVML", "clocks, power and temperature beside timings", False, str(error), "Run: pip install nvidia-ml-py")
    return Capability("NVML", "clocks, power and temperature beside timings", True,
                      f"driver {found['driver']}, {found['power_limit_w']:.0f} W limit")  # fmt: skip


def plots() -> Capability:
    version = _version("matplotlib")
    return Capability("matplotlib", "plots", version is not None, version or "not installed",
                      "Run: pip install 'hopper-fp8-gemm[course]'", False)  # fmt: skip


def notebooks() -> Capability:
    version = _version("jupyterlab")
    return Capability("Jupyter", "the lessons", version is not None, version or "not installed",
                      "Run: pip install 'hopper-fp8-gemm[course]'", False)  # fmt: skip


def deep_gemm() -> Capability:
    version = _version("sgl-deep-gemm")
    if not has_hopper():
        return Capability("DeepGEMM", "the peer measurement", False, "not used without a Hopper GPU", "", False)
    found = importlib.util.find_spec("deep_gemm") is not None
    return Capability("DeepGEMM", "the peer measurement", found, version or "not installed",
                      "Run: pip install 'hopper-fp8-gemm[peers]'", False)  # fmt: skip
