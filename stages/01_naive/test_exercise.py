"""Checks the learner's exercise.cu, blank by blank.   pytest stages/01*     (with --solution: kernel.cu)

The kernels run on the simulator, which says what is wrong in words, and then on the Hopper GPU where there is one.
"""

from pathlib import Path

import pytest
import torch

from hopperlab import check, exercise, formats, reference, stage
from hopperlab.kernel import Kernel

STAGE = stage.load(Path(__file__).resolve().parent)
CONSTANTS = STAGE.module.EXERCISE_CONSTANTS
ROWS, DEPTH = CONSTANTS["BLOCK_M"], CONSTANTS["BLOCK_K"]

# Small kernels that call one function of the learner's file each.
PROBES = """
extern "C" __global__ void probe_decode(const u8* codes, float* e4m3, float* e5m2) {
  e4m3[threadIdx.x] = decode<3>(codes[threadIdx.x]);
  e5m2[threadIdx.x] = decode<2>(codes[threadIdx.x]);
}
extern "C" __global__ void __launch_bounds__(Threads)
probe_load_tile(const u8* source, float* out, int row0, int k0, int rows, int K) {
  __shared__ float tile[BlockK][BlockM + Pad];
  load_tile<3, BlockM>(tile, source, row0, k0, rows, K);
  __syncthreads();
  for (int i = threadIdx.x; i < BlockM * BlockK; i += Threads) out[i] = tile[i % BlockK][i / BlockK];
}
"""


def fail(message: str):
    pytest.fail(message, pytrace=False)


def require_filled(source: Path, *numbers: int):
    for number in numbers:
        exercise.require_filled(source, number, STAGE.number)


def probe(source: Path, tmp_path: Path, entry: str) -> Kernel:
    path = tmp_path / "probe" / source.name  # the name that the learner knows
    path.parent.mkdir(exist_ok=True)
    path.write_text(source.read_text() + PROBES)
    return Kernel(path, entry, CONSTANTS)


def decode_all(source: Path, tmp_path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What the learner's decode makes of every byte, for both formats."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    e4m3, e5m2 = (torch.full((256,), 777.0, device=device) for _ in range(2))
    probe(source, tmp_path, "probe_decode")[1, 256](codes, e4m3, e5m2)
    return {"e4m3": e4m3.cpu(), "e5m2": e5m2.cpu()}


def test_blank_1_decodes_every_byte(source, tmp_path):
    require_filled(source, 1)
    for device in exercise.devices():
        with exercise.explained(1, "01"):
            decoded = decode_all(source, tmp_path, device)
        for name, values in decoded.items():
            want = formats.all_values(name)
            wrong = ~((values == want) | (values.isnan() & want.isnan()))
            if wrong.any():
                fail(describe_decode(name, int(wrong.nonzero()[0]), values, want) + f" {int(wrong.sum())} of 256 bytes are wrong.")


def describe_decode(name: str, code: int, values: torch.Tensor, want: torch.Tensor) -> str:
    fmt = formats.format_of(name)
    kind = "subnormal" if code & 0x7F < 1 << fmt.mantissa_bits else "normal"
    factor = f", a factor of {float(values[code] / want[code]):.6g}" if float(want[code]) and float(values[code]) else ""
    return (f"BLANK 1: {name} byte 0x{code:02x} ({kind}) is {float(want[code])}, decode gives {float(values[code])}{factor}. "
            f"{name} has {fmt.mantissa_bits} mantissa bits and bias {fmt.bias}. Hint: hopperlab hint 01 1.")  # fmt: skip


def test_blank_2_loads_ragged_tiles(source, tmp_path):
    require_filled(source, 1, 2)
    threads = CONSTANTS["BLOCK_M"] // CONSTANTS["THREAD_M"] * (CONSTANTS["BLOCK_N"] // CONSTANTS["THREAD_N"])
    for device in exercise.devices():
        table = decode_all(source, tmp_path, device)["e4m3"].nan_to_num()  # the learner's own decode: this test is about loading
        for rows, k, row0, k0 in ((64, 32, 0, 0), (100, 70, 64, 64), (100, 70, 64, 32), (3, 5, 0, 0)):
            tile = f"the tile at row {row0}, k {k0} of a {rows}x{k} matrix"
            codes = torch.randint(1, 120, (rows, k), generator=torch.Generator().manual_seed(rows), dtype=torch.uint8)
            out = torch.full((ROWS, DEPTH), 777.0, device=device)
            with exercise.explained(2, "01", f", {tile}"):
                probe(source, tmp_path, "probe_load_tile")[1, threads](codes.to(device), out, row0, k0, rows, k)
            want = torch.zeros(ROWS, DEPTH)
            part = table[codes[row0 : row0 + ROWS, k0 : k0 + DEPTH].long()]
            want[: part.shape[0], : part.shape[1]] = part
            wrong = (out.cpu() != want).nonzero()
            if len(wrong):
                r, c = (int(i) for i in wrong[0])
                inside = row0 + r < rows and k0 + c < k
                fail(f"BLANK 2: {tile} holds {float(out[r, c])} for element ({row0 + r}, {k0 + c}), which should be {float(want[r, c])}"
                     f"{'' if inside else ': it lies outside the matrix and must be 0'}. Hint: hopperlab hint 01 2")  # fmt: skip


def run_kernel(source: Path, case: stage.Case, number: int) -> None:
    """Run the whole kernel on one case; fail as blank ``number`` when its output is wrong."""
    gemm = lambda a, b, out: STAGE.module.tiled(a, b, out, source=source)  # noqa: E731
    for device in exercise.devices():
        a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats, device=device)
        with exercise.explained(number, "01", f", {case}"):
            verdict = check.run(gemm, a, b, case.out_dtype, expected=reference.matmul_fp32,
                                tile=(CONSTANTS["BLOCK_M"], CONSTANTS["BLOCK_N"]))  # fmt: skip
        if not verdict.ok:
            fail(f"BLANK {number}, {case}: {verdict} Hint: hopperlab hint 01 {number}")


def test_blank_3_sums_full_tiles(source):
    require_filled(source, 1, 2, 3, 4)
    for m, n, k in ((64, 64, 32), (128, 64, 96)):
        run_kernel(source, stage.Case(m, n, k, ("tensor", "tensor"), ("e4m3", "e4m3"), torch.float32), 3)


def test_blank_4_stores_ragged_scaled_outputs(source):
    require_filled(source, 1, 2, 3, 4)
    for case in stage.cases(next(step for step in STAGE.steps if step.source == "kernel.cu")):
        run_kernel(source, case, 4)
