"""Quantisation in Triton: the bits of hopperlab.quantize.quantize, as fp8_gemm/kernels/quantize.cu gives them.

A program holds a tile in registers, finds its scales and writes FP8, so here too the input is read once. What Triton cannot say
is how many loads a thread has in flight, and through which lanes a maximum goes; what it says shorter is everything else.
"""

import contextlib

import torch
import triton
import triton.language as tl

from fp8_gemm.kernels import quantize as host
from hopperlab.formats import Format, format_of
from hopperlab.quantize import BLOCK, ScaledTensor
from hopperlab.triton_ops import INTERPRETED

ROWS_1X128 = 16  # of a program's tile of 1x128 blocks
LONGEST_ROW = 16384  # elements that a program holds; a longer row is read twice
CHUNK = 8192  # elements of a program of the tensor kernels


@triton.jit
def widen(x):
    """bf16, fp16 or FP32 -> FP32, exact. The interpreter (seen in 3.9.0) widens bf16 subnormals to other numbers."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def finite_magnitude(x):
    """|x|, and 0 for NaN and infinities."""
    bits = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x7F800000, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def scale_of(amax, largest, POWER_OF_TWO: tl.constexpr):
    """The scale of blocks whose finite elements reach amax."""
    scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + largest), 1.1754943508222875e-38)  # 2^-126
    if POWER_OF_TWO:
        scale = ((scale.to(tl.uint32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def to_fp8(x, scale, FP8: tl.constexpr):
    """x / scale, rounded to nearest even and saturated; NaN (byte 0x7f) where x is NaN or infinite. scale broadcasts to x.

    The division as in quantize.cu: the product with the reciprocal, corrected by its remainder. Both x and the reciprocal are
    negated by a multiplication, because Triton's unary minus is 0 - x, which loses the sign of a zero.
    """
    if INTERPRETED:  # its fma rounds twice
        return round_on_interpreter(x, tl.div_rn(x, tl.zeros_like(x) + scale), FP8)
    factor = tl.where(scale < 2.0**-64, 2.0**64, tl.where(scale > 2.0**64, 2.0**-64, 1.0))
    divisor = scale * factor
    negative_reciprocal = tl.div_rn(tl.zeros_like(divisor) - 1.0, divisor)
    negative_x = x * (factor * -1.0)
    quotient = negative_x * negative_reciprocal
    remainder = tl.fma(quotient, tl.zeros_like(x) + divisor, negative_x)
    return tl.fma(remainder, tl.zeros_like(x) + negative_reciprocal, quotient).to(FP8)


@triton.jit
def round_on_interpreter(x, quotient, FP8: tl.constexpr):
    """The interpreter (seen in 3.9.0) truncates to e5m2, flushes some e4m3 subnormals and makes a number of an e4m3 NaN.

    So the quotient is first rounded within FP32 to a value that FP8 holds: adding and taking away 1.5 · 2^23 units of its
    last place leaves whole units.
    """
    LARGEST: tl.constexpr = 448.0 if FP8 == tl.float8e4nv else 57344.0
    MANTISSA: tl.constexpr = 3 if FP8 == tl.float8e4nv else 2
    SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if FP8 == tl.float8e4nv else 2.0**-14
    finite = (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    quotient = tl.where(finite, tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST), 0.0)
    bits = quotient.to(tl.uint32, bitcast=True)
    binade = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), SMALLEST_NORMAL)
    shift = binade * (1.5 * 2.0 ** (23 - MANTISSA))
    rounded = ((quotient + shift) - shift).to(tl.uint32, bitcast=True)
    quotient = ((rounded & 0x7FFFFFFF) | (bits & 0x80000000)).to(tl.float32, bitcast=True)  # -0 keeps its sign
    byte = quotient.to(FP8).to(tl.uint8, bitcast=True)
    return tl.where(finite, byte, 0x7F).to(tl.uint8).to(FP8, bitcast=True)


@triton.jit
def blocks_kernel(X, Q, S, rows, K, row_stride, k_blocks, padded, largest,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE_TILE: tl.constexpr, M_MAJOR: tl.constexpr,
                  POWER_OF_TWO: tl.constexpr):  # fmt: skip
    """A tile of ROWS x 128: one scale for each row, or for the whole tile. S is (rows, K blocks); M_MAJOR: (K blocks, padded)."""
    k_block = tl.program_id(0) % k_blocks
    tile = tl.program_id(0) // k_blocks
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = k_block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    x = widen(tl.load(X + row[:, None] * row_stride + k[None, :], mask=inside, other=0.0))
    amax = tl.max(finite_magnitude(x), axis=1)
    if WHOLE_TILE:
        scale = scale_of(tl.max(amax, axis=0), largest, POWER_OF_TWO)
        tl.store(S + tl.program_id(0), scale)
        q = to_fp8(x, scale, Q.dtype.element_ty)
    else:
        scale = scale_of(amax, largest, POWER_OF_TWO)
        if M_MAJOR:
            tl.store(S + k_block.to(tl.int64) * padded + row, tl.where(row < rows, scale, 0.0), mask=row < padded)
        else:
            tl.store(S + row * k_blocks + k_block, scale, mask=row < rows)
        q = to_fp8(x, scale[:, None], Q.dtype.element_ty)
    tl.store(Q + row[:, None] * K + k[None, :], q, mask=inside)


@triton.jit
def rows_kernel(X, Q, S, K, row_stride, largest, BLOCK_K: tl.constexpr, POWER_OF_TWO: tl.constexpr, ONCE: tl.constexpr):
    """One row. ONCE: all of it is held by the program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    x = widen(tl.load(X + row * row_stride + column, mask=column < K, other=0.0))
    amax = tl.max(finite_magnitude(x), axis=0)
    if not ONCE:
        for k in range(BLOCK_K, K, BLOCK_K):
            more = widen(tl.load(X + row * row_stride + k + column, mask=k + column < K, other=0.0))
            amax = tl.maximum(amax, tl.max(finite_magnitude(more), axis=0))
    scale = scale_of(amax, largest, POWER_OF_TWO)
    tl.store(S + row, scale)
    tl.store(Q + row * K + column, to_fp8(x, scale, Q.dtype.element_ty), mask=column < K)
    if not ONCE:
        for k in range(BLOCK_K, K, BLOCK_K):
            more = widen(tl.load(X + row * row_stride + k + column, mask=k + column < K, other=0.0))
            q = to_fp8(more, scale, Q.dtype.element_ty)
            tl.store(Q + row * K + k + column, q, mask=k + column < K)


@triton.jit
def tensor_amax_kernel(X, amax, count, CHUNK: tl.constexpr):
    """amax is int32: floats that are not negative are ordered as their bits are."""
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    x = widen(tl.load(X + i, mask=i < count, other=0.0))
    tl.atomic_max(amax, tl.max(finite_magnitude(x), axis=0).to(tl.int32, bitcast=True))


@triton.jit
def tensor_cast_kernel(X, Q, amax, S, count, largest, CHUNK: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    # Backwards: what the first kernel read last may still be in L2.
    i = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    x = widen(tl.load(X + i, mask=i < count, other=0.0))
    scale = scale_of(tl.load(amax).to(tl.float32, bitcast=True), largest, POWER_OF_TWO)
    tl.store(Q + i, to_fp8(x, scale, Q.dtype.element_ty), mask=i < count)
    if tl.program_id(0) == 0:
        tl.store(S, scale)


def quantize(x: torch.Tensor, recipe: str, format: Format | str = "e4m3", power_of_two: bool = False, margin: int = 0,
             m_major: bool = False) -> ScaledTensor:  # fmt: skip
    """As fp8_gemm.kernels.quantize.quantize: the same arguments, errors and bits."""
    fmt = format_of(format)
    host.check_arguments(x, recipe, margin, m_major)
    rows, k = x.shape
    data = torch.empty(rows, k, dtype=fmt.dtype, device=x.device)
    scale = torch.empty_strided(*host.scale_layout(recipe, rows, k, m_major), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        scale.fill_(1)
    else:
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            _launch(x, recipe, fmt.max * 2.0**-margin, power_of_two, data, scale, m_major)
    return ScaledTensor(data, scale[:rows] if m_major else scale, recipe)


def _launch(x, recipe, largest, power_of_two, data, scale, m_major):
    rows, k = x.shape
    if recipe == "tensor":
        x, amax = x.detach().contiguous(), torch.zeros(1, dtype=torch.int32, device=x.device)
        grid = (triton.cdiv(x.numel(), CHUNK),)
        tensor_amax_kernel[grid](x, amax, x.numel(), CHUNK=CHUNK, num_warps=8)
        tensor_cast_kernel[grid](x, data, amax, scale, x.numel(), largest, CHUNK=CHUNK, POWER_OF_TWO=power_of_two, num_warps=8)
        return
    x, pitch = host.row_pitch(x)
    if recipe == "row":
        block_k = min(triton.next_power_of_2(k), LONGEST_ROW)
        rows_kernel[(rows,)](x, data, scale, k, pitch, largest, BLOCK_K=block_k, POWER_OF_TWO=power_of_two, ONCE=k <= block_k,
                             num_warps=8)  # fmt: skip
        return
    tile_rows, k_blocks = BLOCK if recipe == "128x128" else ROWS_1X128, scale.shape[1]
    blocks_kernel[(triton.cdiv(rows, tile_rows) * k_blocks,)](
        x, data, scale, rows, k, pitch, k_blocks, scale.shape[0], largest,
        ROWS=tile_rows, BLOCK=BLOCK, WHOLE_TILE=recipe == "128x128", M_MAJOR=m_major, POWER_OF_TWO=power_of_two,
        num_warps=8 if recipe == "128x128" else 4,
    )  # fmt: skip
