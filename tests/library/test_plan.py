"""Every plan fits the hardware, is what was asked for, and can be read."""

import random
from dataclasses import replace

import pytest
import torch

from fp8_gemm import plan as plans
from fp8_gemm.plan import plan
from fp8_gemm.problem import Problem

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
        made = plan(problem, rng.choice((132, 114, 78)))
        assert plans.shared_bytes(made, problem) <= 227 * 1024, (problem, made)
        assert 2 <= made.num_stages <= 8, (problem, made)
        sums = made.rounds * made.block_y // 2 + (made.block_y // 2 if problem.interval else 0)
        assert sums <= 192 and made.block_y % 8 == 0 and 8 <= made.block_y <= 256, (problem, made)  # 232 registers less addresses
        assert 128 * (1 + made.consumers) <= 1024
        assert made.splits == 1 or (problem.kind == "dense" and made.splits <= -(-problem.k // max(problem.interval or 128, 128)))
        assert made.seconds > 0 and made.tiles > 0
        assert not plans.stores_by_tma(made, problem) or (made.block_y % 16 == 0 and not made.swap_ab)
        assert made.rounds == 1 or (problem.interval or 128) == 128


@pytest.mark.parametrize("overrides", [
    {"block_m": 128, "block_n": 112}, {"block_m": 16, "swap_ab": True}, {"block_n": 64, "swap_ab": True}, {"split_k": 3},
    {"num_stages": 3}, {"num_sms": 20}, {"group_m": 2}, {"batch_invariant": True},
])  # fmt: skip
def test_overrides_are_obeyed(overrides):
    made = plan(Problem("dense", 100, 4096, 4096), 132, **overrides)
    for name, value in overrides.items():
        field = {"split_k": "splits", "group_m": "group"}.get(name, name)
        if name != "batch_invariant":
            assert getattr(made, field) == value, made


@pytest.mark.parametrize("overrides, message", [
    ({"block_m": 100}, "block_m=100"), ({"block_n": 256, "swap_ab": False}, "block_n=256"), ({"split_k": 9}, "split_k=9"),
    ({"num_stages": 1}, "num_stages=1"), ({"num_stages": 8, "block_m": 256, "block_n": 128}, "num_stages=8"), ({"num_sms": 133}, "num_sms is 133"),
])  # fmt: skip
def test_impossible_overrides_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        plan(Problem("dense", 4096, 4096, 4096), 132, **overrides)


def test_batch_invariant_plans_do_not_depend_on_m():
    made = {replace(plan(Problem("dense", m, 4096, 7168), 132, batch_invariant=True), tiles=0, seconds=0.0) for m in (1, 17, 128, 4096)}
    assert len(made) == 1


def test_few_rows_use_most_of_the_sms():
    made = plan(Problem("dense", 1, 2112, 7168), 132)
    assert made.tiles > 100, made
    assert "A and B swapped" in str(plan(Problem("dense", 1, 2112, 7168), 132, swap_ab=True)) and "µs" in str(made)


def test_many_rows_take_the_tile_that_was_fastest():
    made = plan(Problem("dense", 4096, 4096, 4096), 132)
    assert (made.block_m, made.block_n, made.splits) == (256, 128, 1), made


def test_promising_plans_begin_with_the_chosen_one_and_can_all_be_launched():
    problem = Problem("dense", 64, 4096, 7168)
    made = plans.promising(problem, 132, 24)
    assert made[0] == plan(problem, 132) and len(set(made)) == 24
    assert all(plans.shared_bytes(one, problem) <= 227 * 1024 for one in made)


def test_the_benchmarks_shapes_and_candidates():
    from fp8_gemm import bench

    assert (4096, 2112, 7168) in bench.shapes() and (1, 576, 7168) in bench.shapes() and len(set(bench.shapes())) == len(bench.shapes())
    made = bench.candidates(Problem("dense", 16, 4096, 7168), 132)
    assert next(iter(made)) == "plan" and len(made) == bench.SEARCHED
