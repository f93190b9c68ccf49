import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopperlab.formats import (
    E4M3,
    E5M2,
    FORMATS,
    all_values,
    cast_saturating,
    cast_truncating,
    format_of,
    spacing,
    table,
)

both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def finite_values(fmt):
    values = all_values(fmt)
    return values[values.isfinite()].unique()  # sorted; -0 and +0 are one


def neighbourhood(fmt):
    """Every finite value, every midpoint, and the FP32 numbers next to each: where roundings go wrong."""
    values = finite_values(fmt).double()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    return torch.cat([points, torch.nextafter(points, points - 1), torch.nextafter(points, points + 1)])


@both_formats
def test_limits_agree_with_torch_and_with_the_bit_patterns(fmt):
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.smallest_normal, fmt.epsilon) == (info.max, info.smallest_normal, info.eps)
    positive = finite_values(fmt)
    positive = positive[positive > 0]
    assert positive[0] == fmt.smallest_subnormal and positive[-1] == fmt.max
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == 8
    assert fmt.smallest_normal == 2.0**fmt.min_exponent
    assert bool(all_values(fmt).isinf().any()) == fmt.has_inf
    assert int(all_values(fmt).isnan().sum()) == (6 if fmt is E5M2 else 2)


@both_formats
def test_format_of_accepts_dtype_name_and_format(fmt):
    assert format_of(fmt) is format_of(fmt.name) is format_of(fmt.dtype) is fmt


@pytest.mark.parametrize("wrong", ["e3m4", torch.float16, None, 8])
def test_format_of_names_what_is_allowed(wrong):
    with pytest.raises(ValueError, match="'e4m3'.*'e5m2'"):
        format_of(wrong)


@both_formats
def test_saturating_cast_rounds_to_nearest_even(fmt):
    x = neighbourhood(fmt)
    expected = x.clamp(-fmt.max, fmt.max).numpy().astype(ORACLE[fmt.name]).view(np.uint8)
    assert (cast_saturating(x, fmt).view(torch.uint8).numpy() == expected).all()


@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saturating_cast_of_wide_random_values(fmt, dtype):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-20, 20, (100_003,), generator=generator)  # odd: the tail of a vectorised cast too
    x = torch.ldexp(torch.randn(100_003, generator=generator), exponents).to(dtype)
    x = torch.where(x.isfinite(), x, 0)
    expected = x.float().clamp(-fmt.max, fmt.max).numpy().astype(ORACLE[fmt.name]).view(np.uint8)
    assert (cast_saturating(x, fmt).view(torch.uint8).numpy() == expected).all()


@both_formats
def test_beyond_the_range_saturates_and_non_finite_becomes_nan(fmt):
    x = torch.tensor([fmt.max * 1.01, -fmt.max * 2, 3e38, torch.inf, -torch.inf, torch.nan, -torch.nan])
    for cast in (cast_saturating, cast_truncating):
        out = cast(x, fmt)
        assert out[:3].float().tolist() == [fmt.max, -fmt.max, fmt.max]
        assert out[3:].view(torch.uint8).tolist() == [0x7F] * 4  # one NaN pattern, so that bits can be compared


@both_formats
def test_every_value_survives_both_casts(fmt):
    values = all_values(fmt)
    codes = torch.arange(256, dtype=torch.uint8)[values.isfinite()]
    for cast in (cast_saturating, cast_truncating):
        assert torch.equal(cast(values[values.isfinite()], fmt).view(torch.uint8), codes)


@both_formats
def test_truncating_cast_takes_the_nearest_value_toward_zero(fmt):
    x = neighbourhood(fmt).clamp(-fmt.max, fmt.max)
    positive = finite_values(fmt)
    positive = positive[positive >= 0]
    below = positive[torch.searchsorted(positive, x.abs(), right=True) - 1]
    assert torch.equal(cast_truncating(x, fmt).float(), below * x.sign())


@both_formats
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_error_is_within_half_a_spacing(fmt, x):
    x = torch.tensor(x).clamp(-fmt.max, fmt.max)
    error = (cast_saturating(x, fmt).float() - x).abs()
    assert error <= spacing(x, fmt) / 2
    assert (cast_truncating(x, fmt).float() - x).abs() < spacing(x, fmt)


@both_formats
def test_spacing_is_the_gap_to_the_next_value(fmt):
    values = finite_values(fmt)
    values = values[values >= 0]
    assert torch.equal(spacing(values[:-1], fmt), values[1:] - values[:-1])
    assert torch.equal(spacing(-values[:-1], fmt), values[1:] - values[:-1])
    assert spacing(1.0, fmt) == fmt.epsilon
    assert spacing(torch.inf, fmt).isnan() and spacing(torch.nan, fmt).isnan()


def test_casts_refuse_what_would_round_twice():
    with pytest.raises(TypeError, match="float64.*x.float()"):
        cast_saturating(torch.zeros(2, dtype=torch.float64), "e4m3")
    with pytest.raises(TypeError, match="list.*torch.Tensor"):
        cast_truncating([1.0], "e4m3")


def test_table_holds_the_published_limits():
    rows = {row["format"]: row for row in table()}
    assert list(rows) == ["e4m3", "e5m2", "fp16", "bf16", "fp32"]
    for fmt in FORMATS:
        row = rows[fmt.name]
        assert row["max"] == fmt.max and row["smallest_subnormal"] == fmt.smallest_subnormal
        assert row["spacing_at_1"] == fmt.epsilon and row["has_inf"] == fmt.has_inf
        assert row["spacing_at_max"] == spacing(fmt.max, fmt)
    assert (rows["e4m3"]["binades"], rows["e5m2"]["binades"]) == (18, 32)
    assert rows["fp16"]["max"] == 65504 and rows["fp32"]["smallest_subnormal"] == 2.0**-149


def test_formats_are_immutable():
    with pytest.raises(AttributeError):
        E4M3.max = 480.0
