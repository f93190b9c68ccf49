"""The two FP8 formats of NVIDIA Hopper: what they can hold, and how to cast to them.

Both are defined in "FP8 Formats for Deep Learning" (Micikevicius et al., arXiv:2209.05433). E4M3 gives up infinities
and all but one NaN pattern per sign, which buys the binade up to 448; E5M2 is a shortened IEEE half precision.
"""

import math
from dataclasses import dataclass

import torch

CASTABLE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Format:
    """One FP8 format. All limits are exact floats; ``epsilon`` is the distance from 1 to the next larger value."""

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_inf: bool
    epsilon: float

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; subnormal values keep it and drop the leading one."""
        return 1 - self.bias


E4M3 = Format(
    name="e4m3", dtype=torch.float8_e4m3fn, exponent_bits=4, mantissa_bits=3, bias=7,
    max=448.0, smallest_normal=2.0**-6, smallest_subnormal=2.0**-9, has_inf=False, epsilon=2.0**-3,
)  # fmt: skip
E5M2 = Format(
    name="e5m2", dtype=torch.float8_e5m2, exponent_bits=5, mantissa_bits=2, bias=15,
    max=57344.0, smallest_normal=2.0**-14, smallest_subnormal=2.0**-16, has_inf=True, epsilon=2.0**-2,
)  # fmt: skip
FORMATS = (E4M3, E5M2)


def format_of(dtype_or_name: torch.dtype | str | Format) -> Format:
    """The Format for a torch dtype (``torch.float8_e4m3fn``), a name (``"e4m3"``) or a Format itself.

    Raises ValueError for anything else.
    """
    for fmt in FORMATS:
        if dtype_or_name in (fmt, fmt.name, fmt.dtype):
            return fmt
    raise ValueError(
        f"format is {dtype_or_name!r}; allowed are 'e4m3' (torch.float8_e4m3fn) and 'e5m2' (torch.float8_e5m2)"
    )


def _as_castable_fp32(x: torch.Tensor) -> torch.Tensor:
    """x widened to FP32, which is exact. FP64 is refused: going through FP32 would round twice."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor: torch.tensor(x)")
    if x.dtype not in CASTABLE:
        raise TypeError(f"x has dtype {x.dtype}; allowed are bfloat16, float16 and float32: call x.float() first")
    return x.float()


def _clamp_to_range(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Finite values clamped to ±max, everything else turned into the positive quiet NaN (byte 0x7f after the cast)."""
    return torch.where(torch.isfinite(x), x.clamp(-fmt.max, fmt.max), torch.nan)


def cast_saturating(x: torch.Tensor, fmt: Format | str) -> torch.Tensor:
    """Round x to FP8: clamp to ±max, then round to nearest, ties to even. Same shape, dtype ``fmt.dtype``.

    x is bfloat16, float16 or float32. Clamping comes first because a plain cast of 480 to E4M3 is NaN and of 65536 to
    E5M2 is Inf. NaN and ±Inf become NaN (byte 0x7f): an infinity is a fault to be seen, not a large number.
    """
    fmt = format_of(fmt)
    return _clamp_to_range(_as_castable_fp32(x), fmt).to(fmt.dtype)


def cast_truncating(x: torch.Tensor, fmt: Format | str) -> torch.Tensor:
    """As cast_saturating, but rounding toward zero. For the lesson that shows its bias; no kernel uses it."""
    fmt = format_of(fmt)
    clamped = _clamp_to_range(_as_castable_fp32(x), fmt)
    grid = spacing(clamped, fmt)
    return ((clamped / grid).trunc() * grid).to(fmt.dtype)  # every step exact: grid is a power of two


def spacing(x: torch.Tensor | float, fmt: Format | str) -> torch.Tensor:
    """Distance between neighbouring FP8 values in the binade of |x|, as float32 of x's shape.

    2^(max(floor(log2 |x|), min_exponent) - mantissa_bits); the spacing of the top binade beyond ±max. Half of it
    bounds the rounding error of cast_saturating for |x| <= max. NaN for NaN and ±Inf.
    """
    fmt = format_of(fmt)
    x = torch.as_tensor(x, dtype=torch.float32)
    clamped = x.abs().clamp(fmt.smallest_normal, fmt.max)
    exponent = torch.frexp(clamped).exponent - 1  # frexp puts the significand in [0.5, 1)
    grid = torch.ldexp(torch.ones_like(clamped), exponent - fmt.mantissa_bits)
    return torch.where(torch.isfinite(x), grid, torch.nan)


def all_values(fmt: Format | str, device: torch.device | str = "cpu") -> torch.Tensor:
    """The value of every byte: float32 of shape (256,), entry i the value of the pattern i (NaN and ±Inf included)."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(format_of(fmt).dtype).float()


def table() -> list[dict]:
    """Range, precision and spacing of FP8 beside the wider formats: one dict a row, for lessons.

    Keys: format, bits, max, smallest_normal, smallest_subnormal, binades (powers of two between smallest subnormal
    and max), spacing_at_1, spacing_at_max, decimal_digits, has_inf.
    """
    names = {fmt.dtype: fmt.name for fmt in FORMATS}
    names |= {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    rows = []
    for dtype, name in names.items():
        info = torch.finfo(dtype)
        subnormal = info.smallest_normal * info.eps
        rows.append({
            "format": name,
            "bits": info.bits,
            "max": info.max,
            "smallest_normal": info.smallest_normal,
            "smallest_subnormal": subnormal,
            "binades": math.floor(math.log2(info.max)) - math.floor(math.log2(subnormal)) + 1,
            "spacing_at_1": info.eps,
            "spacing_at_max": info.eps * 2.0 ** math.floor(math.log2(info.max)),
            "decimal_digits": -math.log10(info.eps / 2),
            "has_inf": dtype != torch.float8_e4m3fn,
        })
    return rows
