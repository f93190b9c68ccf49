"""Stage 06: grouped GEMM for mixtures of experts, and the library that it belongs to. The course's view of fp8_gemm."""

import functools
import sys
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
if str(FOLDER) not in sys.path:  # the library lies here, whether or not it is installed
    sys.path.append(str(FOLDER))

from fp8_gemm import kernels, triton_backend  # noqa: E402
from fp8_gemm.plan import Plan  # noqa: E402
from fp8_gemm.problem import RECIPE_PAIRS, Operands, Problem  # noqa: E402
from hopperlab import reference  # noqa: E402
from hopperlab.kernel import Kernel  # noqa: E402
from hopperlab.quantize import ScaledTensor, scale_to_m_major  # noqa: E402
from hopperlab.stage import Step, check_operands  # noqa: E402

TITLE = "Grouped GEMM for mixtures of experts, as a library"
KERNEL = FOLDER / "fp8_gemm" / "kernels" / "gemm.cu"

# Of the exercise: groups of tokens one after another, 64 rows per tile.
EXERCISE_CONSTANTS = {"KIND": "Contiguous", "SWAPPED": 0, "CONSUMERS": 1, "ROUNDS": 1, "BLOCK_Y": 32, "NUM_STAGES": 3,
                      "GROUP_X": 4, "SPLITS": 1, "MULTICAST": 1, "CTAS_PER_SM": 1, "INTERVAL": 1, "VECTOR_Y": 0, "HALVES": 0, "TURNS": 0, "STORE_BY_TMA": 1, "ACCUMULATE": 0,
                      "BIAS": 0, "OUTPUT": "bf16", "X_FORMAT": "e4m3", "Y_FORMAT": "e4m3"}  # fmt: skip
RECIPES = tuple(sorted(RECIPE_PAIRS, key=lambda pair: pair != ("1x128", "128x128")))  # the library's default first


def problem_of(a: ScaledTensor, b: ScaledTensor, out_dtype: torch.dtype) -> Problem:
    return Problem("dense", a.rows, b.rows, a.k, 1, a.recipe, b.recipe, a.format.name, b.format.name, out_dtype)


def library(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, scale_a: torch.Tensor | None = None,
            scale_b: torch.Tensor | None = None, run=kernels.run) -> None:  # fmt: skip
    """out (M, N) = A (M, K) times B (N, K) transposed, as fp8_gemm.gemm computes it; promoted every 128 of K.

    scale_a, scale_b: the scales of a and b in another layout, which prepare made.
    """
    check_operands(a, b, out, recipes=RECIPES)
    a_scale, b_scale = a.scale if scale_a is None else scale_a, b.scale if scale_b is None else scale_b
    run(problem_of(a, b, out.dtype), Operands(a.data, b.data, a_scale, b_scale), out)


def m_major(a: ScaledTensor, b: ScaledTensor) -> dict[str, torch.Tensor]:
    """The scales per 1x128 in the layout that fp8_gemm.quantize gives them, as arguments of the step."""
    return {f"scale_{name}": scale_to_m_major(x.scale)[:, : x.rows].t() for name, x in (("a", a), ("b", b)) if x.recipe == "1x128"}


def _expected(a, b, out_dtype):
    splits = kernels.plan_for(problem_of(a, b, out_dtype), a.device).splits if a.k and a.rows and b.rows else 1
    return reference.matmul_hopper(a, b, interval=128, out_dtype=out_dtype, split_k=splits)


def _bound(a, b, out_dtype):
    return reference.error_bound(a, b, out_dtype, interval=128)


def list_tiles(problem: Problem, chosen: Plan, begins: torch.Tensor, ends: torch.Tensor, ctas: int, most: int,
               source: Path = KERNEL) -> torch.Tensor:  # fmt: skip
    """The tiles that the scheduler of gemm.cu finds, run on the simulator or the GPU.

    begins, ends  (groups,) int32, as the kernel gets them; where there are no groups any int32 tensor
    ctas          CTAs that share the tiles; most: tiles of each CTA that are written down

    Returns int32 (ctas, most, 32, 9): what each lane of a warp is given, the first fields of struct Tile in order; -1 where there
    is no tile.
    """
    found = torch.full((ctas, most, 32, 9), -1, dtype=torch.int32, device=begins.device)
    x_rows, y_rows = (problem.n, problem.m) if chosen.swap_ab else (problem.m, problem.n)
    with tempfile.TemporaryDirectory() as folder:
        both = Path(folder) / source.name
        both.write_text(source.read_text() + (FOLDER / "look.cu").read_text())
        kernel = Kernel(both, "list_tiles", kernels.constants_of(problem, chosen))
        kernel[ctas, 32](begins, ends, found, x_rows, y_rows, problem.k, problem.groups, most)
    return found


STEPS = [
    Step("library", "one kernel for dense and grouped, tiles chosen by a plan", "fp8_gemm/kernels/gemm.cu", "cuda", library,
         expected=_expected, recipes=RECIPES, prepare=m_major),
    Step("library (Triton)", "the library's kernel for other GPUs with FP8", "fp8_gemm/triton_backend.py", "triton",
         functools.partial(library, run=triton_backend.run), bound=_bound, tile=(64, triton_backend.BLOCK_N), recipes=RECIPES),
]  # fmt: skip
