"""Checks the learner's exercise.cu, blank by blank.   pytest stages/03*     (with --solution: kernel.cu)

A pipeline works only as a whole. So each blank is tested in the learner's file with the *other* blanks filled from kernel.cu:
a failure is then this blank's alone. The last test runs the learner's file as it is. The kernels run on the simulator, which
says what is wrong in words and tries several orders of events, and then on the Hopper GPU where there is one.
"""

import functools
import re
from pathlib import Path

import pytest
import torch

from hopperlab import check, exercise, reference, stage
from hopperlab.compile import CompileError
from hopperlab.sim import SimulatorError

STAGE = stage.load(Path(__file__).resolve().parent)
SOLUTION = STAGE.path / "kernel.cu"
TILE = BLOCK_M, BLOCK_N = STAGE.module.BLOCK_M, STAGE.module.BLOCK_N
BLOCK_K, SLOTS = STAGE.module.BLOCK_K, STAGE.module.NUM_STAGES
# Each slot is used three times and the last round is not full: a wrong parity has nowhere to hide.
DEEP = BLOCK_K * (2 * SLOTS + 1)
ORDERS = ({"order": "lazy"}, {"order": "eager"}, {"seed": 1}, {"seed": 2})
SIMULATOR = torch.device("cpu")
TOGETHER = 0  # in place of a blank's number: all of them


def fail(number: int, message: str):
    if number == TOGETHER:
        pytest.fail(f"All blanks together: {message} If another test fails too, start with that one.", pytrace=False)
    pytest.fail(f"BLANK {number}: {message} Hint: hopperlab hint 03 {number}", pytrace=False)


def alone(source: Path, number: int, tmp_path: Path, replace: tuple[str, str] = ("", "")) -> Path:
    """The learner's file with every blank but one filled from kernel.cu.

    An answer takes the place of its own BLANK line, so that the line numbers in messages stay the learner's.
    replace: a text of the file outside of its blanks, and what to put there instead.
    """
    text = source.read_text()
    answers = {blank.number: blank.body for blank in exercise.blanks(SOLUTION.read_text())}

    def filled(match: re.Match) -> str:
        if int(match["number"]) == number:
            return match[0]
        answer = " ".join(re.sub(r"//.*", "", line).strip() for line in answers[int(match["number"])].splitlines())
        return answer + "\n" * (match["body"].count("\n") + 2)

    text = re.sub(r"[ \t]*// BLANK (?P<number>\d+): .*\n(?P<body>(?:.*\n)*?)[ \t]*// END BLANK.*\n", filled, text)
    path = tmp_path / f"blank_{number}_{'changed' if any(replace) else 'alone'}" / "exercise.cu"  # stage.py compiles a path once
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace(*replace))
    return path


def run(number: int, source: Path, case: stage.Case, **simulator_options):
    """Run the ring on the simulator; fail as this blank's on what it finds. Returns the output and the report."""
    a, b, _ = problem(case)
    out, _ = check.poisoned(case.m, case.n, case.out_dtype, SIMULATOR)
    try:
        # The constants give the simulator the sizes in struct Shared, so that it can name its members.
        return out, STAGE.module.ring(a, b, out, source=source, constants=STAGE.module.EXERCISE_CONSTANTS, **simulator_options)
    except SimulatorError as error:
        message = str(error)
        if number == 2 and "nothing has written yet" in message:
            message += " The wait let it through before the copies were even issued: which barrier, which parity, and which threads wait?"
        fail(number, f"{case}: {message}")
    except CompileError as error:
        fail(number, f"it does not compile with the other blanks filled from kernel.cu: {error}")


@functools.cache
def problem(case: stage.Case):
    """A, B and the output, bit for bit."""
    a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats)
    return a, b, expected(a, b, case.out_dtype)


def expected(a, b, out_dtype):
    return reference.matmul_hopper(a, b, interval=None, out_dtype=out_dtype)


def verify(number: int, source: Path, *cases: stage.Case):
    """Every order of the simulator, then the GPU: equal bits, or the sentence that says what is wrong."""
    for case in cases:
        a, b, want = problem(case)
        for order in ORDERS:
            out, _ = run(number, source, case, **order)
            verdict = check.compare(out, a, b, expected=want, tile=TILE)
            if not verdict.ok:
                fail(number, f"{case}: {resembles(a, b, out) or verdict}")
        for device in exercise.devices()[1:]:
            a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats, device=device)
            verdict = check.run(lambda a, b, out: STAGE.module.ring(a, b, out, source=source), a, b, case.out_dtype,
                                expected=expected, tile=TILE)  # fmt: skip
            if not verdict.ok:
                fail(number, f"{case}, on the GPU: {verdict}")


def resembles(a, b, out) -> str | None:
    """A sentence for the wrong sums that a wrong wgmma gives, recognised by the parts of k they hold."""
    k = torch.arange(a.k)
    still = k // BLOCK_K * BLOCK_K + k % 32  # where k lands when the start of a descriptor does not move inside a block
    ends = {
        "the output holds only the last K block: each block starts from zero. Only the very first wgmma of all may.":
            (a.k - 1) // BLOCK_K * BLOCK_K,
        "the output holds only the last 32 of k: every wgmma starts from zero. Only the very first one may.": a.k - 32,
        "the first K block counts only with its last 32 of k: its four steps all start from zero. Only the first of them may.":
            BLOCK_K - 32,
    }  # fmt: skip
    x, y, got = a.dequantize(torch.float64), b.dequantize(torch.float64), out.double()
    candidates = {
        "of each K block the first 32 of k count four times: the start of both descriptors must move by k.": x[:, still] @ y[:, still].t(),
        "the steps along k meet the first 32 of A every time: the start of A's descriptor must move by k too.": x[:, still] @ y.t(),
        "the steps along k meet the first 32 of B every time: the start of B's descriptor must move by k too.": x @ y[:, still].t(),
    }  # fmt: skip
    candidates |= {what: x[:, k >= start] @ y[:, k >= start].t() for what, start in ends.items()}
    return next((what for what, like in candidates.items() if float((got - like).norm()) < 0.02 * float(like.norm())), None)


def plain(m: int, n: int, k: int, out_dtype=torch.float32) -> stage.Case:
    return stage.Case(m, n, k, ("tensor", "tensor"), ("e4m3", "e4m3"), out_dtype)


def test_blank_1_announces_and_copies_both_tiles(source, tmp_path):
    exercise.require_filled(source, 1, "03")
    path = alone(source, 1, tmp_path)
    _, report = run(1, path, plain(BLOCK_M, BLOCK_N, BLOCK_K), order="eager", math="fast", check=False, trace=True)
    announced = [int(word) for span in report.trace for word in re.findall(r"expect (\d+) bytes", span.name)]
    if announced != [(BLOCK_M + BLOCK_N) * BLOCK_K]:
        fail(1, f"for one K block {announced or 'no'} bytes are announced; boxes of {BLOCK_M} and {BLOCK_N} rows of {BLOCK_K} bytes "
                f"are {(BLOCK_M + BLOCK_N) * BLOCK_K}, and one announcement counts as the one arrival.")  # fmt: skip
    _, report = run(1, path, plain(BLOCK_M, 2 * BLOCK_N, DEEP), math="fast", trace=True)
    loads = [span for span in report.trace if span.kind == "load"]
    for n in range(2):
        found = sorted(tuple(span.details["coordinates"]) for span in loads if span.block == (n, 0, 0))
        want = sorted((k, row) for k in range(0, DEEP, BLOCK_K) for row in (0, n * BLOCK_N))
        if found != want:
            odd = next(pair for pair in zip([*found, None], [*want, None]) if pair[0] != pair[1])
            fail(1, f"the CTA with m0 = 0 and n0 = {n * BLOCK_N} copies a box at (k, row) = {odd[0]} where {odd[1]} is wanted: "
                    "x is where the block starts along k, y is m0 for A and n0 for B.")  # fmt: skip
    verify(1, path, plain(BLOCK_M, BLOCK_N, DEEP), plain(BLOCK_M - 28, BLOCK_N - 3, BLOCK_K + 16))


def test_blank_2_waits_for_each_use_of_a_slot(source, tmp_path):
    exercise.require_filled(source, 2, "03")
    path = alone(source, 2, tmp_path)
    verify(2, path, plain(BLOCK_M, BLOCK_N, DEEP), plain(BLOCK_M, BLOCK_N, BLOCK_K))


def test_blank_3_describes_the_tiles_and_starts_from_zero(source, tmp_path):
    exercise.require_filled(source, 3, "03")
    verify(3, alone(source, 3, tmp_path), plain(BLOCK_M, BLOCK_N, DEEP), plain(BLOCK_M, BLOCK_N, BLOCK_K))
    # Registers of a real GPU hold what the last kernel left. Here they hold NaN.
    declared = "float sum[BlockN / 2];"
    assert declared in source.read_text(), f"the line {declared!r} is gone from outside the blanks"
    poisoned = alone(source, 3, tmp_path, (declared, declared + " for (float& x : sum) x = __uint_as_float(0x7fffffff);"))
    out, _ = run(3, poisoned, plain(BLOCK_M, BLOCK_N, BLOCK_K))
    if out.isnan().any():
        fail(3, "the result depends on what was in the registers of sum before (this test put NaN there). The very first wgmma must "
                "start from zero: accumulate = 0 at k_block 0, k 0, and only there.")  # fmt: skip


def test_blank_4_releases_and_refills_the_last_slot(source, tmp_path):
    exercise.require_filled(source, 4, "03")
    path = alone(source, 4, tmp_path)
    # Fewer blocks than slots, exactly as many, and several rounds.
    for blocks in (SLOTS - 1, SLOTS, 2 * SLOTS + 1):
        _, report = run(4, path, plain(BLOCK_M, BLOCK_N, blocks * BLOCK_K), math="fast", trace=True)
        found = sorted({span.details["coordinates"][0] // BLOCK_K for span in report.trace if span.kind == "load"})
        count = sum(span.kind == "load" for span in report.trace)
        if found != list(range(blocks)) or count != 2 * blocks:
            fail(4, f"with {blocks} K blocks and {SLOTS} slots, the blocks {found} are copied, in {count} copies; wanted are 0 to "
                    f"{blocks - 1}, two copies each. When block i is done its slot gets block i + Stages, if there is one.")  # fmt: skip
    verify(4, path, plain(BLOCK_M, BLOCK_N, DEEP))


def test_the_whole_file_on_ragged_scaled_shapes(source):
    for number in (1, 2, 3, 4):
        exercise.require_filled(source, number, "03")
    ring = next(step for step in STAGE.steps if step.source == "kernel.cu")
    verify(TOGETHER, source, *stage.cases(ring), plain(BLOCK_M, 2 * BLOCK_N, DEEP, torch.bfloat16))
