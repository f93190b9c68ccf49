"""Public calls on the machine that runs the CUDA kernels (GPU or simulator) give the bits that exact=True predicts.

What test_kernels.py shows of the kernels, this shows of the way to them: offsets, counts, indices, padding, K groups, layouts.
"""

import pytest
import torch
from helpers import random

from fp8_gemm import gemm, grouped_gemm, k_grouped_gemm, masked_gemm, quantize, quantize_grouped

BF16, FP32 = torch.bfloat16, torch.float32


def both(call, device):
    """(from the kernels, predicted). One plan for every M, so that nothing is split along K."""
    kernels = "cuda" if device.type == "cuda" else "simulator"
    return call(backend=kernels, batch_invariant=True), call(backend="reference", exact=True)


def same_bits(call, device):
    got, want = both(call, device)
    assert got.dtype == want.dtype and torch.equal(got, want)


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_layouts_bias_and_c(layout, device):
    a, b = random(20, 200, device=device), random(24, 200, seed=1, device=device)
    given = a.t() if layout[0] == "t" else a, b.t() if layout[1] == "n" else b
    bias, c = random(24, seed=2, device=device, dtype=BF16), random(20, 24, seed=3, device=device, dtype=BF16)
    same_bits(lambda **how: gemm(*given, layout=layout, bias=bias, c=c, **how), device)


@pytest.mark.parametrize("recipe, interval", [(("1x128", "1x128"), 128), (("row", "tensor"), None), (("tensor", "row"), 256)])
def test_recipes_and_intervals(recipe, interval, device):
    a, b = random(2, 5, 300, device=device), random(33, 300, seed=1, device=device)
    if recipe[0] == "tensor":  # one scale for all rows is not batch invariant, if the call is to make it
        a = quantize(a.flatten(0, 1), "tensor")
    same_bits(lambda **how: gemm(a, b, recipe=recipe, interval=interval, out_dtype=FP32, **how), device)


@pytest.mark.parametrize("way", ["counts", "indices"])
def test_contiguous_groups(way, device):
    index = [0] * 9 + [-1] * 3 + [2] * 4 + [-1] * 2 if way == "indices" else [0] * 9 + [2] * 4 + [-1] * 5
    x, w = random(18, 200, device=device), random(3, 24, 200, seed=1, device=device)
    x[torch.tensor(index, device=device) < 0] = torch.nan
    groups = {"counts": ints(device, 9, 0, 4), "indices": ints(device, *index)}

    def call(**how):
        return grouped_gemm(x, w, **{way: groups[way]}, out=torch.full((18, 24), 5.0, dtype=BF16, device=device), **how)

    same_bits(call, device)
    assert (call(backend="reference")[torch.tensor(index, device=device) < 0] == 5).all()


def test_masked_groups(device):
    a = quantize_grouped(random(3, 20, 200, device=device), "1x128")
    w = quantize_grouped(random(3, 24, 200, seed=1, device=device))
    masked_m = ints(device, 20, 0, 7)

    def call(**how):
        return masked_gemm(a, w, masked_m, out=torch.full((3, 20, 24), 5.0, device=device), out_dtype=FP32, **how)

    same_bits(call, device)


def test_k_groups_of_any_size(device):
    a, b = random(20, 300, device=device), random(24, 300, seed=1, device=device)
    offsets, c = ints(device, 0, 100, 100, 300), random(3, 20, 24, seed=2, device=device)
    same_bits(lambda **how: k_grouped_gemm(a, b, offsets, c=c, **how), device)


def test_gradients(device):
    """Forward, dA and dB, each of them on the kernels."""
    grad = random(20, 24, seed=2, device=device, dtype=BF16)

    def call(**how):
        x, w = (random(*shape, device=device).requires_grad_() for shape in ((20, 200), (24, 200)))
        return torch.cat([g.flatten() for g in torch.autograd.grad(gemm(x, w, **how), (x, w), grad)])

    same_bits(call, device)


def test_weights_quantised_once(device):
    x, w = random(3, 200, device=device), quantize(random(130, 200, seed=1, device=device), "128x128")
    same_bits(lambda **how: gemm(x, w, **how), device)
