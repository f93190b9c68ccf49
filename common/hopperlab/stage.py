"""Finds the stages of the course on disk, and the steps each one lists.

A stage is a folder ``stages/NN_name`` with a ``stage.py`` that defines ``TITLE`` and ``STEPS``, a list of :class:`Step`.
The harness knows no stage by name: what it finds, it checks, measures and puts on the ladder.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from hopperlab import capability
from hopperlab.quantize import ScaledTensor


@dataclass(frozen=True)
class Step:
    """One kernel of a stage: how to call it, what it computes, what it can be given.

    gemm      (a, b, out) -> None: fills ``out`` (M, N) with A (M, K) times B (N, K) transposed, wherever the tensors are
    expected  (a, b, out_dtype) -> the output bit for bit, from the model of its arithmetic; None when not modelled
    bound     (a, b, out_dtype) -> largest allowed error per element; used when ``expected`` is None
    tile      (block_m, block_n), to name tiles
    prepare   (a, b) -> keyword arguments of gemm that a caller makes once, not per call: scales in another layout, say
    """

    name: str
    title: str
    source: str  # file in the stage's folder
    language: str  # "cuda" or "triton"
    gemm: Callable[[ScaledTensor, ScaledTensor, torch.Tensor], None]
    expected: Callable | None = None
    bound: Callable | None = None
    tile: tuple[int, int] = (128, 128)
    prepare: Callable[[ScaledTensor, ScaledTensor], dict] | None = None
    recipes: tuple[tuple[str, str], ...] = (("tensor", "tensor"),)
    formats: tuple[tuple[str, str], ...] = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"))
    out_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class Stage:
    """One stage folder, loaded."""

    path: Path
    title: str
    steps: list[Step]
    module: object = field(repr=False)

    @property
    def number(self) -> str:
        return self.path.name[:2]

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Case:
    """One problem a step is checked on."""

    m: int
    n: int
    k: int
    recipes: tuple[str, str]
    formats: tuple[str, str]
    out_dtype: torch.dtype

    def __str__(self):
        kind = "/".join(dict.fromkeys(self.formats)) + ", " + " x ".join(dict.fromkeys(self.recipes))
        return f"{self.m}x{self.n}x{self.k} {kind} -> {str(self.out_dtype).removeprefix('torch.')}"


# Small and ragged: M, N and K below, at and beyond a tile, odd, and one row. Every machine runs these, the simulator
# too, so their bits can be compared between machines.
SHARED_SHAPES = ((64, 64, 128), (1, 65, 129), (33, 17, 100), (130, 72, 48), (70, 130, 260))
# A GPU runs these besides: full tiles, odd sizes that fill many CTAs, no K at all.
GPU_SHAPES = ((1024, 1024, 1024), (1000, 999, 777), (257, 4099, 1031), (16, 7168, 512), (5, 3, 0))


def cases(step: Step, shapes=SHARED_SHAPES) -> Iterator[Case]:
    """One case per shape, going round the step's recipes, formats and output types so that all appear."""
    for index, (m, n, k) in zip(count(), shapes):
        pick = lambda options: options[index % len(options)]  # noqa: E731
        yield Case(m, n, k, pick(step.recipes), pick(step.formats), pick(step.out_dtypes))


def root() -> Path:
    """The folder that holds ``stages/``: the repository this package lies in, else the working directory."""
    for candidate in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (candidate / "stages").is_dir():
            return candidate
    raise FileNotFoundError("there is no stages/ folder beside this package or in the working directory; "
                            "run from a clone of the course repository")  # fmt: skip


def folders() -> list[Path]:
    """The stage folders that hold a stage.py, in order."""
    return sorted(path.parent for path in (root() / "stages").glob("[0-9][0-9]_*/stage.py"))


def matching(selector: str = "", single: bool = False) -> list[Path]:
    """The folders whose names start with ``selector`` ("01", or "" for all). Raises ValueError for none, and for several where ``single``."""
    found = [path for path in folders() if path.name.startswith(selector)]
    if not found or single and len(found) > 1:
        which = "there are" if not found else f"one stage is needed, and it fits {len(found)} of"
        raise ValueError(f"stage: got {selector!r}, {which} {[path.name for path in folders()]}")
    return found


def find(selector: str = "") -> list[Stage]:
    """The stages of those folders; see :func:`matching`."""
    return [load(path) for path in matching(selector)]


@functools.cache
def load(path: Path) -> Stage:
    """Import a stage's ``stage.py`` under a name of its own; files beside it are importable from it."""
    capability.use_triton_interpreter_without_gpu()
    module = load_module(path / "stage.py", f"stage_{path.name}")
    return Stage(path, module.TITLE, module.STEPS, module)


def load_module(path: str | os.PathLike, name: str):
    """Import one file as module ``name``. Stages use it for their neighbours: two stages may both have a triton_kernel.py."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running it: dataclasses and Triton look their module up
    spec.loader.exec_module(module)
    return module


def check_operands(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor,
                   recipes: tuple[tuple[str, str], ...] = ()) -> tuple[int, int, int]:  # fmt: skip
    """Refuse operands that a step cannot take, naming the argument. Returns (M, N, K)."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, ScaledTensor):
            raise TypeError(f"{name}: got {type(operand).__name__}; quantise it first: quantize(x, recipe)")
        if not operand.data.is_contiguous():
            raise ValueError(f"{name}.data: strides {operand.data.stride()}; must be row-major and contiguous: .contiguous()")
        if not operand.scale.is_contiguous():
            raise ValueError(f"{name}.scale: strides {operand.scale.stride()}; steps take row-major scales: .contiguous()")
    if a.k != b.k:
        raise ValueError(f"b: A is (M, K) = {tuple(a.data.shape)} and B is (N, K) = {tuple(b.data.shape)}; K must be equal")
    if recipes and (a.recipe, b.recipe) not in recipes:
        raise ValueError(f"a, b: recipes {a.recipe!r} and {b.recipe!r}; this step takes "
                         + " or ".join(f"{x!r} with {y!r}" for x, y in recipes))  # fmt: skip
    if tuple(out.shape) != (a.rows, b.rows):
        raise ValueError(f"out: shape {tuple(out.shape)}; A and B give (M, N) = ({a.rows}, {b.rows})")
    if not out.is_contiguous():
        raise ValueError(f"out: strides {out.stride()}; must be row-major and contiguous")
    if out.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"out: dtype {out.dtype}; allowed are bfloat16, float16 and float32")
    if not a.device == b.device == out.device:
        raise ValueError(f"a, b, out: on {a.device}, {b.device}, {out.device}; must be on one device")
    return a.rows, b.rows, a.k


# What kernels call their output type; see hopper.cuh.
OUTPUT_TYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}


def scale_stride(scaled: ScaledTensor) -> int:
    """Step from one row's scale to the next, for kernels that take tensor and row scales alike: 0 or 1."""
    return 0 if scaled.recipe == "tensor" else 1


def for_tma(name: str, data: torch.Tensor) -> torch.Tensor:
    """FP8 data (rows, K) as TMA can read it: rows a multiple of 16 bytes, at an address that is one.

    Where they are not, a copy is made, padded with zeros, which add nothing to a sum; a warning says so.
    """
    rows, k = data.shape
    if k % 16 == 0 and data.data_ptr() % 16 == 0:
        return data
    reason = f"K = {k} is not a multiple of 16" if k % 16 else "its address is not a multiple of 16"
    warnings.warn(f"{name}: {reason}, which TMA needs; it is copied for this call. Store it padded with zeros to avoid the copy.",
                  stacklevel=3)  # fmt: skip
    padded = torch.zeros(rows, -(-k // 16) * 16, dtype=torch.uint8, device=data.device)
    padded[:, :k] = data.view(torch.uint8)
    return padded.view(data.dtype)


def shared_bytes(*parts: int) -> int:
    """Bytes of a kernel's ``struct alignas(1024) Shared`` whose members have these sizes: their sum, rounded up to 1024."""
    return -(-sum(parts) // 1024) * 1024
