"""Checks the learner's exercise.cu, blank by blank.   pytest stages/06*     (with --solution: fp8_gemm/kernels/gemm.cu)

Each blank is first judged alone: the others are answered from gemm.cu, so an early mistake hides no later one. Blanks 1
to 3 are judged by the tiles that the scheduler finds: look.cu, put behind the learner's file, writes them down. Blank 4 is
judged by the sums of a product whose K is split. Then the whole file multiplies groups, on the simulator in several
orders of events, and on the Hopper GPU where there is one.
"""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from fp8_gemm import kernels
from fp8_gemm.plan import plan
from fp8_gemm.problem import Operands, Problem
from hopperlab import check, exercise, reference, stage
from hopperlab.kernel import Kernel, simulation
from hopperlab.quantize import BLOCK, ScaledTensor
from hopperlab.sim import SimulatorError

STAGE = stage.load(Path(__file__).resolve().parent)
SOLUTION = exercise.blanks(STAGE.module.KERNEL.read_text())
ORDERS = ({"order": "lazy"}, {"order": "eager"}, {"seed": 1})
BLOCKS = ("1x128", "128x128")

# The scheduler's problem. 40 groups: more than a warp looks at together. Some are empty, some need several tiles, one ends
# where a tile does.
SIZES = [0 if group % 3 == 1 else 64 if group == 8 else 1 + 37 * group % 150 for group in range(40)]
GAP = 4  # rows between groups that belong to none, as where a caller pads
N, CTAS = 72, 3
BLOCK_X, BLOCK_Y, GROUP_X = 64, 32, 2

# Said with every failure of a blank: what must hold there.
ADVICE = {
    1: "After the blank, lane l's sum counts the tiles of the groups of lanes 0 to l.",
    2: "The tile belongs to the first group whose sum goes beyond index. All lanes take the group, its size and the tiles "
       "before it from that lane.",
    3: "Tokens are rows of X, or of Y where Swapped. Contiguous: they are rows begins[group] to begins[group] + size. "
       "Masked: rows 0 to size.",
    4: "Split 0's sum, plus split 1's, plus split 2's and so on. This CTA's own is in total[round][i], that of another split s the "
       "(i % 4)th of the four that begin at parts[part(s, piece_of(i), round, i)].",
}  # fmt: skip


def alone(source: Path, number: int, tmp_path: Path) -> Path:
    """The learner's file with every other blank answered from gemm.cu. No line moves, so messages name the learner's lines."""
    lines, inside = [], None
    for line in source.read_text().splitlines():
        if start := re.match(r"\s*// BLANK (\d+):", line):
            inside = int(start[1])
        elif re.match(r"\s*// END BLANK", line):
            if inside != number:
                line = " ".join(re.sub(r"//.*", "", code).strip() for code in SOLUTION[inside - 1].body.splitlines()) + line
            inside = None
        elif inside not in (None, number):
            line = ""
        lines.append(line)
    path = tmp_path / f"blank_{number}" / source.name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def fail(number: int, what: str) -> None:
    pytest.fail(f"BLANK {number}, {what} {ADVICE[number]} Hint: hopperlab hint {STAGE.number} {number}", pytrace=False)


def finding(call) -> str | None:
    """What the call returns, or what the simulator says of it."""
    try:
        return call()
    except SimulatorError as error:
        return str(error)


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def groups(kind: str) -> tuple[list[int], list[int]]:
    """First row of each group's tokens, and the row behind its last."""
    begins = [sum(SIZES[:group]) + GAP * group if kind == "Contiguous" else 0 for group in range(len(SIZES))]
    return begins, [begin + size for begin, size in zip(begins, SIZES)]


def right_tiles(kind: str, swapped: bool) -> list[tuple[int, ...]]:
    """(group, x, y, x_end, y_end) of every tile, in order, group by group."""
    tiles = []
    for group, (begin, end) in enumerate(zip(*groups(kind))):
        x, y = ((0, N), (begin, end)) if swapped else ((begin, end), (0, N))
        rows, columns = -(-(x[1] - x[0]) // BLOCK_X), -(-(y[1] - y[0]) // BLOCK_Y)
        for first in range(0, rows, GROUP_X):
            tiles += [(group, x[0] + row * BLOCK_X, y[0] + column * BLOCK_Y, x[1], y[1])
                      for column in range(columns) for row in range(first, min(first + GROUP_X, rows))]  # fmt: skip
    return tiles


def found_tiles(source: Path, kind: str, swapped: bool, most: int) -> torch.Tensor:
    """What each lane of each CTA was given: (CTAS, most, 32, 5) integers; -1 where it was given nothing."""
    begins, ends = (torch.tensor(rows, dtype=torch.int32) for rows in groups(kind))
    if kind == "Masked":
        begins = ends  # there are none, and the library passes this in their place
    problem = Problem(kind.lower(), int(ends.max()) + GAP, N, BLOCK, len(SIZES))
    tile = {"block_m": BLOCK_Y, "block_n": BLOCK_X} if swapped else {"block_m": BLOCK_X, "block_n": BLOCK_Y}
    chosen = plan(problem, **tile, swap_ab=swapped, group_m=GROUP_X)
    return STAGE.module.list_tiles(problem, chosen, begins, ends, CTAS, most, source)[..., :5]


def describe(tile: tuple[int, ...]) -> str:
    group, x, y, x_end, y_end = tile
    return f"group {group}, X from row {x}, ending at {x_end}, Y from row {y}, ending at {y_end}"


def wrong_tile(source: Path, kind: str, swapped: bool) -> str | None:
    """The first tile that the scheduler does not give, or gives wrongly, in words."""
    tiles = right_tiles(kind, swapped)
    most = -(-len(tiles) // CTAS) + 1
    found = found_tiles(source, kind, swapped, most)
    where = (f"{kind}{', swapped' if swapped else ''}, groups of {', '.join(map(str, SIZES[:9]))}, … tokens, N = {N}, "
             f"tiles of {BLOCK_X} x {BLOCK_Y}")  # fmt: skip
    for index in range(CTAS * most):
        cta, turn = index % CTAS, index // CTAS
        lanes = found[cta, turn]
        given = [tuple(lane) for lane in lanes.tolist()]
        name = f"tile {index}, number {turn} of CTA {cta} of {CTAS}"
        odd = next((lane for lane in range(32) if given[lane] != given[0]), None)
        if odd is not None:
            return f"{where}: the lanes disagree on {name}. Lane 0: {describe(given[0])}; lane {odd}: {describe(given[odd])}."
        nothing = given[0][0] == -1
        if index >= len(tiles):
            if not nothing:
                return f"{where}: there are {len(tiles)} tiles, but CTA {cta} is given one more: {describe(given[0])}."
        elif nothing:
            return f"{where}: {name} is never given to it. Right is: {describe(tiles[index])}."
        elif given[0] != tiles[index]:
            return f"{where}: {name} is given as {describe(given[0])}. Right is: {describe(tiles[index])}."
    return None


def judge_scheduler(source: Path, number: int, tmp_path: Path) -> None:
    exercise.require_filled(source, number, STAGE.number)
    path = alone(source, number, tmp_path)
    for kind in ("Contiguous", "Masked"):
        for swapped in (False, True):
            if message := finding(lambda: wrong_tile(path, kind, swapped)):
                fail(number, message)


# ---- products --------------------------------------------------------------------------------------------------------


def launch(source: Path, problem: Problem, operands: Operands, out: torch.Tensor, options: dict, **overrides) -> None:
    """One product with the learner's kernel."""
    chosen = plan(problem, kernels.SMS_OF_AN_H200, **overrides)
    with mock.patch.object(kernels, "kernel", lambda constants: Kernel(source, "gemm", dict(constants))), simulation(**options):
        kernels.launch(problem, chosen, operands, out)


PIECE = 16  # columns that one CTA adds up: half of a tile's, since pieces of TMA stores have 16 at least


def split_sums(source: Path, options: dict, device: torch.device) -> str | None:
    """A product with K in four parts. What is wrong with it, or None."""
    m, n, k, parts = 70, 40, 1024, 4
    a, b = check.problem(m, n, k, recipes=BLOCKS, device=device)
    out, _ = check.poisoned(m, n, torch.float32, device)
    problem = Problem("dense", m, n, k, out_dtype=torch.float32)
    operands = Operands(a.data, b.data, a.scale, b.scale)
    launch(source, problem, operands, out, options, block_m=64, block_n=32, swap_ab=False, split_k=parts)
    if torch.equal(out, reference.matmul_hopper(a, b, out_dtype=torch.float32, split_k=parts)):
        return None
    length = k // parts
    each = []
    for part in range(parts):
        columns, blocks = slice(part * length, (part + 1) * length), slice(part * length // BLOCK, (part + 1) * length // BLOCK)
        slices = [ScaledTensor(x.data[:, columns].contiguous(), x.scale[:, blocks].contiguous(), x.recipe) for x in (a, b)]
        each.append(reference.matmul_hopper(*slices, out_dtype=torch.float32).double().flatten().cpu())
    each, sums = torch.stack(each, 1), out.double().flatten().cpu()
    where = f"{problem.m} x {n} x {k}, K in {parts} parts" + "".join(f", {name}={value}" for name, value in options.items())
    for piece in (piece for rows in torch.arange(m * n).view(m, n).split(64) for piece in rows.split(PIECE, dim=1)):
        of_piece, (row, column) = piece.flatten(), divmod(int(piece[0, 0]), n)
        place = f"D[{row}][{column}] and those beside it, the piece of split {column // PIECE % 2},"
        times = torch.linalg.lstsq(each[of_piece], sums[of_piece, None]).solution[:, 0].round()
        if (each[of_piece] @ times - sums[of_piece]).abs().max() > 1e-4 * sums.abs().max():
            return f"{where}: {place} are no sums of the four parts of their own element."
        if (times != 1).any():
            counted = ", ".join(str(int(count)) for count in times)
            return f"{where}: {place} hold the four parts {counted} times; each must be there once."
    return f"{where}: every part is in the result once, but the bits are not those of adding them in order."


def grouped(source: Path, kind: str, swapped: bool, options: dict, device: torch.device) -> str | None:
    """Four groups, one of them empty. What is wrong, or None."""
    sizes, n, k, max_m = (5, 0, 70, 3), 40, 200, 71
    experts = [check.problem(1, n, k, recipes=BLOCKS, seed=group, device=device)[1] for group in range(len(sizes))]
    data = torch.stack([b.data.view(torch.uint8) for b in experts]).view(experts[0].data.dtype)
    scale = torch.stack([b.scale for b in experts])
    rows = sum(sizes) + 2 if kind == "contiguous" else len(sizes) * max_m  # with rows of no group
    a, _ = check.problem(rows, 1, k, recipes=BLOCKS, device=device)
    out, _ = check.poisoned(rows, n, torch.bfloat16, device)
    want = out.clone()
    begins = [sum(sizes[:group]) if kind == "contiguous" else group * max_m for group in range(len(sizes))]
    for begin, size, b in zip(begins, sizes, experts):
        if size:
            tokens = ScaledTensor(a.data[begin : begin + size], a.scale[begin : begin + size].contiguous(), a.recipe)
            want[begin : begin + size] = reference.matmul_hopper(tokens, b)
    if kind == "contiguous":
        problem = Problem(kind, rows, n, k, len(sizes))
        offsets = torch.tensor([*begins, sum(sizes)], dtype=torch.int32, device=device)
        operands, shaped = Operands(a.data, data, a.scale, scale, offsets=offsets), out
    else:
        problem = Problem(kind, max_m, n, k, len(sizes))
        masked_m = torch.tensor(sizes, dtype=torch.int32, device=device)
        a_data, a_scale, shaped = (x.view(len(sizes), max_m, -1) for x in (a.data, a.scale, out))
        operands = Operands(a_data, data, a_scale, scale, masked_m=masked_m)
    tile = {"block_m": 16, "block_n": 64, "swap_ab": True} if swapped else {"block_m": 64, "block_n": 32, "swap_ab": False}
    launch(source, problem, operands, shaped, options, **tile)
    wrong = (out.view(torch.int16) != want.view(torch.int16)).nonzero()
    if not len(wrong):
        return None
    row, column = wrong[0].tolist()
    group = next((g for g, (begin, size) in enumerate(zip(begins, sizes)) if begin <= row < begin + size), None)
    owner = f"group {group}" if group is not None else "no group, and must stay as it was"
    return f"{kind}{', swapped' if swapped else ''}: D[{row}][{column}] is wrong; that row belongs to {owner}."


def judge_splits(source: Path, tmp_path: Path) -> None:
    exercise.require_filled(source, 4, STAGE.number)
    path = alone(source, 4, tmp_path)
    for device in exercise.devices():
        for options in ORDERS if device.type == "cpu" else ({},):
            if message := finding(lambda: split_sums(path, options, device)):
                fail(4, message)


def test_blank_1_prefix_sums(source, tmp_path):
    judge_scheduler(source, 1, tmp_path)


def test_blank_2_finds_the_group(source, tmp_path):
    judge_scheduler(source, 2, tmp_path)


def test_blank_3_finds_the_rows(source, tmp_path):
    judge_scheduler(source, 3, tmp_path)


def test_blank_4_adds_the_splits_in_order(source, tmp_path):
    judge_splits(source, tmp_path)


def test_whole_kernel(source):
    """All blanks together: groups one after another and in buffers, A and B in both places, and split K."""
    for number in range(1, len(SOLUTION) + 1):
        exercise.require_filled(source, number, STAGE.number)
    advice = "If every blank passes alone, look at what was changed outside of the blanks."
    for device in exercise.devices():
        for seed, (kind, swapped) in enumerate((kind, swapped) for kind in ("contiguous", "masked") for swapped in (False, True)):
            options = {"seed": seed} if device.type == "cpu" else {}
            message = finding(lambda: grouped(source, kind, swapped, options, device))
            if message:
                pytest.fail(f"The whole file, {message} {advice}", pytrace=False)
        message = finding(lambda: split_sums(source, {"seed": 9} if device.type == "cpu" else {}, device))
        if message:
            pytest.fail(f"The whole file, {message} {advice}", pytrace=False)
