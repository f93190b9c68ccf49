"""Checks the learner's exercise.cu, blank by blank.   pytest stages/04*     (with --solution: kernel.cu)

Each blank is first judged alone: the others are answered from kernel.cu, so an early mistake hides no later one. Then
the whole file runs as it is. The kernels run on the simulator, in several orders of events, and then on the Hopper GPU
where there is one.
"""

import functools
import re
from pathlib import Path

import pytest
import torch

from hopperlab import check, exercise, stage
from hopperlab.kernel import simulation
from hopperlab.sim import SimulatorError

STAGE = stage.load(Path(__file__).resolve().parent)
STEP = next(step for step in STAGE.steps if step.source == "kernel.cu")
BLANKS = len(exercise.blanks((STAGE.path / "kernel.cu").read_text()))

# Orders of events on the simulator: what a race depends on.
ORDERS = ({"order": "lazy"}, {"order": "eager"}, {"seed": 1})
# One cluster of two CTAs works through all tiles: persistence, multicast, and a ring that goes round several times.
ONE_CLUSTER = {"block_n": 128, "cluster": 2, "sms": 2}
TILE = (128, 128)
# Two rows and two columns of cluster tiles, four k blocks each, for a ring of six slots. Rows, columns and k are ragged;
# in the last row of tiles one CTA has nothing but rows outside of D.
RAGGED = stage.Case(300, 136, 400, ("row", "tensor"), ("e4m3", "e4m3"), torch.bfloat16)

# Said with every failure of a blank: what must hold there.
ADVICE = {
    1: "The producer waits for the slot's readers, and in its first round through the ring there are none.",
    2: "In each phase of full[slot] A's tile and every CTA's share of B land in this CTA's slot. The shares are different "
       "rows of B and have different places in the tile. Coordinates are (k, row).",
    3: "The other CTA's producer writes into this slot too. In each phase a consumer warp arrives once on empty[slot] of "
       "each CTA.",
    4: "Each lane names one row of one 8x8 matrix: a row of the panel, and a 16-byte chunk of it, moved to where the "
       "swizzle puts it.",
    5: "First every writer's fence, then a barrier of the warpgroup, then one thread's store and commit, to the panel's "
       "place in D.",
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
                line = " ".join(re.sub(r"//.*", "", code).strip() for code in answers[inside].splitlines()) + line
            inside = None
        elif inside not in (None, number):
            line = ""
        lines.append(line)
    path = tmp_path / f"blank_{number}" / source.name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@functools.cache
def problem(case: stage.Case, device: torch.device):
    """Operands, and the output that the model of the tensor core gives for them. Slower than a run, so kept."""
    a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats, device=device)
    return a, b, STEP.expected(a, b, case.out_dtype)


def finding(source: Path, case: stage.Case, plan: dict, orders=ORDERS) -> str | None:
    """Run the kernel in these orders, and on the GPU. What is wrong, from the simulator or the check, or None."""
    # What the sizes in struct Shared depend on, so that the simulator can name its members.
    sizes = {"BLOCK_N": plan["block_n"], "NUM_STAGES": STAGE.module.ring_slots(plan["block_n"], staging=True)}
    for device in exercise.devices():
        a, b, expected = problem(case, device)
        for options in orders if device.type == "cpu" else ({},):
            where = f"{case}" + "".join(f", {name}={value}" for name, value in options.items())
            outputs = []

            def gemm(a, b, out):
                outputs.append(out)
                with simulation(constants=sizes, **options):
                    STAGE.module.overlapped(a, b, out, source=source, **plan)

            try:
                verdict = check.run(gemm, a, b, case.out_dtype, expected=lambda *_: expected, tile=TILE)
            except SimulatorError as error:
                return f"{where}: {error}"
            if not verdict.ok:
                return f"{where}: {verdict}{misplaced(outputs[0], expected, verdict.first)}"
    return None


def misplaced(out: torch.Tensor, expected: torch.Tensor, first: tuple[int, int] | None) -> str:
    """Where the values at the first wrong element belong, if they are right values in a wrong place of the same tile."""
    if first is None:
        return ""
    m, n = first
    m0, n0 = m // TILE[0] * TILE[0], n // TILE[1] * TILE[1]
    tile, want = out[m0 : m0 + TILE[0], n0 : n0 + TILE[1]], expected[m0 : m0 + TILE[0], n0 : n0 + TILE[1]]
    column = tile[:, n - n0]
    for other in range(want.shape[1]):
        if torch.equal(column, want[:, other]):
            return f" Column {n} of this tile holds the values of column {n0 + other}."
    chunk = (n - n0) // 8 * 8
    held = tile[m - m0, chunk : chunk + 8]
    for r in range(want.shape[0]):
        for c in range(0, want.shape[1] - 7, 8):
            if len(held) == 8 and torch.equal(held, want[r, c : c + 8]):
                return (f" The 16 bytes at row {m}, columns {n0 + chunk} to {n0 + chunk + 7} belong to row {m0 + r}, "
                        f"columns {n0 + c} to {n0 + c + 7}.")  # fmt: skip
    return ""


def judge(source: Path, number: int, tmp_path: Path) -> None:
    exercise.require_filled(source, number, STAGE.number)
    if message := finding(alone(source, number, tmp_path), RAGGED, ONE_CLUSTER):
        pytest.fail(f"BLANK {number}, {message} {ADVICE[number]} Hint: hopperlab hint {STAGE.number} {number}", pytrace=False)


def test_blank_1_producer_waits_for_the_slot(source, tmp_path):
    judge(source, 1, tmp_path)


def test_blank_2_fills_the_slot_of_every_cta(source, tmp_path):
    judge(source, 2, tmp_path)


def test_blank_3_releases_the_slot_to_every_producer(source, tmp_path):
    judge(source, 3, tmp_path)


def test_blank_4_stages_the_panel_swizzled(source, tmp_path):
    judge(source, 4, tmp_path)


def test_blank_5_hands_the_panel_to_tma(source, tmp_path):
    judge(source, 5, tmp_path)


def test_whole_kernel(source):
    """All blanks together, also without a cluster, with a wide tile, and where TMA cannot write D."""
    for number in range(1, BLANKS + 1):
        exercise.require_filled(source, number, STAGE.number)
    wide = stage.Case(150, 264, 144, ("tensor", "row"), ("e5m2", "e4m3"), torch.float16)
    without_tma = stage.Case(260, 65, 272, ("row", "tensor"), ("e4m3", "e5m2"), torch.float32)
    for case, plan, orders in (
        (RAGGED, ONE_CLUSTER, (*ORDERS, {"seed": 2})),
        (wide, {"block_n": 256, "cluster": 1, "sms": 1}, ({"seed": 3},)),
        (without_tma, ONE_CLUSTER, ({"seed": 4},)),
    ):
        if message := finding(source, case, plan, orders):
            pytest.fail(f"The whole file, {message} If every blank passes alone, look at what was changed outside of the blanks.",
                        pytrace=False)  # fmt: skip
