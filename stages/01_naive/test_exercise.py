"""Checks the learner's exercise.cu, blank by blank.   pytest stages/01*     (with --solution: kernel.cu)

The kernels run on a Hopper GPU where there is one, otherwise on the simulator.
"""

from pathlib import Path

import pytest
import torch

from hopperlab import capability, check, exercise, formats, reference, stage
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
    path = tmp_path / "probe.cu"
    path.write_text(source.read_text() + PROBES)
    return Kernel(path, entry, CONSTANTS)


def decode_all(source: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """What the learner's decode makes of every byte, for both formats."""
    codes = torch.arange(256, dtype=torch.uint8, device=capability.device())
    e4m3, e5m2 = (torch.full((256,), 777.0, device=codes.device) for _ in range(2))
    probe(source, tmp_path, "probe_decode")[1, 256](codes, e4m3, e5m2)
    return {"e4m3": e4m3.cpu(), "e5m2": e5m2.cpu()}


def test_blank_1_decodes_every_byte(source, tmp_path):
    require_filled(source, 1)
    for name, values in decode_all(source, tmp_path).items():
        want = formats.all_values(name)
        wrong = ~((values == want) | (values.isnan() & want.isnan()))
        if wrong.any():
            code = int(wrong.nonzero()[0])
            fmt = formats.format_of(name)
            kind = "subnormal" if code & 0x7F < 1 << fmt.mantissa_bits else "normal"
            ratio = float(values[code] / want[code]) if float(want[code]) else float("nan")
            fail(f"BLANK 1: {name} byte 0x{code:02x} ({kind}) is {float(want[code])}, decode gives {float(values[code])}"
                 f"{f', a factor of {ratio:.6g}' if ratio == ratio and ratio not in (0.0, 1.0) else ''}; "
                 f"{int(wrong.sum())} of 256 bytes are wrong. {name} has {fmt.mantissa_bits} mantissa bits and bias {fmt.bias}. "
                 f"Hint: hopperlab hint 01 1")  # fmt: skip


def test_blank_2_loads_ragged_tiles(source, tmp_path):
    require_filled(source, 1, 2)
    table = decode_all(source, tmp_path)["e4m3"].nan_to_num()  # the learner's own decode: this test is about loading
    for rows, k, row0, k0 in ((64, 32, 0, 0), (100, 70, 64, 64), (100, 70, 64, 32), (3, 5, 0, 0)):
        generator = torch.Generator().manual_seed(rows)
        codes = torch.randint(1, 120, (rows, k), generator=generator, dtype=torch.uint8)
        out = torch.full((ROWS, DEPTH), 777.0, device=capability.device())
        matrix = codes.to(out.device)
        threads = CONSTANTS["BLOCK_M"] // CONSTANTS["THREAD_M"] * (CONSTANTS["BLOCK_N"] // CONSTANTS["THREAD_N"])
        probe(source, tmp_path, "probe_load_tile")[1, threads](matrix, out, row0, k0, rows, k)
        want = torch.zeros(ROWS, DEPTH)
        part = table[codes[row0 : row0 + ROWS, k0 : k0 + DEPTH].long()]
        want[: part.shape[0], : part.shape[1]] = part
        wrong = (out.cpu() != want).nonzero()
        if len(wrong):
            r, c = (int(i) for i in wrong[0])
            inside = row0 + r < rows and k0 + c < k
            fail(f"BLANK 2: of a {rows}x{k} matrix, the tile at row {row0}, k {k0} holds {float(out[r, c])} for element "
                 f"({row0 + r}, {k0 + c}), which should be {float(want[r, c])}"
                 f"{'' if inside else ': it lies outside the matrix and must be 0'}. Hint: hopperlab hint 01 2")  # fmt: skip


def run_kernel(source: Path, m: int, n: int, k: int, recipes, formats, out_dtype) -> check.Verdict:
    a, b = check.problem(m, n, k, recipes=recipes, formats=formats, device=capability.device())
    gemm = lambda a, b, out: STAGE.module.tiled(a, b, out, source=source)  # noqa: E731
    return check.run(gemm, a, b, out_dtype, expected=reference.matmul_fp32, tile=(CONSTANTS["BLOCK_M"], CONSTANTS["BLOCK_N"]))


def test_blank_3_sums_full_tiles(source):
    require_filled(source, 1, 2, 3, 4)
    for m, n, k in ((64, 64, 32), (128, 64, 96)):
        verdict = run_kernel(source, m, n, k, ("tensor", "tensor"), ("e4m3", "e4m3"), torch.float32)
        if not verdict.ok:
            fail(f"BLANK 3 (or 4), on full tiles {m}x{n}x{k}: {verdict}{rounding(verdict)} Hint: hopperlab hint 01 3")


def test_blank_4_stores_ragged_scaled_outputs(source):
    require_filled(source, 1, 2, 3, 4)
    for case in stage.cases(next(step for step in STAGE.steps if step.source == "kernel.cu")):
        verdict = run_kernel(source, case.m, case.n, case.k, case.recipes, case.formats, case.out_dtype)
        if not verdict.ok:
            fail(f"BLANK 4, on {case}: {verdict}{rounding(verdict)} Hint: hopperlab hint 01 4")


def rounding(verdict: check.Verdict) -> str:
    if verdict.first is not None and verdict.max_rel_error < 1e-2 and verdict.diff < 1e-5:
        return (" The values are right but for rounding: add k in ascending order with fmaf, and multiply the two scales "
                "before the sum.")  # fmt: skip
    return ""
