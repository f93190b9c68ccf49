"""The description of a problem: what it accepts, and that every refusal names the argument and the fix."""

import dataclasses

import pytest
import torch
from helpers import ints, random, refused

from fp8_gemm import (
    GroupedTensor,
    Problem,
    ScaledTensor,
    describe,
    gemm,
    quantize,
    quantize_grouped,
    quantize_k_grouped,
)
from fp8_gemm.problem import RECIPE_PAIRS, check_out, row_groups

BF16 = torch.bfloat16


def scaled(rows=4, k=256, recipe="1x128", seed=0, format="e4m3"):
    return quantize(random(rows, k, seed=seed), recipe, format)


def stack(groups=3, rows=8, k=256, recipe="128x128", seed=1):
    return quantize_grouped(random(groups, rows, k, seed=seed), recipe)


# ---------------------------------------------------------------- Problem


@pytest.mark.parametrize("recipe_a, recipe_b", RECIPE_PAIRS)
@pytest.mark.parametrize("m, n, k", [(0, 0, 0), (1, 1, 1), (7, 33, 576), (1, 2, 2**31 - 1)])
def test_every_size_and_recipe_pair_is_a_problem(recipe_a, recipe_b, m, n, k):
    problem = Problem("dense", m, n, k, recipe_a=recipe_a, recipe_b=recipe_b)
    assert problem.out_shape == (m, n) and problem.flops == 2 * m * n * k
    assert problem.block_scaled == (recipe_a == "1x128")
    assert hash(problem) == hash(dataclasses.replace(problem))


def test_shape_of_the_result_of_each_kind():
    assert Problem("contiguous", 5, 6, 7, 3).out_shape == (5, 6)
    assert Problem("masked", 5, 6, 7, 3).out_shape == (3, 5, 6)
    assert Problem("masked", 5, 6, 7, 3).flops == 3 * 2 * 5 * 6 * 7
    assert Problem("k_grouped", 5, 6, 7, 3, "1x128", "1x128").out_shape == (3, 5, 6)


@pytest.mark.parametrize("change, words", [
    ({"kind": "sparse"}, ["kind", "'sparse'", "'contiguous'"]),
    ({"m": -1}, ["m is -1", "allowed"]),
    ({"n": 2**31}, ["n is 2147483648", "2^31 - 1", "split the n dimension"]),
    ({"k": 2**31}, ["k is 2147483648", "split the k dimension"]),
    ({"groups": 2}, ["groups is 2", "dense problem has 1"]),
    ({"kind": "masked", "groups": 0}, ["groups is 0", "at least 1"]),
    ({"kind": "masked", "groups": 1 << 20, "m": 1 << 12}, ["groups", "m 4096", "split the groups"]),
    ({"recipe_a": "block"}, ["recipe_a", "'block'", "'1x128'"]),
    ({"recipe_b": "2x2"}, ["recipe_b", "'2x2'", "'128x128'"]),
    ({"recipe_a": "128x128"}, ["recipe is ('128x128', '128x128')", "('1x128', '1x128')", "quantise"]),
    ({"recipe_a": "row"}, ["recipe is ('row', '128x128')", "('row', 'row')"]),
    ({"kind": "k_grouped"}, ["recipe", "('1x128', '1x128')", "quantize_k_grouped"]),
    ({"format_a": "e3m4"}, ["'e3m4'", "'e4m3'"]),
    ({"interval": None}, ["interval is None", "interval=128"]),
    ({"interval": 256}, ["interval is 256", "interval=128"]),
    ({"interval": 100}, ["interval is 100", "multiples of 128"]),
    ({"interval": True}, ["interval is True", "multiples of 128"]),
    ({"interval": -128}, ["interval is -128", "multiples of 128"]),
    ({"out_dtype": torch.int8}, ["out_dtype", "torch.int8", "torch.bfloat16"]),
    ({"out_dtype": torch.float64}, ["out_dtype", "torch.float64", "torch.float32"]),
    ({"out_dtype": torch.float8_e5m2, "accumulate": True}, ["out_dtype", "accumulat", "float32"]),
    ({"kind": "contiguous", "bias": True}, ["bias", "contiguous", "add it to the result"]),
])  # fmt: skip
def test_a_wrong_field_is_refused_by_name(change, words):
    with refused(ValueError, *words):
        Problem(**{"kind": "dense", "m": 4, "n": 8, "k": 256} | change)


@pytest.mark.parametrize("interval", [None, 128, 256, 1280])
def test_intervals_without_block_scales(interval):
    assert Problem("dense", 1, 1, 1, recipe_a="row", recipe_b="tensor", interval=interval).interval == interval


# ---------------------------------------------------------------- GroupedTensor


def test_grouped_tensor_is_the_stack_of_its_matrices():
    x = random(3, 130, 200)
    for recipe in ("tensor", "row", "1x128", "128x128"):
        for format in ("e4m3", "e5m2"):
            grouped = quantize_grouped(x, recipe, format, margin=1)
            assert (grouped.groups, grouped.rows, grouped.k, grouped.format.name) == (3, 130, 200, format)
            for group in range(3):
                alone = quantize(x[group], recipe, format, margin=1)
                assert torch.equal(grouped[group].scale, alone.scale)
                assert torch.equal(grouped[group].data.view(torch.uint8), alone.data.view(torch.uint8))
            assert torch.equal(grouped.dequantize()[2], grouped[2].dequantize())


@pytest.mark.parametrize("build, error, words", [
    (lambda w: GroupedTensor(w.data[0], w.scale, w.recipe), ValueError, ["data", "three dimensions", "torch.stack"]),
    (lambda w: GroupedTensor(w.data[:0], w.scale[:0], w.recipe), ValueError, ["data", "at least one group"]),
    (lambda w: GroupedTensor(w.data, w.scale[:2], w.recipe), ValueError, ["scale", "(2, 2, 3)", "(3, 2, 3)", "quantize_grouped"]),
    (lambda w: GroupedTensor(w.data, w.scale.mT.contiguous(), w.recipe), ValueError, ["scale", "transposed", "contiguous()"]),
    (lambda w: GroupedTensor(w.data, w.scale.mT.contiguous().mT, w.recipe), ValueError, ["scale", "strides", "contiguous()"]),
    (lambda w: GroupedTensor(w.data, w.scale.half(), w.recipe), TypeError, ["scale", "float16", "float()"]),
    (lambda w: GroupedTensor(w.data.float(), w.scale, w.recipe), TypeError, ["data", "float32", "quantize"]),
    (lambda w: GroupedTensor(w.data, w.scale, "row"), ValueError, ["scale", "'row'"]),
    (lambda w: GroupedTensor(w.data, [1], "row"), TypeError, ["scale", "list"]),
    (lambda w: quantize_grouped(w.dequantize()[0]), ValueError, ["x", "(groups, rows, K)", "torch.stack"]),
    (lambda w: quantize_grouped([1]), TypeError, ["x", "list"]),
])  # fmt: skip
def test_a_wrong_grouped_tensor_is_refused(build, error, words):
    weight = stack(3, 200, 300)
    with refused(error, *words):
        build(weight)


# ---------------------------------------------------------------- describe


def test_describe_fills_in_the_problem():
    b = scaled(8, recipe="128x128", format="e5m2")
    problem, operands = describe("dense", scaled(4), b, bias=random(8).half(), accumulate=True)
    assert problem == Problem("dense", 4, 8, 256, format_b="e5m2", bias=True, accumulate=True)
    assert operands.bias.dtype == torch.float32 and operands.offsets is None
    problem, operands = describe("contiguous", scaled(9), stack(), offsets=ints(0, 2, 2, 8))
    assert problem == Problem("contiguous", 9, 8, 256, 3)
    problem, operands = describe("masked", stack(3, 5, recipe="1x128"), stack(), masked_m=ints(0, 5, 1), out_dtype=torch.float32)
    assert problem == Problem("masked", 5, 8, 256, 3, out_dtype=torch.float32)
    problem, operands = describe("k_grouped", scaled(4), scaled(8), offsets=ints(0, 128, 256))
    assert problem == Problem("k_grouped", 4, 8, 256, 2, "1x128", "1x128")


W = scaled(8, recipe="128x128")


@pytest.mark.parametrize("call, error, words", [
    (lambda: describe("sparse", scaled(), W), ValueError, ["kind", "'sparse'", "'dense'"]),
    (lambda: describe("dense", random(4, 256), W), TypeError, ["a is a Tensor", "ScaledTensor", "quantize(a"]),
    (lambda: describe("dense", scaled(), stack()), TypeError, ["b is a GroupedTensor", "quantize(b"]),
    (lambda: describe("masked", scaled(), stack()), TypeError, ["a is a ScaledTensor", "quantize_grouped(a"]),
    (lambda: describe("dense", scaled(k=128), W), ValueError, ["b has shape (8, 256)", "(4, 128)", "transpose b"]),
    (lambda: describe("dense", scaled(), W, bias=random(7)), ValueError, ["bias", "(7,)", "(8,)"]),
    (lambda: describe("dense", scaled(), W, bias=random(8, 1)), ValueError, ["bias", "(8, 1)", "reshape"]),
    (lambda: describe("dense", scaled(), W, bias=random(8).double()), TypeError, ["bias", "float64", "bias.float()"]),
    (lambda: describe("dense", scaled(), W, bias=[0] * 8), TypeError, ["bias", "list"]),
    (lambda: describe("dense", scaled(), W, bias=random(8).to("meta")), ValueError, ["bias is on meta", "bias.to('cpu')"]),
    (lambda: describe("dense", scaled(), scaled(8)), None, None),
    (lambda: describe("contiguous", scaled(), stack()), ValueError, ["offsets is None", "int32"]),
    (lambda: describe("contiguous", scaled(), stack(), offsets=ints(0, 1, 2, 3).long()),
     TypeError, ["offsets", "int64", ".int()"]),
    (lambda: describe("contiguous", scaled(), stack(), offsets=ints(0, 1, 2)), ValueError, ["offsets", "(3,)", "(4,)"]),
    (lambda: describe("contiguous", scaled(), stack(), offsets=ints(0, 9, 1, 9, 2, 9, 3, 9)[::2]), ValueError,
     ["offsets", "stride 2", "contiguous()"]),
    (lambda: describe("contiguous", scaled(), stack(), offsets=ints(1, 2, 3, 4)), ValueError, ["offsets[0] is 1", "starts at 0"]),
    (lambda: describe("contiguous", scaled(), stack(), offsets=ints(0, 3, 2, 4)),
     ValueError, ["offsets[2] is 2", "decrease", "counts="]),
    (lambda: describe("contiguous", scaled(), stack(), offsets=ints(0, 1, 2, 5)), ValueError, ["offsets[3] is 5", "M = 4"]),
    (lambda: describe("contiguous", scaled(), stack(), offsets=ints(0, 1, 2, 4), ends=ints(1, 3, 4)),
     ValueError, ["ends[1] is 3"]),
    (lambda: describe("masked", stack(3, 5, recipe="1x128"), stack()), ValueError, ["masked_m is None"]),
    (lambda: describe("masked", stack(3, 5, recipe="1x128"), stack(), masked_m=ints(0, 6, 1)), ValueError,
     ["masked_m[1] is 6", "0 to 5", "make a larger"]),
    (lambda: describe("masked", stack(3, 5, recipe="1x128"), stack(), masked_m=ints(-1, 5, 1)),
     ValueError, ["masked_m[0] is -1"]),
    (lambda: describe("masked", stack(2, 5, recipe="1x128"), stack(), masked_m=ints(0, 5)),
     ValueError, ["a has 2 groups", "b 3"]),
    (lambda: describe("masked", stack(3, 5, recipe="1x128"), stack(), masked_m=ints(0, 5)),
     ValueError, ["masked_m", "(2,)", "(3,)"]),
    (lambda: describe("k_grouped", scaled(), scaled(8), offsets=ints(0, 100, 256)), ValueError,
     ["offsets[1] is 100", "multiple of 128", "quantize_k_grouped"]),
    (lambda: describe("k_grouped", scaled(), scaled(8), offsets=ints(0)), ValueError, ["offsets", "(1,)", "at least one group"]),
    (lambda: describe("k_grouped", scaled(), scaled(8), offsets=ints(0, 384)), ValueError, ["offsets[1] is 384", "K = 256"]),
    (lambda: describe("k_grouped", scaled(), W, offsets=ints(0, 256)), ValueError, ["recipe", "('1x128', '1x128')"]),
])  # fmt: skip
def test_wrong_operands_are_refused_by_name(call, error, words):
    if error is None:
        call()
        return
    with refused(error, *words):
        call()


@pytest.mark.parametrize("view, words", [
    (lambda data: data.view(torch.uint8).t().contiguous().view(data.dtype).t(),
     ["transposed view", "K-major", "a.data.contiguous()"]),
    (lambda data: data[:1].expand(4, 256), ["strides", "(0, 1)", "a.data.contiguous()"]),
    (lambda data: torch.cat([data.view(torch.uint8)] * 2, 1).view(data.dtype)[:, ::2], ["strides", "stride 1", "contiguous()"]),
    (lambda data: torch.as_strided(data, (4, 256), (128, 1)), ["strides", "overlap"]),
])  # fmt: skip
def test_operands_that_do_not_lie_along_k_are_refused(view, words):
    good = scaled(4)
    with refused(ValueError, "a.data", *words):
        describe("dense", ScaledTensor(view(good.data), good.scale, "1x128"), W)


def test_rows_may_have_any_pitch_and_offset():
    wide = quantize(random(4, 512), "tensor")
    window = ScaledTensor(wide.data[:, 100:356], wide.scale, "tensor")
    assert describe("dense", window, scaled(8, recipe="row"), interval=None)[0].k == 256


@pytest.mark.parametrize("make, error, words", [
    (lambda: torch.empty(4, 8), TypeError, ["out", "float32", "out_dtype=torch.float32"]),
    (lambda: torch.empty(8, 4, dtype=BF16), ValueError, ["out", "(8, 4)", "(4, 8)", "transposed"]),
    (lambda: torch.empty(4, 9, dtype=BF16), ValueError, ["out", "(4, 9)", "(4, 8)"]),
    (lambda: torch.empty(8, 4, dtype=BF16).t(), ValueError, ["out", "strides (1, 4)", "side by side"]),
    (lambda: torch.empty(4, 16, dtype=BF16)[:, ::2], ValueError, ["out", "strides (16, 2)", "contiguous()"]),
    (lambda: torch.empty(1, 8, dtype=BF16).expand(4, 8), ValueError, ["out", "strides (0, 1)", "overlap"]),
    (lambda: torch.empty(4, 8, dtype=BF16, device="meta"), ValueError, ["out is on meta", "out.to('cpu')"]),
    (lambda: torch.empty(4, 8, dtype=BF16, requires_grad=True), ValueError, ["out", "requires grad", "out.detach()"]),
    (lambda: [0], TypeError, ["out", "list"]),
])  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused(make, error, words):
    problem, operands = describe("dense", scaled(4), W)
    with refused(error, *words):
        check_out(problem, operands, make())


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "bias"])
def test_an_output_on_top_of_an_input_is_refused(name):
    a, b, bias = scaled(4), scaled(8, recipe="128x128"), random(8)
    sizes = {"a": a.data, "b": b.data, "a_scale": a.scale, "b_scale": b.scale, "bias": bias}
    pool = torch.zeros(4096, dtype=torch.uint8)
    out = pool[:64].view(BF16).view(4, 8)
    inside = pool[60 : 60 + sizes[name].numel() * sizes[name].element_size()] if sizes[name].element_size() == 4 else pool[63:]
    moved = inside[: sizes[name].numel() * sizes[name].element_size()].view(sizes[name].dtype).view(sizes[name].shape)
    problem, operands = describe("dense", a, b, bias=bias)
    with refused(ValueError, "out shares memory with", name, "torch.empty"):
        check_out(problem, dataclasses.replace(operands, **{name: moved}), out)
    check_out(problem, operands, out)


def test_an_output_may_be_a_window_of_a_wider_tensor():
    problem, operands = describe("dense", scaled(4), W)
    check_out(problem, operands, torch.empty(6, 20, dtype=BF16)[1:5, 3:11])


# ---------------------------------------------------------------- groups of rows


def test_three_ways_to_say_the_same_groups():
    counts = [2, 0, 3, 0]
    offsets, ends = row_groups(4, 5, offsets=ints(0, 2, 2, 5, 5))
    assert offsets.tolist() == [0, 2, 2, 5, 5] and ends is None
    for dtype in (torch.int32, torch.int64):
        offsets, ends = row_groups(4, 5, counts=torch.tensor(counts, dtype=dtype))
        assert offsets.tolist() == [0, 2, 2, 5, 5] and offsets.dtype == torch.int32 and ends is None
    offsets, ends = row_groups(4, 5, indices=ints(0, 0, 2, 2, 2))
    assert [list(range(s, e)) for s, e in zip(offsets.tolist(), ends.tolist())] == [[0, 1], [], [2, 3, 4], []]
    assert offsets.dtype == ends.dtype == torch.int32


@pytest.mark.parametrize("indices, rows_of", [
    ([-1, -1, 0, 0, -1, 2, -1], [[2, 3], [], [5]]),
    ([1, -1, -1, 2, -1], [[], [0], [3]]),
    ([-1, -1], [[], [], []]),
    ([], [[], [], []]),
    ([2], [[], [], [0]]),
])  # fmt: skip
def test_rows_of_no_group_in_indices(indices, rows_of):
    offsets, ends = row_groups(3, len(indices), indices=ints(*indices))
    assert [list(range(s, e)) for s, e in zip(offsets.tolist(), ends.tolist())] == rows_of


@pytest.mark.parametrize("given, error, words", [
    ({}, ValueError, ["none of offsets", "exactly one"]),
    ({"offsets": ints(0, 5), "counts": ints(5)}, ValueError, ["offsets, counts", "exactly one"]),
    ({"counts": [2, 3]}, TypeError, ["counts is a list", "torch.tensor(counts"]),
    ({"counts": torch.tensor([2.0, 3.0, 0.0])}, TypeError, ["counts", "float32", "counts.int()"]),
    ({"counts": ints(2, 3)}, ValueError, ["counts", "(2,)", "(3,)"]),
    ({"counts": ints(2, -1, 3)}, ValueError, ["counts[1] is -1", "0 or more"]),
    ({"indices": ints(0, 0, 1, 1)}, ValueError, ["indices", "(4,)", "(5,)", "5 rows"]),
    ({"indices": ints(0, 0, 1, 1, 1).long()}, TypeError, ["indices", "int64", "indices.int()"]),
    ({"indices": ints(0, 0, 1, 1, 3)}, ValueError, ["indices[4] is 3", "3 groups", "0 to 2"]),
    ({"indices": ints(0, -2, 1, 1, 1)}, ValueError, ["indices[1] is -2", "-1"]),
    ({"indices": ints(0, 2, 1, 1, 2)}, ValueError, ["indices[2] is 1 after 2", "argsort"]),
    ({"indices": ints(0, 1, -1, 1, 2)}, ValueError, ["indices[3] is 1", "neighbours", "padding after"]),
    ({"indices": ints(0, 2, -1, 1, 2)}, ValueError, ["indices[3] is 1 after 2", "sorted"]),
])  # fmt: skip
def test_wrong_groups_of_rows_are_refused(given, error, words):
    with refused(error, *words):
        row_groups(3, 5, **given)


# ---------------------------------------------------------------- groups of K


@pytest.mark.parametrize("sizes", [[128, 256], [1, 0, 127, 129], [0, 0, 0], [5], [300, 1, 1, 1, 500, 0]], ids=str)
def test_k_groups_are_moved_to_multiples_of_128(sizes):
    offsets = torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()
    x = random(3, sum(sizes))
    packed, moved = quantize_k_grouped(x, offsets)
    values = packed.dequantize()
    assert moved.dtype == torch.int32 and len(moved) == len(sizes) + 1 and (moved % 128 == 0).all()
    assert int(moved[-1]) == packed.k
    for group, size in enumerate(sizes):
        start, end = int(moved[group]), int(moved[group + 1])
        source = quantize(x[:, int(offsets[group]) : int(offsets[group]) + size], "1x128").dequantize()
        assert end - start >= size
        assert torch.equal(values[:, start : start + size], source)
        assert not values[:, start + size : end].any()


# ---------------------------------------------------------------- remembered problems


@pytest.mark.parametrize("change, error, words", [
    ({"bias": random(8).double()}, TypeError, ["bias", "float64"]),
    ({"bias": random(9)}, ValueError, ["bias", "(9,)"]),
    ({"interval": None}, ValueError, ["interval is None"]),
    ({"out_dtype": torch.int8}, ValueError, ["out_dtype"]),
    ({"b": scaled(8, k=384, recipe="128x128")}, ValueError, ["b has shape (8, 384)"]),
    ({"b": scaled(8, recipe="row")}, ValueError, ["recipe is ('1x128', 'row')"]),
    ({"b": stack()}, TypeError, ["b is a GroupedTensor"]),
    ({"kind": "masked"}, TypeError, ["a is a ScaledTensor"]),
    ({"kind": "sparse"}, ValueError, ["kind is 'sparse'"]),
])  # fmt: skip
def test_what_was_checked_once_excuses_nothing_else(change, error, words):
    good = {"kind": "dense", "a": scaled(), "b": W, "bias": random(8), "interval": 128, "out_dtype": BF16}
    first = describe(**good)[0]
    assert describe(**good)[0] is first
    with refused(error, *words):
        describe(**{**good, **change})


def test_values_of_groups_are_checked_every_time():
    a, b, offsets = scaled(), stack(), ints(0, 1, 2, 4)
    describe("contiguous", a, b, offsets=offsets)
    offsets[1] = 3
    with refused(ValueError, "offsets[2] is 2"):
        describe("contiguous", a, b, offsets=offsets)


# ---------------------------------------------------------------- more than 2^31 elements


@pytest.mark.parametrize("m, n, k", [(70_000, 70_000, 256), (300_000, 16, 16_384), (16, 300_000, 16_384), (3, 5, 2**31 - 1)])
def test_tensors_of_more_than_2_to_the_31_elements(m, n, k):
    """Shapes and scales of meta tensors: nothing is computed in 32 bits on the way."""
    a, b = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    got = gemm(a, b)
    assert got.shape == (m, n) and got.is_meta
    data = ScaledTensor(a.to(torch.float8_e4m3fn), torch.empty(m, -(-k // 128), device="meta"), "1x128")
    weight = torch.empty(-(-n // 128), -(-k // 128), device="meta")
    problem, _ = describe("dense", data, ScaledTensor(b.to(torch.float8_e4m3fn), weight, "128x128"))
    assert problem.flops == 2 * m * n * k and problem.out_shape == (m, n)
