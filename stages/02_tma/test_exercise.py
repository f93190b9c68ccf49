"""Checks the learner's exercise.cu, blank by blank.   pytest stages/02*     (with --solution: kernel.cu)

The kernels run on the simulator, which says what is wrong in words, and then on the Hopper GPU where there is one. A
kernel that the simulator finds wrong, or stuck, never reaches the GPU.
"""

import contextlib
import re
from pathlib import Path

import pytest
import torch

from hopperlab import check, exercise, formats, reference, stage
from hopperlab.kernel import Kernel, simulation
from hopperlab.quantize import ScaledTensor
from hopperlab.sim import SimulatorError
from hopperlab.tensormap import TensorMap

STAGE = stage.load(Path(__file__).resolve().parent)
CONSTANTS = STAGE.module.EXERCISE_CONSTANTS
ROWS, COLUMNS, DEPTH, THREADS = STAGE.module.BLOCK_M, STAGE.module.BLOCK_N, STAGE.module.BLOCK_K, STAGE.module.THREADS
CHUNK = 16  # bytes that a swizzle moves as one
EVERY = (1, 2, 3, 4)

# Small kernels that call one function of the learner's file each, on tiles that TMA has loaded.
PROBES = """
struct alignas(1024) Probe {
  u8 first[BlockM * BlockK];
  u8 second[BlockN * BlockK];
  u64 landed;
};
__device__ void load_both(Probe& probe, const TensorMap* first, const TensorMap* second) {
  if (threadIdx.x == 0) {
    mbarrier_init(&probe.landed, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&probe.landed, (BlockM + BlockN) * BlockK);
    tma_load_2d(probe.first, first, &probe.landed, 0, 0);
    tma_load_2d(probe.second, second, &probe.landed, 0, 0);
  }
  mbarrier_wait(&probe.landed, 0);
}
// Two tiles in the order of their addresses, and the offset at which swizzled() looks for each byte.
extern "C" __global__ void __launch_bounds__(Threads)
probe_swizzled(const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second,
               u8* stored_first, u8* stored_second, int* offset) {
  extern __shared__ u8 raw[];
  Probe& probe = *reinterpret_cast<Probe*>(raw);
  load_both(probe, &first, &second);
  for (int i = threadIdx.x; i < BlockM * BlockK; i += Threads) {
    stored_first[i] = probe.first[i];
    stored_second[i] = probe.second[i];
    offset[i] = static_cast<int>(swizzled(probe.first, i / BlockK, i % BlockK) - probe.first);
  }
}
// D (BlockM, BlockN) = one tile of A times one of B, by multiply().
extern "C" __global__ void __launch_bounds__(Threads)
probe_multiply(const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second, float* D) {
  extern __shared__ u8 raw[];
  Probe& probe = *reinterpret_cast<Probe*>(raw);
  load_both(probe, &first, &second);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_m = warp / 4 * WarpM, warp_n = warp % 4 * WarpN;
  float sum[WarpM / 16][WarpN / 8][4] = {};
  multiply(sum, probe.first + warp_m * BlockK, probe.second + warp_n * BlockK, lane);
  for (int i = 0; i < WarpM / 16; ++i)
    for (int j = 0; j < WarpN / 8; ++j)
      for (int x = 0; x < 4; ++x)
        D[(warp_m + 16 * i + lane / 4 + x / 2 * 8) * BlockN + warp_n + 8 * j + lane % 4 * 2 + x % 2] = sum[i][j][x];
}
"""
PROBE_SHARED = stage.shared_bytes((ROWS + COLUMNS) * DEPTH, 8)


def fail(message: str):
    pytest.fail(message, pytrace=False)


def require_filled(source: Path, *numbers: int):
    for number in numbers:
        exercise.require_filled(source, number, STAGE.number)


# What the simulator's general findings mean in this kernel: blank -> (words of the finding, their meaning here).
MEANING = {
    3: [(r"written yet|without having waited|arrives on|a second TMA load|^deadlock",
         "In this kernel both boxes are announced together, once per block, on the barrier of the block's own buffer, "
         "and both copies go there.")],
    4: [(r"written yet|without having waited", "So threads went on before this block's bytes had landed. "
         "Which phase of its buffer's barrier is this block's, and does every thread wait for it?"),
        (r"^deadlock", "So a wait never ends: is it on this block's buffer, and for a phase that comes?")],
}  # fmt: skip


@contextlib.contextmanager
def explained(number: int, where: str = ""):
    """exercise.explained, and what the finding means in this kernel."""
    with exercise.explained(number, STAGE.number, where):
        try:
            yield
        except SimulatorError as error:
            text = str(error)
            meaning = [words for pattern, words in MEANING.get(number, []) if re.search(pattern, text)]
            raise type(error)(" ".join([text, *meaning])) from None


def isolated(source: Path, number: int, tmp_path: Path, probes: str = "") -> Path:
    """The learner's file with the other blanks answered as in kernel.cu, so that each mistake is blamed on its own blank.

    ``#line`` keeps the line numbers of the learner's file in every message.
    """
    answers = {blank.number: blank.body for blank in exercise.blanks((STAGE.path / "kernel.cu").read_text())}
    text, inside = [], None
    for at, line in enumerate(source.read_text().splitlines(), 1):
        if inside is not None and "// END BLANK" in line:
            text += [*answers[inside].splitlines(), f"#line {at}"]
            inside = None
        if inside is None:
            text.append(line)
        found = re.match(r"\s*// BLANK (\d+):", line)
        if found and int(found[1]) != number:
            inside = int(found[1])
    folder = tmp_path / f"blank_{number}"
    folder.mkdir(exist_ok=True)
    (folder / source.name).write_text("\n".join(text) + "\n" + probes)
    return folder / source.name


def run_probe(path: Path, entry: str, first: torch.Tensor, second: torch.Tensor, *outputs: torch.Tensor) -> None:
    """Run a probe on two (128, 128) byte tensors."""
    maps = [TensorMap.tiled(x, box=(DEPTH, len(x)), swizzle=128) for x in (first, second)]
    Kernel(path, entry, CONSTANTS)[1, THREADS, 1, PROBE_SHARED](*maps, *outputs)


def test_blank_1_finds_every_byte(source, tmp_path):
    require_filled(source, 1)
    path = isolated(source, 1, tmp_path, PROBES)
    row, byte = (x.to(torch.uint8) for x in torch.meshgrid(torch.arange(ROWS), torch.arange(DEPTH), indexing="ij"))
    for device in exercise.devices():
        stored_row, stored_byte = (torch.empty(ROWS * DEPTH, dtype=torch.uint8, device=device) for _ in range(2))
        offsets = torch.empty(ROWS * DEPTH, dtype=torch.int32, device=device)
        with explained(1):
            run_probe(path, "probe_swizzled", row.to(device), byte.to(device), stored_row, stored_byte, offsets)
        want = torch.empty(ROWS * DEPTH, dtype=torch.int64)  # (row, byte) -> offset, from where TMA put it
        want[stored_row.cpu().long() * DEPTH + stored_byte.cpu().long()] = torch.arange(ROWS * DEPTH)
        wrong = offsets.cpu() != want
        if wrong.any():
            at = int(wrong.nonzero()[0])
            fail(describe_offset(at, int(offsets[at]), int(want[at]), stored_row.cpu(), stored_byte.cpu())
                 + f" {int(wrong.sum())} of {len(wrong)} bytes are wrong. Hint: hopperlab hint 02 1")  # fmt: skip


def describe_offset(at: int, got: int, want: int, stored_row: torch.Tensor, stored_byte: torch.Tensor) -> str:
    row, byte = divmod(at, DEPTH)
    if 0 <= got < ROWS * DEPTH:
        found = f"where TMA put byte {int(stored_byte[got])} of row {int(stored_row[got])}"
    else:
        found = f"which lies outside the tile of {ROWS * DEPTH} bytes"
    return (f"BLANK 1: byte k = {byte} of row {row} (chunk {byte // CHUNK}) is sought at offset {got}, {found}. "
            f"It lies at offset {want}: in place {want % DEPTH // CHUNK} of the 8 chunks of its row.")  # fmt: skip


def test_blank_2_reads_the_fragments_of_b(source, tmp_path):
    require_filled(source, 2)
    path = isolated(source, 2, tmp_path, PROBES)
    codes = formats.cast_saturating(torch.arange(CHUNK + 1).float(), "e4m3").view(torch.uint8)  # whole numbers to 16 are exact
    row, chunk = torch.meshgrid(torch.arange(COLUMNS), torch.arange(DEPTH) // CHUNK, indexing="ij")
    for device in exercise.devices():
        # A is 1 in one chunk of k, so an output is 16 times what B holds there: three numbers that say which bytes it is.
        for half in (0, 1):
            ones = torch.where(torch.arange(DEPTH) // CHUNK == half, codes[1], codes[0]).repeat(ROWS, 1)
            seen = []
            for label in (row % CHUNK, row // CHUNK, chunk):
                out = torch.full((ROWS, COLUMNS), float("nan"), device=device)
                with explained(2):
                    run_probe(path, "probe_multiply", ones.to(device), codes[label + 1].to(device), out)
                seen.append(out.cpu() / CHUNK - 1)
            read_row, read_chunk = seen[1] * CHUNK + seen[0], seen[2]
            wrong = (read_row != torch.arange(COLUMNS)) | (read_chunk != half)
            if wrong.any():
                n = int(wrong.any(0).nonzero()[0])
                m = int(wrong[:, n].nonzero()[0])
                fail(f"BLANK 2: column {n} of D multiplies A at k {CHUNK * half} to {CHUNK * half + CHUNK - 1} with "
                     f"{name_piece(float(read_row[m, n]), float(read_chunk[m, n]))}. It must be row {n} of B at the same k. "
                     f"{int(wrong.any(0).sum())} of {COLUMNS} columns are wrong. Hint: hopperlab hint 02 2")  # fmt: skip
        a, b = check.problem(ROWS, COLUMNS, DEPTH, device=device)
        one = torch.ones(1, device=device)
        a, b = ScaledTensor(a.data, one, a.recipe), ScaledTensor(b.data, one, b.recipe)
        out = torch.full((ROWS, COLUMNS), float("nan"), device=device)
        with explained(2):
            run_probe(path, "probe_multiply", a.data, b.data, out)
        verdict = check.compare(out, a, b, expected=reference.matmul_mma_sync(a, b, torch.float32))
        if not verdict.ok:
            fail(f"BLANK 2: one tile times one tile: {verdict} Hint: hopperlab hint 02 2")


def name_piece(row: float, chunk: float) -> str:
    if 0 <= row < COLUMNS and 0 <= chunk < DEPTH // CHUNK and row == int(row) and chunk == int(chunk):
        return f"row {int(row)} of B at k {int(chunk) * CHUNK} to {int(chunk) * CHUNK + CHUNK - 1}"
    return "a mixture of several rows of B, or a register that was never loaded"


def run_kernel(source: Path, case: stage.Case, blame: str, hint: int, orders: tuple[dict, ...] = ({},)) -> None:
    """Run the whole kernel on one case, on the simulator in the given orders of events, then on the GPU if there is one."""
    for device in exercise.devices():
        a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats, device=device)
        expected = reference.matmul_mma_sync(a, b, case.out_dtype)
        for options in orders if device.type == "cpu" else ({},):
            where = f", {case}" + "".join(f", {key}={value}" for key, value in options.items())
            with explained(hint, where), simulation(**options):
                verdict = check.run(lambda a, b, out: STAGE.module.two_buffers(a, b, out, source=source), a, b, case.out_dtype,
                                    expected=lambda *_: expected, tile=(ROWS, COLUMNS))  # fmt: skip
            if not verdict.ok:
                fail(f"{blame}{where}: {verdict} Hint: hopperlab hint 02 {hint}")


def fp32_case(m: int, n: int, k: int) -> stage.Case:
    return stage.Case(m, n, k, ("tensor", "row"), ("e4m3", "e4m3"), torch.float32)


def test_blank_3_asks_for_both_tiles(source, tmp_path):
    require_filled(source, 3)
    path = isolated(source, 3, tmp_path)
    # Two tiles of D side by side, two of k, all but one of them reaching past A or B.
    case = fp32_case(40, 136, 208)
    a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes)
    with explained(3, f", {case}"), simulation(trace=True) as reports:
        STAGE.module.two_buffers(a, b, torch.empty(case.m, case.n), source=path)
    for block in (0, 1):
        loads = [span for span in reports[0].trace if span.kind == "load" and span.block[0] == block]
        asked = [tuple(span.details["coordinates"]) for span in loads]
        needed = [(k, row) for k in (0, DEPTH) for row in (0, COLUMNS * block)]
        if sorted(asked) != sorted(needed):
            fail(f"BLANK 3, {case}: CTA {block} asks for boxes at (k, row) = {asked}. It needs {needed}: for each block of k one "
                 f"of A, at row m0 = 0, and one of B, at row n0 = {COLUMNS * block}. Hint: hopperlab hint 02 3")  # fmt: skip
    run_kernel(path, case, "BLANK 3", 3)


def test_blank_4_waits_for_the_right_phase(source, tmp_path):
    require_filled(source, 4)
    path = isolated(source, 4, tmp_path)
    # 3 blocks of k are the first buffer's second phase, 5 its third.
    run_kernel(path, fp32_case(16, 16, 384), "BLANK 4", 4, orders=({}, {"order": "eager"}, {"seed": 1}))
    run_kernel(path, fp32_case(16, 16, 640), "BLANK 4", 4)


@pytest.mark.filterwarnings("ignore:.*which TMA needs")
def test_the_whole_kernel(source):
    require_filled(source, *EVERY)
    for case in stage.cases(next(step for step in STAGE.steps if step.source == "kernel.cu")):
        run_kernel(source, case, "The whole kernel", 4)
