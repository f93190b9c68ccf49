"""Every step found on disk: right to the bit on shared shapes, the same bits as the H200, finished kernels clean, bad input refused."""

import functools
import os

import pytest
import torch

from hopperlab import capability, check, quantize, reference, report, stage

# K that is no multiple of 16 is copied for TMA, with a warning: right here, where every K is tried.
pytestmark = pytest.mark.filterwarnings("ignore:.*which TMA needs:UserWarning")

STEPS = [(found, step) for found in stage.find() for step in found.steps]
each_step = pytest.mark.parametrize("found, step", STEPS, ids=[f"{found.name}-{step.name}" for found, step in STEPS])


@each_step
def test_right_on_every_shared_shape_and_the_h200s_bits(found, step):
    digests = {}
    for case in stage.cases(step):
        a, b = check.problem(case.m, case.n, case.k, recipes=case.recipes, formats=case.formats, device=capability.device())
        verdict = check.run(step.gemm, a, b, case.out_dtype, expected=step.expected, bound=step.bound, tile=step.tile)
        assert verdict.ok, f"{case}: {verdict}"
        digests[str(case)] = verdict.digest
    recorded = report.published_step(report.published(), found.name, step.name)
    if recorded is None:
        pytest.skip(f"right, but docs/results/{report.LADDER} holds no H200 run of this step to compare bits with")
    if step.expected:
        theirs = {case["case"]: case["digest"] for case in recorded["cases"]}
        assert digests == {case: theirs[case] for case in digests}, "not the bits that an H200 wrote"


@each_step
def test_every_recipe_format_pair_and_output_type(found, step):
    pairs = [(step.recipes[0], formats, out_dtype) for formats in step.formats for out_dtype in step.out_dtypes]
    pairs += [(recipes, step.formats[-1], step.out_dtypes[0]) for recipes in step.recipes[1:]]
    for recipes, formats, out_dtype in pairs:
        a, b = check.problem(17, 19, 37, recipes=recipes, formats=formats, device=capability.device())
        verdict = check.run(step.gemm, a, b, out_dtype, expected=step.expected, bound=step.bound, tile=step.tile)
        assert verdict.ok, f"{recipes} {formats} {out_dtype}: {verdict}"


@each_step
def test_empty_and_tiny_problems(found, step):
    for m, n, k in ((0, 5, 16), (5, 0, 16), (3, 4, 0), (1, 1, 1)):
        a, b = check.problem(m, n, k, recipes=step.recipes[0], device=capability.device())
        verdict = check.run(step.gemm, a, b, step.out_dtypes[0], expected=step.expected, bound=step.bound, tile=step.tile)
        assert verdict.ok, f"{m}x{n}x{k}: {verdict}"


@each_step
def test_every_byte_zero_blocks_and_nonfinite_values(found, step):
    """All 256 bytes of each format, infinities and NaN included; a row of NaN changes no other row."""
    for fmt in ("e4m3", "e5m2"):
        codes = torch.arange(256, dtype=torch.uint8, device=capability.device()).reshape(16, 16)
        dtype = quantize.format_of(fmt).dtype
        for codes_b in (codes.flip(0), codes.t(), torch.zeros_like(codes)):
            a, b = (quantize.ScaledTensor(x.contiguous().view(dtype), torch.ones(quantize.scale_shape(recipe, 16, 16), device=x.device), recipe)
                    for x, recipe in zip((codes, codes_b), step.recipes[0]))  # fmt: skip
            verdict = check.run(step.gemm, a, b, torch.float32, expected=step.expected, bound=step.bound, tile=step.tile)
            assert verdict.ok, f"{fmt}: {verdict}"


@each_step
def test_refuses_operands_it_cannot_take(found, step):
    device = capability.device()
    a, b = check.problem(16, 8, 32, recipes=step.recipes[0], device=device)
    out = torch.empty(16, 8, dtype=step.out_dtypes[0], device=device)
    longer, _ = check.problem(16, 8, 48, recipes=step.recipes[0], device=device)
    refused = next(pair for pair in (("1x128", "tensor"), ("row", "1x128")) if pair not in step.recipes)
    others = check.problem(16, 8, 32, recipes=refused, device=device)
    strided = quantize.ScaledTensor(torch.empty(32, 16, dtype=a.data.dtype, device=device).t(), a.scale, a.recipe)
    for arguments, error, message in (
        ((a.data, b, out), TypeError, "a: got Tensor; quantise it first"),
        ((longer, b, out), ValueError, "K must be equal"),
        ((a, b, out.t()), ValueError, r"out: shape \(8, 16\); A and B give \(M, N\) = \(16, 8\)"),
        ((a, b, out.to(torch.float64)), TypeError, "out: dtype torch.float64"),
        ((a, b, torch.empty(8, 16, dtype=out.dtype, device=device).t()), ValueError, "out: strides"),
        ((strided, b, out), ValueError, "a.data: strides"),
        ((a, b, out.to("meta")), ValueError, "must be on one device"),
    ):
        with pytest.raises(error, match=message):
            step.gemm(*arguments)
    with pytest.raises(ValueError, match=f"a, b: recipes '{refused[0]}' and '{refused[1]}'; this step takes"):
        step.gemm(*others, out)


CUDA = [(found, step) for found, step in STEPS if step.language == "cuda"]


@pytest.mark.parametrize("found, step", CUDA, ids=[f"{found.name}-{step.name}" for found, step in CUDA])
def test_finished_kernels_compile_without_spills_or_injected_waits(found, step, monkeypatch):
    """The log of every kernel this step launches, for the format pair with the most registers in use."""
    from hopperlab.kernel import Kernel

    launched = []
    monkeypatch.setattr(Kernel, "launch", lambda self, *arguments, **options: launched.append(self))
    for formats in step.formats:
        a, b = check.problem(17, 19, 37, recipes=step.recipes[0], formats=formats, device=capability.device())
        step.gemm(a, b, torch.empty(17, 19, dtype=step.out_dtypes[0], device=capability.device()))
    assert launched
    for kernel in launched:
        assert kernel.compiled.problems == [], kernel


ORDERS = int(os.environ.get("HOPPERLAB_ORDERS", 4))  # random orders each; 100 were run when the kernels were finished


@pytest.mark.parametrize("found, step", CUDA, ids=[f"{found.name}-{step.name}" for found, step in CUDA])
def test_no_hazard_and_the_same_bits_in_every_order(found, step):
    """Asynchronous work as late as allowed, at once, and in random orders, on the simulator: no race, no deadlock, equal bits."""
    from hopperlab.kernel import simulation

    # Eight K blocks go once round every ring; kernels without barriers in memory have nothing that long.
    m, n, k = (130, 72, 900) if "mbarrier" in (found.path / step.source).read_text() else (70, 40, 100)
    a, b = check.problem(m, n, k, recipes=step.recipes[0])
    digests = set()
    for options in [{"order": "lazy"}, {"order": "eager"}] + [{"seed": seed} for seed in range(ORDERS)]:
        out, _ = check.poisoned(m, n, step.out_dtypes[0], "cpu")
        with simulation(**options) as reports:
            step.gemm(a, b, out)
        assert reports
        digests.add(check.digest(out))
    assert len(digests) == 1


def test_unknown_stage():
    with pytest.raises(ValueError, match=r"stage: got '99', there are \['01_naive'"):
        stage.find("99")


def step_of(number, name):
    return next(step for step in stage.find(number)[0].steps if step.name == name)


BY_ROWS = {"04": {"group_m": 1}, "05": {"tile": stage.find("05")[0].module.Tile(1, 128, 1)}}  # groups of one row of tiles


@pytest.mark.parametrize("number, name, shape, options", [
    # Two rows of tiles are two groups, of which the second does not begin at row 0.
    ("04", "persistent", (130, 72, 900), {}),  # and the second tile finds every slot given back by the first
    ("04", "overlapped", (130, 72, 128), {"cluster": 1, "block_n": 128}),
    ("05", "promoted", (130, 72, 128), {}),
    ("05", "block scaled", (130, 136, 128), {}),  # and a CTA's next tile has scales of its own
    ("05", "overlapped", (130, 72, 128), {}),
    ("05", "wgrad", (130, 72, 128), {}),
    ("05", "block scaled", (8, 136, 66 * 128), {}),  # 32 scales of B are fetched at a time, two times ahead
])  # fmt: skip
def test_tiles_one_after_another(number, name, shape, options, monkeypatch):
    step = step_of(number, name)
    monkeypatch.setattr(stage.find(number)[0].module, "SMS_OF_AN_H200", 1)
    a, b = check.problem(*shape, recipes=step.recipes[0])
    gemm = functools.partial(step.gemm, **BY_ROWS[number], **options)
    verdict = check.run(gemm, a, b, step.out_dtypes[0], expected=step.expected)
    assert verdict.ok, verdict


def test_promotion_after_two_blocks_or_beyond_a_threshold():
    promoted, unscaled_then_scaled = (getattr(stage.find("05")[0].module, name) for name in ("promoted", "unscaled_then_scaled"))
    a, b = check.problem(17, 19, 600)
    gemm, expected = (functools.partial(each, interval=256) for each in (promoted, unscaled_then_scaled))
    assert check.run(gemm, a, b, expected=expected).ok

    def by_threshold(a, b, out_dtype, threshold=7e5, rows=64):
        """64 rows, which a warpgroup has, decide together: the first 64 here have a sum beyond it, the others not."""
        totals, one = [], torch.ones(1)
        for first in range(0, a.rows, rows):
            total, start = 0.0, 0  # start: of what the accumulator holds
            for end in range(128, a.k + 1, 128):
                part = [quantize.ScaledTensor(x[:, start:end].contiguous(), one, "tensor") for x in (a.data[first : first + rows], b.data)]
                sums = reference.matmul_hopper(*part, interval=None, out_dtype=torch.float32)
                if end == a.k or sums.abs().max() > threshold:
                    total, start = total + sums, end
            totals.append(total)
        return (torch.cat(totals) * (a.scale * b.scale)).to(out_dtype)

    a, b = check.problem(70, 72, 512)
    verdict = check.run(functools.partial(promoted, interval=None, threshold=7e5), a, b, torch.float32, expected=by_threshold)
    assert verdict.ok, verdict


@pytest.mark.parametrize("m, n, sms, accumulate", [
    (700, 130, 4, False),  # 6 tiles: 4 whole ones, and 2 in halves, each of which gets a CTA
    (600, 130, 4, True),  # the same, where the last half has no rows
    (520, 264, 5, False),  # 9 tiles: the last 4 would be 8 halves, too many for 5 CTAs, so they stay whole
    (300, 132, 8, True),  # 4 tiles on 8 SMs: halves only; rows of 16 bytes, so that TMA adds
])  # fmt: skip
def test_weight_gradients_with_the_last_wave_in_halves(m, n, sms, accumulate, monkeypatch):
    step = step_of("05", "wgrad")
    monkeypatch.setattr(stage.find("05")[0].module, "SMS_OF_AN_H200", sms)
    a, b = check.problem(m, n, 260, recipes=("1x128", "1x128"))
    out = torch.randn(m, n) if accumulate else check.poisoned(m, n, torch.float32, "cpu")[0]
    want = reference.matmul_hopper(a, b, out_dtype=torch.float32, c=out.clone() if accumulate else None)
    step.gemm(a, b, out, accumulate=accumulate)
    assert torch.equal(out.view(torch.int32), want.view(torch.int32))
