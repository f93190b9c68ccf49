"""Checks the learner's exercise.cu, blank by blank.   pytest stages/05*     (with --solution: kernel.cu)

Each blank is first judged alone: the others are answered from kernel.cu, so an early mistake hides no later one. Then
the whole file runs as it is. The kernels run on the simulator, in several orders of events, and then on the Hopper GPU
where there is one. Where a result is wrong, two small products say more: one tells which scales were used, one what was summed.
"""

import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from hopperlab import check, exercise, stage
from hopperlab.kernel import simulation
from hopperlab.quantize import BLOCK, ScaledTensor, scale_shape
from hopperlab.sim import SimulatorError

STAGE = stage.load(Path(__file__).resolve().parent)
STEP = next(step for step in STAGE.steps if step.source == "kernel.cu")
BLANKS = len(exercise.blanks((STAGE.path / "kernel.cu").read_text()))

# Orders of events on the simulator: what a race depends on.
ORDERS = ({"order": "lazy"}, {"order": "eager"}, {"seed": 1})
# 96 columns: tiles start at columns 0, 96 and 192. The second straddles blocks 0 and 1 of B's scales, the third 1 and 2.
TILE = STAGE.module.Tile(2, 96, 4)
# Three tiles, six blocks of K for a ring of four slots. M, N and K are ragged. FP32 shows every rounding.
RAGGED = stage.Case(200, 264, 720, ("1x128", "128x128"), ("e4m3", "e4m3"), torch.float32)

# Said with every failure of a blank: what must hold there.
ADVICE = {
    1: "Column c of the tile is column n0 % 128 + c, counted from the start of the first block of B's scales that the tile "
       "touches. Both rows of the thread change their scale there.",
    2: "This round's 64 rows of A, all of B, in four steps of 32 along k. The first of the four starts from zero, in every "
       "block and every round: the sum before has been promoted, and the next block has another scale.",
    3: "In each phase empty[slot] takes one arrival of each consumer warp, when its block has been multiplied and promoted. That "
       "slot is last_slot; ring is at the one that wgmma reads now.",
    4: "Each sum goes to its own round's total, times the scale of its own row and of its own column, rounded once.",
}  # fmt: skip


def alone(source: Path, number: int, tmp_path: Path) -> Path:
    """The learner's file with every other blank answered from kernel.cu. No line moves, so messages name the learner's lines."""
    answers = {blank.number: blank.body for blank in exercise.blanks((STAGE.path / "kernel.cu").read_text())}
    lines, inside = [], None
    for line in source.read_text().splitlines():
        if start := re.match(r"\s*// BLANK (\d+):", line):
            inside = int(start[1])
        elif re.match(r"\s*// END BLANK", line):
            if inside != number:
                line = one_line(answers[inside]) + line
            inside = None
        elif inside not in (None, number):
            line = ""
        lines.append(line)
    path = tmp_path / f"blank_{number}" / source.name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def one_line(answer: str) -> str:
    """An answer without comments in one line. A #pragma must end its line; the operator _Pragma may stand within one."""
    lines = [re.sub(r"//.*", "", code).strip() for code in answer.splitlines()]
    return " ".join(re.sub(r"#pragma (\w+)", r'_Pragma("\1")', code) for code in lines)


@functools.cache
def problem(case: stage.Case, device: torch.device):
    """Operands, and the output that the model of the tensor core gives for them. Slower than a run, so kept."""
    a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats, device=device)
    return a, b, STEP.expected(a, b, case.out_dtype)


def run(source: Path, a: ScaledTensor, b: ScaledTensor, out: torch.Tensor, tile=TILE, **options) -> None:
    """One product. On the simulator a single CTA works through all tiles, so that the ring goes round from tile to tile."""
    with mock.patch.object(STAGE.module, "SMS_OF_AN_H200", 1), simulation(**options):
        STAGE.module.overlapped(a, b, out, tile=tile, source=source)


def finding(source: Path, case: stage.Case, tile=TILE, orders=ORDERS) -> str | None:
    """Run the kernel in these orders, and on the GPU. What is wrong, from the simulator or the check, or None."""
    for device in exercise.devices():
        a, b, expected = problem(case, device)
        for options in orders if device.type == "cpu" else ({},):
            where = f"{case}" + "".join(f", {name}={value}" for name, value in options.items())
            gemm = functools.partial(run, source, tile=tile, **options)
            try:
                verdict = check.run(gemm, a, b, case.out_dtype, expected=lambda *_: expected, tile=(tile.block_m, tile.block_n))
            except SimulatorError as error:
                return f"{where}: {error}"
            if not verdict.ok:
                return f"{where}: {verdict}{sums(source)}{scales_used(source)}"
    return None


def probe(source: Path, a: torch.Tensor, n: int, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None) -> torch.Tensor:
    """The product of A (256, K) with n rows of ones, on the simulator, in float32. Scales not given are ones."""
    operands = []
    for x, recipe, scale in ((a, "1x128", scale_a), (torch.ones(n, a.shape[1]), "128x128", scale_b)):
        ones = torch.ones(scale_shape(recipe, *x.shape))
        operands.append(ScaledTensor(x.to(torch.float8_e4m3fn), ones if scale is None else scale, recipe))
    out = torch.full((len(a), n), torch.nan)
    run(source, *operands, out)
    return out


def sums(source: Path) -> str:
    """What a product with ones says about the sums; nothing if they are right."""
    k, values = 3 * BLOCK, torch.tensor([1.0, 7.0, 11.0, 13.0])  # of A's rows 0 to 63, 64 to 127, ...: no two have a common factor
    expected = k * values.repeat_interleave(64)
    out = probe(source, values.repeat_interleave(64)[:, None].expand(256, k), 96)
    wrong = (out != expected[:, None]).nonzero()
    if not len(wrong):
        return ""
    m, n = wrong[0].tolist()
    value, own = float(out[m, n]), float(values[m // 64])
    sentence = (f" In a product with ones, K = {k}, no scales, where row {m} of A holds {own:g}, D[{m}][{n}] must be {float(expected[m]):g} and "
                f"is {value:g}")  # fmt: skip
    if value in k * values:
        group = 64 * (k * values).tolist().index(value)
        return sentence + f", the sum of rows {group} to {group + 63}."
    if value == own * BLOCK:
        return sentence + ", the sum of one block of K."
    return sentence + (": sums that were promoted before are in it again." if value > expected[m] else ".")


def scales_used(source: Path) -> str:
    """Which scales were multiplied with the first output that has wrong ones; nothing if all are right.

    A's scales are 1 + m / 512 and B's 4^block: each product of two belongs to one pair.
    """
    n = 300
    scale_a = 1 + torch.arange(256)[:, None] / 512
    scale_b = 4.0 ** torch.arange(-(-n // BLOCK))[:, None]
    out = probe(source, torch.ones(256, BLOCK), n, scale_a, scale_b) / BLOCK
    pairs = scale_a * scale_b.t()
    wrong = (out != pairs.repeat_interleave(BLOCK, 1)[:, :n]).nonzero()
    if not len(wrong):
        return ""
    m, column = wrong[0].tolist()
    used = (pairs == out[m, column]).nonzero()
    if not len(used):
        return ""
    row, block = used[0].tolist()
    return (f" In a product of one block of K, D[{m}][{column}], in the tile that starts at column {column // 96 * 96}, was given A's scale "
            f"of row {row} and B's of block {block}: right are row {m} and block {column // BLOCK}.")  # fmt: skip


def judge(source: Path, number: int, tmp_path: Path) -> None:
    exercise.require_filled(source, number, STAGE.number)
    if message := finding(alone(source, number, tmp_path), RAGGED):
        pytest.fail(f"BLANK {number}, {message} {ADVICE[number]} Hint: hopperlab hint {STAGE.number} {number}", pytrace=False)


def test_blank_1_scale_of_a_straddling_tile(source, tmp_path):
    judge(source, 1, tmp_path)


def test_blank_2_multiplies_one_block(source, tmp_path):
    judge(source, 2, tmp_path)


def test_blank_3_gives_the_slot_back(source, tmp_path):
    judge(source, 3, tmp_path)


def test_blank_4_promotes(source, tmp_path):
    judge(source, 4, tmp_path)


def test_whole_kernel(source):
    """All blanks together, also with 128 rows per tile, a width of 112, and where TMA cannot write D."""
    for number in range(1, BLANKS + 1):
        exercise.require_filled(source, number, STAGE.number)
    recipes = ("1x128", "128x128")
    low = stage.Case(150, 264, 144, recipes, ("e5m2", "e4m3"), torch.float16)
    without_tma = stage.Case(260, 239, 272, recipes, ("e4m3", "e5m2"), torch.float32)
    for case, tile, orders in (
        (RAGGED, TILE, (*ORDERS, {"seed": 2})),
        (low, STAGE.module.Tile(1, 160, 8), ({"seed": 3},)),
        (without_tma, STAGE.module.Tile(2, 112, 4), ({"seed": 4},)),
    ):
        if message := finding(source, case, tile, orders):
            pytest.fail(f"The whole file, {message} If every blank passes alone, look at what was changed outside of the blanks.",
                        pytrace=False)  # fmt: skip
