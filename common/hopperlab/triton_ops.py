"""Casts that give the same bits on the GPU and on Triton's interpreter.

The interpreter (seen in 3.7.1) casts FP32 to bf16 by truncation, which biases every output toward zero, and reads
FP8's NaN and infinities as numbers beyond the largest. Both are put right here, on the interpreter alone; on the GPU these are plain casts.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def to_float32(x):
    """FP8 -> FP32, exact; NaN and infinities stay what they are."""
    value = x.to(tl.float32)
    if INTERPRETED and x.dtype == tl.float8e5:  # the upper byte of an IEEE half
        value = (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    if INTERPRETED and x.dtype == tl.float8e4nv:
        value = tl.where((x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """FP32 -> float32, float16 or bfloat16, round to nearest even.

    On the interpreter a value for bf16 is first rounded within FP32 to one that bf16 holds exactly: add just under half
    of the last bit kept, one more if that bit is odd, drop the rest. NaN must not take part: the addition would carry
    out of its mantissa.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot_fp8(a, b, total):
    """total + a (M, K) times b (N, K) transposed, FP8 on the tensor cores, in FP32. On the interpreter the same product in FP32."""
    if INTERPRETED:
        return tl.dot(to_float32(a), tl.trans(to_float32(b)), total, input_precision="ieee")
    return tl.dot(a, tl.trans(b), total)
