"""Grouped calls on the reference backend: each group against its own dense product, and what no group may touch."""

import dataclasses

import pytest
import torch
from helpers import assert_right, ints, part, random, refused

import fp8_gemm
from fp8_gemm import (
    GroupedTensor,
    ScaledTensor,
    grouped_gemm,
    k_grouped_gemm,
    masked_gemm,
    quantize,
    quantize_grouped,
    quantize_k_grouped,
    routing_report,
    swiglu_quantize,
    validate_groups,
)
from fp8_gemm.problem import RECIPE_PAIRS
from hopperlab.reference import matmul_hopper

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = [[3, 5, 2], [0, 7, 0], [1, 1, 1], [0, 0, 0], [130, 0, 1], [64, 128, 127]]


def offsets_of(sizes):
    return torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()


def rows_of(sizes):
    bounds = offsets_of(sizes).tolist()
    return list(zip(bounds, bounds[1:]))


# ---------------------------------------------------------------- contiguous groups


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPE_PAIRS, ids=str)
def test_each_contiguous_group_meets_its_own_weight(recipe, sizes):
    a, b = quantize(random(sum(sizes), 300), recipe[0]), quantize_grouped(random(3, 33, 300, seed=1), recipe[1])
    got = grouped_gemm(a, b, offsets=offsets_of(sizes), out_dtype=FP32)
    for group, (start, stop) in enumerate(rows_of(sizes)):
        assert_right(got[start:stop], part(a, start, stop), b[group])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_offsets_counts_and_indices_agree(sizes):
    x, w = random(sum(sizes), 130), random(3, 9, 130, seed=1)
    want = grouped_gemm(x, w, offsets=offsets_of(sizes))
    assert torch.equal(grouped_gemm(x, w, counts=ints(*sizes)), want)
    assert torch.equal(grouped_gemm(x, w, counts=torch.tensor(sizes)), want)
    assert torch.equal(grouped_gemm(x, w, indices=ints(*[g for g, size in enumerate(sizes) for _ in range(size)])), want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("indices", [[0, 0, -1, -1, 1, 2, -1], [-1, 1, 1, 1, -1, -1, -1], [-1] * 7, [-1, -1, -1, 2, 2, 2, 2]],
                         ids=str)  # fmt: skip
def test_rows_of_no_group_neither_change_nor_are_changed(indices, bad):
    x, w = random(7, 200), random(3, 12, 200, seed=1)
    for row, group in enumerate(indices):
        if group < 0:
            x[row] = bad
    out = torch.full((7, 12), 5.0)
    grouped_gemm(x, w, indices=ints(*indices), out=out, out_dtype=FP32)
    for row, group in enumerate(indices):
        if group < 0:
            assert (out[row] == 5).all()
        else:
            assert_right(out[row : row + 1], quantize(x[row : row + 1]), quantize(w[group], "128x128"))


@pytest.mark.parametrize("sizes", [[2, 3, 0], [0, 0, 0], [0, 0, 1]], ids=str)
def test_rows_after_the_last_group_are_left_alone(sizes):
    x, w = random(9, 200), random(3, 12, 200, seed=1)
    x[sum(sizes) :] = torch.nan
    out = torch.full((9, 12), 5.0, dtype=BF16)
    assert grouped_gemm(x, w, offsets=offsets_of(sizes), out=out) is out
    assert (out[sum(sizes) :] == 5).all() and not out.isnan().any()
    assert sum(sizes) == 0 or not (out[: sum(sizes)] == 5).all()


@pytest.mark.parametrize("shape", [(0, 8, 128), (4, 0, 128), (4, 8, 0)], ids=str)
def test_empty_dimensions_of_contiguous_groups(shape):
    m, n, k = shape
    got = grouped_gemm(random(m, k), random(2, n, k), counts=ints(m // 2, m - m // 2))
    assert got.shape == (m, n) and (k or not got.any())


# ---------------------------------------------------------------- masked groups


@pytest.mark.parametrize("max_m", [1, 5, 64, 100, 130])
@pytest.mark.parametrize("recipe", RECIPE_PAIRS, ids=str)
def test_each_masked_group_meets_its_own_weight_and_no_other_row(recipe, max_m):
    """max M that is no multiple of any tile: the last rows of one group must not reach the next."""
    masked_m = ints(0, max_m, max(max_m // 2, 1), 1)
    x = random(4, max_m, 200)
    b = quantize_grouped(random(4, 12, 200, seed=1), recipe[1])
    a = quantize_grouped(x, recipe[0])
    if recipe[0] != "tensor":
        for group, rows in enumerate(masked_m.tolist()):
            x[group, rows:] = torch.nan
        a = quantize_grouped(x, recipe[0])
    out = torch.full((4, max_m, 12), 5.0)
    masked_gemm(a, b, masked_m, out=out, out_dtype=FP32)
    for group, rows in enumerate(masked_m.tolist()):
        assert_right(out[group, :rows], part(a[group], 0, rows), b[group])
        assert (out[group, rows:] == 5).all()


@pytest.mark.parametrize("shape", [(0, 8, 128), (4, 0, 128), (4, 8, 0)], ids=str)
def test_empty_dimensions_of_masked_groups(shape):
    m, n, k = shape
    got = masked_gemm(random(2, m, k), random(2, n, k), ints(m, m))
    assert got.shape == (2, m, n) and (k or not got.any())


# ---------------------------------------------------------------- groups of K


@pytest.mark.parametrize("sizes", [[128, 256], [0, 128], [1, 127, 300], [0, 0], [5, 0, 0, 129]], ids=str)
@pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=str)
def test_each_k_group_gives_its_own_product(sizes, out_dtype):
    a, b, offsets = random(6, sum(sizes)), random(10, sum(sizes), seed=1), offsets_of(sizes)
    got = k_grouped_gemm(a, b, offsets, out_dtype=out_dtype)
    assert got.shape == (len(sizes), 6, 10) and got.dtype == out_dtype
    for group, (start, stop) in enumerate(rows_of(sizes)):
        assert_right(got[group], quantize(a[:, start:stop], "1x128"), quantize(b[:, start:stop], "1x128"))
        assert stop > start or not got[group].any()


@pytest.mark.parametrize("sizes", [[128, 0, 256], [1, 0, 127]], ids=str)
def test_accumulating_k_groups(sizes):
    a, b, offsets = random(6, sum(sizes)), random(10, sum(sizes), seed=1), offsets_of(sizes)
    c = random(3, 6, 10, seed=2)
    kept = c.clone()
    got = k_grouped_gemm(a, b, offsets, c=c)
    assert torch.equal(c, kept) and torch.equal(got[1], c[1])
    assert torch.equal(got, k_grouped_gemm(a, b, offsets) + c)
    assert torch.equal(k_grouped_gemm(a, b, offsets, out=c, accumulate=True), got) and torch.equal(c, got)
    out = torch.full_like(kept, torch.nan)
    assert torch.equal(k_grouped_gemm(a, b, offsets, c=kept, out=out), got)


def test_quantised_k_groups_once_for_many_calls():
    sizes = [100, 0, 28, 300]
    (a, offsets), (b, _) = (quantize_k_grouped(random(r, 428, seed=r), offsets_of(sizes)) for r in (6, 10))
    first = k_grouped_gemm(a, b, offsets)
    assert torch.equal(first, k_grouped_gemm(random(6, 428, seed=6), random(10, 428, seed=10), offsets_of(sizes)))
    for _ in range(5):
        assert torch.equal(k_grouped_gemm(a, b, offsets), first)


# ---------------------------------------------------------------- all kinds


def test_exact_gives_the_bits_of_the_kernels():
    sizes, a, b = [3, 0, 4], quantize(random(7, 300), "1x128"), quantize_grouped(random(3, 20, 300, seed=1))
    got = grouped_gemm(a, b, counts=ints(*sizes), exact=True)
    for group, (start, stop) in enumerate(rows_of(sizes)):
        assert torch.equal(got[start:stop], matmul_hopper(part(a, start, stop), b[group]))
    stack = quantize_grouped(random(3, 4, 300), "1x128")
    got = masked_gemm(stack, b, ints(4, 0, 2), exact=True)
    assert torch.equal(got[2, :2], matmul_hopper(part(stack[2], 0, 2), b[2]))
    (p, offsets), (q, _) = (quantize_k_grouped(random(r, 428, seed=r), ints(0, 200, 428)) for r in (6, 10))
    got = k_grouped_gemm(p, q, offsets, exact=True)
    alone = [quantize(random(r, 428, seed=r)[:, 200:], "1x128") for r in (6, 10)]
    assert torch.equal(got[1], matmul_hopper(*alone, out_dtype=FP32))


@pytest.mark.parametrize("out_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_output(out_dtype):
    x, w = random(5, 200), random(2, 140, 200, seed=1)
    got = grouped_gemm(x, w, counts=ints(2, 3), out_dtype=out_dtype)
    want = quantize(grouped_gemm(x, w, counts=ints(2, 3), out_dtype=FP32), "1x128", out_dtype)
    assert isinstance(got, ScaledTensor) and torch.equal(got.scale, want.scale)
    got = masked_gemm(x[None].expand(2, 5, 200), w, ints(5, 5), out_dtype=out_dtype)
    assert isinstance(got, GroupedTensor) and got.recipe == "1x128" and got.data.shape == (2, 5, 140)


def test_weights_may_be_a_window_and_activations_views():
    w = quantize_grouped(random(4, 24, 300, seed=1), "row")
    window = GroupedTensor(w.data[1:3, 8:20], w.scale[1:3, 8:20].contiguous(), "row")
    x = random(6, 300)
    want = grouped_gemm(x, GroupedTensor(window.data.contiguous(), window.scale, "row"), counts=ints(2, 4), recipe=("row", "row"))
    assert torch.equal(grouped_gemm(x.t().contiguous().t(), window, counts=ints(2, 4), recipe=("row", "row")), want)


X, E = random(4, 256), random(3, 8, 256, seed=1)
C = ints(1, 1, 2)
STACK = random(3, 4, 256)
K_OFFSETS = ints(0, 128, 256)


@pytest.mark.parametrize("call, error, words", [
    (lambda: grouped_gemm(X, E), ValueError, ["none of offsets, counts, indices", "exactly one"]),
    (lambda: grouped_gemm(X, E, counts=C, offsets=offsets_of([1, 1, 2])), ValueError, ["offsets, counts", "exactly one"]),
    (lambda: grouped_gemm(X, E, counts=ints(1, 1, 3)), ValueError, ["counts add up to 5", "M = 4"]),
    (lambda: grouped_gemm(X, E, counts=ints(1, 3)), ValueError, ["counts", "(2,)", "(3,)"]),
    (lambda: grouped_gemm(X[None], E, counts=C), ValueError, ["a has shape (1, 4, 256)", "flatten"]),
    (lambda: grouped_gemm(X, E[0], counts=C), ValueError, ["b has shape (8, 256)", "(groups, rows, K)"]),
    (lambda: grouped_gemm(X, E[:0], counts=C), ValueError, ["b has shape (0, 8, 256)", "at least one group"]),
    (lambda: grouped_gemm(X, quantize(E[0], "128x128"), counts=C), TypeError, ["b is a ScaledTensor", "GroupedTensor"]),
    (lambda: grouped_gemm(X, E.long(), counts=C), TypeError, ["b has dtype torch.int64", "b.float()"]),
    (lambda: grouped_gemm(X, quantize_grouped(E).data, counts=C),
     TypeError, ["b has dtype torch.float8", "GroupedTensor(b, scale, recipe)"]),
    (lambda: grouped_gemm(X[:, :128], E, counts=C), ValueError, ["b has shape (3, 8, 256)", "K"]),
    (lambda: grouped_gemm(X, E, counts=C, recipe=("1x128",)), ValueError, ["recipe", "pair"]),
    (lambda: grouped_gemm(X, E, counts=C, recipe=("128x128", "128x128")), ValueError, ["recipe is ('128x128', '128x128')"]),
    (lambda: grouped_gemm(X, E, counts=C, out=torch.empty(4, 8)), TypeError, ["out has dtype torch.float32"]),
    (lambda: grouped_gemm(X, E, counts=C, out=X[:, :8], out_dtype=FP32), None, None),
    (lambda: grouped_gemm(X, E, counts=C, out=torch.empty(4, 8), out_dtype=torch.float8_e5m2),
     ValueError, ["out_dtype", "out cannot"]),
    (lambda: grouped_gemm(X, E, counts=C, split_k=2), ValueError, ["split_k", "backend='cuda'"]),
    (lambda: masked_gemm(STACK, E, [1, 2, 3]), TypeError, ["masked_m is a list", "int32"]),
    (lambda: masked_gemm(STACK, E, ints(1, 5, 3)), ValueError, ["masked_m[1] is 5", "0 to 4"]),
    (lambda: masked_gemm(STACK, E, ints(1, 4, 3).long()), TypeError, ["masked_m", "int64", ".int()"]),
    (lambda: masked_gemm(STACK, E[:2], ints(1, 4)), ValueError, ["a has 3 groups", "b 2"]),
    (lambda: masked_gemm(X, E, ints(1, 1, 1)), ValueError, ["a has shape (4, 256)", "(groups, rows, K)"]),
    (lambda: grouped_gemm(X, E, counts=torch.tensor([2**32 + 1, 1, 1])), ValueError, ["counts add up to 4294967299", "M = 4"]),
    (lambda: grouped_gemm(X, E, counts=C, recipe=("tensor", "tensor")), ValueError, ["recipe[0] is 'tensor'", "quantize(a, 'tensor')"]),
    (lambda: masked_gemm(STACK, E, ints(1, 2, 3), recipe=("tensor", "row")), ValueError, ["recipe[0] is 'tensor'", "no group"]),
    (lambda: grouped_gemm(X, E, counts=C, interval=128.0), ValueError, ["interval is 128.0"]),
    (lambda: grouped_gemm(X, E, counts=C, grad_format="e9"), ValueError, ["e9"]),
    (lambda: k_grouped_gemm(X, X, ints(0, 300)), ValueError, ["offsets[1] is 300", "K = 256"]),
    (lambda: k_grouped_gemm(X, X, ints(0, 200, 100, 256)), ValueError, ["offsets[2] is 100", "decrease"]),
    (lambda: k_grouped_gemm(X, X, ints(5, 256)), ValueError, ["offsets[0] is 5", "starts at 0"]),
    (lambda: k_grouped_gemm(X, X, ints(-5, 256)), ValueError, ["offsets[0] is -5"]),
    (lambda: k_grouped_gemm(X, X, torch.tensor([0.0, 256.0])), TypeError, ["offsets has dtype torch.float32", "int32"]),
    (lambda: k_grouped_gemm(X, X, torch.tensor([0, 256])), TypeError, ["offsets has dtype torch.int64", "offsets.int()"]),
    (lambda: quantize_k_grouped(X, [0, 256]), ValueError, ["offsets is list", "int32"]),
    (lambda: quantize_k_grouped(X[0], ints(0, 256)), ValueError, ["x has shape (256,)", "(rows, K)"]),
    (lambda: quantize_k_grouped(X, ints(0, 257)), ValueError, ["offsets[1] is 257", "K = 256"]),
    (lambda: quantize_k_grouped(X, ints(0, 256), ints(1, 2)), ValueError, ["ends has shape (2,)", "(1,)"]),
    (lambda: quantize_k_grouped("x", ints(0, 256)), TypeError, ["x is a str"]),
    (lambda: k_grouped_gemm(X, X, None), ValueError, ["offsets is NoneType", "int32"]),
    (lambda: k_grouped_gemm(X, quantize(X, "1x128"), K_OFFSETS), TypeError, ["a, b", "quantize_k_grouped"]),
    (lambda: k_grouped_gemm(quantize(X, "1x128"), quantize(X, "1x128"), ints(0, 100, 256)), ValueError,
     ["offsets[1] is 100", "quantize_k_grouped"]),
    (lambda: k_grouped_gemm(X, X, K_OFFSETS, accumulate=True), ValueError, ["accumulate is True", "without out"]),
    (lambda: k_grouped_gemm(X, X, K_OFFSETS, c=random(2, 4, 5)), ValueError, ["c has shape (2, 4, 5)", "(2, 4, 4)"]),
    (lambda: k_grouped_gemm(X, X, K_OFFSETS, c=1.0), TypeError, ["c is a float", "torch.Tensor"]),
    (lambda: k_grouped_gemm(X, X, K_OFFSETS, c=random(2, 4, 4, dtype=BF16)), TypeError, ["c has", "bfloat16", "out_dtype"]),
    (lambda: k_grouped_gemm(X, X, K_OFFSETS, out_dtype=torch.float8_e5m2), ValueError, ["out_dtype", "float32"]),
    (lambda: k_grouped_gemm(X, X, K_OFFSETS, out=torch.empty(2, 4, 4, dtype=BF16)), TypeError, ["out has dtype", "out_dtype"]),
])  # fmt: skip
def test_refusals_name_the_argument_and_the_fix(call, error, words):
    if error is None:  # plain inputs are copied into FP8 before out is written: sharing memory with them does no harm
        call()
        return
    with refused(error, *words):
        call()


# ---------------------------------------------------------------- validation on demand


@pytest.mark.parametrize("arguments, words", [
    ({"offsets": ints(0, 3, 2, 4)}, ["offsets[2] is 2", "decrease"]),
    ({"counts": ints(1, 1, 9)}, ["counts add up to 11", "M = 4"]),
    ({"offsets": ints(0, 4)}, ["offsets has shape (2,)", "3 groups", "(4,)"]),
    ({"indices": ints(0, 1, 0, 2)}, ["indices[2] is 0 after 1", "sorted"]),
    ({"indices": ints(0, 1, 1, 7)}, ["indices[3] is 7", "0 to 2"]),
    ({}, ["exactly one"]),
])  # fmt: skip
def test_validate_groups_of_rows(arguments, words):
    validate_groups(X, E, counts=C)
    with refused(ValueError, *words):
        validate_groups(quantize(X), quantize_grouped(E), **arguments)


def test_validate_masked_and_k_groups():
    validate_groups(STACK, E, masked_m=ints(0, 4, 1))
    with refused(ValueError, "masked_m[2] is 5"):
        validate_groups(STACK, E, masked_m=ints(0, 4, 5))
    with refused(ValueError, "masked_m has shape (2,)", "(3,)"):
        validate_groups(STACK, E, masked_m=ints(0, 4))
    validate_groups(X, X, k_offsets=K_OFFSETS)
    with refused(ValueError, "offsets[1] is 130", "multiple of 128"):
        validate_groups(X, X, k_offsets=ints(0, 130, 256))


def test_the_validation_switch_checks_each_call(monkeypatch):
    """As on a GPU: describe cannot look at values there, the switch makes the call look."""
    problem, operands = fp8_gemm.describe("contiguous", quantize(X), quantize_grouped(E), offsets=offsets_of([1, 1, 2]))
    operands = dataclasses.replace(operands, offsets=ints(0, 1, 2, 9))
    monkeypatch.setenv("FP8_GEMM_VALIDATE", "1")
    with refused(ValueError, "offsets[3] is 9"):
        fp8_gemm.dispatch.run(problem, operands, torch.empty(4, 8, dtype=BF16))


# ---------------------------------------------------------------- routing, SwiGLU


def test_routing_report_counts_tiles():
    report = routing_report(torch.tensor([64, 0, 1, 65]))
    assert (report.experts, report.rows, report.idle_experts, report.largest, report.tiles) == (4, 130, 1, 65, 4)
    assert report.skew == 2.0 and report.masked_share == 4 / 8 and report.filled == 130 / 256
    assert "advice: masked" in str(report)
    same = routing_report(topk_ids=torch.tensor([[0, 3], [3, -1]]), num_experts=4)
    assert (same.rows, same.tokens, same.tiles, same.idle_experts) == (3, 2, 2, 2)


@pytest.mark.parametrize("counts, options, advice", [
    ([4096, 10, 3, 0, 0, 0, 0, 1], {}, "contiguous"),
    ([300, 310, 290, 305], {}, "masked"),
    ([4096, 10, 3, 0, 0, 0, 0, 1], {"fixed_shapes": True}, "masked"),
    ([100, 100, 99, 100], {"max_m": 4096}, "contiguous"),
    ([10, 10, 9, 10], {}, "dense"),
    ([128], {}, "dense"),
    ([0, 0, 0], {}, "contiguous"),
])  # fmt: skip
def test_routing_advice(counts, options, advice):
    report = routing_report(torch.tensor(counts), **options)
    assert report.advice == advice and report.why


def test_dense_is_advised_when_every_token_goes_nearly_everywhere():
    ids = torch.stack([torch.arange(8)] * 256)
    assert routing_report(topk_ids=ids, num_experts=8).advice == "dense"
    assert routing_report(topk_ids=ids[:, :2], num_experts=8).advice != "dense"
    assert routing_report(torch.full((8,), 256), tokens=256).advice == "dense"


@pytest.mark.parametrize("call, error, words", [
    (lambda: routing_report(), ValueError, ["counts and topk_ids", "exactly one"]),
    (lambda: routing_report([1, 2]), TypeError, ["counts is list", "integers"]),
    (lambda: routing_report(torch.tensor([0.5])), TypeError, ["counts is torch.float32"]),
    (lambda: routing_report(torch.tensor([[1]])), ValueError, ["counts has shape (1, 1)", "(experts,)"]),
    (lambda: routing_report(torch.tensor([-1])), ValueError, ["counts is [-1]", ">= 0"]),
    (lambda: routing_report(topk_ids=torch.tensor([[1]])), ValueError, ["num_experts is None"]),
    (lambda: routing_report(topk_ids=torch.tensor([[4]]), num_experts=4), ValueError, ["topk_ids holds 4", "0 to 3"]),
    (lambda: routing_report(torch.tensor([1]), num_experts=2), ValueError, ["num_experts is 2", "1 entries"]),
    (lambda: routing_report(torch.tensor([9]), tokens=8), ValueError, ["tokens is 8", "9 rows"]),
    (lambda: routing_report(torch.tensor([9]), max_m=8), ValueError, ["max_m is 8", "max_m >= 9"]),
])  # fmt: skip
def test_routing_report_refuses(call, error, words):
    with refused(error, *words):
        call()


def test_swiglu_then_quantise():
    x = random(5, 400, dtype=BF16)
    gate, value = x.float().chunk(2, 1)
    want = quantize(torch.nn.functional.silu(gate) * value, "1x128")
    got = swiglu_quantize(x)
    assert torch.equal(got.scale, want.scale) and torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    with refused(ValueError, "x has shape (5, 399)", "2 K"):
        swiglu_quantize(x[:, 1:])
    with refused(TypeError, "x is torch.int64"):
        swiglu_quantize(x.long())
