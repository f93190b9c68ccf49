"""The check must reject every fault a kernel can have, and name where it is; and accept what hardware computes."""

import re

import pytest
import torch

from hopperlab import check, reference

M, N, K = 256, 384, 512
RECIPES = ("1x128", "128x128")


@pytest.fixture(scope="module")
def right():
    a, b = check.problem(M, N, K, recipes=RECIPES, seed=3)
    return a, b, reference.matmul_hopper(a, b), reference.error_bound(a, b, torch.bfloat16, interval=128)


def modes(right):
    """The two ways to check: equal bits, and a bound per element."""
    a, b, out, bound = right
    return {"bits": {"expected": out}, "bound": {"bound": bound}}


def rejected(right, wrong, mode) -> check.Verdict:
    a, b, *_ = right
    verdict = check.compare(wrong, a, b, **modes(right)[mode])
    assert not verdict.ok and verdict.message.startswith("WRONG")
    return verdict


both = pytest.mark.parametrize("mode", ["bits", "bound"])


@both
def test_accepts_the_right_result(right, mode):
    a, b, out, _ = right
    verdict = check.compare(out, a, b, **modes(right)[mode])
    assert verdict.ok, verdict
    assert 0 < verdict.max_rel_error < 0.01 and 0 < verdict.diff < 1e-4


@both
def test_one_element_off_by_two_percent(right, mode):
    wrong = right[2].clone()
    m, n = divmod(int(wrong.abs().argmax()), N)
    wrong[m, n] *= 1.02
    verdict = rejected(right, wrong, mode)
    assert verdict.wrong == 1 and verdict.first == (m, n) and verdict.tile == (m // 128, n // 128)


def test_every_single_element_off_by_two_percent_is_noticed_or_within_rounding(right):
    """Where 2 % of an element is more than its bound, the bound alone must catch it; bits always do."""
    a, b, out, bound = right
    exact = reference.matmul_exact(a, b)
    caught = ((out.double() * 1.02 - exact).abs() > bound) | (out.double() == 0)
    typical = out.abs() > out.abs().float().median()
    assert caught[typical].float().mean() > 0.99


@both
def test_one_row_shifted(right, mode):
    wrong = right[2].clone()
    wrong[130] = right[2][129]
    verdict = rejected(right, wrong, mode)
    assert verdict.first[0] == 130 and verdict.tile[0] == 1
    assert "Row 130 holds the values of row 129" in verdict.message


def test_one_tile_of_zeros_in_a_large_output_that_a_global_metric_lets_pass():
    """128x128 zeros in 4096x4096: calc_diff stays under the usual 1e-3. The check does not."""
    a, b = check.problem(4096, 4096, 32, seed=1)
    out = reference.matmul_exact(a, b).to(torch.bfloat16)
    bound = reference.error_bound(a, b, torch.bfloat16)
    assert check.compare(out, a, b, bound=bound).ok
    out[2048:2176, 1024:1152] = 0
    verdict = check.compare(out, a, b, bound=bound)
    assert verdict.diff < 1e-3
    assert not verdict.ok and verdict.tile == (16, 8) and verdict.first == (2048, 1024)
    assert "all zero" in verdict.message


@both
def test_a_tile_left_unwritten(right, mode):
    a, b, out, _ = right
    wrong, _ = check.poisoned(M, N, torch.bfloat16, "cpu")
    wrong[:] = out
    fresh, _ = check.poisoned(M, N, torch.bfloat16, "cpu")
    wrong[128:256, 256:384] = fresh[128:256, 256:384]
    verdict = rejected(right, wrong, mode)
    assert verdict.tile == (1, 2) and f"{128 * 128} elements were never written" in verdict.message


def test_a_tile_left_from_the_last_run(right):
    """A kernel that skips a tile cannot pass by finding an earlier right answer in its output: run() poisons it first."""
    a, b, out, _ = right

    def skips_a_tile(a, b, d):
        d[:128] = out[:128]

    verdict = check.run(skips_a_tile, a, b, expected=lambda *_: out)
    assert not verdict.ok and verdict.first == (128, 0) and "never written" in verdict.message


@both
def test_one_nan(right, mode):
    wrong = right[2].clone()
    wrong[200, 7] = float("nan")
    verdict = rejected(right, wrong, mode)
    assert verdict.wrong == 1 and verdict.first == (200, 7) and "1 NaN" in verdict.message


@both
@pytest.mark.parametrize("k_block", [0, 2, 3])
def test_one_k_block_with_its_neighbours_scale(right, mode, k_block):
    a, b, *_ = right
    scale = a.scale.clone()
    scale[:, k_block] = a.scale[:, k_block - 1] * 1.5  # scales of random normal data are nearly equal
    wrong = reference.matmul_hopper(check.ScaledTensor(a.data, scale, a.recipe), b)
    verdict = rejected(right, wrong, mode)
    assert verdict.k_block == k_block and f"K block {k_block} (k {128 * k_block} to {128 * k_block + 127})" in verdict.message


@both
def test_scales_transposed(mode):
    a, b = check.problem(512, 512, 512, recipes=("1x128", "128x128"), seed=5, outliers=True)
    b.scale.mul_(torch.arange(1, 17).reshape(4, 4))
    out, bound = reference.matmul_hopper(a, b), reference.error_bound(a, b, torch.bfloat16, interval=128)
    wrong = reference.matmul_hopper(a, check.ScaledTensor(b.data, b.scale.t().contiguous(), b.recipe))
    kwargs = {"expected": out} if mode == "bits" else {"bound": bound}
    assert check.compare(out, a, b, **kwargs).ok
    assert not check.compare(wrong, a, b, **kwargs).ok


@both
@pytest.mark.parametrize("where", ["row", "column"])
def test_the_last_ragged_row_or_column_missing(mode, where):
    a, b = check.problem(129, 65, 130, seed=2)
    out, bound = reference.matmul_hopper(a, b, interval=None), reference.error_bound(a, b, torch.bfloat16)
    wrong, _ = check.poisoned(129, 65, torch.bfloat16, "cpu")
    part = (slice(128), slice(None)) if where == "row" else (slice(None), slice(64))
    wrong[part] = out[part]
    verdict = check.compare(wrong, a, b, **({"expected": out} if mode == "bits" else {"bound": bound}), tile=(128, 64))
    assert not verdict.ok and verdict.first == ((128, 0) if where == "row" else (0, 64))
    assert verdict.tile == ((1, 0) if where == "row" else (0, 1))


def test_a_write_past_the_output(right):
    a, b, out, _ = right

    def overruns(a, b, d):
        d[:] = out
        torch.as_strided(d, (1,), (1,), d.storage_offset() + d.numel())[0] = 1.0

    verdict = check.run(overruns, a, b, expected=lambda *_: out)
    assert not verdict.ok and "outside its output" in verdict.message and "0 elements after the end" in verdict.message


def test_an_input_changed(right):
    a, b, out, _ = right
    mine = check.ScaledTensor(a.data.clone(), a.scale.clone(), a.recipe)

    def scribbles(a, b, d):
        d[:] = out
        a.scale[0, 0] += 1

    verdict = check.run(scribbles, mine, b, expected=lambda *_: out)
    assert not verdict.ok and "changed A's scale" in verdict.message


def test_a_constant_factor_is_named(right):
    assert "1.5 times what it should be" in rejected(right, right[2] * 1.5, "bound").message


def test_nan_in_the_inputs_is_expected_where_it_belongs():
    a, b = check.problem(130, 70, 256, seed=4)
    a.data.view(torch.uint8)[100, 30] = 0x7F
    out, bound = reference.matmul_hopper(a, b, interval=None), reference.error_bound(a, b, torch.bfloat16)
    assert out[100].isnan().all() and int(out.isnan().sum()) == 70
    assert check.compare(out, a, b, expected=out).ok and check.compare(out, a, b, bound=bound).ok
    hidden = out.clone()
    hidden[100, 3] = 0.0
    spread = out.clone()
    spread[101] = float("nan")
    for wrong in (hidden, spread):
        assert not check.compare(wrong, a, b, bound=bound).ok and not check.compare(wrong, a, b, expected=out).ok


def test_empty_outputs_and_empty_k():
    for m, n, k in ((0, 5, 16), (5, 0, 16), (3, 4, 0)):
        a, b = check.problem(m, n, k)
        out = torch.zeros(m, n, dtype=torch.bfloat16)
        assert check.compare(out, a, b, expected=out).ok


def test_refuses_misuse(right):
    a, b, out, bound = right
    with pytest.raises(ValueError, match=r"out has shape \(384, 256\)"):
        check.compare(out.t(), a, b, expected=out)
    with pytest.raises(ValueError, match="one of them"):
        check.compare(out, a, b)
    with pytest.raises(ValueError, match="one of them"):
        check.compare(out, a, b, expected=out, bound=bound)
    for other in (out.double(), out.int()):
        with pytest.raises(TypeError, match=f"out.dtype is {other.dtype}; allowed are torch.float32, torch.bfloat16"):
            check.compare(other, a, b, bound=bound)
    for other in (out.float(), out.half(), out[:1], out[:, :1], out.t()):
        given = f"expected has shape {tuple(other.shape)} and dtype {other.dtype}, and out"
        with pytest.raises(ValueError, match=re.escape(given)):
            check.compare(out, a, b, expected=other)
    with pytest.raises(ValueError, match=r"bound has shape \(1, 384\), and out \(256, 384\)"):
        check.compare(out, a, b, bound=bound[:1])
    with pytest.raises(TypeError, match="dtype is torch.float64"):
        check.run(lambda a, b, out: None, a, b, torch.float64, bound=reference.error_bound)


def test_problems_differ_by_position_and_seed():
    a, b = check.problem(64, 64, 64, seed=0)
    c, _ = check.problem(64, 64, 64, seed=1)
    assert not torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    assert not torch.equal(a.data.view(torch.uint8), c.data.view(torch.uint8))
    rows = {bytes(row) for row in a.data.view(torch.uint8).numpy()}
    assert len(rows) == 64
