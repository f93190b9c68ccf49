"""Every plan fits the hardware, is what was asked for, and can be read."""

import random

import pytest
import torch

from fp8_gemm import plan as plans
from fp8_gemm.plan import plan
from fp8_gemm.problem import LARGEST_SIZE, Problem

KINDS = ("dense", "contiguous", "masked", "k_grouped")


def random_problem(rng: random.Random) -> Problem:
    size = lambda most: max(1, int(2 ** rng.uniform(0, most)))  # noqa: E731
    kind = rng.choice(KINDS)
    recipes = ("1x128", "1x128") if kind == "k_grouped" else rng.choice(
        (("1x128", "128x128"), ("1x128", "1x128"), ("tensor", "tensor"), ("row", "row")))  # fmt: skip
    out = torch.float32 if kind == "k_grouped" else rng.choice((torch.bfloat16, torch.float16, torch.float32))
    interval = 128 if recipes[0] == "1x128" else rng.choice((128, 256, 1024, None))
    return Problem(kind, size(15), size(15), size(17), 1 if kind == "dense" else size(8), *recipes, rng.choice(("e4m3", "e5m2")), "e4m3",
                   out, kind == "dense" and rng.random() < 0.2, rng.random() < 0.2, interval)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_20000_random_problems_fit_the_hardware(seed):
    """What a launch would refuse: shared memory, registers, block size; and what the kernel takes for granted. 5000 per seed."""
    rng = random.Random(seed)
    for _ in range(5000):
        problem = random_problem(rng)
        made = plan(problem, rng.choice((132, 131, 114, 78, 3)))
        assert plans.shared_bytes(made, problem) <= (227, 113)[made.ctas_per_sm - 1] * 1024, (problem, made)
        assert 2 <= made.num_stages <= 9, (problem, made)
        sums = made.rounds * made.block_y // 2 + (made.block_y // 2 if problem.interval else 0)
        assert sums <= 192 and made.block_y % 8 == 0 and 8 <= made.block_y <= 256, (problem, made)  # 232 registers less addresses
        assert 128 * (1 + made.consumers) <= 1024
        assert made.splits == 1 or (problem.kind == "dense" and made.splits <= -(-problem.k // max(problem.interval or 128, 128)))
        assert made.seconds > 0 and made.tiles > 0
        assert not plans.stores_by_tma(made, problem) or (made.block_y % 16 == 0 and not made.swap_ab)
        assert made.rounds == 1 or (problem.interval or 128) == 128
        assert made.multicast == 1 or (made.multicast == 2 and made.splits == 1 and not made.swap_ab)
        assert made.ctas(problem) % (made.splits * made.multicast) == 0, (problem, made)  # whole clusters


@pytest.mark.parametrize("overrides", [
    {"block_m": 128, "block_n": 112}, {"block_m": 16, "swap_ab": True}, {"block_n": 64, "swap_ab": True}, {"split_k": 3},
    {"num_stages": 3}, {"num_sms": 20}, {"group_m": 2}, {"batch_invariant": True}, {"split_k": 5}, {"block_m": 40, "swap_ab": True},
    {"block_m": 256}, {"block_n": 256, "swap_ab": True}, {"multicast": 1}, {"multicast": 2}, {"multicast": 2, "num_sms": 2},
    {"ctas_per_sm": 1}, {"ctas_per_sm": 2, "block_m": 64, "swap_ab": False}, {"num_stages": 9},
])  # fmt: skip
def test_overrides_are_obeyed(overrides):
    made = plan(Problem("dense", 100, 4096, 4096), 132, **overrides)
    for name, value in overrides.items():
        field = {"split_k": "splits", "group_m": "group"}.get(name, name)
        if name != "batch_invariant":
            assert getattr(made, field) == value, made


@pytest.mark.parametrize("overrides, message", [
    ({"block_m": 100}, "block_m=100"), ({"block_n": 256, "swap_ab": False}, "block_n=256"), ({"split_k": 9}, "split_k=9"),
    ({"block_n": 24, "swap_ab": False}, "block_n=24"), ({"block_m": 136, "swap_ab": True}, "block_m=136"), ({"num_stages": 1}, "num_stages=1"),
    ({"num_stages": 10}, "num_stages=10"),
    ({"num_stages": 8, "block_m": 256, "block_n": 128}, "num_stages=8"), ({"num_sms": 133}, "num_sms is 133"),
    ({"multicast": 3}, "multicast=3"), ({"multicast": 2, "swap_ab": True}, "swap_ab=True, multicast=2"),
    ({"multicast": 2, "split_k": 2}, "split_k=2, multicast=2"), ({"multicast": 2, "num_sms": 1}, "multicast=2, num_sms=1"),
    ({"multicast": 2, "batch_invariant": True}, "multicast=2, batch_invariant=True"), ({"ctas_per_sm": 3}, "ctas_per_sm=3"),
    ({"ctas_per_sm": 2, "block_m": 128, "swap_ab": False}, "ctas_per_sm=2"), ({"ctas_per_sm": 2, "num_sms": 100}, "ctas_per_sm=2, num_sms=100"),
])  # fmt: skip
def test_impossible_overrides_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        plan(Problem("dense", 4096, 4096, 4096), 132, **overrides)


def test_buckets():
    assert [plans.bucket(m) for m in (0, 1, 8, 9, 128, 129, 144, 145, 256, 257, 1025, 2049, 4096, 4097, 8193, 70000)] == [
        0, 8, 8, 16, 128, 144, 144, 160, 256, 288, 1152, 2176, 4096, 4224, 8448, 71680]  # fmt: skip
    for m in range(1, 20000):
        assert m <= plans.bucket(m) <= max(m + 7, 1.125 * m) and plans.bucket(plans.bucket(m)) == plans.bucket(m)


def test_the_bucket_of_the_largest_problems_is_no_larger():
    for problem in (Problem("dense", LARGEST_SIZE, 8, 128), Problem("masked", 2**15 - 1, 8, 128, 2**16),
                    Problem("k_grouped", 8, 8, LARGEST_SIZE, 2, "1x128", "1x128")):  # fmt: skip
        assert plans.bucketed(problem).m >= problem.m and plan(problem).tiles > 0


WEIGHTS = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (576, 7168))


def cut(made):
    """What of a plan its kernel is compiled for."""
    return made._replace(tiles=0, seconds=0.0)


@pytest.mark.parametrize("problem", [
    *(Problem("dense", 0, n, k) for n, k in (*WEIGHTS, (24, 100))),
    Problem("dense", 0, 4096, 7168, recipe_a="row", recipe_b="row", interval=None, out_dtype=torch.float32),
    Problem("contiguous", 0, 4096, 7168, 4), Problem("contiguous", 0, 7168, 2048, 256), Problem("masked", 0, 4096, 7168, 8),
    Problem("k_grouped", 4096, 7168, 0, 8, "1x128", "1x128", out_dtype=torch.float32),
], ids=str)  # fmt: skip
def test_one_n_and_k_need_a_dozen_kernels_whatever_m(problem):
    """Every M up to 8192, and larger ones; warmup does not go through those beyond 65536."""
    kernel = lambda sized: (cut(plan(sized)), plans.turns(plan(sized), sized))  # noqa: E731
    known = {kernel(sized) for sized in plans.every_size(problem)}
    assert len(known) <= 24
    for tokens in [*range(8193), *range(8193, 400000, 3001), 2**20, 2**24]:
        assert kernel(plans.with_tokens(problem, tokens)) in known, tokens


@pytest.mark.parametrize("n, k", WEIGHTS)
def test_a_buckets_plan_is_as_fast_as_the_best_for_each_m(n, k):
    """By the model: 1.5 % slower at most. And its tiles and time are those of the real M."""
    for m in [*range(1, 129), *range(129, 8193, 97)]:
        problem = Problem("dense", m, n, k)
        finished = [made for made in (plans._finish(problem, one) for one in plans._candidates(problem, 132)) if made is not None]
        assert plan(problem) in finished and plan(problem).seconds <= 1.015 * min(made.seconds for made in finished), m


def test_batch_invariant_plans_do_not_depend_on_m():
    made = {plan(Problem("dense", m, 4096, 7168), 132, batch_invariant=True)._replace(tiles=0, seconds=0.0) for m in (1, 17, 128, 4096)}
    assert len(made) == 1


@pytest.mark.parametrize("shape", [(30, 16512, 9600), (1, 7168, 16384), (64, 2112, 7168), (128, 7168, 16384), (300, 4096, 7168), (6, 1152, 896)])
def test_parts_of_k_run_at_the_same_time(shape):
    """Parts that wait for room were never among the fastest; only split_k asks for them."""
    assert all(made.splits == 1 or made.waves == 1 for made in plans.promising(Problem("dense", *shape), 132, 200))
    asked = plan(Problem("dense", 30, 16512, 9600), split_k=2, block_m=32, block_n=128, swap_ab=True)
    assert (asked.splits, asked.waves) == (2, 2)


def test_tiles_on_their_side_read_large_weights_again(monkeypatch):
    """Where L2 has not kept them: those tiles come after all others. 381 rows are one upright tile and one on its side; 120 rows the latter only."""
    asked = dict(block_m=256, block_n=128, swap_ab=False, split_k=1, multicast=1)
    made = {problem: plan(problem, **asked) for problem in (Problem("dense", m, 20672, k) for m in (381, 120) for k in (7296, 1920))}
    assert all(plans.turns(one, problem) for problem, one in made.items())
    monkeypatch.setattr(plans, "STAYS_BYTES", 1 << 60)  # as if L2 kept everything
    again = [problem for problem, one in made.items() if plans._predict(problem, one) < one.seconds]
    assert again == [Problem("dense", 381, 20672, 7296)]


# (M, N, K): plans (block_m, block_n, splits) that took at most 4 % longer than the fastest of those timed on an H200, fastest first.
FASTEST = {
    (1, 2112, 7168): [(8, 64, 6), (8, 64, 3)],
    (1, 4096, 7168): [(8, 64, 2)],
    (1, 7168, 2048): [(8, 64, 1), (8, 64, 2), (8, 128, 2)],
    (1, 7168, 16384): [(8, 64, 1), (8, 64, 2), (8, 128, 2)],
    (1, 24576, 1536): [(8, 64, 1), (8, 128, 1)],
    (1, 32768, 512): [(8, 64, 1), (8, 128, 1)],
    (16, 2112, 7168): [(16, 64, 6), (16, 64, 3)],
    (16, 4096, 7168): [(16, 64, 2)],
    (16, 7168, 2048): [(16, 64, 1), (16, 64, 2)],
    (16, 7168, 16384): [(16, 64, 1), (16, 64, 2), (16, 128, 2)],
    (16, 24576, 1536): [(16, 64, 1), (64, 192, 1), (16, 128, 1)],
    (16, 32768, 512): [(16, 64, 1), (16, 128, 1)],
    (64, 2112, 7168): [(64, 64, 6), (64, 64, 3), (64, 32, 3)],
    (64, 4096, 7168): [(64, 64, 2), (64, 32, 2)],
    (64, 7168, 2048): [(64, 64, 1), (64, 32, 1)],
    (64, 7168, 16384): [(64, 112, 2), (64, 64, 1)],
    (64, 24576, 1536): [(64, 96, 1)],
    (128, 2112, 7168): [(128, 32, 2), (128, 64, 3)],
    (128, 4096, 7168): [(128, 64, 2)],
    (128, 7168, 2048): [(128, 64, 1), (64, 64, 1)],
    (128, 7168, 16384): [(128, 128, 2), (128, 112, 2), (128, 192, 3)],
    (128, 24576, 1536): [(128, 96, 1), (128, 192, 1)],
    (128, 32768, 512): [(128, 96, 1), (128, 128, 1)],
    (4096, 4096, 4096): [(256, 128, 1)],
    (4096, 7168, 2048): [(256, 128, 1)],
    (8192, 8192, 8192): [(256, 128, 1), (128, 192, 1)],
}


@pytest.mark.parametrize("shape", FASTEST)
def test_the_plan_is_one_of_the_fastest_that_were_timed(shape):
    made = plan(Problem("dense", *shape), 132)
    assert (made.block_m, made.block_n, made.splits) in FASTEST[shape], made


WEIGHT_GRADIENT = {"recipe_a": "1x128", "recipe_b": "1x128", "out_dtype": torch.float32}


@pytest.mark.parametrize("problem, rows, why", [
    (Problem("masked", 32, 4096, 7168, 32), 16, "half of a receive buffer's rows are tokens: they share one narrow tile, swapped"),
    (Problem("contiguous", 64, 4096, 7168, 32), 8, "two tokens a group"),
    (Problem("contiguous", 8192, 4096, 7168, 32), 256, "sizes around 256: the last rows of a group take half a tile, on its side, where they fill no more"),
    (Problem("contiguous", 32768, 4096, 7168, 8), 256, "sizes around 4096: waste is little, the tile with the fewest bytes wins"),
    (Problem("k_grouped", 4096, 7168, 32768, 8, **WEIGHT_GRADIENT), 256, "as large as a dense one"),
])  # fmt: skip
def test_groups_choose_their_rows(problem, rows, why):
    made = plan(problem, 132)
    assert made.block_m == rows and made.swap_ab == (rows < 64), (why, made)


@pytest.mark.parametrize("splits", range(1, 9))
def test_a_single_sm_is_planned_for_or_refused(splits):
    """Clusters of 3 and 6 CTAs find no place on it by the model's shares of places."""
    problem = Problem("dense", 16, 256, 1024)
    if splits == 1:
        assert plan(problem, 132, split_k=splits, num_sms=1).waves == plan(problem, 132, split_k=splits, num_sms=1).tiles
    else:
        with pytest.raises(ValueError, match=f"split_k={splits}"):
            plan(problem, 132, split_k=splits, num_sms=1)


def test_clusters_that_leave_places_free_need_another_wave_sooner():
    for splits, most in ((2, 264), (3, 216), (6, 208)):
        made = plan(Problem("dense", 16, 2112, 7168), 132, split_k=splits, swap_ab=True, block_m=16, block_n=64)
        assert made.at_once == most and made.waves == -(-made.tiles // most)


def test_few_rows_use_most_of_the_sms():
    made = plan(Problem("dense", 1, 2112, 7168), 132)
    assert made.tiles > 100, made
    assert "A and B swapped" in str(plan(Problem("dense", 1, 2112, 7168), 132, swap_ab=True)) and "µs" in str(made)


def test_planning_is_a_matter_of_few_predictions():
    """A call with a new M waits for its plan: at 10 µs a prediction, 64 of them take less than a millisecond."""
    from fp8_gemm import bench

    assert all(len(list(plans._candidates(Problem("dense", *shape), 132))) <= 64 for shape in bench.shapes())


def test_a_prediction_is_the_memorys_time_where_bytes_are_all_that_counts():
    """One row, much K: 117 MB at 4.27 TB/s are 27.5 µs. Launch, and what is left of the products' time, come on top."""
    seconds = plan(Problem("dense", 1, 7168, 16384), 132).seconds
    assert 7168 * 16384 / 4.27e12 < seconds < 1.2 * 7168 * 16384 / 4.27e12


def test_promising_plans_begin_with_the_chosen_one_and_can_all_be_launched():
    problem = Problem("dense", 64, 4096, 7168)
    made = plans.promising(problem, 132, 24)
    assert made[0] == plan(problem, 132) and len(set(made)) == 24
    assert all(plans.shared_bytes(one, problem) <= 227 * 1024 for one in made)


def test_the_benchmarks_shapes_and_candidates():
    from fp8_gemm import bench

    assert (4096, 2112, 7168) in bench.shapes() and (1, 576, 7168) in bench.shapes() and len(set(bench.shapes())) == len(bench.shapes())
    problem = Problem("dense", 16, 4096, 7168)
    made = bench.candidates(problem, 132, search=True)
    assert next(iter(made)) == "plan" and len(made) == bench.SEARCHED
    assert bench.candidates(problem, 132, search=False) == {"library": plan(problem)}
