"""The library's kernel against the bit-exact model: every kind, swap, split, epilogue, ragged and empty. On a Hopper GPU the same
tests run there; on a CPU the kernel runs on the simulator, which also reports races, deadlocks and stray writes."""

import re
import struct

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fp8_gemm import kernels
from fp8_gemm.plan import SHORT_K, plan
from fp8_gemm.problem import Operands, Problem
from hopperlab import capability, check, reference, sass
from hopperlab.quantize import ScaledTensor, scale_to_m_major

DEVICE = torch.device(capability.device())
ON_CPU = DEVICE.type == "cpu"
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # every try takes a second on the simulator
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS, GRADIENT = ("1x128", "128x128"), ("1x128", "1x128")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(check.POISON[x.dtype][0])


def poisoned(*shape, dtype=BF16) -> torch.Tensor:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return check.poisoned(rows, shape[-1], dtype, DEVICE)[0].view(shape)


def dense(m, n, k, recipes=BLOCKS, formats=("e4m3", "e4m3"), dtype=BF16, bias=False, accumulate=False, interval=128, **overrides):
    a, b = check.problem(m, n, k, recipes=recipes, formats=formats, device=DEVICE)
    problem = Problem("dense", m, n, k, 1, *recipes, *formats, dtype, bias, accumulate, interval)
    generator = torch.Generator().manual_seed(m + n + k)
    added = torch.randn(n, generator=generator).to(DEVICE) if bias else None
    out = poisoned(m, n, dtype=dtype)
    old = torch.randn(m, n, generator=generator).to(DEVICE, dtype) if accumulate else None
    if accumulate:
        out.copy_(old)
    kernels.run(problem, Operands(a.data, b.data, a.scale, b.scale, added), out, **overrides)
    splits = plan(problem, kernels.SMS_OF_AN_H200 if ON_CPU else kernels._sms(0), **overrides).splits
    want = reference.matmul_hopper(a, b, interval=interval, out_dtype=dtype, bias=added, c=old, split_k=splits)
    assert torch.equal(bits(out), bits(want)), check.compare(out, a, b, expected=want) if not (bias or accumulate) else "differs"


@pytest.mark.parametrize("case", [
    dict(m=130, n=200, k=300, block_m=128, block_n=128, swap_ab=False, split_k=1),
    dict(m=260, n=200, k=300, block_m=256, block_n=112, swap_ab=False, split_k=1, dtype=FP32),
    dict(m=70, n=200, k=300, block_m=64, block_n=48, swap_ab=False, split_k=1, dtype=FP16, formats=("e5m2", "e4m3"), bias=True),
    dict(m=130, n=391, k=300, block_m=128, block_n=176, swap_ab=False, split_k=1, group_m=1),
    dict(m=5, n=200, k=300, block_m=8, block_n=128, swap_ab=True, split_k=1),
    dict(m=30, n=201, k=300, block_m=32, block_n=256, swap_ab=True, split_k=1, bias=True),
    dict(m=5, n=200, k=1030, block_m=16, block_n=64, swap_ab=True, split_k=3),
    dict(m=130, n=200, k=900, block_m=128, block_n=96, swap_ab=False, split_k=2, accumulate=True, dtype=FP32),
    dict(m=130, n=200, k=900, block_m=128, block_n=96, swap_ab=False, accumulate=True, bias=True),
    dict(m=260, n=200, k=300, recipes=GRADIENT, block_m=256, block_n=128, swap_ab=False, split_k=1, dtype=FP32),
    dict(m=130, n=200, k=300, recipes=("row", "row"), interval=None, block_m=128, block_n=256, swap_ab=False, split_k=1),
    dict(m=130, n=200, k=700, recipes=("row", "tensor"), interval=None, block_m=128, block_n=64, swap_ab=False, split_k=2),
    dict(m=13, n=200, k=600, recipes=("row", "row"), interval=256, block_m=16, block_n=64, swap_ab=True, split_k=2),  # half an interval is left
    dict(m=13, n=200, k=700, recipes=("tensor", "row"), interval=128),
    dict(m=260, n=40, k=300, recipes=("tensor", "tensor"), interval=None, block_m=256, block_n=64, swap_ab=False, split_k=1),
    dict(m=260, n=40, k=300, block_m=256, block_n=64, swap_ab=False, split_k=2),  # as above: two rounds, neither of them stored late
    dict(m=130, n=200, k=900, block_m=128, block_n=64, swap_ab=False, multicast=2),  # two pairs side by side
    dict(m=70, n=330, k=300, block_m=64, block_n=64, swap_ab=False, multicast=2, dtype=FP32, bias=True),  # the last CTA: no columns
    dict(m=600, n=300, k=700, block_m=256, block_n=128, swap_ab=False, multicast=2, num_sms=3),  # a pair has six tiles, one SM nothing
    dict(m=330, n=700, k=300, block_m=256, block_n=128, swap_ab=False, multicast=2, num_sms=4),  # pairs on their side
    dict(m=70, n=200, k=300, recipes=("row", "tensor"), interval=None, block_m=64, block_n=48, swap_ab=False, multicast=2),
    dict(m=1, n=1, k=1), dict(m=3, n=33, k=576), dict(m=17, n=96, k=2000, batch_invariant=True),
], ids=str)  # fmt: skip
def test_dense(case):
    dense(**case)


@settings(max_examples=25 if ON_CPU else 300, deadline=None, phases=NO_SHRINKING, suppress_health_check=list(HealthCheck))
@given(m=st.integers(1, 150), n=st.integers(1, 300), k=st.integers(1, 700), dtype=st.sampled_from((BF16, FP16, FP32)),
       recipes=st.sampled_from((BLOCKS, GRADIENT, ("tensor", "tensor"), ("row", "row"))), bias=st.booleans(), accumulate=st.booleans(),
       formats=st.sampled_from((("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))))  # fmt: skip
def test_dense_random(m, n, k, dtype, recipes, bias, accumulate, formats):
    dense(m, n, k, recipes, formats, dtype, bias, accumulate)


@pytest.mark.parametrize("k", [0, 5])
def test_empty(k):
    for m, n in ((0, 5), (5, 0)):
        a, b = check.problem(m, n, k, recipes=BLOCKS, device=DEVICE)
        kernels.run(Problem("dense", m, n, k), Operands(a.data, b.data, a.scale, b.scale), torch.empty(m, n, dtype=BF16, device=DEVICE))
    a, b = check.problem(3, 4, 0, recipes=BLOCKS, device=DEVICE)
    out = poisoned(3, 4)
    kernels.run(Problem("dense", 3, 4, 0), Operands(a.data, b.data, a.scale, b.scale), out)
    assert not out.any()


def test_scales_of_a_in_either_order():
    a, b = check.problem(70, 96, 300, recipes=BLOCKS, device=DEVICE)
    outs = []
    for scale in (a.scale, scale_to_m_major(a.scale).t()[:70]):
        outs.append(poisoned(70, 96))
        kernels.run(Problem("dense", 70, 96, 300), Operands(a.data, b.data, scale, b.scale), outs[-1])
    assert torch.equal(bits(outs[0]), bits(outs[1]))


def test_batch_invariant_rows_have_the_same_bits_alone():
    a, b = check.problem(70, 96, 1100, recipes=BLOCKS, device=DEVICE)
    outs = []
    for rows in (70, 1):
        outs.append(poisoned(rows, 96))
        operands = Operands(a.data[:rows], b.data, a.scale[:rows], b.scale)
        kernels.run(Problem("dense", rows, 96, 1100), operands, outs[-1], batch_invariant=True)
    assert torch.equal(bits(outs[0][:1]), bits(outs[1]))


# ---- groups ---------------------------------------------------------------------------------------------------------


def weights(groups, n, k):
    made = [check.problem(1, n, k, recipes=BLOCKS, seed=group, device=DEVICE)[1] for group in range(groups)]
    return made, torch.stack([b.data.view(torch.uint8) for b in made]).view(made[0].data.dtype), torch.stack([b.scale for b in made])


def offsets_of(sizes) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(DEVICE, torch.int32)


def contiguous(counts, n, k, rows_after=0, used=None, dtype=BF16, accumulate=False, **overrides):
    """used: rows of each group that are tokens, where groups are padded."""
    m = sum(counts) + rows_after
    a, _ = check.problem(m, 1, k, recipes=BLOCKS, device=DEVICE)
    each, data, scale = weights(len(counts), n, k)
    offsets = offsets_of(counts)
    ends = None if used is None else offsets[:-1] + torch.tensor(used, dtype=torch.int32, device=DEVICE)
    out = torch.randn(m, n, device=DEVICE).to(dtype) if accumulate else poisoned(m, n, dtype=dtype)
    want = out.clone()
    problem = Problem("contiguous", m, n, k, len(counts), *BLOCKS, out_dtype=dtype, accumulate=accumulate)
    kernels.run(problem, Operands(a.data, data, a.scale, scale, offsets=offsets, ends=ends), out, **overrides)
    for group, b in enumerate(each):
        rows = slice(int(offsets[group]), int(offsets[group + 1] if ends is None else ends[group]))
        if rows.start < rows.stop:
            of_group = ScaledTensor(a.data[rows], a.scale[rows].contiguous(), "1x128")
            want[rows] = reference.matmul_hopper(of_group, b, out_dtype=dtype, c=want[rows] if accumulate else None)
    assert torch.equal(bits(out), bits(want))  # rows of no group are as they were


def masked(sizes, max_m, n, k, **overrides):
    each, data, scale = weights(len(sizes), n, k)
    tokens = [check.problem(max_m, 1, k, recipes=BLOCKS, seed=50 + group, device=DEVICE)[0] for group in range(len(sizes))]
    out = poisoned(len(sizes), max_m, n)
    want = out.clone()
    operands = Operands(torch.stack([a.data.view(torch.uint8) for a in tokens]).view(data.dtype), data, torch.stack([a.scale for a in tokens]),
                        scale, masked_m=torch.tensor(sizes, dtype=torch.int32, device=DEVICE))  # fmt: skip
    kernels.run(Problem("masked", max_m, n, k, len(sizes)), operands, out, **overrides)
    for group, (a, b, size) in enumerate(zip(tokens, each, sizes)):
        if size:
            want[group, :size] = reference.matmul_hopper(ScaledTensor(a.data[:size], a.scale[:size].contiguous(), "1x128"), b)
    assert torch.equal(bits(out), bits(want))


def k_grouped(sizes, m, n, accumulate=False, **overrides):
    k = sum(sizes)
    a, b = check.problem(m, n, k, recipes=GRADIENT, device=DEVICE)
    offsets = offsets_of(sizes)
    out = torch.randn(len(sizes), m, n, device=DEVICE) if accumulate else poisoned(len(sizes), m, n, dtype=FP32)
    old = out.clone()
    problem = Problem("k_grouped", m, n, k, len(sizes), *GRADIENT, out_dtype=FP32, accumulate=accumulate)
    kernels.run(problem, Operands(a.data, b.data, a.scale, b.scale, offsets=offsets), out, **overrides)
    for group in range(len(sizes)):
        low, high = int(offsets[group]), int(offsets[group + 1])
        want = old[group] if accumulate else torch.zeros_like(old[group])
        if low < high:
            part = [ScaledTensor(x.data[:, low:high].contiguous(), x.scale[:, low // 128 : -(-high // 128)].contiguous(), "1x128") for x in (a, b)]
            want = reference.matmul_hopper(*part, out_dtype=FP32, c=old[group] if accumulate else None)
        assert torch.equal(bits(out[group]), bits(want)), f"group {group}"


SQUARE = dict(block_m=64, block_n=64, swap_ab=False)
TILES = [{}, dict(block_m=128, block_n=128, swap_ab=False), dict(block_m=256, block_n=112, swap_ab=False), dict(block_m=16, block_n=64, swap_ab=True)]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_grouped(tile):
    contiguous([5, 0, 130, 3], 200, 300, **tile)
    masked([5, 0, 130, 1], 140, 200, 300, **tile)


def test_contiguous_corners():
    contiguous([0] * 40 + [7] + [0] * 30 + [9, 1] + [0] * 30 + [3], 72, 200, num_sms=4)  # more groups than a warp looks at together, twice
    contiguous([8, 16], 64, 128, used=[5, 16], rows_after=4)  # groups padded by the caller
    contiguous([0, 0, 0], 64, 128, rows_after=5)
    contiguous([1], 33, 100)
    contiguous([64, 64], 72, 128, dtype=FP32)
    contiguous([3, 15], 64, 128, rows_after=1, **SQUARE)  # a group ends one row before 16 rows of a warp do
    contiguous([5, 3], 64, 128, dtype=FP32, accumulate=True, **SQUARE)  # rows that TMA cannot add
    contiguous([70, 0, 3, 129], 200, 300, **SQUARE, multicast=2, num_sms=5)
    contiguous([270, 0, 3, 129, 400], 1030, 300, **PAIRS, num_sms=6)  # on their side, two of five columns outside


def test_masked_corners():
    masked([0, 0], 8, 40, 130)
    masked([3], 3, 40, 130)
    masked([130, 129], 130, 24, 130, block_m=128, block_n=16, swap_ab=False)  # a largest size that is no multiple of the tile
    masked([15, 31], 32, 64, 128, **SQUARE)
    masked([15, 31, 0, 64], 64, 300, 300, **SQUARE, multicast=2, num_sms=6)
    masked([270, 3, 129, 400], 500, 520, 300, **PAIRS, num_sms=6)


@pytest.mark.parametrize("tile", [dict(block_m=64, block_n=48, swap_ab=False), dict(block_m=16, block_n=64, swap_ab=True),
                                  dict(block_m=64, block_n=16, swap_ab=False, multicast=2)], ids=str)  # fmt: skip
def test_sizes_beyond_the_tensors_touch_nothing_outside(tile):
    """Only the device knows them, so no host check can refuse them: rows of other groups, and what lies around, stay as they are."""
    each, data, scale = weights(3, 40, 130)
    tokens = [check.problem(20, 1, 130, recipes=BLOCKS, seed=group, device=DEVICE)[0] for group in range(3)]
    stacked = torch.stack([a.data.view(torch.uint8) for a in tokens]).view(data.dtype), torch.stack([a.scale for a in tokens])
    out = poisoned(3, 20, 40)
    want = out.clone()
    sizes = torch.tensor([25, 2, -3], dtype=torch.int32, device=DEVICE)
    kernels.run(Problem("masked", 20, 40, 130, 3), Operands(stacked[0], data, stacked[1], scale, masked_m=sizes), out, **tile)
    for group, size in ((0, 20), (1, 2)):
        part = ScaledTensor(tokens[group].data[:size], tokens[group].scale[:size].contiguous(), "1x128")
        want[group, :size] = reference.matmul_hopper(part, each[group])
    assert torch.equal(bits(out), bits(want))

    out = poisoned(20, 40)
    want = out.clone()
    offsets = torch.tensor([-4, 3, 15, 90], dtype=torch.int32, device=DEVICE)
    kernels.run(Problem("contiguous", 20, 40, 130, 3), Operands(tokens[0].data, data, tokens[0].scale, scale, offsets=offsets), out, **tile)
    for group, rows in enumerate((slice(0, 3), slice(3, 15), slice(15, 20))):
        want[rows] = reference.matmul_hopper(ScaledTensor(tokens[0].data[rows], tokens[0].scale[rows].contiguous(), "1x128"), each[group])
    assert torch.equal(bits(out), bits(want))


def test_groups_of_k_beyond_the_tensors_add_nothing():
    a, b = check.problem(40, 72, 256, recipes=GRADIENT, device=DEVICE)
    out = poisoned(2, 40, 72, dtype=FP32)
    offsets = torch.tensor([-200, 128, 400], dtype=torch.int32, device=DEVICE)
    kernels.run(Problem("k_grouped", 40, 72, 256, 2, *GRADIENT, out_dtype=FP32), Operands(a.data, b.data, a.scale, b.scale, offsets=offsets), out)
    for group in range(2):
        part = [ScaledTensor(x.data.split(128, 1)[group].contiguous(), x.scale[:, group : group + 1].contiguous(), "1x128") for x in (a, b)]
        assert torch.equal(bits(out[group]), bits(reference.matmul_hopper(*part, out_dtype=FP32))), f"group {group}"


@pytest.mark.parametrize("tile", [SQUARE, dict(block_m=16, block_n=64, swap_ab=True)], ids=str)
def test_outputs_beyond_two_billion(tile):
    """An int overflows where the last group begins. The memory in front of it is reserved, never touched."""
    groups, rows, n, k = 33, 1 << 20, 64, 16
    a, b = check.problem(3, n, k, recipes=BLOCKS, device=DEVICE)
    data = torch.empty(groups, rows, k, dtype=torch.uint8, device=DEVICE)
    scale, out = torch.empty(groups, rows, 1, device=DEVICE), torch.empty(groups, rows, n, dtype=BF16, device=DEVICE)
    data[-1, :3], scale[-1, :3], out[-1, :4] = a.data.view(torch.uint8), a.scale, 7
    b_data, b_scale = b.data.view(torch.uint8).repeat(groups, 1, 1).view(b.data.dtype), b.scale.repeat(groups, 1, 1)
    sizes = torch.tensor([0] * (groups - 1) + [3], dtype=torch.int32, device=DEVICE)
    operands = Operands(data.view(a.data.dtype), b_data, scale, b_scale, masked_m=sizes)
    kernels.run(Problem("masked", rows, n, k, groups), operands, out, **tile, num_sms=1)
    assert out[:-1].numel() == 2**31 and torch.equal(bits(out[-1, :3]), bits(reference.matmul_hopper(a, b))) and (out[-1, 3] == 7).all()


def test_k_grouped():
    k_grouped([128, 0, 256, 100], 130, 72)
    k_grouped([128, 0, 256, 100], 130, 73, accumulate=True)
    k_grouped([256, 384], 300, 200, accumulate=True, block_m=256, block_n=128)
    k_grouped([256, 0, 128], 300, 500, **PAIRS)


WIDE, NARROW = dict(block_m=256, block_n=128, swap_ab=False, multicast=1), dict(block_m=16, block_n=64, swap_ab=True)
PAIRS = WIDE | {"multicast": 2}


def test_a_cta_with_many_tiles_stores_each_under_the_next():
    """Outputs wait for the next tile's first wgmma: here each CTA has several tiles, of one block of K or more, at edges and across groups."""
    few = dict(split_k=1, num_sms=2)
    dense(520, 130, 200, **WIDE, **few)
    dense(520, 130, 200, **PAIRS, **few)
    dense(300, 130, SHORT_K + 1, **WIDE, split_k=1, num_sms=1)           # whole rounds at once, not halves
    dense(300, 130, 100, dtype=FP32, bias=True, **WIDE, **few)
    dense(200, 130, 200, recipes=GRADIENT, dtype=FP32, accumulate=True, block_m=128, block_n=64, swap_ab=False, **few)
    dense(130, 72, 400, recipes=("row", "row"), interval=256, block_m=64, block_n=64, swap_ab=False, **few)
    dense(130, 72, 200, recipes=("row", "row"), interval=None, block_m=64, block_n=64, swap_ab=False, **few)
    dense(40, 130, 200, **NARROW, **few)
    for tile in (WIDE, NARROW):
        contiguous([5, 0, 270, 3], 130, 130, **tile, num_sms=1)
        masked([5, 0, 260, 1], 270, 72, 130, **tile, num_sms=1)
    contiguous([5, 0, 270, 3], 272, 130, **PAIRS, num_sms=2)
    k_grouped([128, 0, 256, 0, 0, 100], 130, 72, **WIDE, num_sms=2)


@pytest.mark.parametrize("order", [{}, {"order": "eager"}, {"seed": 1}], ids=str)
def test_parts_of_a_split_k_arrive_in_the_ring(order):
    """In slots that are empty: with blocks of k that fill the ring a part of a time, once, and more; with parts that take one slot, three, and more
    than the ring."""
    from hopperlab.kernel import simulation

    if order and not ON_CPU:
        pytest.skip("orders are the simulator's")
    one, several = (dict(block_m=64, block_n=width, swap_ab=False) for width in (32, 16))
    with simulation(**order):
        for blocks in range(2, 16, 3):  # 1 to 7 for each of the two; unequal where odd
            dense(5, 32, 128 * blocks, **one, split_k=2, num_stages=3)
        for blocks in (8, 19, 45):
            dense(64, 16, 128 * blocks - 5, **several, split_k=8, num_stages=4)
            dense(9, 24, 128 * blocks, **several, split_k=8, num_stages=2, dtype=FP32)
        dense(9, 72, 1400, block_m=64, block_n=48, swap_ab=False, split_k=2)  # pieces of 32 and 16 columns
        dense(20, 70, 1500, recipes=("row", "row"), interval=None, **one, split_k=3, num_stages=2)
        dense(200, 70, 1500, block_m=256, block_n=64, swap_ab=False, split_k=2, num_stages=3)  # two rounds: parts lie where X lay


def test_last_rows_that_half_a_tile_holds_are_multiplied_by_tiles_on_their_side():
    for rows, columns in ((100, 272), (384, 392), (385, 130), (129, 72)):  # on their side: all, the last; upright: the last, all
        dense(rows, columns, 200, **WIDE, split_k=1, num_sms=2)
    dense(300, 392, 200, dtype=FP32, bias=True, **WIDE, split_k=1, num_sms=1)
    contiguous([128, 0, 300, 1, 256], 392, 130, **WIDE, num_sms=2)
    masked([128, 300, 0, 256], 320, 272, 130, **WIDE, num_sms=2)


@settings(max_examples=8 if ON_CPU else 100, deadline=None, phases=NO_SHRINKING, suppress_health_check=list(HealthCheck))
@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=6), n=st.integers(1, 150), k=st.integers(1, 400))
def test_grouped_random(counts, n, k):
    contiguous(counts, n, k)
    if max(counts):
        masked(counts, max(counts), n, k)


@pytest.mark.parametrize("order", [{"order": "eager"}, {"seed": 1}, {"seed": 2}], ids=str)
def test_no_race_in_any_order(order):
    from hopperlab.kernel import simulation

    if not ON_CPU:
        pytest.skip("orders are the simulator's")
    with simulation(**order):
        dense(130, 200, 900, block_m=128, block_n=96, swap_ab=False, split_k=2)
        dense(5, 200, 1030, block_m=16, block_n=64, swap_ab=True, split_k=3)
        contiguous([5, 0, 130, 3], 200, 900, block_m=128, block_n=64, swap_ab=False)
        contiguous([5, 0, 330, 3], 300, 600, **PAIRS, num_sms=4)
        masked([5, 0, 130, 1], 140, 200, 900, block_m=16, block_n=64, swap_ab=True)
        dense(300, 40, 130, **WIDE, split_k=1, num_sms=1)
        contiguous([5, 0, 130, 3], 40, 130, **WIDE, num_sms=2)


def test_kernels_compile_without_spills_or_injected_waits():
    """The tiles with the most registers of each kind."""
    for kind, recipes, interval, dtype, overrides in (
        ("dense", BLOCKS, 128, BF16, dict(block_m=256, block_n=128, swap_ab=False, split_k=1)),
        ("dense", BLOCKS, 128, FP32, dict(block_m=256, block_n=112, swap_ab=False, split_k=1)),
        ("dense", BLOCKS, 128, BF16, dict(block_m=256, block_n=128, swap_ab=False, split_k=1, k=2 * SHORT_K)),
        ("dense", BLOCKS, 128, BF16, dict(block_m=32, block_n=256, swap_ab=True, split_k=1)),
        ("dense", BLOCKS, 128, BF16, dict(block_m=128, block_n=192, swap_ab=False, split_k=1)),
        ("dense", BLOCKS, 128, BF16, dict(block_m=128, block_n=96, swap_ab=False, split_k=2)),
        ("dense", ("row", "row"), None, BF16, dict(block_m=128, block_n=256, swap_ab=False, split_k=1)),
        ("contiguous", BLOCKS, 128, BF16, dict(block_m=256, block_n=128, swap_ab=False)),
        ("contiguous", BLOCKS, 128, BF16, dict(block_m=128, block_n=192, swap_ab=False)),
        ("masked", BLOCKS, 128, BF16, dict(block_m=256, block_n=128, swap_ab=False)),
        ("masked", BLOCKS, 128, BF16, dict(block_m=64, block_n=128, swap_ab=False)),
        ("masked", BLOCKS, 128, BF16, dict(block_m=16, block_n=128, swap_ab=True)),
        ("k_grouped", GRADIENT, 128, FP32, dict(block_m=256, block_n=128, swap_ab=False)),
    ):
        k = overrides.pop("k", 1024)
        problem = Problem(kind, 512, 512, k, 1 if kind == "dense" else 4, *recipes, out_dtype=dtype, interval=interval)
        made = kernels.kernel(tuple(kernels.constants_of(problem, plan(problem, 132, **overrides)).items()))
        assert made.compiled.problems == [], (kind, overrides)


def test_nothing_is_read_or_written_while_the_kernel_before_may_still_write():
    """It is launched early, so griddepcontrol.wait comes first. The simulator runs kernels one after another: no result would say so.
    Only weights may be sent for, as far as L2, where a dense product has few tokens: other kernels write through the same L2."""
    prefetch = r"cp\.async\.bulk\.prefetch\.tensor[^;]*;"
    for kind, m, recipes, groups in (("dense", 512, BLOCKS, 1), ("dense", 16, BLOCKS, 1), ("dense", 64, BLOCKS, 1), ("contiguous", 512, BLOCKS, 4),
                                     ("contiguous", 64, BLOCKS, 4), ("masked", 512, BLOCKS, 4), ("masked", 16, BLOCKS, 4),
                                     ("dense", 16384, BLOCKS, 1), ("k_grouped", 512, GRADIENT, 4)):  # fmt: skip
        problem = Problem(kind, m, 512, 1024, groups, *recipes, out_dtype=FP32 if kind == "k_grouped" else BF16)
        chosen = plan(problem, 132)
        ptx = kernels.kernel_of(problem, chosen).compiled.ptx
        before, after = ptx[ptx.index(".entry gemm") :].split("griddepcontrol.wait;")
        assert bool(re.search(prefetch, before)) == (kind == "dense" and m <= 64), (kind, m)
        touched = r"\b(?:ld|st|atom|red|cp)\.(?:[a-z]+\.)*(?:global|tensor)"
        assert not re.search(touched, re.sub(prefetch, "", before)) and re.search(touched, after), (kind, m)
        assert (chosen.rounds == 2) == (m == 16384) and ".nc." not in after, (kind, m)
        # The next kernel, in turn: at once, or, where tiles have one round and weights are large, when all bytes are on their way.
        assert after.count("griddepcontrol.launch_dependents;") == 3 - chosen.rounds and "launch_dependents" not in before, (kind, m)


QGMMA, R2UR = 0x9F3, 0x2CA  # opcodes: wgmma for FP8; a register's value to a uniform register


@pytest.mark.parametrize("problem, overrides", [
    (Problem("dense", 4096, 4096, 4096), {"block_m": 256}),
    (Problem("dense", 4096, 4096, 7168), {"block_m": 256}),
    (Problem("dense", 4096, 2112, 7168), {"block_m": 128, "block_n": 192}),
    (Problem("dense", 16, 4096, 7168), {"split_k": 3}),
    (Problem("dense", 4096, 4096, 4096, recipe_a="tensor", recipe_b="tensor", interval=None), {}),
    (Problem("contiguous", 4096, 4096, 7168, 8), {"block_m": 256}),
    (Problem("contiguous", 4096, 7168, 2048, 8), {"block_m": 256}),
    (Problem("contiguous", 4096, 4096, 7168, 8), {"block_m": 128, "block_n": 128}),
    (Problem("masked", 1024, 4096, 7168, 8), {"block_m": 256}),
    (Problem("masked", 128, 4096, 7168, 8), {}),
    (Problem("masked", 16, 4096, 7168, 8), {"swap_ab": True}),
    (Problem("k_grouped", 4096, 4096, 7168, 8, recipe_b="1x128", out_dtype=torch.float32, accumulate=True), {"block_m": 128}),
], ids=str)  # fmt: skip
def test_descriptors_stay_in_uniform_registers(problem, overrides):
    """A branch that the compiler cannot prove to be the same for a whole warp sends them through ordinary registers, for each wgmma:
    12 % slower, and nothing else would say so."""
    chosen = plan(problem, 132, **overrides)
    cubin = kernels.kernel_of(problem, chosen).compiled.cubin
    ((first, end),) = sass._sections(cubin)
    opcodes = [struct.unpack_from("<H", cubin, at)[0] & sass.OPCODE_BITS for at in range(first, end, 16)]
    wgmmas = [at for at, opcode in enumerate(opcodes) if opcode == QGMMA][-4 * chosen.rounds :]  # of the loop over k
    assert len(wgmmas) == 4 * chosen.rounds and R2UR in opcodes[: wgmmas[0]]  # those before it
    assert R2UR not in opcodes[wgmmas[0] : wgmmas[-1]]
