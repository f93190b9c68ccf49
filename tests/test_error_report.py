"""The error report: its figures are those of the definition, and a planted fault in one K block stands out."""

import json
from dataclasses import replace

import pytest
import torch

from hopperlab import check, reference
from hopperlab.quantize import ScaledTensor, quantize

M, N, K = 136, 152, 640  # five K blocks; ragged segments along both axes
RECIPES = ("1x128", "128x128")


@pytest.fixture(scope="module")
def operands():
    generator = torch.Generator().manual_seed(5)
    sources = [torch.randn(rows, K, generator=generator) for rows in (M, N)]
    return *sources, *(quantize(x, recipe) for x, recipe in zip(sources, RECIPES))


def shares(report, figure):
    return [getattr(block, figure) for block in report.k_blocks]


def scaled_by(scaled: ScaledTensor, where, factor) -> ScaledTensor:
    scale = scaled.scale.clone()
    scale[where] *= factor
    return replace(scaled, scale=scale)


def test_figures_are_those_of_their_definition(operands):
    x, y, a, b = operands
    out = reference.matmul_hopper(a, b)
    report = check.error_report(out, a, b, a_source=x, b_source=y)
    against = [reference.matmul_exact(a, b), a.dequantize() @ b.dequantize().t(), x.bfloat16() @ y.bfloat16().t()]
    for comparison, wanted in zip(report.comparisons, against, strict=True):
        error = (out.double() - wanted.double()).abs()
        for statistics, values in ((comparison.absolute, error), (comparison.relative, error / wanted.double().abs())):
            assert statistics.max == float(values.max()) and statistics.count == M * N
            assert statistics.mean == pytest.approx(float(values.mean()))
            assert statistics.std == pytest.approx(float(values.std()), rel=1e-3)
            assert sum(statistics.bins) + statistics.zeros == M * N and len(statistics.edges) == len(statistics.bins) + 1
    fp64, fp32, bf16 = report.comparisons
    assert fp64.absolute.mean < bf16.absolute.mean / 10, "quantisation costs far more than the kernel"
    assert "originals" in bf16.reference and abs(fp64.absolute.mean - fp32.absolute.mean) < 1e-2 * fp64.absolute.mean


def test_a_histogram_has_each_error_in_its_bin(operands):
    *_, a, b = operands
    out = reference.matmul_exact(a, b)
    out[0, 0] += 1e-3
    out[1, :50] += 2e-6
    absolute = check.error_report(out, a, b).comparisons[0].absolute
    found = {edge: count for edge, count in zip(absolute.edges, absolute.bins) if count}
    assert absolute.zeros == M * N - 51
    # log10(1e-3) is an edge; adding to a large number moves it by less than a bin, to one side or the other.
    assert found.pop(-6) == 50 and sum(found.values()) == 1 and next(iter(found)) in (-3.5, -3)


@pytest.mark.parametrize("k_block", range(5))
@pytest.mark.parametrize("side", ["one row of A", "a column block of A", "a block of B"])
def test_a_bad_scale_is_the_maximum_of_its_k_block(operands, side, k_block):
    *_, a, b = operands
    wrong_a, wrong_b = a, b
    if side == "one row of A":
        wrong_a = scaled_by(a, (77, k_block), 1.25)
    elif side == "a column block of A":
        wrong_a = scaled_by(a, (slice(None), k_block), torch.linspace(0.5, 2, M))
    else:
        wrong_b = scaled_by(b, (1, k_block), 1.5)
    report = check.error_report(reference.matmul_exact(wrong_a, wrong_b).bfloat16(), a, b)
    for figure in ("share", "share_of_worst"):
        values = shares(report, figure)
        assert max(range(5), key=values.__getitem__) == k_block and values[k_block] > 0.9, values
        assert sorted(values)[-2] < 0.3, values
    assert report.suspect == k_block
    (top, bottom), (left, right) = report.worst_segment
    if side == "one row of A":
        assert top <= 77 <= bottom
    if side == "a block of B":
        assert left >= 128
    assert f"K block {k_block} (k {128 * k_block} to {128 * k_block + 127}) alone explains" in str(report)


def test_a_small_row_with_a_bad_scale_shows_beside_large_rows():
    """The rounding errors of the large rows are far larger than the whole small row."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(64, 512, generator=generator)
    x[5] *= 1e-6
    a, b = quantize(x, "1x128"), quantize(torch.randn(128, 512, generator=generator), "128x128")
    report = check.error_report(reference.matmul_hopper(scaled_by(a, (5, 2), 1.5), b), a, b)
    assert report.suspect == 2 and report.worst_segment[0] == (5, 5)


def test_one_column_of_b_with_a_bad_scale(operands):
    x, y, a, _ = operands
    b = quantize(y, "1x128")
    report = check.error_report(reference.matmul_hopper(a, scaled_by(b, (140, 3), 1.5)), a, b)
    assert report.suspect == 3 and report.worst_segment[1] == (140, 140)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipes", [("1x128", "128x128"), ("tensor", "tensor")])
def test_rounding_singles_out_no_block(operands, recipes, out_dtype):
    x, y, *_ = operands
    a, b = quantize(x, recipes[0]), quantize(y, recipes[1])
    interval = 128 if recipes[0] == "1x128" else None
    report = check.error_report(reference.matmul_hopper(a, b, interval=interval, out_dtype=out_dtype), a, b)
    assert report.suspect is None
    values = shares(report, "share")
    assert max(values) < 0.3 and max(values) < 3 * sorted(values)[2], values
    assert "alone explains" not in str(report)


@pytest.mark.parametrize("factor", [0.5, 1.01])
def test_a_wrong_factor_on_everything_is_no_ones_fault(operands, factor):
    *_, a, b = operands
    report = check.error_report(reference.matmul_exact(a, b) * factor, a, b)
    assert report.suspect is None
    assert max(shares(report, "share")) < 0.6


@pytest.mark.parametrize("shape", [(1, 256), (256, 1), (3, 3), (1, 1)])
def test_thin_outputs(shape):
    m, n = shape
    a, b = check.problem(m, n, 384, recipes=RECIPES, seed=2)
    right = check.error_report(reference.matmul_hopper(a, b, out_dtype=torch.float32), a, b)
    assert right.suspect is None and len(right.k_blocks) == 3
    wrong = check.error_report(reference.matmul_hopper(scaled_by(a, (slice(None), 1), 2), b, out_dtype=torch.float32), a, b)
    assert wrong.suspect == (1 if max(shape) >= 8 else None)


def test_nan_and_infinity_are_counted_and_left_out(operands):
    *_, a, b = operands
    out = reference.matmul_hopper(scaled_by(a, (77, 3), 2), b)
    clean = check.error_report(out, a, b)
    out[3], out[77, :7], out[90, 5] = torch.nan, torch.inf, -torch.inf
    report = check.error_report(out, a, b)
    assert (report.nan, report.infinite) == (N, 8)
    assert all(c.left_out == N + 8 and c.absolute.count == M * N - N - 8 for c in report.comparisons)
    assert report.suspect == 3 and report.comparisons[0].absolute.mean < 2 * clean.comparisons[0].absolute.mean
    out[:] = torch.nan
    nothing = check.error_report(out, a, b)
    assert nothing.comparisons[0].absolute.count == 0 and nothing.worst_segment is None and str(nothing)


def test_nan_in_the_operands_and_in_the_output_is_left_out(operands):
    x, y, *_ = operands
    x = x.clone()
    x[4, 9] = torch.nan
    a, b = quantize(x, "1x128"), quantize(y, "128x128")
    report = check.error_report(reference.matmul_hopper(scaled_by(a, (77, 1), 2), b), a, b, a_source=x, b_source=y)
    assert report.nan == N and report.comparisons[2].left_out == N and report.suspect == 1


@pytest.mark.parametrize("shape", [(0, 5, 128), (5, 0, 128), (5, 7, 0), (0, 0, 0)])
def test_empty_shapes(shape, tmp_path):
    m, n, k = shape
    a, b = check.problem(m, n, k, recipes=RECIPES)
    report = check.error_report(torch.zeros(m, n), a, b)
    assert report.shape == shape and report.suspect is None
    assert report.comparisons[0].absolute.max == 0 and json.dumps(report.to_json(), allow_nan=False) and str(report)
    report.plot().savefig(tmp_path / "empty.png")


def test_json_is_plain_and_holds_every_figure(operands):
    *_, a, b = operands
    report = check.error_report(reference.matmul_hopper(a, b), a, b)
    record = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert record["comparisons"][0]["absolute"]["max"] == report.comparisons[0].absolute.max
    assert [block["share"] for block in record["k_blocks"]] == shares(report, "share")
    assert replace(report, suspect=float("nan")).to_json()["suspect"] is None


def test_plot_draws_one_histogram_per_reference_and_two_bars_per_k_block(operands):
    *_, a, b = operands
    left, right = check.error_report(reference.matmul_hopper(a, b), a, b).plot().axes
    assert len(left.patches) == 3 and len(right.patches) == 10


def test_refuses_what_does_not_belong_together(operands):
    x, y, a, b = operands
    out = torch.zeros(M, N)
    with pytest.raises(ValueError, match=r"out has shape \(152, 136\)"):
        check.error_report(out.t(), a, b)
    with pytest.raises(ValueError, match="both a_source and b_source"):
        check.error_report(out, a, b, a_source=x)
    with pytest.raises(ValueError, match=r"b_source has shape \(136, 640\)"):
        check.error_report(out, a, b, a_source=x, b_source=x)
