import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hopperlab.formats import E4M3, FORMATS, cast_saturating, spacing
from hopperlab.quantize import (
    RECIPES,
    SMALLEST_SCALE,
    ScaledTensor,
    dequantize,
    expand_scale,
    quantize,
    scale_from_m_major,
    scale_of_k_block,
    scale_shape,
    scale_to_m_major,
)

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
SHAPES = [(1, 1), (5, 127), (128, 128), (129, 257), (3, 576), (260, 130)]
BLOCK_SHAPE = {"tensor": (None, None), "row": (1, None), "1x128": (1, 128), "128x128": (128, 128)}


def random(rows, k, seed=0, spread=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    if spread:
        x = torch.ldexp(x, torch.randint(-spread, spread + 1, (rows, k), generator=generator))
    return x


def blocks(recipe, rows, k):
    """(index of the scale, slice of the data), block by block: the definition, written as loops."""
    row_step, k_step = (size or extent for size, extent in zip(BLOCK_SHAPE[recipe], (rows, k)))
    for i, row in enumerate(range(0, rows, row_step)):
        for j, column in enumerate(range(0, k, k_step)):
            index = {"tensor": (0,), "row": (i,)}.get(recipe, (i, j))
            yield index, (slice(row, row + row_step), slice(column, column + k_step))


def quantize_with_loops(x, recipe, fmt, margin):
    """The rules of the module in NumPy FP32, one block at a time."""
    x = x.float().numpy()
    scale = np.empty(scale_shape(recipe, *x.shape), np.float32)
    data = np.empty(x.shape, np.float32)
    for index, block in blocks(recipe, *x.shape):
        amax = np.abs(x[block]).max()
        scale[index] = max(amax / np.float32(fmt.max / 2**margin), np.float32(2.0**-126)) if amax else 1
        data[block] = np.clip(x[block] / scale[index], -fmt.max, fmt.max)
    return torch.from_numpy(data).to(fmt.dtype), torch.from_numpy(scale)


@every_recipe
@both_formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, margin", [(torch.float32, 0), (torch.bfloat16, 2), (torch.float16, 5)])
def test_equals_the_definition_bit_for_bit(recipe, fmt, shape, dtype, margin):
    x = random(*shape, spread=6).to(dtype)
    scaled = quantize(x, recipe, fmt, margin=margin)
    data, scale = quantize_with_loops(x, recipe, fmt, margin)
    assert torch.equal(scaled.scale, scale)
    assert torch.equal(scaled.data.view(torch.uint8), data.view(torch.uint8))
    assert (scaled.rows, scaled.k, scaled.format, scaled.recipe) == (*shape, fmt, recipe)


@every_recipe
@both_formats
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 140),
    k=st.integers(1, 270),
    log2_size=st.integers(-140, 120),
    margin=st.integers(0, 7),
)
def test_amax_reaches_the_top_and_errors_stay_within_half_a_spacing(recipe, fmt, seed, rows, k, log2_size, margin):
    x = torch.ldexp(random(rows, k, seed).clamp(-4, 4), torch.tensor(log2_size))
    scaled = quantize(x, recipe, fmt, margin=margin)
    scale = expand_scale(scaled)
    ratio = x.double() / scale.double()
    assert (ratio.abs() <= fmt.max * 2.0**-margin * (1 + 2.0**-22)).all()
    error = (scaled.data.double() - ratio).abs()
    assert (error <= spacing(ratio.float(), fmt).double() * 0.5001).all()
    for index, block in blocks(recipe, rows, k):
        if scaled.scale[index] > SMALLEST_SCALE and x[block].any():
            assert scaled.data[block].float().abs().max() == fmt.max / 2**margin


@every_recipe
def test_power_of_two_scales_are_the_plain_ones_rounded_up(recipe):
    x = random(130, 300, spread=8)
    plain, rounded = quantize(x, recipe), quantize(x, recipe, power_of_two=True)
    assert (torch.frexp(rounded.scale).mantissa == 0.5).all()
    assert (rounded.scale >= plain.scale).all() and (rounded.scale < 2 * plain.scale).all()
    exact = rounded.dequantize(torch.float64)
    assert torch.equal(rounded.dequantize().double(), exact)  # multiplying by a power of two does not round


def test_a_power_of_two_scale_stays_as_it_is():
    assert quantize(torch.tensor([[E4M3.max / 4]]), "row", power_of_two=True).scale.item() == 0.25


@every_recipe
@both_formats
def test_a_block_of_zeros_has_scale_one(recipe, fmt):
    scaled = quantize(torch.zeros(130, 200), recipe, fmt, power_of_two=True, margin=3)
    assert (scaled.scale == 1).all()
    assert (scaled.data.view(torch.uint8) == 0).all()


def test_a_zero_block_beside_others_does_not_change_them():
    x = random(3, 384)
    x[1, 128:256] = 0
    scaled = quantize(x, "1x128")
    assert scaled.scale[1, 1] == 1 and (scaled.dequantize()[1, 128:256] == 0).all()
    x[1, 128:256] = 5
    others = torch.ones(3, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(quantize(x, "1x128").scale[others], scaled.scale[others])


@every_recipe
@both_formats
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_elements_become_nan_and_leave_the_scale_alone(recipe, fmt, bad):
    x = random(130, 200)
    clean = x.clone()
    clean[2, 150] = 0  # what the block's finite part looks like
    x[2, 150] = bad
    scaled, expected = quantize(x, recipe, fmt), quantize(clean, recipe, fmt)
    assert torch.equal(scaled.scale, expected.scale)
    assert scaled.data[2, 150].view(torch.uint8) == 0x7F
    data, expected_data = scaled.data.view(torch.uint8).clone(), expected.data.view(torch.uint8)
    data[2, 150] = expected_data[2, 150]
    assert torch.equal(data, expected_data)


@pytest.mark.parametrize("tiny", [2.0**-149, 2.0**-130, 1e-30, 1e-10])
def test_small_activations_are_not_flushed_to_zero(tiny):
    x = torch.tensor([[tiny, tiny / 2, 0.0]])
    scaled = quantize(x, "1x128")
    assert scaled.scale.item() >= SMALLEST_SCALE
    if tiny / E4M3.max >= SMALLEST_SCALE:
        assert scaled.data.float()[0, :2].tolist() == [E4M3.max, E4M3.max / 2]
    else:  # the scale cannot shrink further; what FP8 still holds at that scale stays
        assert torch.equal(scaled.data, cast_saturating(x / SMALLEST_SCALE, E4M3))


@pytest.mark.parametrize("power_of_two", [False, True])
@both_formats
def test_the_largest_fp32_value_has_a_finite_scale_at_every_margin(fmt, power_of_two):
    x = torch.full((1, 4), torch.finfo(torch.float32).max)
    for margin in range(8):
        scaled = quantize(x, "tensor", fmt, power_of_two=power_of_two, margin=margin)
        assert scaled.scale.isfinite().all() and scaled.data.float().isfinite().all()


@every_recipe
@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (0, 0)], ids=str)
def test_zero_sized_dimensions(recipe, shape):
    scaled = quantize(torch.empty(shape), recipe)
    assert tuple(scaled.data.shape) == shape and tuple(scaled.scale.shape) == scale_shape(recipe, *shape)
    assert (scaled.scale == 1).all()
    assert tuple(scaled.dequantize().shape) == shape


@every_recipe
def test_strides_do_not_matter(recipe):
    wide = random(600, 260)
    views = [wide.t(), wide[::2, 1::3], wide[:1].expand(70, 260), wide.flip(0)]
    for view in views:
        one, other = quantize(view, recipe), quantize(view.contiguous(), recipe)
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)


def test_quantize_records_no_autograd_graph():
    x = random(4, 128).requires_grad_()
    scaled = quantize(x, "row")
    assert not scaled.scale.requires_grad and not scaled.data.requires_grad


@every_recipe
def test_dequantize_multiplies_by_the_expanded_scale(recipe):
    scaled = quantize(random(130, 300), recipe)
    exact = scaled.dequantize(torch.float64)
    assert torch.equal(exact, scaled.data.double() * expand_scale(scaled).double())
    assert torch.equal(dequantize(scaled), exact.float())  # one rounding of the exact product
    for index, block in blocks(recipe, 130, 300):
        assert (expand_scale(scaled)[block] == scaled.scale[index]).all()
    for k_block in range(3):
        column = expand_scale(scaled)[:, k_block * 128]
        assert torch.equal(scale_of_k_block(scaled, k_block), column)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 128, 130])
@pytest.mark.parametrize("k_blocks", [0, 1, 4])
def test_m_major_scales_are_aligned_and_come_back(rows, k_blocks):
    scale = random(rows, k_blocks)
    m_major = scale_to_m_major(scale)
    assert m_major.shape == (k_blocks, math.ceil(rows / 4) * 4) and m_major.is_contiguous()
    assert m_major.stride(0) * 4 % 16 == 0 or m_major.numel() == 0
    for k_block in range(k_blocks):
        assert torch.equal(m_major[k_block, :rows], scale[:, k_block])
    assert (m_major[:, rows:] == 0).all()
    assert torch.equal(scale_from_m_major(m_major, rows), scale)


def test_m_major_scales_are_scales_like_others():
    scaled = quantize(torch.randn(7, 300), "1x128")
    view = scale_to_m_major(scaled.scale)[:, :7].t()
    assert not view.is_contiguous()
    assert torch.equal(ScaledTensor(scaled.data, view, "1x128").dequantize(), scaled.dequantize())


def test_m_major_helpers_refuse_other_layouts():
    with pytest.raises(ValueError, match=r"ceil\(K/128\)"):
        scale_to_m_major(torch.ones(4))
    for rows in (4, 9):
        with pytest.raises(ValueError, match=f"rows = {rows}"):
            scale_from_m_major(torch.ones(2, 8), rows)


DATA = torch.zeros(256, 512).to(torch.float8_e4m3fn)
WRONG = {
    "data not a tensor": (dict(data=[1]), TypeError, "data is a list"),
    "data not fp8": (dict(data=torch.zeros(256, 512)), TypeError, "data has dtype torch.float32.*call quantize"),
    "data 3-D": (dict(data=DATA[None]), ValueError, r"data has shape \(1, 256, 512\).*two dimensions"),
    "scale not a tensor": (dict(scale=1.0), TypeError, "scale is a float"),
    "scale fp64": (dict(scale=torch.ones(256, 4).double()), TypeError, r"torch.float64.*scale.float\(\)"),
    "scale elsewhere": (dict(scale=torch.ones(256, 4, device="meta")), ValueError, r"on meta.*scale.to\('cpu'\)"),
    "scale transposed": (dict(scale=torch.ones(4, 256)), ValueError, r"it is transposed, pass scale.t\(\).contiguous"),
    "scale flat": (dict(scale=torch.ones(1024)), ValueError, r"pass scale.reshape\(\(256, 4\)\)"),
    "scale of another K": (dict(scale=torch.ones(256, 5)), ValueError, r"needs \(256, 4\).*quantize\(x, '1x128'\)"),
    "scale of another recipe": (dict(scale=torch.ones(2, 4)), ValueError, r"has shape \(2, 4\).*needs \(256, 4\)"),
    "scale with gaps": (dict(scale=torch.ones(256, 8)[:, ::2]), ValueError, r"strides \(8, 2\).*scale.contiguous\(\)"),
    "128x128 scale m-major": (dict(scale=torch.ones(4, 2).t(), recipe="128x128"), ValueError, r"strides \(1, 2\).*scale.contiguous\(\)"),
    "recipe": (dict(recipe="1x64"), ValueError, "recipe is '1x64'; allowed are 'tensor', 'row', '1x128', '128x128'"),
}


@pytest.mark.parametrize("change, error, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_scaled_tensors_are_refused_with_the_fix(change, error, message):
    right = dict(data=DATA, scale=torch.ones(256, 4), recipe="1x128")
    ScaledTensor(**right)
    with pytest.raises(error, match=message):
        ScaledTensor(**(right | change))


def test_a_transposed_square_scale_is_told_by_its_strides():
    data = torch.zeros(512, 512).to(torch.float8_e4m3fn)
    scale = torch.rand(4, 4)
    ScaledTensor(data, scale, "128x128")
    with pytest.raises(ValueError, match="transposed view of a square scale"):
        ScaledTensor(data, scale.t(), "128x128")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(x=torch.zeros(2, 2).double()), TypeError, r"float64.*x.float\(\)"),
        (dict(x=torch.zeros(2, 2).to(torch.float8_e4m3fn)), TypeError, "float8_e4m3fn"),
        (dict(x=[[1.0]]), TypeError, "x is a list"),
        (dict(x=torch.zeros(4)), ValueError, r"shape \(4,\).*two dimensions"),
        (dict(recipe="block"), ValueError, "recipe is 'block'"),
        (dict(format="e4m3fnuz"), ValueError, "format is 'e4m3fnuz'"),
        (dict(margin=8), ValueError, "margin is 8.*0 to 7"),
        (dict(margin=0.5), ValueError, "margin is 0.5"),
        (dict(margin=True), ValueError, "margin is True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_quantize_refuses_wrong_arguments_with_the_fix(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize(**(dict(x=torch.zeros(2, 2), recipe="row") | arguments))


def test_dequantize_refuses_narrow_types():
    with pytest.raises(TypeError, match="float32 and float64"):
        quantize(torch.zeros(2, 2), "row").dequantize(torch.bfloat16)
