"""Integer, conversion and float instructions against oracles that work on one Python number at a time."""

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hopperlab.sim import arithmetic
from hypothesis import given, settings
from hypothesis import strategies as st

N = 256
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def s32(x):
    return x - (1 << 32) if x >> 31 & 1 else x


def s64(x):
    return x - (1 << 64) if x >> 63 & 1 else x


def byte(x, i):
    return s32((x >> 8 * i & 255) << 24) >> 24


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bfe(a, b, c, signed):
    position, length = b & 255, c & 255
    sign = signed and length and a >> min(position + length - 1, 31) & 1
    return sum((a >> position + i & 1 if i < length and position + i <= 31 else sign) << i for i in range(32))


def bfi(a, b, c, d):
    position, length = c & 255, d & 255
    for i in range(length):
        if position + i <= 31:
            b = b & ~(1 << position + i) | (a >> i & 1) << position + i
    return b


def prmt(a, b, c):
    data, result = a | b << 32, 0
    for i in range(4):
        digit = c >> 4 * i & 15
        byte = data >> 8 * (digit & 7) & 255
        result |= (255 * (byte >> 7) if digit & 8 else byte) << 8 * i
    return result


def lop3(a, b, c, table):
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


INTEGER = {
    "add.u32 %0, %1, %2": lambda a, b, c: a + b,
    "sub.s32 %0, %1, %2": lambda a, b, c: a - b,
    "mul.lo.s32 %0, %1, %2": lambda a, b, c: a * b,
    "mul.hi.s32 %0, %1, %2": lambda a, b, c: s32(a) * s32(b) >> 32,
    "mul.hi.u32 %0, %1, %2": lambda a, b, c: a * b >> 32,
    "mad.lo.u32 %0, %1, %2, %3": lambda a, b, c: a * b + c,
    "mad.hi.u32 %0, %1, %2, %3": lambda a, b, c: (a * b >> 32) + c,
    "div.u32 %0, %1, %2": lambda a, b, c: a // b if b else M32,
    "rem.u32 %0, %1, %2": lambda a, b, c: a % b if b else a,
    "div.s32 %0, %1, %2": lambda a, b, c: quotient(s32(a), s32(b)) if b else 0xFFFFFFFF if s32(a) >= 0 else 1,
    "min.s32 %0, %1, %2": lambda a, b, c: min(s32(a), s32(b)),
    "max.u32 %0, %1, %2": lambda a, b, c: max(a, b),
    "abs.s32 %0, %1": lambda a, b, c: abs(s32(a)),
    "neg.s32 %0, %1": lambda a, b, c: -s32(a),
    "sad.s32 %0, %1, %2, %3": lambda a, b, c: c + abs(s32(a) - s32(b)),
    "not.b32 %0, %1": lambda a, b, c: ~a,
    "cnot.b32 %0, %1": lambda a, b, c: int(a == 0),
    "xor.b32 %0, %1, %2": lambda a, b, c: a ^ b,
    "lop3.b32 %0, %1, %2, %3, 0x96": lambda a, b, c: lop3(a, b, c, 0x96),
    "lop3.b32 %0, %1, %2, %3, 0xca": lambda a, b, c: lop3(a, b, c, 0xCA),
    "shl.b32 %0, %1, %2": lambda a, b, c: a << b if b < 32 else 0,
    "shr.u32 %0, %1, %2": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 %0, %1, %2": lambda a, b, c: s32(a) >> min(b, 31),
    "shl.b32 %0, %1, 7": lambda a, b, c: a << 7,
    "shr.s32 %0, %1, 31": lambda a, b, c: s32(a) >> 31,
    "shf.l.wrap.b32 %0, %1, %2, %3": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.wrap.b32 %0, %1, %2, %3": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.r.clamp.b32 %0, %1, %2, %3": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "shf.l.clamp.b32 %0, %1, %2, %3": lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32,
    "prmt.b32 %0, %1, %2, %3": prmt,
    "prmt.b32 %0, %1, %2, 0x5410": lambda a, b, c: prmt(a, b, 0x5410),
    "popc.b32 %0, %1": lambda a, b, c: bin(a).count("1"),
    "clz.b32 %0, %1": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %0, %1": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %0, %1": lambda a, b, c: a.bit_length() - 1 if a else M32,
    "bfind.s32 %0, %1": lambda a, b, c: (a if a < 1 << 31 else ~a & M32).bit_length() - 1,
    "bfe.u32 %0, %1, %2, %3": lambda a, b, c: bfe(a, b, c, False),
    "bfe.s32 %0, %1, %2, %3": lambda a, b, c: bfe(a, b, c, True),
    "bfi.b32 %0, %1, %2, %3, 5": lambda a, b, c: bfi(a, b, c, 5),
    "mul24.lo.s32 %0, %1, %2": lambda a, b, c: s32(a << 8 & M32) // 256 * (s32(b << 8 & M32) // 256),
    "dp4a.s32.s32 %0, %1, %2, %3": lambda a, b, c: c + sum(byte(a, i) * byte(b, i) for i in range(4)),
    "slct.b32.s32 %0, %1, %2, %3": lambda a, b, c: a if s32(c) >= 0 else b,
    "set.lt.u32.s32 %0, %1, %2": lambda a, b, c: M32 if s32(a) < s32(b) else 0,
    "{.reg .pred p; setp.hi.u32 p, %1, %2; selp.b32 %0, %1, %3, p;}": lambda a, b, c: a if a > b else c,
    "{.reg .pred p, q, r; setp.ne.u32 r, %3, 0; setp.ge.and.s32 p|q, %1, %2, r; selp.b32 %0, 1, 2, q;}":
        lambda a, b, c: 1 if s32(a) < s32(b) and c else 2,
    "{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, l};}": lambda a, b, c: a >> 16 | a << 16,
    "{.reg .u16 l; cvt.u16.u32 l, %1; cvt.s32.s16 %0, l;}": lambda a, b, c: s32((a & 0xFFFF) << 16) >> 16,
    "cvt.s32.s8 %0, %1": lambda a, b, c: s32((a & 0xFF) << 24) >> 24,
    "cvt.sat.u8.s32 %0, %1": lambda a, b, c: min(max(s32(a), 0), 255),
    "{.reg .u64 x; mul.wide.s32 x, %1, %2; shr.u64 x, x, 13; cvt.u32.u64 %0, x;}": lambda a, b, c: (s32(a) * s32(b) & M64) >> 13,
    "{.reg .s64 x, y; cvt.s64.s32 x, %1; cvt.s64.s32 y, %2; mul.lo.s64 x, x, x; mul.hi.s64 y, x, y; cvt.u32.u64 %0, y;}":
        lambda a, b, c: s32(a) ** 2 * s32(b) >> 64,
    "{.reg .u64 x, y; mov.b64 x, {%1, %2}; mov.b64 y, {%3, %1}; div.u64 x, x, y; cvt.u32.u64 %0, x;}":
        lambda a, b, c: (a | b << 32) // (c | a << 32) if c | a else M32,
    "{.reg .u64 x; mov.b64 x, {%1, %2}; brev.b64 x, x; clz.b64 %0, x;}":
        lambda a, b, c: 64 - int(f"{a | b << 32:064b}"[::-1], 2).bit_length(),
}  # fmt: skip


def words(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 32, (3, N), np.uint64).astype(np.uint32)
    corners = np.array([0, 1, 2, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFF], np.uint32)
    mask = rng.random((3, N)) < 0.35
    x[mask] = rng.choice(corners, mask.sum())
    small = rng.random((3, N)) < 0.2
    x[small] = rng.integers(0, 40, small.sum())
    return x


def run_unary(run, instructions, inputs, out_type="u32", in_type="u32", constraint=("r", "r")):
    """Each instruction on each input triple; returns out[instruction][element]."""
    body = "".join(  # a block { ... } takes no semicolon
        f'{{ {out_type} r = 0; asm volatile("{text}" : "+{constraint[0]}"(r) : "{constraint[1]}"(a), "{constraint[1]}"(b), '
        f'"{constraint[1]}"(c)); out[{i} * {N} + t] = r; }}\n'
        for i, text in enumerate(t if t.endswith("}") else t + ";" for t in instructions)
    )
    out = np.zeros(
        (len(instructions), N), {"u32": np.uint32, "f32": np.float32, "f64": np.float64, "u16": np.uint16}[out_type]
    )
    run(
        f'extern "C" __global__ void k(const {in_type}* in, {out_type}* out) {{ int t = threadIdx.x;'
        f" {in_type} a = in[t], b = in[t + {N}], c = in[t + {2 * N}];\n{body} }}",
        inputs,
        out,
        block=N,
    )
    return out


@pytest.mark.parametrize("seed", range(3))
def test_integer_instructions(run, seed):
    x = words(seed)
    out = run_unary(run, INTEGER, x)
    for row, (text, oracle) in zip(out, INTEGER.items()):
        want = [oracle(*map(int, column)) & M32 for column in x.T]
        bad = [i for i in range(N) if int(row[i]) != want[i]]
        assert not bad, (
            f"{text}: {[hex(int(v)) for v in x[:, bad[0]]]} -> {int(row[bad[0]]):#x}, expected {want[bad[0]]:#x}"
        )


# ---- float -----------------------------------------------------------------------------------------------------------


def round_fraction(value: Fraction, mantissa: int, minimum: int, maximum: int, mode="rn"):
    """value rounded to mantissa bits (with the leading one), exponents minimum..maximum; None for overflow."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value))) if abs(value) > Fraction(1, 1 << 1000) else minimum
    while Fraction(2) ** exponent > abs(value):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, minimum) - mantissa + 1)
    scaled = value / unit
    down = math.floor(scaled)
    if mode == "rn":
        rest = scaled - down
        n = down + (rest > Fraction(1, 2) or rest == Fraction(1, 2) and down & 1)
    else:
        n = {"rz": math.trunc(scaled), "rm": down, "rp": math.ceil(scaled)}[mode]
    return n * unit


def f32_of(value: Fraction, mode="rn"):
    rounded = round_fraction(value, 24, -126, 127, mode)
    return float(rounded) if abs(rounded) < Fraction(2) ** 128 else math.copysign(math.inf, rounded)


def floats(seed):
    """Pairs and triples that round in interesting ways: cancelling, tied, subnormal."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(3, N)) * 2.0 ** rng.integers(-20, 20, (3, N))).astype(np.float32)
    x[:, : N // 4] = (rng.integers(-4096, 4096, (3, N // 4)) * 2.0 ** rng.integers(-4, 14, (3, N // 4))).astype(
        np.float32
    )
    near = slice(N // 4, N // 2)
    x[2, near] = -(x[0, near] * x[1, near])
    tiny = slice(N // 2, N // 2 + 40)
    x[:, tiny] = (rng.normal(size=(3, 40)) * np.array([[2.0**-70], [2.0**-70], [2.0**-140]])).astype(np.float32)
    return x


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float32_rounding(run, mode):
    x = floats(1)
    out = run_unary(run, [f"add.{mode}.f32 %0, %1, %2", f"mul.{mode}.f32 %0, %1, %2", f"fma.{mode}.f32 %0, %1, %2, %3"],
                    x, "f32", "f32", ("f", "f"))  # fmt: skip
    for i in range(N):
        a, b, c = (Fraction(float(v)) for v in x[:, i])
        for got, exact in zip(out[:, i], (a + b, a * b, a * b + c)):
            assert float(got) == f32_of(exact, mode), (mode, x[:, i], got)


def test_fma_needs_a_single_rounding():
    """A case where rounding through float64 gives another result: the product's tail decides a tie."""
    a, b, c = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2.0**-60)
    half_way = np.float32(2.0**24)  # 2**24 + 1 lies between two float32; the tail 2**-60 must push it up
    assert float(np.float32(float(half_way) + 1.0)) == 2.0**24
    assert float(arithmetic.fma_f32(half_way, np.float32(1), np.float32(1))) == 2.0**24
    x = np.full(4, 1 + 2**-23, np.float32)
    y = np.array([2**24 + 2, 2**24 + 4, 1 + 2**-22, 3], np.float32)
    z = np.array([2.0**-60, -(2.0**-60), 2.0**-80, 1], np.float32)
    want = [f32_of(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))) for p, q, r in zip(x, y, z)]
    assert arithmetic.fma_f32(x, y, z).tolist() == want
    assert float(arithmetic.fma_f32(a, b, c)) == f32_of(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


float_bits = st.integers(0, M32).map(lambda b: struct.unpack("<f", struct.pack("<I", b))[0]).filter(math.isfinite)


@settings(max_examples=400, deadline=None)
@given(float_bits, float_bits, float_bits, st.integers(-3, 3))
def test_fma_property(a, b, c, shift):
    """Any bits, and c close to the negated product, where everything cancels."""
    close = np.float32(-(a * b) * 2.0**shift) if abs(a * b) < 1e38 and shift else np.float32(c)
    with np.errstate(all="ignore"):
        for z in (np.float32(c), close):
            if not np.isfinite(z):
                continue
            got = arithmetic.fma_f32(np.float32([a]), np.float32([b]), np.atleast_1d(z))[0]
            assert float(got) == f32_of(Fraction(a) * Fraction(b) + Fraction(float(z)))


@settings(max_examples=300, deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_fma64_property(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) > Fraction(1.7e308):
        return
    with np.errstate(all="ignore"):
        if np.isfinite(np.float64(a) * b + c):
            assert float(arithmetic.fma_f64(np.float64(a), np.float64(b), np.float64(c))) == float(exact)


@pytest.mark.parametrize(
    "kind, mantissa, minimum, largest", [("f16", 11, -14, 65504.0), ("bf16", 8, -126, 3.3895313892515355e38)]
)
def test_half_fma(run, kind, mantissa, minimum, largest):
    rng = np.random.default_rng(2)
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    x = (rng.normal(size=(3, N)) * 2.0 ** rng.integers(-6, 6, (3, N))).astype(dtype)
    x[2, : N // 2] = -(x[0, : N // 2].astype(np.float32) * x[1, : N // 2].astype(np.float32)).astype(dtype)
    out = run_unary(run, [f"fma.rn.{kind} %0, %1, %2, %3", f"add.rn.{kind} %0, %1, %2", f"mul.rn.{kind} %0, %1, %2"],
                    x.view(np.uint16), "u16", "u16", ("h", "h")).view(dtype)  # fmt: skip
    for i in range(N):
        a, b, c = (Fraction(float(v)) for v in x[:, i])
        for got, exact in zip(out[:, i], (a * b + c, a + b, a * b)):
            assert float(got) == float(round_fraction(exact, mantissa, minimum, 127)), (x[:, i], got)


CONVERT = [f"cvt.{m}.{t}.f32 %0, %1" for m in ("rni", "rzi", "rmi", "rpi") for t in ("s32", "u32")]


def test_float_to_integer(run):
    x = floats(3)
    x[0, :12] = [0.5, 1.5, -0.5, -1.5, 2.5, 3e9, -3e9, 5e9, np.inf, -np.inf, np.nan, 2147483520]
    out = run_unary(run, CONVERT, x, "u32", "f32", ("r", "f"))
    functions = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for row, text in zip(out, CONVERT):
        _, mode, to, _ = text.split()[0].split(".")
        low, high = (-(1 << 31), (1 << 31) - 1) if to == "s32" else (0, M32)
        for value, got in zip(x[0].tolist(), row.tolist()):
            if math.isnan(value):
                want = 0
            elif math.isinf(value):
                want = high if value > 0 else low
            else:
                want = min(max(functions[mode](value), low), high)
            assert got == want & M32, (text, value)


def test_narrow_conversions(run):
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(3, N)) * 2.0 ** rng.integers(-12, 18, (3, N))).astype(np.float32)
    x[0, :8] = [np.nan, np.inf, -np.inf, 448, 464, 480, 1e30, -0.0]
    x[0, 8:24] = np.arange(16) / 16 * 2.0**-6
    texts = ["cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1", "cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1", "cvt.rn.bf16.f32 %0, %1",
             "cvt.rn.f16.f32 %0, %1"]  # fmt: skip
    out = run_unary(run, texts, x, "u16", "f32", ("h", "f"))
    with np.errstate(all="ignore"):
        e4m3 = np.clip(x[:2], -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint16)
        e5m2 = np.clip(x[:2], -57344, 57344).astype(ml_dtypes.float8_e5m2).view(np.uint8).astype(np.uint16)
        for codes in (e4m3, e5m2):
            codes[np.isnan(x[:2])] = 0x7F
        want = [
            e4m3[0] | e4m3[1] << 8,
            e5m2[0] | e5m2[1] << 8,
            x[0].astype(ml_dtypes.bfloat16).view(np.uint16),
            x[0].astype(np.float16).view(np.uint16),
        ]
    want[2][0] = want[3][0] = 0x7FFF
    assert np.array_equal(out, np.array(want))


def test_every_fp8_code_decodes(run):
    codes = np.arange(256, dtype=np.uint16)
    out = np.zeros((2, 256), np.float32)
    run(
        """__device__ float low(u32 h) {
          float f; PTX("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(h)); return f; }
        extern "C" __global__ void k(const u16* in, float* out) {
          int t = threadIdx.x; u32 h;
          PTX("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(in[t])); out[t] = low(h);
          PTX("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(h) : "h"(in[t])); out[t + 256] = low(h);
        }""",
        codes,
        out,
        block=256,
    )
    for row, dtype in zip(out, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)):
        assert np.array_equal(row, codes.astype(np.uint8).view(dtype).astype(np.float32), equal_nan=True)


# ---- random programs -------------------------------------------------------------------------------------------------

PLAIN = {text: oracle for text, oracle in INTEGER.items() if not text.startswith("{")}


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(run, seed):
    """Sequences of random instructions on eight registers, in loops and branches that the threads decide differently."""
    rng = np.random.default_rng(seed)
    texts = list(PLAIN)
    program = [
        (texts[rng.integers(len(texts))], rng.integers(0, 8, 4).tolist(), int(rng.integers(0, 32)), rng.random())
        for _ in range(60)
    ]
    body = ""
    for text, (to, a, b, c), bit, kind in program:
        statement = f'asm volatile("{text};" : "+r"(r{to}) : "r"(r{a}), "r"(r{b}), "r"(r{c}));'
        if kind < 0.25:
            statement = f"if (r{c} >> {bit} & 1) {{ {statement} }} else r{to} ^= r{b};"
        elif kind < 0.35:
            statement = f"for (u32 i = 0; i < r{c} % 4; ++i) {{ {statement} }}"
        body += statement + "\n"
    names = ", ".join(f"r{i} = in[t + {N * i}]" for i in range(8))
    ends = " ".join(f"out[t + {N * i}] = r{i};" for i in range(8))
    x = np.concatenate([words(100 + seed), words(200 + seed), words(300 + seed)])[:8].copy()
    out = np.zeros((8, N), np.uint32)
    run(
        f'extern "C" __global__ void k(const u32* in, u32* out) {{ int t = threadIdx.x; u32 {names};\n{body}{ends} }}',
        x,
        out,
        block=N,
    )
    for t in range(0, N, 7):
        r = [int(v) for v in x[:, t]]
        for text, (to, a, b, c), bit, kind in program:
            if kind < 0.25 and not r[c] >> bit & 1:
                r[to] ^= r[b]
                continue
            i = 0
            while i < (r[c] % 4 if 0.25 <= kind < 0.35 else 1):
                r[to] = PLAIN[text](r[a], r[b], r[c]) & M32
                i += 1
        assert r == out[:, t].tolist(), t
