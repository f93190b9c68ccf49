"""The Triton backend, on the GPU or else on Triton's interpreter; and that it compiles for every GPU it is for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import part, random, refused

from fp8_gemm import GroupedTensor, ScaledTensor, gemm, grouped_gemm, k_grouped_gemm, masked_gemm, quantize, quantize_grouped
from fp8_gemm.problem import RECIPE_PAIRS
from hopperlab.reference import error_bound, matmul_exact

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TRITON = {"backend": "triton"}


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_right(got, a, b, interval=128, **addends):
    arithmetic = "tensor_core" if got.is_cuda else "fp32"
    exact = matmul_exact(a, b, **addends)
    bound = error_bound(a, b, got.dtype, interval, arithmetic=arithmetic, **addends)
    assert got.shape == exact.shape and not got.isnan().any()
    assert ((got.double() - exact).abs() <= bound).all()


def pair(m, n, k, recipe=("1x128", "128x128"), device="cpu", formats=("e4m3", "e4m3")):
    return (quantize(random(m, k, device=device), recipe[0], formats[0]),
            quantize(random(n, k, seed=1, device=device), recipe[1], formats[1]))  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPE_PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(1, 33, 576), (40, 130, 128), (129, 130, 300), (3, 1, 1)], ids=str)
def test_dense_recipes_on_ragged_shapes(recipe, shape, device):
    a, b = pair(*shape, recipe, device)
    assert_right(gemm(a, b, **TRITON), a, b)


@pytest.mark.parametrize("formats", [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_formats_outputs_bias_and_accumulation(formats, out_dtype, device):
    a, b = pair(20, 40, 300, device=device, formats=formats)
    bias, c = random(40, seed=2, device=device), random(20, 40, seed=3, dtype=out_dtype, device=device)
    assert_right(gemm(a, b, bias=bias, c=c, out_dtype=out_dtype, **TRITON), a, b, bias=bias, c=c)


@pytest.mark.parametrize("interval", [None, 128, 256])
def test_intervals_without_block_scales(interval, device):
    a, b = pair(20, 40, 700, ("row", "tensor"), device)
    assert_right(gemm(a, b, interval=interval, out_dtype=FP32, **TRITON), a, b, interval)


def test_windows_pitches_and_misaligned_data(device):
    wide, b = quantize(random(6, 400, device=device), "row"), quantize(random(10, 131, seed=1, device=device), "row")
    window = ScaledTensor(wide.data[1:, 3:134], wide.scale[1:].contiguous(), "row")
    assert_right(gemm(window, b, **TRITON), window, b)
    out = torch.full((8, 20), 5.0, dtype=BF16, device=device)
    gemm(window, b, out=out[2:7, 4:14], **TRITON)
    assert_right(out[2:7, 4:14], window, b)
    outside = out.clone()
    outside[2:7, 4:14] = 5
    assert (outside == 5).all()


@pytest.mark.parametrize("m, n, k", [(0, 5, 128), (5, 0, 128), (5, 6, 0)])
def test_empty_dimensions(m, n, k, device):
    bias = random(n, device=device)
    got = gemm(random(m, k, device=device), random(n, k, device=device), bias=bias, out_dtype=FP32, **TRITON)
    assert got.shape == (m, n) and (k or torch.equal(got, bias.expand(m, n)))


def test_batch_invariant_rows(device):
    a, b = pair(130, 40, 300, device=device)
    whole = gemm(a, b, batch_invariant=True, **TRITON)
    for rows in (1, 20, 64):
        assert torch.equal(gemm(part(a, 0, rows), b, batch_invariant=True, **TRITON), whole[:rows])


@pytest.mark.parametrize("sizes", [[3, 0, 40, 1], [0, 0, 0, 0], [0, 130, 0, 20], [17, 16, 15, 64]], ids=str)
@pytest.mark.parametrize("recipe", RECIPE_PAIRS[:4], ids=str)
def test_contiguous_groups(recipe, sizes, device):
    total = sum(sizes)
    x = random(total + 3, 300, device=device)
    if recipe[0] != "tensor":
        x[total:] = torch.nan
    a, b = quantize(x, recipe[0]), quantize_grouped(random(4, 40, 300, seed=1, device=device), recipe[1])
    out = torch.full((total + 3, 40), 5.0, device=device)
    grouped_gemm(a, b, counts=ints(device, *sizes), out=out, out_dtype=FP32, **TRITON)
    start = 0
    for group, size in enumerate(sizes):
        assert_right(out[start : start + size], part(a, start, start + size), b[group])
        start += size
    assert (out[total:] == 5).all()


def test_contiguous_groups_with_padding_between(device):
    indices = ints(device, *[0] * 5, *[-1] * 11, *[2] * 33, *[-1] * 15, *[3] * 2)
    x = random(66, 200, device=device)
    x[indices < 0] = torch.inf
    a, b = quantize(x), quantize_grouped(random(4, 24, 200, seed=1, device=device))
    out = torch.full((66, 24), 5.0, dtype=BF16, device=device)
    grouped_gemm(a, b, indices=indices, out=out, **TRITON)
    for group in (0, 2, 3):
        rows = (indices == group).nonzero().flatten()
        assert_right(out[rows], part(a, int(rows[0]), int(rows[-1]) + 1), b[group])
    assert (out[indices < 0] == 5).all()


@pytest.mark.parametrize("max_m", [1, 20, 70, 130])
@pytest.mark.parametrize("recipe", RECIPE_PAIRS[:4], ids=str)
def test_masked_groups(recipe, max_m, device):
    masked_m = ints(device, 0, max_m, (max_m + 1) // 2)
    a = quantize_grouped(random(3, max_m, 200, device=device), recipe[0])
    b = quantize_grouped(random(3, 40, 200, seed=1, device=device), recipe[1])
    out = torch.full((3, max_m, 40), 5.0, dtype=BF16, device=device)
    masked_gemm(a, b, masked_m, out=out, **TRITON)
    for group, rows in enumerate(masked_m.tolist()):
        assert_right(out[group, :rows], part(a[group], 0, rows), b[group])
        assert (out[group, rows:] == 5).all()


def test_masked_windows(device):
    a = quantize_grouped(random(3, 20, 400, device=device), "row")
    window = GroupedTensor(a.data[:, 2:12, 5:205], a.scale[:, 2:12].contiguous(), "row")
    b = quantize_grouped(random(3, 40, 200, seed=1, device=device), "tensor")
    got = masked_gemm(window, b, ints(device, 10, 3, 10), **TRITON)
    assert_right(got[2], window[2], b[2])


@pytest.mark.parametrize("sizes", [[128, 0, 300], [1, 127, 129], [0, 0]], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_k_groups(sizes, accumulate, device):
    a, b = random(20, sum(sizes), device=device), random(40, sum(sizes), seed=1, device=device)
    offsets = torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int().to(device)
    c = random(len(sizes), 20, 40, seed=2, device=device) if accumulate else None
    got = k_grouped_gemm(a, b, offsets, c=c, **TRITON)
    start = 0
    for group, size in enumerate(sizes):
        columns = slice(start, start + size)
        addends = {"c": c[group]} if accumulate else {}
        assert_right(got[group], quantize(a[:, columns], "1x128"), quantize(b[:, columns], "1x128"), **addends)
        start += size


def test_plan_overrides_are_refused(device):
    with refused(ValueError, "block_m", "'triton'", "batch_invariant"):
        gemm(*pair(4, 8, 128, device=device), block_m=64, **TRITON)


def test_compiles_for_every_gpu_it_is_for(tmp_path):
    """Without the interpreter, which forgives types that the compiler does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("triton_compiles.py")
    done = subprocess.run([sys.executable, str(program), "quick"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["sm_89", "sm_90", "sm_100", "sm_120"]
