"""What a GEMM should give: exactly, within which error, and to the bit.

``matmul_exact``   FP64 GEMM of the dequantised operands: what the kernel was given, not what was quantised.
``error_bound``    how far a right kernel may be from it, for every output.
``matmul_hopper``  every bit of a kernel that runs on Hopper's FP8 tensor cores through wgmma.
``matmul_fp32``    every bit of a kernel that runs on CUDA cores.

D[m, n] = sum over k of A[m, k] · B[n, k], with A of shape (M, K) and B of shape (N, K). Everything is torch and runs on
the device of its operands.

The tensor-core model is the one P. Xie et al. published (MMA-Sim, arXiv:2511.10909): a fused sum with truncated
alignment. An H200 agrees with it in every bit; the model of mma.sync was found by comparing with one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hopperlab.formats import Format, format_of
from hopperlab.quantize import BLOCK, ScaledTensor, scale_of_k_block

STEP_K = 32  # elements of K that one FP8 wgmma adds
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP32_ROUNDOFF = 2.0**-24  # largest relative error of one rounding to nearest
FP32_UNDERFLOW = 2.0**-150  # largest absolute error of one rounding in the subnormal range
FP32_MAX = torch.finfo(torch.float32).max
# The values NVIDIA GPUs give every NaN they produce, as integers.
CANONICAL_NAN = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
}


# ---------------------------------------------------------------- tensor cores: one step


@dataclass(frozen=True)
class _DotUnit:
    """A fused dot product unit: aligns its summands to the largest exponent, truncates, adds exactly, truncates."""

    alignment_bits: int  # fraction bits each summand keeps below the largest exponent
    result_bits: int  # fraction bits the result keeps below its own leading bit
    dtype: torch.dtype  # in which the aligned summands, integers, are added exactly


# 33 summands below 2^(2 + 13) in magnitude sum to less than 2^24: exact in FP32.
_WGMMA_FP8 = _DotUnit(alignment_bits=13, result_bits=13, dtype=torch.float32)
_HMMA_FP16 = _DotUnit(alignment_bits=25, result_bits=23, dtype=torch.float64)

_FP16_MIN_EXPONENT = -14  # every FP8 value is an FP16 value, and those of e4m3 are all normal there
_ZERO = -64  # exponent of a zero operand: any sum with it is below that of any two non-zero FP8 values, and fits int8
_SMALLEST_PRODUCT = -28  # e5m2 · e5m2, both subnormal
_ZERO_SUMMAND = -133  # the exponent the hardware gives a zero summand


@dataclass(frozen=True)
class _Operand:
    """FP8 values decoded for the tensor core, K first: values (K, rows) FP32, exponents (K, rows) int8."""

    values: torch.Tensor
    exponents: torch.Tensor

    @staticmethod
    def decode(data: torch.Tensor, min_exponent: int) -> "_Operand":
        """data is float8 (rows, K). Values below 2^min_exponent are subnormal and keep that exponent."""
        values = data.t().float().contiguous()
        exponents = ((values.view(torch.int32) >> 23) & 0xFF) - 127
        exponents = exponents.clamp(min_exponent, 15)  # Inf and NaN: any exponent does, they decide the sum anyway
        return _Operand(values, torch.where(values == 0, _ZERO, exponents).to(torch.int8))

    def pad_k(self, multiple: int) -> "_Operand":
        """K padded with zeros, as TMA fills what is out of bounds. Zero products change nothing."""
        pad = (0, 0, 0, -self.values.shape[0] % multiple)
        return _Operand(
            torch.nn.functional.pad(self.values, pad), torch.nn.functional.pad(self.exponents, pad, value=_ZERO)
        )

    def part(self, k, rows=slice(None)) -> "_Operand":
        return _Operand(self.values[k, rows], self.exponents[k, rows])


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in FP64, exact on every device (exp2 need not be)."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """x with every NaN in NVIDIA's bit pattern."""
    integer, pattern = CANONICAL_NAN[x.dtype]
    return x.view(integer).masked_fill(x.isnan(), pattern).view(x.dtype)


def _fused_dot(a: _Operand, b: _Operand, c: torch.Tensor, unit: _DotUnit) -> torch.Tensor:
    """c (m, n) FP32 + sum over all k of a[k, m] · b[k, n], as the unit computes it. Every operation here is exact.

    NaN and Inf take care of themselves: scaling and truncating keep them, and adding them is IEEE arithmetic.
    """
    largest = (a.exponents[:, :, None] + b.exponents[:, None, :]).amax(0).int()
    largest = torch.where(largest < _SMALLEST_PRODUCT, _ZERO_SUMMAND, largest)
    c_exponent = (((c.view(torch.int32) >> 23) & 0xFF) - 127).clamp_min(-126)
    largest = torch.maximum(largest, torch.where(c == 0, _ZERO_SUMMAND, c_exponent))

    # Alignment: count in units of 2^(largest - alignment_bits), truncated toward zero. Far below 2^-28 only zero
    # products are left, so the clamp, which keeps the factor a normal FP32 number, changes nothing.
    per_unit = _power_of_two(unit.alignment_bits - largest)
    summands = a.values.to(unit.dtype)[:, :, None] * b.values.to(unit.dtype)[:, None, :]
    summands.mul_(per_unit.clamp_max(2.0**126).to(unit.dtype)).trunc_()
    total = (summands.sum(0).double() + (c.double() * per_unit).trunc()) / per_unit

    # Dropping low mantissa bits truncates toward zero. What is left fits FP32: a result in FP32's subnormal range is
    # a multiple of 2^(-126 - 13). Adding +0 turns a -0 into +0, which is what the hardware gives.
    mask = -(1 << (52 - unit.result_bits))
    return _canonical((total.view(torch.int64) & mask).view(torch.float64).float() + 0.0)


def tensor_core_step(
    a_codes: torch.Tensor, b_codes: torch.Tensor, c: torch.Tensor, format_a: Format | str, format_b: Format | str
) -> torch.Tensor:
    """One ``wgmma … k32 … .f32.{format_a}.{format_b}``: the accumulators it writes, bit for bit.

    a_codes (m, 32) and b_codes (n, 32), FP8 or the same bytes as uint8; c (m, n) float32. Returns float32 (m, n).

    1. Products keep the exponent e_a + e_b and a significand that is not renormalised, 1 <= |s| < 4 for normal
       operands. A subnormal operand keeps its format's smallest exponent.
    2. E is the largest exponent among the non-zero products and c.
    3. Each product and c is truncated toward zero to a multiple of 2^(E - 13).
    4. These 33 numbers are added exactly.
    5. The sum is truncated toward zero to 13 fraction bits of its own leading bit; a zero is +0.

    NaN and Inf operands give what IEEE arithmetic gives; every NaN is 0x7fffffff.
    """
    format_a, format_b = format_of(format_a), format_of(format_b)
    a_data, b_data = _step_operands(a_codes, b_codes, c, format_a, format_b)
    a = _Operand.decode(a_data, format_a.min_exponent)
    b = _Operand.decode(b_data, format_b.min_exponent)
    return _fused_dot(a, b, c, _WGMMA_FP8)


def mma_sync_step(
    a_codes: torch.Tensor, b_codes: torch.Tensor, c: torch.Tensor, format_a: Format | str, format_b: Format | str
) -> torch.Tensor:
    """One ``mma.sync.m16n8k32 … .f32.{format_a}.{format_b}.f32`` on Hopper, bit for bit. Arguments as tensor_core_step.

    sm_90 has no such tensor-core instruction: ptxas converts the operands to FP16 and issues two FP16 ones of k = 16.
    The first starts from zero and takes the elements whose k mod 4 is 0 or 1, the second adds those whose k mod 4 is 2
    or 3; each aligns to 25 fraction bits and truncates its result to FP32. c is added last, by an ordinary FP32 add.
    """
    format_a, format_b = format_of(format_a), format_of(format_b)
    a_data, b_data = _step_operands(a_codes, b_codes, c, format_a, format_b)
    a, b = _Operand.decode(a_data, _FP16_MIN_EXPONENT), _Operand.decode(b_data, _FP16_MIN_EXPONENT)
    first_half = torch.arange(STEP_K, device=c.device) % 4 < 2
    dot = torch.zeros_like(c)
    for half in (first_half, ~first_half):
        dot = _fused_dot(a.part(half), b.part(half), dot, _HMMA_FP16)
    return _canonical(dot + c)


def _step_operands(a_codes, b_codes, c, format_a, format_b) -> tuple[torch.Tensor, torch.Tensor]:
    for name, codes, fmt in (("a_codes", a_codes, format_a), ("b_codes", b_codes, format_b)):
        if codes.dtype not in (torch.uint8, fmt.dtype):
            raise TypeError(f"{name} has dtype {codes.dtype}; allowed are uint8 and {fmt.dtype} (bytes of {fmt.name})")
        if codes.dim() != 2 or codes.shape[1] != STEP_K:
            raise ValueError(f"{name} has shape {tuple(codes.shape)}; one step takes (rows, {STEP_K}): slice K")
    if c.dtype != torch.float32 or tuple(c.shape) != (len(a_codes), len(b_codes)):
        raise ValueError(
            f"c is {c.dtype} of shape {tuple(c.shape)}; it must be float32 of shape {(len(a_codes), len(b_codes))}, "
            "one accumulator for each row of a_codes and of b_codes"
        )
    return a_codes.view(format_a.dtype), b_codes.view(format_b.dtype)


# ---------------------------------------------------------------- whole GEMMs, bit for bit


def matmul_hopper(
    a: ScaledTensor,
    b: ScaledTensor,
    *,
    interval: int | None = BLOCK,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    split_k: int = 1,
) -> torch.Tensor:
    """The output of a wgmma kernel, bit for bit: (M, N) of out_dtype (bfloat16, float16 or float32).

    interval  K between promotions. Every ``interval`` of K the tensor core starts from zero, and its accumulator is
              added to the result on CUDA cores: ``final = fma(acc, sa·sb, final)`` in FP32, sa·sb rounded first.
              A multiple of 128, or 32 or 64. With block scales it must divide 128: the scale changes there.
              None: one accumulator over all of K and an epilogue ``acc · (sa·sb)``; not with block scales.
    bias      (N,), bfloat16, float16 or float32: added in FP32 after scaling.
    c         (M, N), bfloat16, float16 or float32: added in FP32 after the bias.
    split_k   K is cut into U units of max(interval, 128); split i of S takes units floor(i·U/S) to floor((i+1)·U/S).
              The splits' results are added in order, in FP32: before the epilogue's scale if interval is None.

    The last step converts to out_dtype, round to nearest even. K is padded with zeros to a multiple of 32. Where sa·sb
    leaves FP32's range it is Inf or rounds to 0, as in the kernel; then a zero accumulator gives NaN (0 · Inf).
    """
    _check_pair(a, b)
    _check_interval(a, b, interval)
    _check_out_dtype(out_dtype)
    addends = _epilogue_addends(a, b, bias, c)
    if isinstance(split_k, bool) or not isinstance(split_k, int) or split_k < 1:
        raise ValueError(f"split_k is {split_k!r}; it must be an integer >= 1")

    a_operand = _Operand.decode(a.data, a.format.min_exponent).pad_k(STEP_K)
    b_operand = _Operand.decode(b.data, b.format.min_exponent).pad_k(STEP_K)
    out = torch.empty(a.rows, b.rows, dtype=out_dtype, device=a.device)
    for rows, columns in _tiles(a.rows, b.rows, a.device):
        final = torch.zeros(out[rows, columns].shape, device=a.device)
        for split, (start, stop) in enumerate(_split_ranges(a.k, interval, split_k)):
            partial = torch.zeros_like(final)
            for k, k_end in _promotion_ranges(start, stop, interval):
                accumulator = _chain(a_operand.part(slice(k, k_end), rows), b_operand.part(slice(k, k_end), columns))
                if interval is None:
                    partial = accumulator
                else:
                    partial = _fma(accumulator, _scale_product(a, b, k // BLOCK, rows, columns), partial)
            final = final + partial if split else partial
        if interval is None:
            final = final * _scale_product(a, b, 0, rows, columns)
        for addend in addends:
            final = final + addend[rows, columns]
        out[rows, columns] = final
    return _canonical(out)


def matmul_fp32(a: ScaledTensor, b: ScaledTensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The output of a CUDA-core kernel, bit for bit: (M, N) of out_dtype (bfloat16, float16 or float32).

    ``acc = fma(a_k, b_k, acc)`` in FP32 with k ascending from a zero accumulator, ``acc · (sa·sb)`` with both products
    rounded to FP32, then round to nearest even to out_dtype. With block scales every 128 of K starts from zero and is
    added by ``final = fma(acc, sa·sb, final)``.
    """
    _check_pair(a, b)
    _check_out_dtype(out_dtype)
    interval = _accumulation_length(a, b, None)
    a_values, b_values = a.data.t().float().contiguous(), b.data.t().float().contiguous()
    out = torch.empty(a.rows, b.rows, dtype=out_dtype, device=a.device)
    for rows, columns in _tiles(a.rows, b.rows, a.device):
        final = torch.zeros(out[rows, columns].shape, device=a.device)
        for start, stop in _promotion_ranges(0, a.k, interval):
            accumulator = torch.zeros_like(final)
            for k in range(start, stop):
                # The product of two FP8 values is exact in FP32, so only the addition rounds, as in an fma.
                accumulator.addcmul_(a_values[k, rows, None], b_values[k, None, columns])
            scale = _scale_product(a, b, start // BLOCK, rows, columns)
            final = accumulator * scale if interval is None else _fma(accumulator, scale, final)
        out[rows, columns] = final
    return _canonical(out)


def matmul_mma_sync(a: ScaledTensor, b: ScaledTensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The output of a kernel on mma.sync (see mma_sync_step), bit for bit: (M, N) of out_dtype. No block scales.

    One chain of k = 32 steps over all of K, ascending, from zero; then ``acc · (sa·sb)`` as in matmul_hopper.
    """
    _check_pair(a, b)
    _check_out_dtype(out_dtype)
    if _accumulation_length(a, b, None) is not None:
        raise ValueError(f"a, b: recipes {a.recipe!r} and {b.recipe!r}; one chain over K takes one scale per tensor or row")
    a_operand = _Operand.decode(a.data, _FP16_MIN_EXPONENT).pad_k(STEP_K)
    b_operand = _Operand.decode(b.data, _FP16_MIN_EXPONENT).pad_k(STEP_K)
    first_half = torch.arange(STEP_K, device=a.device) % 4 < 2
    out = torch.empty(a.rows, b.rows, dtype=out_dtype, device=a.device)
    for rows, columns in _tiles(a.rows, b.rows, a.device):
        accumulator = torch.zeros(out[rows, columns].shape, device=a.device)
        for k in range(0, a_operand.values.shape[0], STEP_K):
            step = slice(k, k + STEP_K)
            parts = a_operand.part(step, rows), b_operand.part(step, columns)
            dot = torch.zeros_like(accumulator)
            for half in (first_half, ~first_half):
                dot = _fused_dot(parts[0].part(half), parts[1].part(half), dot, _HMMA_FP16)
            accumulator = _canonical(dot + accumulator)
        out[rows, columns] = accumulator * _scale_product(a, b, 0, rows, columns)
    return _canonical(out)


def _chain(a: _Operand, b: _Operand) -> torch.Tensor:
    """wgmma steps over all of K, in order, from a zero accumulator."""
    accumulator = torch.zeros(a.values.shape[1], b.values.shape[1], device=a.values.device)
    for k in range(0, a.values.shape[0], STEP_K):
        step = slice(k, k + STEP_K)
        accumulator = _fused_dot(a.part(step), b.part(step), accumulator, _WGMMA_FP8)
    return accumulator


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x · y + z in FP32 with one rounding, to nearest even.

    x · y is exact in FP64, but rounding the sum to FP64 and then to FP32 would round twice. So the FP64 sum is rounded
    to odd instead: where it is inexact, take the neighbour whose last bit is 1, which no FP32 tie has (S. Boldo and
    G. Melquiond, "Emulation of FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd", IEEE
    Transactions on Computers 57(4), 2008).
    """
    product, z = x.double() * y.double(), z.double()
    total = product + z
    from_z = total - product
    error = (product - (total - from_z)) + (z - from_z)  # Knuth's TwoSum: product + z = total + error
    bits = total.view(torch.int64)
    to_odd = error.isfinite() & (error != 0) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    bits = bits + to_odd * torch.where(away_from_zero, 1, -1)
    return bits.view(torch.float64).float()


def _scale_product(a: ScaledTensor, b: ScaledTensor, k_block: int, rows: slice, columns: slice) -> torch.Tensor:
    """sa · sb of a tile within one K block, rounded to FP32 as the kernel does."""
    return scale_of_k_block(a, k_block)[rows, None] * scale_of_k_block(b, k_block)[None, columns]


def _tiles(m: int, n: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Output tiles: their (32, tile_m, tile_n) summands take 16 MB on a CPU, near its caches, and 1 GB on a GPU."""
    tile_m, tile_n = (256, 512) if device.type == "cpu" else (2048, 4096)
    for row in range(0, m, tile_m):
        for column in range(0, n, tile_n):
            yield slice(row, min(row + tile_m, m)), slice(column, min(column + tile_n, n))


def _promotion_ranges(start: int, stop: int, interval: int | None) -> Iterator[tuple[int, int]]:
    """[start, stop) of K cut every ``interval``; uncut if that is None."""
    length = interval or max(stop - start, 1)
    for k in range(start, stop, length):
        yield k, min(k + length, stop)


def _split_ranges(k: int, interval: int | None, split_k: int) -> list[tuple[int, int]]:
    """[start, stop) of K for each split that has work."""
    unit = max(interval or BLOCK, BLOCK)
    units = -(-k // unit)
    bounds = [min(unit * (i * units // split_k), k) for i in range(split_k + 1)]
    return [(start, stop) for start, stop in zip(bounds, bounds[1:]) if start < stop]


# ---------------------------------------------------------------- the exact result and how far from it is right


def partial_products(
    a: ScaledTensor, b: ScaledTensor, rows: slice = slice(None), columns: slice = slice(None)
) -> Iterator[torch.Tensor]:
    """The exact GEMM one K block (128) at a time: ceil(K/128) float64 tensors, scaled, in order of K.

    ``rows`` and ``columns`` select a part of the output. A check compares an error with them to name a bad K block.
    """
    _check_pair(a, b)
    for k_block in range(-(-a.k // BLOCK)):
        k = slice(k_block * BLOCK, (k_block + 1) * BLOCK)
        a_scale, b_scale = scale_of_k_block(a, k_block)[rows], scale_of_k_block(b, k_block)[columns]
        product = a.data[rows, k].double() @ b.data[columns, k].double().t()
        yield product * (a_scale.double()[:, None] * b_scale.double()[None, :])


def matmul_exact(
    a: ScaledTensor, b: ScaledTensor, *, bias: torch.Tensor | None = None, c: torch.Tensor | None = None
) -> torch.Tensor:
    """FP64 GEMM of the dequantised operands, plus bias (N,) and c (M, N): float64 (M, N).

    Within a K block e4m3 products add up without any rounding; what FP64 rounds is below 2^-50 of the summands.
    """
    _check_pair(a, b)
    total = torch.zeros(a.rows, b.rows, dtype=torch.float64, device=a.device)
    for partial in partial_products(a, b):
        total += partial
    for addend in _epilogue_addends(a, b, bias, c):
        total += addend
    return total


def error_bound(
    a: ScaledTensor,
    b: ScaledTensor,
    out_dtype: torch.dtype,
    interval: int | None = None,
    arithmetic: str = "tensor_core",
    *,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """A bound on |D - matmul_exact(a, b)| that every right kernel keeps, for each output: float64 (M, N).

    arithmetic  "tensor_core": FP8 wgmma, K ascending; K may be split at promotions.
                "fp32": FP32 on CUDA cores; within 128 of K in any order, so that it also holds for a blocked dot.
    interval    K between promotions, as in matmul_hopper; None: only where block scales force one, every 128.
    bias, c     as in matmul_hopper.

    Derivation. Follow one accumulator from promotion to promotion. Let P be the exact sum so far and err the bound on
    its error, so the accumulator is at most |P| + err. One wgmma step (tensor_core_step) with largest exponent E
    truncates to the unit u = 2^(E - 13):

    - A product that is a multiple of 2^l loses at most u - 2^l if 2^l < u, else nothing. With t = l - (E - 13) that is
      (1 - 2^t)·u <= 3/8 · 2^(-t/2) · u for every integer t < 0. Since l is l_a + l_b, the sum over k of 2^(-l/2) is a
      GEMM of 2^(-l_a/2) and 2^(-l_b/2). Nor can 32 products lose more than 32·u.
    - The accumulator is a multiple of 2^(e - 13), e its exponent: it loses at most u - 2^(e - 13).
    - The sum, a multiple of u, loses at most 2^(e - 13) - u, e its exponent.

    The largest exponent among products is exact: with 32 products floor(log2(sum of 2^(6·(e_a + e_b)))/6), because
    32 < 2^6; that sum is a GEMM too. Exponents of accumulators lie between those of |P| - err and |P| + err. In FP32
    the step is 128 long and every one of 128 additions errs by at most 2^-24·(|P| + err + sum |a·b|).

    Scales multiply that error; rounding sa·sb, promoting, and adding bias and c cost 2^-24 each of what they produce;
    the output costs half its spacing. Inf where the result or a scale product leaves the range of FP32 or out_dtype;
    NaN where the exact result is NaN or Inf: compare those outputs by class.
    """
    _check_pair(a, b)
    _check_out_dtype(out_dtype)
    if arithmetic not in ("tensor_core", "fp32"):
        raise ValueError(f"arithmetic is {arithmetic!r}; allowed are 'tensor_core' and 'fp32'")
    interval = _accumulation_length(a, b, interval)
    addends = _epilogue_addends(a, b, bias, c)
    a_parts, b_parts = _ErrorOperand.of(a), _ErrorOperand.of(b)

    out = torch.empty(a.rows, b.rows, dtype=torch.float64, device=a.device)
    tile_m = max(1, (2**18 if a.device.type == "cpu" else 2**24) // max(b.rows, 1))
    for row in range(0, a.rows, tile_m):
        rows = slice(row, row + tile_m)
        exact, error, magnitude = torch.zeros(3, *out[rows].shape, dtype=torch.float64, device=a.device)
        largest_scale = torch.zeros_like(exact)
        ranges = list(_promotion_ranges(0, a.k, interval))
        for start, stop in ranges:
            p, p_error = _accumulation_error(a_parts.rows(rows), b_parts, start, stop, arithmetic)
            scale = _exact_scale_product(a, b, start // BLOCK, rows)
            largest_scale = torch.maximum(largest_scale, scale)
            at_most = p.abs() + p_error
            exact += p * scale
            error += p_error * scale + at_most * (scale * FP32_ROUNDOFF + FP32_UNDERFLOW)
            magnitude += at_most * scale
        error += len(ranges) * (magnitude * FP32_ROUNDOFF + FP32_UNDERFLOW)
        for addend in addends:
            exact += addend[rows]
            error += (exact.abs() + error) * FP32_ROUNDOFF
            magnitude = torch.maximum(magnitude, exact.abs() + error)
        error = error * (1 + 2.0**-20)  # covers the rounding of this calculation
        error += _half_spacing(exact.abs() + error, out_dtype)
        overflow = (magnitude > FP32_MAX) | (largest_scale > FP32_MAX)
        overflow |= exact.abs() + error > torch.finfo(out_dtype).max
        out[rows] = torch.where(overflow, torch.inf, error)
        out[rows] = torch.where(exact.isfinite(), out[rows], torch.nan)
    return out


@dataclass(frozen=True)
class _ErrorOperand:
    """What error_bound multiplies, each (rows, K) float64 and 0 where the value is 0; l is the exponent of the lowest
    set bit of a value, e its exponent."""

    values: torch.Tensor
    sixth_power: torch.Tensor  # 2^(6·e)
    root_of_bit: torch.Tensor  # 2^(-l/2)

    @staticmethod
    def of(scaled: ScaledTensor) -> "_ErrorOperand":
        values, fmt = scaled.data.double(), scaled.format
        magnitude = values.abs().clamp(max=fmt.max)  # Inf and NaN never reach a bound
        exponent = _floor_log2(magnitude).clamp_min(fmt.min_exponent)
        lowest_place = exponent - fmt.mantissa_bits
        significand = (magnitude / _power_of_two(lowest_place)).nan_to_num().long()
        lowest_bit = (significand & -significand) * _power_of_two(lowest_place)
        zero = values == 0
        return _ErrorOperand(
            values,
            _power_of_two(6 * exponent).masked_fill(zero, 0),
            lowest_bit.rsqrt().masked_fill(zero, 0),
        )

    def rows(self, rows: slice) -> "_ErrorOperand":
        return _ErrorOperand(self.values[rows], self.sixth_power[rows], self.root_of_bit[rows])


def _accumulation_error(
    a: _ErrorOperand, b: _ErrorOperand, start: int, stop: int, arithmetic: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact sum of products, bound on the error) of one accumulator over K in [start, stop)."""
    exact = a.values.new_zeros(len(a.values), len(b.values))
    error = torch.zeros_like(exact)
    step_k = STEP_K if arithmetic == "tensor_core" else BLOCK
    for k in range(start, stop, step_k):
        step = slice(k, min(k + step_k, stop))
        before, exact = exact, exact + a.values[:, step] @ b.values[:, step].t()
        if arithmetic == "tensor_core":
            lost_bits = a.root_of_bit[:, step] @ b.root_of_bit[:, step].t()
            sixth_powers = a.sixth_power[:, step] @ b.sixth_power[:, step].t()
            error = _wgmma_step_error(before, exact, error, sixth_powers, lost_bits, first=k == start)
        else:
            absolute = a.values[:, step].abs() @ b.values[:, step].abs().t()
            at_most = (before.abs() + error + absolute) * (1 + 2.0**-14)  # second-order terms
            error = error + step_k * FP32_ROUNDOFF * at_most
    return exact, error


def _wgmma_step_error(before, after, error, sixth_powers, lost_bits, first: bool) -> torch.Tensor:
    """Error bound after one wgmma step whose exact sums are ``before`` and ``after``; see error_bound."""
    slack = 2.0**-20
    product_exponent = _floor_log2(sixth_powers).div(6, rounding_mode="floor")
    c_high = _floor_log2((before.abs() + error) * (1 + slack))
    c_low = _floor_log2((before.abs() - error) * (1 - slack))
    bits = _WGMMA_FP8.alignment_bits
    unit_high = _power_of_two(torch.maximum(product_exponent, c_high) - bits)
    unit_low = _power_of_two(torch.maximum(product_exponent, c_low) - bits)

    error = error + torch.minimum(0.375 * unit_high**1.5 * lost_bits, STEP_K * unit_high)
    if not first:
        error = error + unit_high - _power_of_two(c_low - bits)
    sum_exponent = _floor_log2((after.abs() + error) * (1 + slack))
    return error + (_power_of_two(sum_exponent - _WGMMA_FP8.result_bits) - unit_low).clamp_min(0)


def _floor_log2(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 x) as int32; a number below every FP8 product's exponent for x <= 0."""
    return torch.frexp(x.clamp_min(2.0 ** (6 * _ZERO_SUMMAND))).exponent - 1


def _half_spacing(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of ``dtype`` in the binade of ``magnitude``: what rounding can cost."""
    info = torch.finfo(dtype)
    binade = _power_of_two(_floor_log2(magnitude.clamp(info.smallest_normal, info.max)))
    return binade * (info.eps / 2)


def _exact_scale_product(a: ScaledTensor, b: ScaledTensor, k_block: int, rows: slice) -> torch.Tensor:
    """|sa · sb| within one K block, float64 (rows, N)."""
    a_scale, b_scale = scale_of_k_block(a, k_block)[rows].double(), scale_of_k_block(b, k_block).double()
    return a_scale.abs()[:, None] * b_scale.abs()[None, :]


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2·sum(x·y) / sum(x² + y²) in FP64, the measure DeepGEMM reports: 0 for equal tensors, 0 if both are zero.

    x and y are of one shape, any (…, N) and type. One number for a whole matrix: it says how good the numbers are, not whether all
    of them are right. Raises ValueError for different shapes.
    """
    if x.shape != y.shape:
        raise ValueError(f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; they must be equal")
    x, y = x.double(), y.double()
    squares = (x * x + y * y).sum()
    return (1 - 2 * (x * y).sum() / squares).item() if squares != 0 else 0.0


# ---------------------------------------------------------------- arguments


def _check_pair(a: ScaledTensor, b: ScaledTensor) -> None:
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, ScaledTensor):
            kind = type(operand).__name__
            raise TypeError(f"{name} is a {kind}; it must be a ScaledTensor: quantize({name}, recipe)")
    if a.k != b.k:
        raise ValueError(
            f"b has shape {tuple(b.data.shape)} and a {tuple(a.data.shape)}; their K must be equal, "
            "A is (M, K) and B is (N, K): transpose b before quantising it"
        )
    if a.device != b.device:
        raise ValueError(f"b is on {b.device} and a on {a.device}; they must be on one device")


def _scale_changes_along_k(scaled: ScaledTensor) -> bool:
    return scaled.recipe in ("1x128", "128x128")


def _check_interval(a: ScaledTensor, b: ScaledTensor, interval: int | None) -> int | None:
    block_scaled = [scaled.recipe for scaled in (a, b) if _scale_changes_along_k(scaled)]
    if interval is None:
        if block_scaled:
            raise ValueError(
                f"interval is None, but recipe {block_scaled[0]!r} has another scale every {BLOCK} of K, "
                f"so the accumulator must be promoted there: pass interval={BLOCK}"
            )
        return None
    allowed = f"a multiple of {BLOCK}, or {STEP_K} or {2 * STEP_K}"
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval is {interval!r}; it must be None or {allowed}")
    if interval % BLOCK and interval not in (STEP_K, 2 * STEP_K):
        raise ValueError(f"interval is {interval}; it must be {allowed}")
    if block_scaled and interval > BLOCK:
        raise ValueError(
            f"interval is {interval}, but recipe {block_scaled[0]!r} has another scale every {BLOCK} of K: "
            f"pass interval={BLOCK}"
        )
    return interval


def _accumulation_length(a: ScaledTensor, b: ScaledTensor, interval: int | None) -> int | None:
    """The interval, or the one that block scales force where none is given."""
    if interval is None and (_scale_changes_along_k(a) or _scale_changes_along_k(b)):
        return BLOCK
    return _check_interval(a, b, interval)


def _check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; allowed are {', '.join(map(str, OUT_DTYPES))}")


def _epilogue_addends(a: ScaledTensor, b: ScaledTensor, bias, c) -> list[torch.Tensor]:
    """bias and c, those given, as float32 (M, N) views in the order in which the epilogue adds them."""
    addends = []
    for name, tensor, shape in (("bias", bias, (b.rows,)), ("c", c, (a.rows, b.rows))):
        if tensor is None:
            continue
        if tensor.dtype not in OUT_DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed are {', '.join(map(str, OUT_DTYPES))}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape} for this GEMM")
        if tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device} and a on {a.device}; they must be on one device")
        addends.append(tensor.float().expand(a.rows, b.rows))
    return addends
