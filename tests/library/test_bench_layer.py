"""The decoder layer of the benchmark: all ways compute the same layer, on a machine without a GPU."""

import pytest
import torch

from fp8_gemm import bench_layer

SMALL = bench_layer.Layer(hidden=256, heads=4, kv_heads=2, head=64, intermediate=128, context=8)


def by_hand(layer, x, weights, cache):
    """The layer in FP64, written out; attention head by head."""
    x, weights = x.double(), {name: weight.double() for name, weight in weights.items()}
    norm = lambda y: y / (y.square().mean(1, keepdim=True) + torch.finfo(torch.bfloat16).eps).sqrt()  # noqa: E731
    q, k, v = (norm(x) @ weights["qkv"].t()).split([heads * layer.head for heads in (layer.heads, layer.kv_heads, layer.kv_heads)], dim=1)
    seen = torch.empty_like(q)
    for head in range(layer.heads):
        own, shared = slice(head * layer.head, (head + 1) * layer.head), head // (layer.heads // layer.kv_heads)
        of_group = slice(shared * layer.head, (shared + 1) * layer.head)
        for token in range(len(x)):
            keys = k[: token + 1, of_group] if cache is None else cache[0][token, shared].double()
            values = v[: token + 1, of_group] if cache is None else cache[1][token, shared].double()
            seen[token, own] = torch.softmax(keys @ q[token, own] / layer.head**0.5, 0) @ values
    x = x + seen @ weights["out"].t()
    gate, value = (norm(x) @ weights["gate_up"].t()).chunk(2, dim=1)
    return x + (gate * torch.sigmoid(gate) * value) @ weights["down"].t()


@pytest.mark.parametrize("decode", [True, False])
def test_all_ways_compute_the_layer(decode):
    made = bench_layer.inputs(SMALL, 5, decode, torch.device("cpu"), sets=2)
    ways, missing = bench_layer.calls(SMALL, made, backend="reference")
    assert set(ways) | set(missing) == {"bf16", "library", "deep_gemm"}
    for place, (x, plain, _, cache) in enumerate(made):
        right = by_hand(SMALL, x, plain, cache)
        for name, bound in (("bf16", 0.02), ("library", 0.06)):  # of the largest output: bf16 and FP8 operands
            assert float((ways[name][place]().double() - right).abs().max() / right.abs().max()) < bound, name


def test_a_wrong_layer_is_seen():
    """The bound above is one that a layer without its attention does not reach."""
    ((x, plain, _, cache),) = bench_layer.inputs(SMALL, 5, True, torch.device("cpu"), sets=1)
    right = by_hand(SMALL, x, plain, cache)
    without = by_hand(SMALL, x, plain | {"out": torch.zeros_like(plain["out"])}, cache)
    assert float((without - right).abs().max() / right.abs().max()) > 0.1


def test_the_layer_has_the_parameters_that_it_says():
    assert sum(n * k for n, k in bench_layer.Layer().weights.values()) == 218_103_808
