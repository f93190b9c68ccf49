"""What several Triton kernels of the course need and Triton's language lacks."""

import triton
import triton.language as tl


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """FP32 -> dtype (float32, float16, bfloat16), round to nearest even, on the GPU and on Triton's interpreter alike.

    The interpreter truncates FP32 to bf16 (seen in 3.7.1), which biases every output toward zero. So the value is first
    rounded within FP32 to one that bf16 holds exactly: add just under half of the last bit kept, one more if that bit is
    odd, drop the rest. NaN must not take part: the addition would carry out of its mantissa.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
