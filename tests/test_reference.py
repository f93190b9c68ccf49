import hashlib
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hopperlab.formats import E4M3, E5M2, all_values, cast_saturating
from hopperlab.quantize import RECIPES, ScaledTensor, expand_scale, quantize, scale_shape
from hopperlab.reference import (
    _fma,
    calc_diff,
    error_bound,
    matmul_exact,
    matmul_fp32,
    matmul_hopper,
    mma_sync_step,
    partial_products,
    tensor_core_step,
)

FORMAT_PAIRS = [(E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2), (E5M2, E4M3)]
every_format_pair = pytest.mark.parametrize("formats", FORMAT_PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
RECIPE_PAIRS = [("tensor", "tensor"), ("row", "row"), ("row", "128x128"), ("1x128", "128x128"), ("1x128", "1x128")]
every_recipe_pair = pytest.mark.parametrize("recipes", RECIPE_PAIRS, ids="-".join)


# ---------------------------------------------------------------- inputs


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(rows, k, fmt, g):
    return cast_saturating(torch.randn(rows, k, generator=g), fmt)


def all_finite_bytes(rows, k, fmt, g):
    codes = torch.arange(256, dtype=torch.uint8)[all_values(fmt).isfinite()]
    return codes[torch.randint(len(codes), (rows, k), generator=g)].view(fmt.dtype)


def spread(rows, k, fmt, g):
    exponents = torch.randint(-9, 10, (rows, k), generator=g)
    return cast_saturating(torch.ldexp(torch.randn(rows, k, generator=g), exponents), fmt)


def positive(rows, k, fmt, g):
    return cast_saturating(torch.rand(rows, k, generator=g) + 0.1, fmt)


def tiny(rows, k, fmt, g):
    return cast_saturating(torch.randn(rows, k, generator=g) * fmt.smallest_normal, fmt)


def sparse(rows, k, fmt, g):
    x = torch.randn(rows, k, generator=g) * (torch.rand(rows, k, generator=g) < 0.1)
    return cast_saturating(x * 100, fmt)


# name: (data, magnitude of the first accumulator)
FAMILIES = {
    "normal": (normal, 3.0),
    "all finite bytes": (all_finite_bytes, 3.0),
    "spread exponents": (spread, 3.0),
    "all positive": (positive, 3.0),
    "tiny accumulator": (normal, 1e-6),
    "subnormal accumulator": (sparse, 1e-41),
    "huge accumulator": (normal, 1e6),
    "tiny operands": (tiny, 1e-7),
    "zero accumulator": (sparse, 0.0),
}


def bits(x):
    return x.view({4: torch.int32, 2: torch.int16}[x.element_size()])


def assert_same_bits(x, y):
    assert x.dtype == y.dtype and x.shape == y.shape
    different = int((bits(x) != bits(y)).sum())
    assert different == 0, f"{different} of {x.numel()} outputs differ"


def fp8_codes(a, b):
    return a.view(torch.uint8), b.view(torch.uint8)


def scaled(data, recipe, g, low=0.5, high=2.0):
    """A ScaledTensor with random scales, which need not come from quantising."""
    shape = scale_shape(recipe, *data.shape)
    return ScaledTensor(data, torch.rand(shape, generator=g) * (high - low) + low, recipe)


# ---------------------------------------------------------------- one step against independent models


@every_format_pair
@pytest.mark.parametrize("family", FAMILIES)
def test_chained_wgmma_steps_equal_mmasim_and_mmaemu(formats, family):
    """36 cases of four steps with 16,384 outputs each: 2.4 million outputs against each model."""
    import mmasim.nv_ptx
    from mmaemu.model.chain import dot as mmaemu_dot

    make, c_size = FAMILIES[family]
    format_a, format_b = formats
    g = generator(7)
    wgmma = mmasim.nv_ptx.WGMMA("Hopper", f"m64n256k32.f32.{format_a.name}.{format_b.name}")
    c = torch.randn(64, 256, generator=g) * c_size
    for _ in range(4):
        a, b = make(64, 32, format_a, g), make(256, 32, format_b, g)
        ours = tensor_core_step(a, b, c, format_a, format_b)
        assert_same_bits(ours, wgmma(a, b.t(), c))
        pairs = a[:, None, :].expand(64, 256, 32).contiguous(), b[None].expand(64, 256, 32).contiguous()
        assert_same_bits(ours, mmaemu_dot(*pairs, c, preset="hopper"))
        c = ours


@every_format_pair
@pytest.mark.parametrize("family", ["normal", "all finite bytes", "spread exponents", "tiny operands"])
def test_mma_sync_equals_two_fp16_instructions_of_mmasim_and_an_addition(formats, family):
    import mmasim.nv_ptx

    make, c_size = FAMILIES[family]
    g = generator(3)
    hmma = mmasim.nv_ptx.MMA("Hopper", "m16n8k16.f32.f16.f16.f32")
    a, b = make(16, 32, formats[0], g), make(8, 32, formats[1], g)
    c = torch.randn(16, 8, generator=g) * c_size
    first = torch.tensor([k for k in range(32) if k % 4 < 2])
    second = first + 2
    dot = torch.zeros(16, 8)
    for half in (first, second):
        dot = hmma(a.half()[:, half], b.half()[:, half].t(), dot)
    assert_same_bits(mma_sync_step(*fp8_codes(a, b), c, *formats), dot + c)


def test_mma_sync_is_more_precise_than_wgmma():
    g = generator(5)
    a, b, c = positive(16, 32, E4M3, g), positive(8, 32, E4M3, g), torch.full((16, 8), 100.0)
    exact = a.double() @ b.double().t() + c
    wgmma = (tensor_core_step(a, b, c, E4M3, E4M3) - exact).abs().max()
    mma_sync = (mma_sync_step(a, b, c, E4M3, E4M3) - exact).abs().max()
    assert mma_sync < wgmma / 100


def round_toward_zero(x, unit):
    return Fraction(abs(x) // unit) * unit * (1 if x > 0 else -1)


def exponent_of(x, smallest):
    """floor(log2 |x|) of a Fraction whose denominator is a power of two; at least ``smallest``."""
    return max(abs(x.numerator).bit_length() - x.denominator.bit_length(), smallest)


def step_in_fractions(a, b, c, format_a, format_b):
    """One output of a wgmma step by its five rules, in exact rational arithmetic."""
    products = [Fraction(x) * Fraction(y) for x, y in zip(a, b)]
    exponents = [
        exponent_of(Fraction(x), format_a.min_exponent) + exponent_of(Fraction(y), format_b.min_exponent)
        for x, y, product in zip(a, b, products)
        if product
    ]
    c = Fraction(c)
    largest = max(exponents + [exponent_of(c, -126)] if c else exponents + [-133])
    total = sum(round_toward_zero(term, Fraction(2) ** (largest - 13)) for term in [*products, c])
    return float(round_toward_zero(total, Fraction(2) ** (exponent_of(total, -126) - 13))) if total else 0.0


# Zeros are drawn more often than by chance: they must not take part in choosing the largest exponent.
FINITE_CODES = {
    fmt.name: st.sampled_from(all_values(fmt).isfinite().nonzero().flatten().tolist() + [0x00, 0x80] * 20)
    for fmt in (E4M3, E5M2)
}


@every_format_pair
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_step_equals_the_rules_in_exact_arithmetic(formats, data):
    a, b = (
        torch.tensor([data.draw(st.lists(FINITE_CODES[fmt.name], min_size=32, max_size=32))], dtype=torch.uint8)
        for fmt in formats
    )
    c = data.draw(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100))
    step = tensor_core_step(a, b, torch.tensor([[c]]), *formats)
    values = [codes.view(fmt.dtype).float()[0].tolist() for codes, fmt in zip((a, b), formats)]
    assert_same_bits(step, torch.tensor([[step_in_fractions(*values, c, *formats)]]))


@pytest.mark.parametrize("step", [tensor_core_step, mma_sync_step])
@every_format_pair
def test_nan_and_inf_operands_give_what_ieee_arithmetic_gives(step, formats):
    g = generator(11)
    a, b = (torch.randint(256, (rows, 32), generator=g).to(torch.uint8) for rows in (64, 96))
    keep = torch.rand(64, 32, generator=g) < 0.97  # few enough specials that finite, Inf and NaN outputs all occur
    a = torch.where(keep, all_finite_bytes(64, 32, formats[0], g).view(torch.uint8), a)
    keep = torch.rand(96, 32, generator=g) < 0.97
    b = torch.where(keep, all_finite_bytes(96, 32, formats[1], g).view(torch.uint8), b)
    c = torch.randn(64, 96, generator=g)
    c[0, 0], c[1, 1], c[2, 2] = torch.inf, -torch.inf, torch.nan
    a_values, b_values = a.view(formats[0].dtype).double(), b.view(formats[1].dtype).double()
    ieee = (a_values[:, None, :] * b_values[None]).sum(-1) + c
    out = step(a, b, c, *formats)
    assert torch.equal(out.isnan(), ieee.isnan()) and ieee.isnan().any()
    assert torch.equal(out[ieee.isinf()].double(), ieee[ieee.isinf()]) and ieee.isinf().any()
    assert out.isfinite().any()
    assert (bits(out[out.isnan()]) == 0x7FFFFFFF).all()


def test_a_zero_sum_is_positive_zero():
    a = torch.full((1, 32), -0.0).to(E4M3.dtype)
    for c in (0.0, -0.0):
        assert bits(tensor_core_step(a, a, torch.tensor([[c]]), E4M3, E4M3)).item() == 0
    ones = torch.ones(1, 32).to(E4M3.dtype)
    assert bits(tensor_core_step(ones, ones, torch.tensor([[-32.0]]), E4M3, E4M3)).item() == 0


def test_the_largest_accumulators_are_truncated_not_overflowed():
    c = torch.tensor([[torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max]])
    ones = torch.ones(1, 32).to(E4M3.dtype)
    out = tensor_core_step(ones, torch.ones(2, 32).to(E4M3.dtype), c, E4M3, E4M3)
    assert out.tolist() == [[2.0**128 - 2.0**114, -(2.0**128 - 2.0**114)]]


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(a_codes=torch.zeros(2, 32)), TypeError, "a_codes has dtype torch.float32.*uint8 and torch.float8_e4m3fn"),
        (dict(b_codes=torch.zeros(3, 32).to(E5M2.dtype)), TypeError, "b_codes has dtype torch.float8_e5m2"),
        (dict(a_codes=torch.zeros(2, 64, dtype=torch.uint8)), ValueError, r"a_codes has shape \(2, 64\).*slice K"),
        (dict(c=torch.zeros(3, 2)), ValueError, r"c is torch.float32 of shape \(3, 2\).*\(2, 3\)"),
        (dict(c=torch.zeros(2, 3).double()), ValueError, "c is torch.float64"),
        (dict(format_a="e3m4"), ValueError, "format is 'e3m4'"),
    ],
)
def test_steps_refuse_wrong_arguments(change, error, message):
    right = dict(
        a_codes=torch.zeros(2, 32, dtype=torch.uint8), b_codes=torch.zeros(3, 32, dtype=torch.uint8),
        c=torch.zeros(2, 3), format_a="e4m3", format_b="e4m3",
    )  # fmt: skip
    for step in (tensor_core_step, mma_sync_step):
        assert step(**right).shape == (2, 3)
        with pytest.raises(error, match=message):
            step(**(right | change))


# ---------------------------------------------------------------- FP32 fma


def round_to_fp32(x):
    """Nearest FP32 to a Fraction, ties to even; overflow is not needed here."""
    unit = Fraction(2) ** (exponent_of(x, -126) - 23)
    return float(round(x / unit) * unit)


def test_fma_rounds_once_where_fp64_would_round_twice():
    x = torch.tensor([1 + 2.0**-12] * 4)  # x² = 1 + 2^-11 + 2^-24: half way between two FP32 numbers
    z = torch.tensor([2.0**-90, -(2.0**-90), 0.0, 2.0**-30])
    up, down = 1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11
    assert _fma(x, x, z).tolist() == [up, down, down, up]
    assert _fma(-x, x, -z).tolist() == [-up, -down, -down, -up]
    assert (x.double() * x.double() + z.double()).float().tolist() != [up, down, down, up]


fp32 = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60)


@settings(max_examples=300, deadline=None)
@given(x=fp32, y=fp32, z=fp32)
def test_fma_is_correctly_rounded(x, y, z):
    expected = round_to_fp32(Fraction(x) * Fraction(y) + Fraction(z))
    assert _fma(*(torch.tensor([v]) for v in (x, y, z))).item() == expected


def test_fma_of_non_finite_values_is_ieee():
    inf, nan, big = torch.inf, torch.nan, 3e38
    x = torch.tensor([inf, 0.0, nan, big, big, 1.0])
    y = torch.tensor([2.0, inf, 1.0, 2.0, -2.0, 1.0])
    z = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -inf])
    expected = torch.tensor([inf, nan, nan, inf, -inf, -inf])
    assert torch.equal(_fma(x, y, z).nan_to_num(nan=7.0, posinf=8.0, neginf=9.0), expected.nan_to_num(7.0, 8.0, 9.0))


# ---------------------------------------------------------------- whole GEMMs

# SHA-256 of the bfloat16 outputs an H200 wrote (driver 580) with a warp-specialised kernel and with a 2-CTA cluster
# kernel, for the inputs below.
H200_OUTPUTS = {
    (128, 128, 512): "c28e962c780d26c688baed1a332187b5e6b94fbc71ac741c3436d82d3b2d99c8",
    (256, 128, 512): "35ac492e42b23317c839bd8083ff0595c21862101aa5aee44d23729e49f104ff",
}


@pytest.mark.parametrize("shape", H200_OUTPUTS, ids=str)
def test_equals_what_an_h200_wrote(shape):
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(rows, k)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for rows in (m, n))
    a_scale = rng.uniform(0.5, 2, (m, k // 128)).astype(np.float32)
    b_scale = rng.uniform(0.5, 2, (n // 128, k // 128)).astype(np.float32)
    a = ScaledTensor(torch.from_numpy(a).view(E4M3.dtype), torch.from_numpy(a_scale), "1x128")
    b = ScaledTensor(torch.from_numpy(b).view(E4M3.dtype), torch.from_numpy(b_scale), "128x128")
    assert hashlib.sha256(bits(matmul_hopper(a, b)).numpy().tobytes()).hexdigest() == H200_OUTPUTS[shape]


def hopper_step_by_step(a, b, interval):
    """matmul_hopper before the output conversion, put together from single steps."""
    k_padded = -(-a.k // 32) * 32
    a_codes, b_codes = (
        torch.nn.functional.pad(scaled.data.view(torch.uint8), (0, k_padded - scaled.k)) for scaled in (a, b)
    )
    a_scale, b_scale = expand_scale(a), expand_scale(b)
    final = torch.zeros(a.rows, b.rows)
    accumulator = torch.zeros_like(final)
    for k in range(0, k_padded, 32):
        accumulator = tensor_core_step(a_codes[:, k : k + 32], b_codes[:, k : k + 32], accumulator, a.format, b.format)
        last = k + 32 == k_padded
        scale = a_scale[:, k, None] * b_scale[None, :, k]
        if interval is not None and (last or (k + 32) % interval == 0):
            final = _fma(accumulator, scale, final)
            accumulator = torch.zeros_like(final)
        elif last:
            final = accumulator * scale
    return final


def block_scaled(recipes):
    return any("x128" in recipe for recipe in recipes)


@pytest.mark.parametrize(
    "recipes, interval",
    [
        (recipes, interval)
        for recipes in RECIPE_PAIRS
        for interval in ((32, 64, 128) if block_scaled(recipes) else (None, 32, 64, 128, 256))
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_matmul_hopper_is_its_steps(recipes, interval):
    g = generator(1)
    m, n, k = 260, 131, 300  # ragged in every direction, and more than one tile of outputs
    a, b = scaled(spread(m, k, E4M3, g), recipes[0], g), scaled(normal(n, k, E5M2, g), recipes[1], g)
    expected = hopper_step_by_step(a, b, interval)
    assert_same_bits(matmul_hopper(a, b, interval=interval, out_dtype=torch.float32), expected)
    for out_dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(matmul_hopper(a, b, interval=interval, out_dtype=out_dtype), expected.to(out_dtype))


@pytest.mark.parametrize("interval", [None, 128])
def test_epilogue_adds_bias_then_c_in_fp32(interval):
    g = generator(2)
    a, b = scaled(normal(9, 256, E4M3, g), "row", g), scaled(normal(20, 256, E4M3, g), "tensor", g)
    bias, c = torch.randn(20, generator=g).bfloat16(), torch.randn(9, 20, generator=g) * 1e-3
    plain = matmul_hopper(a, b, interval=interval, out_dtype=torch.float32)
    out = matmul_hopper(a, b, interval=interval, bias=bias, c=c, out_dtype=torch.float16)
    assert_same_bits(out, (plain + bias.float() + c).half())


@pytest.mark.parametrize("interval, k, split_k, bounds", [
    (128, 1000, 2, [0, 512, 1000]),
    (128, 640, 3, [0, 128, 384, 640]),
    (64, 640, 2, [0, 256, 640]),
    (256, 1024, 3, [0, 256, 512, 1024]),
    (None, 640, 2, [0, 256, 640]),
    (128, 256, 5, [0, 128, 256]),
])  # fmt: skip
def test_split_k_adds_the_splits_in_order(interval, k, split_k, bounds):
    g = generator(4)
    recipe = "row" if interval in (None, 256) else "1x128"
    a, b = scaled(normal(33, k, E4M3, g), recipe, g), scaled(normal(40, k, E4M3, g), recipe, g)
    unit = torch.ones(33), torch.ones(40)
    total = None
    for start, stop in zip(bounds, bounds[1:]):
        parts = []
        for operand, ones in zip((a, b), unit):
            scale = operand.scale
            if recipe == "1x128":
                scale = scale[:, start // 128 : -(-stop // 128)].contiguous()
            elif interval is None:
                scale = ones  # scaled once, after the splits are added
            parts.append(ScaledTensor(operand.data[:, start:stop], scale, recipe))
        part = matmul_hopper(*parts, interval=interval, out_dtype=torch.float32)
        total = part if total is None else total + part
    if interval is None:
        total = total * (a.scale[:, None] * b.scale[None, :])
    assert_same_bits(matmul_hopper(a, b, interval=interval, split_k=split_k, out_dtype=torch.float32), total)


def test_a_row_does_not_depend_on_the_batch():
    g = generator(6)
    a, b = scaled(normal(300, 256, E4M3, g), "1x128", g), scaled(normal(520, 256, E4M3, g), "128x128", g)
    whole = matmul_hopper(a, b)
    one = ScaledTensor(a.data[217:218], a.scale[217:218], "1x128")
    assert_same_bits(matmul_hopper(one, b), whole[217:218])


def test_promotion_keeps_a_long_sum_of_positive_numbers():
    """The relative errors the course quotes for K = 8192."""
    g = generator(8)
    a, b = (quantize(torch.rand(16, 8192, generator=g), "tensor") for _ in range(2))
    exact = matmul_exact(a, b)
    error = {
        interval: ((matmul_hopper(a, b, interval=interval, out_dtype=torch.float32) - exact) / exact).abs().max().item()
        for interval in (None, 128)
    }
    assert 0.05 < error[None] < 0.2
    assert error[128] < 1e-3


@pytest.mark.parametrize("multiply", [matmul_hopper, matmul_fp32], ids=["hopper", "fp32"])
@pytest.mark.parametrize(
    "out_dtype, pattern", [(torch.float32, 0x7FFFFFFF), (torch.bfloat16, 0x7FFF), (torch.float16, 0x7FFF)]
)
def test_non_finite_elements_reach_only_their_row_and_column(multiply, out_dtype, pattern):
    x, y = torch.randn(70, 300, generator=generator(9)), torch.randn(140, 300, generator=generator(10))
    clean = multiply(quantize(x, "1x128"), quantize(y, "128x128"), out_dtype=out_dtype)
    x[5, 17], y[100, 299] = torch.inf, torch.nan
    x[5, 18] = y[100, 298] = 0.0
    dirty = multiply(quantize(x, "1x128"), quantize(y, "128x128"), out_dtype=out_dtype)
    hit = torch.zeros(70, 140, dtype=torch.bool)
    hit[5], hit[:, 100] = True, True
    assert (bits(dirty)[hit] == pattern).all()
    assert torch.equal(bits(dirty)[:, 128:][~hit[:, 128:]], bits(clean)[:, 128:][~hit[:, 128:]])
    assert dirty[~hit].isfinite().all()


def test_scale_products_past_fp32_are_inf_or_zero_as_in_the_kernel():
    data = torch.tensor([[1.0] * 128, [0.0] * 128]).to(E4M3.dtype)
    other = torch.ones(1, 128).to(E4M3.dtype)
    for size, one, zero in ((1e30, torch.inf, torch.nan), (1e-30, 0.0, 0.0)):
        a = ScaledTensor(data, torch.full((2,), size), "row")
        b = ScaledTensor(other, torch.full((1,), size), "row")
        for out in (matmul_hopper(a, b), matmul_hopper(a, b, interval=None), matmul_fp32(a, b)):
            assert out[0].item() == one
            assert out[1].item() == zero or (zero != zero and bits(out)[1].item() == 0x7FFF)


def test_output_beyond_fp16_is_inf():
    a = quantize(torch.full((1, 128), 300.0), "row")
    assert matmul_hopper(a, a, out_dtype=torch.float16).item() == torch.inf
    assert matmul_hopper(a, a, out_dtype=torch.bfloat16).item() == pytest.approx(128 * 300.0**2, rel=2**-8)


@pytest.mark.parametrize("shape", [(0, 5, 128), (3, 0, 128), (3, 5, 0)], ids=str)
@every_recipe_pair
def test_empty_problems(shape, recipes):
    m, n, k = shape
    a, b = quantize(torch.ones(m, k), recipes[0]), quantize(torch.ones(n, k), recipes[1])
    bias = torch.ones(n)
    for out in (matmul_hopper(a, b, bias=bias), matmul_exact(a, b, bias=bias)):
        assert out.shape == (m, n) and (out == 1).all()
    assert (matmul_fp32(a, b) == 0).all() and (error_bound(a, b, torch.float32, 128) < 1e-30).all()
    assert len(list(partial_products(a, b))) == -(-k // 128)


@every_recipe_pair
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_matmul_fp32_is_a_loop_of_fmas(recipes, out_dtype):
    g = generator(12)
    m, n, k = 5, 131, 150
    a, b = scaled(spread(m, k, E4M3, g), recipes[0], g), scaled(all_finite_bytes(n, k, E5M2, g), recipes[1], g)
    a_values, b_values = a.data.float().numpy(), b.data.float().numpy()
    a_scale, b_scale = expand_scale(a), expand_scale(b)
    final, accumulator = torch.zeros(m, n), np.zeros((m, n), np.float32)
    for i in range(k):
        product = a_values[:, i, None] * b_values[None, :, i]  # exact, so that adding it rounds once
        accumulator = accumulator + product
        scale = a_scale[:, i, None] * b_scale[None, :, i]
        if block_scaled(recipes) and (i % 128 == 127 or i == k - 1):
            final, accumulator = _fma(torch.from_numpy(accumulator), scale, final), np.zeros_like(accumulator)
    if not block_scaled(recipes):
        final = torch.from_numpy(accumulator) * scale
    assert_same_bits(matmul_fp32(a, b, out_dtype), final.to(out_dtype))


# ---------------------------------------------------------------- exact result, bound, calc_diff


@every_recipe_pair
@every_format_pair
def test_matmul_exact_is_the_gemm_of_the_dequantised_operands(recipes, formats):
    g = generator(13)
    a, b = scaled(normal(60, 300, formats[0], g), recipes[0], g), scaled(normal(140, 300, formats[1], g), recipes[1], g)
    exact = matmul_exact(a, b)
    a64, b64 = a.dequantize(torch.float64), b.dequantize(torch.float64)
    assert (exact - a64 @ b64.t()).abs().max() < 1e-12
    parts = list(partial_products(a, b))
    for k_block, part in enumerate(parts):
        k = slice(128 * k_block, 128 * (k_block + 1))
        assert (part - a64[:, k] @ b64[:, k].t()).abs().max() < 1e-12
    assert torch.equal(sum(parts), exact)
    (first, *_) = partial_products(a, b, slice(10, 20), slice(128, None))
    assert torch.equal(first, parts[0][10:20, 128:])
    bias, c = torch.randn(140), torch.randn(60, 140)
    assert torch.equal(matmul_exact(a, b, bias=bias, c=c), exact + bias + c)


def adversarial(rows, k, fmt, g):
    """Values whose truncation hurts most: one large number, then many with all bits set, far below, of one sign."""
    top = 1.0 if fmt is E4M3 else 2.0**8
    values = torch.full((rows, k), (2 - fmt.epsilon) * 2.0 ** int(torch.randint(-4, 2, (1,), generator=g)))
    values[:, int(torch.randint(8, (1,), generator=g)) :: 32] = top * 2.0 ** int(torch.randint(0, 9, (1,), generator=g))
    return cast_saturating(values * torch.where(torch.rand(rows, 1, generator=g) < 0.5, 1.0, -1.0), fmt)


def cancelling(rows, k, fmt, g):
    """Every second value undoes the one before it, so results are small and errors are not."""
    values = spread(rows, k, fmt, g).float()
    values[:, 1::2] = -values[:, : k - 1 : 2] if k % 2 else -values[:, ::2]
    return cast_saturating(values, fmt)


# Products of scales: ordinary, small, subnormal in FP32, below FP32, large, beyond FP32.
SCALE_RANGES = [(0.5, 2), (1e-15, 1e-10), (2**-75, 2**-70), (2**-126, 2**-100), (1e10, 1e15), (1e15, 1e20)]
MAKERS = [normal, all_finite_bytes, spread, positive, tiny, sparse, adversarial, cancelling]


@every_format_pair
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    makers=st.tuples(st.sampled_from(MAKERS), st.sampled_from(MAKERS)),
    recipes=st.tuples(st.sampled_from(RECIPES), st.sampled_from(RECIPES)),
    k=st.integers(1, 700),
    interval=st.sampled_from([None, 32, 64, 128, 256]),
    out_dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    scale_range=st.sampled_from(SCALE_RANGES),
    with_addends=st.booleans(),
    split_k=st.integers(1, 3),
)
def test_right_results_keep_the_bound(
    formats, seed, makers, recipes, k, interval, out_dtype, scale_range, with_addends, split_k
):
    g = generator(seed)
    a = scaled(makers[0](17, k, formats[0], g), recipes[0], g, *scale_range)
    b = scaled(makers[1](23, k, formats[1], g), recipes[1], g, *scale_range)
    if block_scaled(recipes) and interval in (None, 256):
        interval = 128
    addends = {}
    if with_addends:
        size = min(float(matmul_exact(a, b).abs().mean()), 1e37) or 1.0
        addends = dict(bias=torch.randn(23, generator=g) * size, c=torch.randn(17, 23, generator=g) * size)
    exact = matmul_exact(a, b, **addends)
    out = matmul_hopper(
        a, b, interval=interval, out_dtype=out_dtype, split_k=split_k if interval else 1, **addends
    )
    assert_within(out, exact, error_bound(a, b, out_dtype, interval, **addends))

    bound = error_bound(a, b, out_dtype, arithmetic="fp32")
    assert_within(matmul_fp32(a, b, out_dtype), matmul_exact(a, b), bound)
    assert_within(blocked_fp32(a, b).to(out_dtype), matmul_exact(a, b), bound)


def blocked_fp32(a, b):
    """FP32 in another order: a BLAS call for each K block, as Triton's interpreter does."""
    constant_scale = not block_scaled((a.recipe, b.recipe))
    final = torch.zeros(a.rows, b.rows)
    for k in range(0, a.k, 128):
        block = slice(k, k + 128)
        product = a.data[:, block].float() @ b.data[:, block].float().t()
        scale = expand_scale(a)[:, k, None] * expand_scale(b)[None, :, k]
        final = final + product if constant_scale else _fma(product, scale, final)
    return final * scale if constant_scale else final


def assert_within(out, exact, bound):
    error = (out.double() - exact).abs()
    wrong = ~(error <= bound)
    # A zero accumulator times a scale product that overflowed is NaN; the bound is Inf there.
    wrong &= ~(out.isnan() & bound.isinf())
    assert not wrong.any(), f"error {error[wrong][0]:.3e}, bound {bound[wrong][0]:.3e} at {wrong.nonzero()[0].tolist()}"


def test_the_bound_is_nearly_reached_by_an_adversary():
    """31 products a little below the truncation unit, all of one sign, are lost whole."""
    a = torch.full((1, 32), 1.875)
    a[0, 0] = 256.0
    b = torch.full((1, 32), 2.0**-6)
    b[0, 0] = 1.0
    a, b = (ScaledTensor(cast_saturating(x, E4M3), torch.ones(1), "row") for x in (a, b))
    error = (matmul_hopper(a, b, out_dtype=torch.float32) - matmul_exact(a, b)).abs().item()
    assert 0.8 < error / error_bound(a, b, torch.float32, 128).item() <= 1


def test_the_bound_counts_the_rounding_of_every_promotion():
    """Each of 100 small K blocks is rounded away against the first, large one."""
    x, y = torch.zeros(1, 128 * 101), torch.zeros(1, 128 * 101)
    x[0, 0] = y[0, 0] = 320.0
    x[0, 128::128], y[0, 128::128] = 1.75, 2.0**-9
    a, b = (ScaledTensor(cast_saturating(values, E4M3), torch.ones(1), "row") for values in (x, y))
    exact, bound = matmul_exact(a, b), error_bound(a, b, torch.float32, 128)
    out = matmul_hopper(a, b, out_dtype=torch.float32)
    assert out.item() == 320.0**2
    assert 0.4 * bound < (out - exact).abs() <= bound


def test_the_bound_is_infinite_where_a_running_sum_overflows():
    x = torch.ones(1, 384)
    x[0, 256:] = -1
    b = quantize(torch.full((1, 384), 1e18), "row")
    a = quantize(x * 0.8e18, "row")
    assert matmul_hopper(a, b).isfinite() and error_bound(a, b, torch.bfloat16, 128).isfinite()
    a = quantize(x * 1.5e18, "row")
    assert matmul_exact(a, b) < torch.finfo(torch.float32).max / 1.5
    assert matmul_hopper(a, b).isinf() and error_bound(a, b, torch.bfloat16, 128).isinf()


@pytest.mark.parametrize("k", [128, 1024, 8192])
@every_format_pair
def test_a_two_percent_error_exceeds_the_bound(k, formats):
    x, y = torch.randn(20, k, generator=generator(k)), torch.randn(40, k, generator=generator(k + 1))
    a, b = quantize(x, "1x128", formats[0]), quantize(y, "128x128", formats[1])
    exact = matmul_exact(a, b)
    right = matmul_hopper(a, b).double()
    bound = error_bound(a, b, torch.bfloat16, 128)
    assert ((right - exact).abs() <= bound).all()
    typical = exact.abs() > exact.square().mean().sqrt()
    assert typical.sum() > 150
    for factor in (0.98, 1.02):
        assert ((right * factor - exact).abs() > bound)[typical].all()


def test_the_bound_is_nan_where_the_exact_result_is_not_finite_and_only_there():
    x = torch.randn(8, 256, generator=generator(14))
    x[3, 200] = torch.nan
    b = quantize(torch.randn(16, 256, generator=generator(15)), "128x128")
    bound = error_bound(quantize(x, "1x128"), b, torch.bfloat16, 128)
    assert bound[3].isnan().all()
    rest = torch.arange(8) != 3
    assert bound[rest].isfinite().all()
    x[3, 200] = 0.0
    assert torch.equal(bound[rest], error_bound(quantize(x, "1x128"), b, torch.bfloat16, 128)[rest])


def test_calc_diff_is_a_whole_matrix_number():
    g = generator(16)
    x = torch.randn(64, 64, generator=g)
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-15) and calc_diff(x, -x) == pytest.approx(2)
    assert calc_diff(torch.zeros(2), torch.zeros(2)) == 0
    y = 1.5 * x
    assert calc_diff(x, y) == pytest.approx(1 - 2 * 1.5 / (1 + 1.5**2))
    with pytest.raises(ValueError, match="must be equal"):
        calc_diff(x, x[:1])


def test_quantised_normal_data_has_the_known_difference():
    x, y = torch.randn(128, 512, generator=generator(17)), torch.randn(256, 512, generator=generator(18))
    product = x.double() @ y.double().t()
    assert 5e-4 < calc_diff(matmul_hopper(quantize(x, "1x128"), quantize(y, "128x128")), product) < 9e-4


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false")


@needs_gpu
@every_recipe_pair
def test_a_gpu_computes_the_same_bits(recipes):
    g = generator(19)
    x, y = torch.randn(300, 700, generator=g), torch.randn(260, 700, generator=g)
    x[7, 7] = torch.nan
    on_cpu = quantize(x, recipes[0]), quantize(y, recipes[1], "e5m2", margin=1)
    on_gpu = quantize(x.cuda(), recipes[0]), quantize(y.cuda(), recipes[1], "e5m2", margin=1)
    for one, other in zip(on_cpu, on_gpu):
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8).cpu())
        assert torch.equal(one.scale, other.scale.cpu())
    assert_same_bits(matmul_hopper(*on_gpu).cpu(), matmul_hopper(*on_cpu))
    assert_same_bits(matmul_fp32(*on_gpu).cpu(), matmul_fp32(*on_cpu))
    finite = torch.arange(300) != 7
    for on_device in (matmul_exact, lambda a, b: error_bound(a, b, torch.bfloat16, 128)):
        expected, out = on_device(*on_cpu)[finite], on_device(*on_gpu).cpu()[finite]
        assert torch.allclose(out, expected, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- refusals

OPERAND = quantize(torch.ones(4, 256), "row")
BLOCKS = quantize(torch.ones(4, 256), "1x128")
ELSEWHERE = ScaledTensor(OPERAND.data.to("meta"), OPERAND.scale.to("meta"), "row")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(a=torch.ones(4, 256)), TypeError, r"a is a Tensor.*quantize\(a, recipe\)"),
        (dict(b=quantize(torch.ones(4, 128), "row")), ValueError, r"b has shape \(4, 128\) and a \(4, 256\)"),
        (dict(b=ELSEWHERE), ValueError, "b is on meta and a on cpu"),
        (dict(interval=100), ValueError, "interval is 100; it must be a multiple of 128, or 32 or 64"),
        (dict(interval=0), ValueError, "interval is 0"),
        (dict(interval=True), ValueError, "interval is True"),
        (dict(a=BLOCKS, interval=None), ValueError, "'1x128' has another scale every 128.*pass interval=128"),
        (dict(b=BLOCKS, interval=256), ValueError, "interval is 256, but recipe '1x128'.*pass interval=128"),
        (dict(out_dtype=torch.float64), ValueError, "out_dtype is torch.float64; allowed are torch.bfloat16"),
        (dict(split_k=0), ValueError, "split_k is 0"),
        (dict(bias=torch.ones(5)), ValueError, r"bias has shape \(5,\); it must be \(4,\)"),
        (dict(c=torch.ones(4)), ValueError, r"c has shape \(4,\); it must be \(4, 4\)"),
        (dict(c=torch.ones(4, 4).double()), TypeError, "c has dtype torch.float64"),
        (dict(bias=torch.ones(4, device="meta")), ValueError, "bias is on meta and a on cpu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_matmul_hopper_refuses_wrong_arguments_with_the_fix(arguments, error, message):
    with pytest.raises(error, match=message):
        matmul_hopper(**(dict(a=OPERAND, b=OPERAND) | arguments))


def test_error_bound_refuses_unknown_arithmetic():
    with pytest.raises(ValueError, match="arithmetic is 'fp16'; allowed are 'tensor_core' and 'fp32'"):
        error_bound(OPERAND, OPERAND, torch.float32, arithmetic="fp16")
