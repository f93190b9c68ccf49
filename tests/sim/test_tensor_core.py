"""mma.sync on FP8: every sum against exact fractions, and instructions that run as one batch against the same one by one."""

from fractions import Fraction
from math import frexp, trunc

import ml_dtypes
import numpy as np
import pytest
from hopperlab.compile import compile_source
from hopperlab.sim.launcher import _program
from hopperlab.sim.tensor_core import mma_arithmetic

FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344)}
FAMILIES = {
    "a full scale": lambda rng, shape, top: top * rng.uniform(-1, 1, shape),
    "tiny": lambda rng, shape, top: rng.normal(size=shape) * 2.0**-9,
    "wide": lambda rng, shape, top: rng.normal(size=shape) * 2.0 ** rng.integers(-14, 8, shape),
    "sparse": lambda rng, shape, top: rng.normal(size=shape) * (rng.random(shape) < 0.2),
    "zeros": lambda rng, shape, top: np.zeros(shape) * rng.choice([-1, 1], shape),
}


def codes(rng, fmt, family, shape):
    dtype, top = FORMATS[fmt]
    return np.clip(FAMILIES[family](rng, shape, top), -top, top).astype(dtype).view(np.uint8)


def half_step(a, b, c):
    """Products and c cut to 25 fraction bits of the largest exponent; the sum cut to float32. Python numbers."""

    def exponent(x):
        return max(frexp(x)[1] - 1, -14)

    exponents = [exponent(x) + exponent(y) for x, y in zip(a, b) if x * y] + ([frexp(c)[1] - 1] if c else [])
    if not exponents:
        return 0.0
    unit = Fraction(2) ** (max(exponents) - 25)
    total = unit * (trunc(Fraction(c) / unit) + sum(trunc(Fraction(x) * Fraction(y) / unit) for x, y in zip(a, b)))
    last = Fraction(2) ** (frexp(float(total))[1] - 24)
    return float(last * trunc(total / last))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("a_type", FORMATS)
@pytest.mark.parametrize("b_type", FORMATS)
def test_fp8_sums(a_type, b_type, family):
    rng = np.random.default_rng(len(family))
    a, b = codes(rng, a_type, family, (2, 3, 16, 32)), codes(rng, b_type, family, (2, 3, 8, 32))
    c = (rng.normal(size=(4, 3, 16, 8)) * 2.0**-6).astype(np.float32)
    a_of, b_of = [0, 0, 1, 1], [0, 1, 0, 1]
    d = mma_arithmetic(a, b, c, a_type, b_type, a_of=a_of, b_of=b_of)
    x, y = a.view(FORMATS[a_type][0]).astype(float), b.view(FORMATS[b_type][0]).astype(float)
    for index in zip(*(rng.integers(0, n, 60) for n in d.shape)):
        n, warp, row, column = (int(i) for i in index)
        p, q = x[a_of[n], warp, row].reshape(8, 4), y[b_of[n], warp, column].reshape(8, 4)
        total = 0.0
        for half in (slice(0, 2), slice(2, 4)):
            total = half_step(p[:, half].ravel().tolist(), q[:, half].ravel().tolist(), total)
        assert d[index].view(np.uint32) == (np.float32(total) + c[index]).view(np.uint32), (index, d[index], total)


def test_fp8_specials_stay_in_their_row_and_column():
    rng = np.random.default_rng(0)
    a, b = (codes(rng, "e5m2", "wide", (1, 1, rows, 32)) for rows in (16, 8))
    c = np.zeros((1, 1, 16, 8), np.float32)
    usual = mma_arithmetic(a, b, c, "e5m2", "e5m2")
    a[0, 0, 3, 5], b[0, 0, 2, 9], b[0, 0, 2, 11] = 0x7E, 0x7C, 0xFC  # NaN; both infinities
    with np.errstate(all="ignore"):
        d = mma_arithmetic(a, b, c, "e5m2", "e5m2")
    touched = np.zeros((1, 1, 16, 8), bool)
    touched[0, 0, 3], touched[0, 0, :, 2] = True, True
    assert np.array_equal(d[~touched], usual[~touched]) and not np.isfinite(d[touched]).any()
    assert (d[0, 0, 3].view(np.uint32) == 0x7FFFFFFF).all()


def multiply(d, a, b, c):
    """PTX of one mma.sync; each argument is the number of the first asm operand of that fragment."""
    names = [f"{{{', '.join(f'%{first + i}' for i in range(count))}}}" for first, count in ((d, 4), (a, 4), (b, 2), (c, 4))]
    return f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {', '.join(names)};"


X, Y, Z, A0, A1, B0, B1 = 0, 4, 8, 12, 16, 20, 22
SEQUENCE = [
    multiply(X, A0, B0, Y),
    multiply(Y, A0, B1, Y),  # writes what the first has read
    multiply(Z, A1, B1, Z),
    multiply(Z, A1, B0, Z),  # needs the one before
    multiply(Y, A0, B0, X),
]
KERNEL = """extern "C" __global__ void k(const u32* in, float* out) {
  u32 w[12]; float s[12];
  for (int i = 0; i < 12; ++i) w[i] = in[threadIdx.x + 128 * i], s[i] = 2.5f * threadIdx.x - i;
  asm volatile(CODE : OUTPUTS : INPUTS);
  for (int i = 0; i < 12; ++i) out[threadIdx.x + 128 * i] = s[i];
}"""
for _word, _text in {"OUTPUTS": '"+f"(s[{}])', "INPUTS": '"r"(w[{}])'}.items():
    KERNEL = KERNEL.replace(_word, ", ".join(_text.format(i) for i in range(12)))


@pytest.mark.parametrize("options", [dict(order="lazy"), dict(seed=1), dict(seed=2)])
def test_instructions_in_one_batch_equal_one_by_one(run, options):
    words = codes(np.random.default_rng(0), "e4m3", "wide", (12, 512)).view(np.uint32)
    results, batches = [], []
    for between in (" ", " bar.warp.sync 0xffffffff; "):
        source = KERNEL.replace("CODE", f'"{between.join(SEQUENCE)}"')
        out = np.zeros((12, 128), np.float32)
        report = run(source, words, out, block=128, **options)
        assert report.instructions["mma"] == 5 * 128
        results.append(out)
        program = _program(compile_source("typedef unsigned u32;\n" + source, "kernel.cu").ptx, "k")
        ends = [s for s in program.segments if s.terminator and s.terminator.parts[0] == "mma"]
        batches.append([1 + len(segment.joined) for segment in ends])
    assert batches == [[3, 2], [1] * 5]
    assert np.array_equal(results[0].view(np.uint32), results[1].view(np.uint32)) and np.isfinite(results[0]).all()
