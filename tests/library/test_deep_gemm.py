"""DeepGEMM's names do on this library what its callers expect."""

import inspect

import pytest
import torch
from helpers import assert_right, calc_diff, ints, random, refused

import fp8_gemm.deep_gemm as deep_gemm
from fp8_gemm import GroupedTensor, ScaledTensor, dispatch, gemm, quantize, quantize_grouped
from hopperlab import capability

BF16, FP32 = torch.bfloat16, torch.float32


def token(rows, k, seed=0):
    return deep_gemm.per_token_cast_to_fp8(random(rows, k, seed=seed))


def block(rows, k, seed=1):
    return deep_gemm.per_block_cast_to_fp8(random(rows, k, seed=seed))


def blocks(groups, rows, k, seed=1):
    grouped = quantize_grouped(random(groups, rows, k, seed=seed))
    return grouped.data, grouped.scale


def m_major(operand):
    return operand[0], deep_gemm.get_mn_major_tma_aligned_tensor(operand[1])


@pytest.mark.parametrize("shape", [(1, 33, 576), (5, 130, 128), (130, 8, 300)], ids=str)
@pytest.mark.parametrize("d_type", [BF16, FP32], ids=str)
@pytest.mark.parametrize("scales", ["row-major", "M-major"])
def test_dense(shape, d_type, scales):
    m, n, k = shape
    a, b = token(m, k), block(n, k)
    d = torch.full((m, n), torch.nan, dtype=d_type)
    assert deep_gemm.fp8_gemm_nt(m_major(a) if scales == "M-major" else a, b, d) is None
    assert_right(d, ScaledTensor(*a, "1x128"), ScaledTensor(*b, "128x128"))
    assert calc_diff(d, random(m, k) @ random(n, k, seed=1).t()) < 2e-3
    for name in ("fp8_gemm_nn", "fp8_gemm_tn", "fp8_gemm_tt"):
        given_a = tuple(x.t() for x in a) if name[-2] == "t" else a
        given_b = tuple(x.t() for x in b) if name[-1] == "n" else b
        again = torch.empty_like(d)
        getattr(deep_gemm, name)(given_a, given_b, again)
        assert torch.equal(again, d), name
    first = torch.empty(m, n, dtype=BF16)
    deep_gemm.gemm_fp8_fp8_bf16_nt(a, b, first)
    assert torch.equal(first, d.to(BF16))


def test_weight_gradient_recipe_accumulates():
    a, b, c = token(6, 300), token(10, 300, seed=1), random(6, 10)
    a_scaled, b_scaled = ScaledTensor(*a, "1x128"), ScaledTensor(*b, "1x128")
    want = gemm(a_scaled, b_scaled, c=c, out_dtype=FP32)
    d = torch.empty(6, 10)
    deep_gemm.fp8_gemm_nt(a, b, d, c, (1, 1, 128))
    assert torch.equal(d, want)
    deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(1, 128))
    assert torch.equal(d, gemm(a_scaled, b_scaled, out_dtype=FP32))
    deep_gemm.fp8_gemm_nt(m_major(a), m_major(b), c, c=c, recipe=(1, 1, 128))
    assert torch.equal(c, want)
    for scales in (lambda x: x, lambda x: (x[0], x[1].t()), lambda x: (x[0], x[1].t().contiguous())):
        c = random(6, 10)
        deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(scales(a), scales(b), c)
        assert torch.equal(c, want)


def test_square_scales_of_a_weight_gradient_are_taken_as_rows_by_k_blocks():
    a, b = token(3, 300), token(3, 300, seed=1)
    c = torch.zeros(3, 3)
    deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(a, b, c)
    assert torch.equal(c, gemm(ScaledTensor(*a, "1x128"), ScaledTensor(*b, "1x128"), out_dtype=FP32))


@pytest.mark.parametrize("scales", ["row-major", "M-major"])
def test_contiguous_groups(scales):
    sizes, alignment = [100, 0, 128, 3], deep_gemm.get_m_alignment_for_contiguous_layout()
    padded = [deep_gemm.align(size, alignment) for size in sizes]
    m_indices, x = ints(*[-1] * sum(padded)), random(sum(padded), 256)
    start = 0
    for group, (size, room) in enumerate(zip(sizes, padded)):
        m_indices[start : start + size] = group
        x[start + size : start + room] = torch.nan
        start += room
    a, b = deep_gemm.per_token_cast_to_fp8(x), blocks(4, 24, 256)
    d = torch.full((sum(padded), 24), 5.0, dtype=BF16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(m_major(a) if scales == "M-major" else a, b, d, m_indices)
    weights = quantize_grouped(random(4, 24, 256, seed=1))
    for group in range(4):
        rows = m_indices == group
        if rows.any():
            assert_right(d[rows], quantize(x[rows]), weights[group])
    assert (d[m_indices < 0] == 5).all()

    again = torch.full_like(d, 5)
    deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(a, b, again, m_indices)
    assert torch.equal(again, d)
    again.fill_(5)
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, tuple(t.mT for t in b), again, m_indices)
    assert torch.equal(again, d)
    # Each group starts at the end before it, rounded up to 128; the empty one may end at either place.
    for empty_end in (100, 128):
        again.fill_(5)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, again, ints(100, empty_end, 256, 259), use_psum_layout=True)
        assert torch.equal(again, d)
    short = tuple(t[:259].contiguous() for t in a)
    again.fill_(5)
    five = tuple(torch.cat([t.view(torch.uint8), t[:1].view(torch.uint8)]).view(t.dtype) for t in b)  # the last group is empty
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(short, five, again[:259], ints(100, 128, 256, 259, 259), use_psum_layout=True)
    assert torch.equal(again[:259], d[:259])


@pytest.mark.parametrize("max_m", [5, 130])
def test_masked_groups(max_m):
    masked_m = ints(max_m, 0, 3)
    x = random(3, max_m, 256)
    a, b = quantize_grouped(x, "1x128"), quantize_grouped(random(3, 24, 256, seed=1))
    d = torch.full((3, max_m, 24), 5.0, dtype=BF16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((a.data, a.scale), (b.data, b.scale), d, masked_m, 4)
    for group, rows in enumerate(masked_m.tolist()):
        assert_right(d[group, :rows], quantize(x[group, :rows]), b[group])
        assert (d[group, rows:] == 5).all()
    for name in ("fp8_m_grouped_gemm_nt_masked", "m_grouped_gemm_fp8_fp8_bf16_nt_masked"):
        again = torch.full_like(d, 5)
        getattr(deep_gemm, name)(m_major((a.data, a.scale)), (b.data, b.scale), again, masked_m, expected_m=4)
        assert torch.equal(again, d)


@pytest.mark.parametrize("ks", [[128, 256], [0, 128, 0, 384]], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_k_groups_as_a_weight_gradient(ks, accumulate):
    """As its callers make them: cast per channel along K, then each group transposed and flattened."""
    m, n, total = 6, 10, sum(ks)
    x, y = random(total, m), random(total, n, seed=1)

    def flat(tensor):
        data, scale = deep_gemm.per_channel_cast_to_fp8(tensor)
        groups = data.view(torch.uint8).split(ks)
        return torch.cat([group.t().flatten() for group in groups]).view(data.dtype), scale

    c = random(len(ks), m, n, seed=2) if accumulate else None
    d = torch.full((len(ks), m, n), torch.nan)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(flat(x), flat(y), d, ks, ints(*ks), c)
    start = 0
    for group, k in enumerate(ks):
        a, b = quantize(x[start : start + k].t(), "1x128"), quantize(y[start : start + k].t(), "1x128")
        assert_right(d[group], a, b, **({"c": c[group]} if accumulate else {}))
        start += k


def per_channel(ks, rows, seed):
    """x (sum of ks, rows) cast per channel, and the same with each group transposed and flattened."""
    data, scale = deep_gemm.per_channel_cast_to_fp8(random(sum(ks), rows, seed=seed))
    groups = data.view(torch.uint8).split(ks)
    return (data, scale), (torch.cat([group.t().flatten() for group in groups]).view(data.dtype), scale)


@pytest.mark.parametrize("ks", [[128, 256], [0, 128, 0, 384]], ids=str)
def test_k_groups_by_their_other_names(ks):
    (a, flat_a), (b, flat_b) = per_channel(ks, 6, 0), per_channel(ks, 10, 1)
    c = random(len(ks), 6, 10, seed=2)
    want, got = torch.empty_like(c), torch.empty_like(c)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(flat_a, flat_b, want, ks, ints(*ks), c)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a, b, got, ks, ints(*ks), c)
    assert torch.equal(got, want)
    deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(flat_a, flat_b, c, ks)
    assert torch.equal(c, want)


def test_first_weight_gradients_take_any_sizes():
    sizes, m, n = [100, 0, 130, 128], 6, 10
    x = [quantize(random(m, k, seed=k), "1x128") for k in sizes]
    y = [quantize(random(n, k, seed=k + 1), "1x128") for k in sizes]

    def flat(groups):
        data = torch.cat([group.data.view(torch.uint8).flatten() for group in groups])
        return data.view(torch.float8_e4m3fn), torch.cat([group.scale.t() for group in groups])

    out = torch.ones(4, m, n)
    deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(flat(x), flat(y), out, sizes)
    for group, (a, b) in enumerate(zip(x, y)):
        assert_right(out[group], a, b, c=torch.ones(m, n))


# ---------------------------------------------------------------- scales are read where they lie


def calls_on(device):
    """name -> a function that lays every operand's scales out by its argument, calls, and returns the result."""
    a, b, row_b = token(20, 256), block(24, 256), token(24, 256, seed=1)
    stack_a, stack_b = blocks(2, 12, 256), blocks(2, 24, 256)
    stack_a = (stack_a[0], quantize_grouped(random(2, 12, 256, seed=1), "1x128").scale)
    flat = [(torch.zeros(rows * 256).to(torch.float8_e4m3fn), torch.rand(2, rows) + 0.5) for rows in (8, 16)]
    for data, _ in flat:
        data.copy_(random(data.numel()))
    a, b, row_b, stack_a, stack_b, *flat = (tuple(x.to(device) for x in each) for each in (a, b, row_b, stack_a, stack_b, *flat))
    new = lambda *shape, dtype=BF16: torch.zeros(*shape, dtype=dtype, device=device)  # noqa: E731
    numbers = lambda *values: ints(*values).to(device)  # noqa: E731

    def dense(lay):
        deep_gemm.fp8_gemm_nt(lay(a), lay(b), d := new(20, 24))
        return d

    def weight_gradient(lay):
        deep_gemm.wgrad_gemm_fp8_fp8_fp32_nt(lay(a), lay(row_b), d := new(20, 24, dtype=FP32))
        return d

    def contiguous(lay):
        indices = numbers(*[0] * 9, *[1] * 11)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(lay(a), lay(stack_b), d := new(20, 24), indices)
        return d

    def masked(lay):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(lay(stack_a), lay(stack_b), d := new(2, 12, 24), numbers(12, 5), 8)
        return d

    def k_grouped(lay):
        operands = lay(flat[0]), lay(flat[1])
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*operands, d := new(2, 8, 16, dtype=FP32), [128, 128], numbers(128, 128))
        return d

    return {call.__name__: call for call in (dense, weight_gradient, contiguous, masked, k_grouped)}


CALLS = calls_on("cpu")


@pytest.mark.parametrize("name", CALLS)
def test_m_major_scales_reach_the_backend_as_they_are(monkeypatch, name):
    """Same address, same strides: no copy is made of them."""
    given, seen = [], []

    def lay(operand):
        given.append(m_major(operand)[1])
        return operand[0], given[-1]

    monkeypatch.setattr(dispatch, "run", lambda problem, operands, out, *rest, **options: seen.append(operands))
    CALLS[name](lay)
    passed = [seen[0].a_scale, seen[0].b_scale]
    if name == "k_grouped":  # given (K blocks, rows)
        given = [scale.t() for scale in given]
    assert [(s.data_ptr(), s.shape, s.stride()) for s in passed] == [(s.data_ptr(), s.shape, s.stride()) for s in given]
    assert not all(s.is_contiguous() for s in passed)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["simulator", "reference"])
def test_m_major_scales_give_the_bits_of_row_major_ones(monkeypatch, name, backend):
    monkeypatch.setenv("FP8_GEMM_BACKEND", backend)
    want = CALLS[name](lambda operand: operand)
    assert want.any() and torch.equal(CALLS[name](m_major), want)
    assert torch.equal(CALLS[name](lambda operand: operand), want)  # nothing remembers the other strides


@pytest.mark.skipif(not capability.has_hopper(), reason=capability.hopper().sentence())
@pytest.mark.parametrize("name", CALLS)
def test_m_major_scales_give_the_bits_of_row_major_ones_on_a_gpu(name):
    call = calls_on("cuda")[name]
    want = call(lambda operand: operand)
    assert want.any() and torch.equal(call(m_major), want)
    assert torch.equal(call(lambda operand: operand), want)


def test_other_strides_than_m_major_ones_are_taken_by_these_names_alone():
    data, scale = block(130, 300)
    with refused(ValueError, "scale has strides", "contiguous"):
        ScaledTensor(data, scale.t().contiguous().t(), "128x128")
    stack = quantize_grouped(random(2, 5, 300), "1x128")
    with refused(ValueError, "scale has strides", "contiguous"):
        GroupedTensor(stack.data, stack.scale.contiguous().repeat(1, 1, 2)[:, :, ::2], "1x128")


def test_m_major_scales_are_traced():
    a, b, d = m_major(token(4, 256)), block(8, 256), torch.empty(4, 8, dtype=BF16)
    want = torch.empty_like(d)
    deep_gemm.fp8_gemm_nt(a, b, want)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(a_data, a_scale, b_data, b_scale, d):
        deep_gemm.fp8_gemm_nt((a_data, a_scale), (b_data, b_scale), d)
        return d

    assert torch.equal(compiled(*a, *b, d), want)


# ---------------------------------------------------------------- helpers


@pytest.mark.parametrize("shape", [(5, 3), (8, 1), (1, 4), (2, 7, 3)], ids=str)
def test_m_major_scales_keep_their_values(shape):
    scale = random(*shape)
    got = deep_gemm.get_mn_major_tma_aligned_tensor(scale)
    assert torch.equal(got, scale) and got.stride(-2) == 1 and got.stride(-1) == deep_gemm.align(shape[-2], 4)
    assert torch.equal(deep_gemm.get_col_major_tma_aligned_tensor(got), scale)


def test_small_helpers():
    assert [deep_gemm.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [deep_gemm.align(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert deep_gemm.get_tma_aligned_size(5, 4) == 8 and deep_gemm.get_tma_aligned_size(5, 1) == 16
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128
    x = random(130, 300)
    for cast, recipe in (("per_token_cast_to_fp8", "1x128"), ("per_block_cast_to_fp8", "128x128")):
        for power_of_two in (False, True):
            data, scale = getattr(deep_gemm, cast)(x, power_of_two)
            want = quantize(x, recipe, power_of_two=power_of_two)
            assert torch.equal(scale, want.scale) and torch.equal(data.view(torch.uint8), want.data.view(torch.uint8))
    data, scale = deep_gemm.per_channel_cast_to_fp8(x)
    assert data.shape == x.shape and scale.shape == (2, 300)
    assert deep_gemm.calc_diff(x, x) == 0


def test_layout_transform():
    a, b = token(5, 300)[1], block(200, 300)[1]
    got = deep_gemm.transform_sf_into_required_layout(a, 5, 300, (1, 128, 128), is_sfa=True)
    assert torch.equal(got, a) and got.stride(0) == 1
    assert deep_gemm.transform_sf_into_required_layout(b, 200, 300, (1, 128, 128), is_sfa=False) is b
    assert deep_gemm.transform_sf_into_required_layout(a[None], 5, 300, (1, 128), 1).stride(1) == 1
    with refused(ValueError, "sf has shape (5, 3)", "(6, 3)"):
        deep_gemm.transform_sf_into_required_layout(a, 6, 300, (1, 128))
    with refused(ValueError, "is_sfa"):
        deep_gemm.transform_sf_into_required_layout(a, 5, 300, (1, 128, 128))


def test_number_of_sms(monkeypatch):
    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    available = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(16)
    assert deep_gemm.get_num_sms() == 16
    assert deep_gemm._overrides(torch.empty(1)) == {}
    for wrong in (0, available + 1):
        with refused(ValueError, f"num_sms is {wrong}", f"1 to {available}"):
            deep_gemm.set_num_sms(wrong)


def test_every_name_is_there_with_its_leading_arguments():
    orders = {
        "fp8_gemm_nt": "a b d c recipe", "m_grouped_fp8_gemm_nt_contiguous": "a b d grouped_layout recipe",
        "m_grouped_fp8_gemm_nt_masked": "a b d masked_m expected_m recipe",
        "k_grouped_fp8_gemm_nt_contiguous": "a b d ks ks_tensor c recipe",
        "k_grouped_fp8_gemm_tn_contiguous": "a b d ks ks_tensor c recipe",
        "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": "lhs rhs out batch_sizes",
        "gemm_fp8_fp8_bf16_nt": "lhs rhs out", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": "lhs rhs out m_indices",
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked": "lhs rhs out masked_m expected_m", "wgrad_gemm_fp8_fp8_fp32_nt": "lhs rhs out",
    }  # fmt: skip
    for name in deep_gemm.__all__:
        assert callable(getattr(deep_gemm, name))
    for name, order in orders.items():
        assert list(inspect.signature(getattr(deep_gemm, name)).parameters)[: len(order.split())] == order.split()


A, B, D = token(4, 256), block(8, 256), torch.empty(4, 8, dtype=BF16)
K2 = (torch.zeros(4 * 256).to(torch.float8_e4m3fn), torch.ones(2, 4))


@pytest.mark.parametrize("call, error, words", [
    (lambda: deep_gemm.fp8_gemm_nt(A[0], B, D), TypeError, ["a is Tensor", "pair", "per_token_cast_to_fp8"]),
    (lambda: deep_gemm.fp8_gemm_nt(A, B, None), TypeError, ["d is a NoneType"]),
    (lambda: deep_gemm.fp8_gemm_nt(A, B, D, recipe=(128, 128, 128)), ValueError, ["recipe is (128, 128, 128)", "(1, 1, 128)"]),
    (lambda: deep_gemm.fp8_gemm_nt(A, B, D, recipe_a=(1, 32), recipe_b=(1, 128)), ValueError, ["recipe", "(1, 128, 128)"]),
    (lambda: deep_gemm.fp8_gemm_nt(A, B, D, recipe_b=(1, 128)), ValueError, ["recipe_a is None", "recipe_b (1, 128)", "both"]),
    (lambda: deep_gemm.fp8_gemm_nt(A, B, D, None, None, (1, 128), (64, 128), "nk", False), ValueError, ["recipe is (1, 64, 128)"]),
    (lambda: deep_gemm.per_token_cast_to_fp8(random(4, 256), False, 64), ValueError, ["gran_k is 64", "128"]),
    (lambda: deep_gemm.fp8_gemm_nt(A, B, D, random(4, 8)), TypeError, ["c has dtype torch.float32"]),
    (lambda: deep_gemm.fp8_gemm_nt((A[0], A[1].t()), B, D), ValueError, ["scale has shape (2, 4)", "transposed"]),
    (lambda: deep_gemm.fp8_gemm_nt(A, B, D.t()), ValueError, ["out has shape (8, 4)", "transposed"]),
    (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, blocks(2, 8, 256), D, ints(1, 9), use_psum_layout=True), ValueError,
     ["grouped_layout[1] is 9", "1 to 4"]),
    (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, blocks(2, 8, 256), D, ints(3, 2), use_psum_layout=True), ValueError,
     ["grouped_layout[1] is 2", "decrease", "3 to 4"]),
    (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, blocks(2, 8, 256), D, ints(-1, 2), use_psum_layout=True), ValueError,
     ["grouped_layout[0] is -1"]),
    (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, blocks(2, 8, 256), D, None, use_psum_layout=True), TypeError,
     ["grouped_layout is a NoneType", "int32"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(K2, K2, torch.empty(2, 4, 4), [128, 128], ints(0, 256)), ValueError,
     ["ks_tensor holds [0, 256]", "[128, 128]"]),
    (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, blocks(2, 8, 256), D, ints(0), use_psum_layout=True), ValueError,
     ["grouped_layout", "(2,)"]),
    (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(A, blocks(2, 8, 256), D, ints(0, 1)), ValueError, ["indices", "4 rows"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(K2, K2, torch.empty(2, 4, 4), [100, 156], ints(100, 156)), ValueError,
     ["ks[0] is 100", "k_grouped_gemm"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(K2, K2, torch.empty(1, 4, 4), [128, 128], ints(128, 128)), ValueError,
     ["d has shape (1, 4, 4)", "ks 2 entries"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(K2, K2, torch.empty(2, 4, 5), [128, 128], ints(128, 128)), ValueError,
     ["b[0] has 1024 elements", "5 x 256"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous((K2[0], K2[1].t()), K2, torch.empty(2, 4, 4), [128, 128], ints(128, 128)),
     ValueError, ["a[1] has shape (4, 2)", "(2, 4)"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(K2, K2, torch.empty(2, 4, 4), [128, 128], ints(128)), ValueError,
     ["ks_tensor", "(2,)"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(K2, K2, torch.empty(2, 4, 4), [128, 128], ints(128, 128),
                                                         recipe=(1, 128, 128)),
     ValueError, ["recipe is (1, 128, 128)"]),
    (lambda: deep_gemm.k_grouped_fp8_gemm_tn_contiguous(K2, K2, torch.empty(2, 4, 4), [128, 128], ints(128, 128)), ValueError,
     ["a[0] has shape (1024,)", "(256, 4)"]),
    (lambda: deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(K2, K2, torch.empty(2, 4, 4), [128, -1]), ValueError,
     ["batch_sizes[1] is -1", "0 and more"]),
    (lambda: deep_gemm.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(K2, K2, torch.empty(1, 4, 4), [128, 128]), ValueError,
     ["out has shape (1, 4, 4)", "batch_sizes 2 entries"]),
    (lambda: deep_gemm.get_mn_major_tma_aligned_tensor(torch.ones(3)), ValueError, ["sf", "(3,)", "(rows, K blocks)"]),
])  # fmt: skip
def test_refusals_name_the_argument(call, error, words):
    with refused(error, *words):
        call()
