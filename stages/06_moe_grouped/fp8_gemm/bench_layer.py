"""A decoder layer end to end: its linears in BF16, through the library, and through DeepGEMM, everything else the same.

    python -m fp8_gemm.bench RECORD.json --layer

Activations are quantised where they arise, weights once. DeepGEMM quantises nothing, so its linears use the library's kernels for
that: what differs is the products, and what surrounds their calls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from fp8_gemm import gemm, quantize, swiglu_quantize
from hopperlab import bench
from hopperlab.quantize import ScaledTensor


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer: by default those of an 8-billion-parameter Llama 3, 218 million parameters of it."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    intermediate: int = 14336
    context: int = 1024  # tokens that each sequence has already, when decoding

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each linear."""
        return {"qkv": ((self.heads + 2 * self.kv_heads) * self.head, self.hidden), "out": (self.hidden, self.heads * self.head),
                "gate_up": (2 * self.intermediate, self.hidden), "down": (self.hidden, self.intermediate)}  # fmt: skip


DECODE, PREFILL = (1, 16, 64, 128), (4096,)  # tokens: one of each sequence; all of one sequence
SETS = 2  # of weights: each alone exceeds L2

Product = Callable[[torch.Tensor, object], torch.Tensor]


def forward(layer: Layer, x: torch.Tensor, weights: dict, cache: tuple[torch.Tensor, torch.Tensor] | None, product: Product,
            middle: Callable) -> torch.Tensor:  # fmt: skip
    """x (tokens, hidden) bf16 through the layer. cache: keys and values (tokens, kv heads, context, head), one sequence per token;
    None: x is one sequence, seen causally. Positions are not encoded: it would be the same for all."""
    tokens, queries, keys = len(x), layer.heads * layer.head, layer.kv_heads * layer.head
    qkv = product(rms_norm(x, (layer.hidden,)), weights["qkv"])
    q, k, v = qkv.split((queries, keys, keys), dim=1)
    if cache is None:
        q, k, v = (part.view(1, tokens, -1, layer.head).transpose(1, 2) for part in (q, k, v))
        seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    else:
        seen = scaled_dot_product_attention(q.view(tokens, layer.heads, 1, layer.head), *cache, enable_gqa=True)
    x = x + product(seen.reshape(tokens, queries), weights["out"])
    return x + middle(product(rms_norm(x, (layer.hidden,)), weights["gate_up"]), weights["down"])


def bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight)


def bf16_middle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=1)
    return linear(silu(gate) * value, weight)


def library_way(backend: str | None = None) -> tuple[Product, Callable]:
    """gemm quantises what comes in; the middle of the MLP is one pass, swiglu_quantize."""
    product = lambda x, weight: gemm(x, weight, backend=backend)
    return product, lambda x, weight: product(swiglu_quantize(x), weight)


def deep_gemm_way() -> tuple[Product, Callable]:
    """DeepGEMM's product between the library's quantisation. Raises ImportError without DeepGEMM."""
    import deep_gemm

    def multiply(a: ScaledTensor, weight: ScaledTensor) -> torch.Tensor:
        out = torch.empty(a.rows, weight.rows, dtype=torch.bfloat16, device=a.data.device)
        deep_gemm.fp8_gemm_nt((a.data, deep_gemm.get_mn_major_tma_aligned_tensor(a.scale)), (weight.data, weight.scale), out)
        return out

    return lambda x, weight: multiply(quantize(x), weight), lambda x, weight: multiply(swiglu_quantize(x), weight)


def inputs(layer: Layer, tokens: int, decode: bool, device: torch.device, sets: int = SETS) -> list[tuple]:
    """(x, BF16 weights, FP8 weights, cache) for each set. Weights keep the size of what goes through: 1 / sqrt(K)."""
    generator = torch.Generator(device).manual_seed(tokens)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
    made = []
    for _ in range(sets):
        plain = {name: normal(n, k) / k**0.5 for name, (n, k) in layer.weights.items()}
        scaled = {name: quantize(weight, "128x128") for name, weight in plain.items()}
        rows = (tokens, layer.kv_heads, layer.context, layer.head)
        made.append((normal(tokens, layer.hidden), plain, scaled, (normal(*rows), normal(*rows)) if decode else None))
    return made


def calls(layer: Layer, made: list[tuple], backend: str | None = None) -> tuple[dict[str, list[Callable]], dict[str, str]]:
    """name -> a call per set; and why a way is missing."""
    ways, missing = {"bf16": (bf16_product, bf16_middle), "library": library_way(backend)}, {}
    try:
        ways["deep_gemm"] = deep_gemm_way()
    except ImportError as error:
        missing["deep_gemm"] = f"ImportError: {error}"
    return {
        name: [lambda x=x, w=plain if name == "bf16" else scaled, cache=cache, way=way: forward(layer, x, w, cache, *way)
               for x, plain, scaled, cache in made]
        for name, way in ways.items()
    }, missing  # fmt: skip


def measure(layer: Layer, tokens: int, decode: bool, device: torch.device, rounds: int) -> tuple[list[dict], dict[str, str]]:
    """One row for each way: time, and the largest difference from BF16 relative to its largest output."""
    made = inputs(layer, tokens, decode, device)
    candidates, missing = calls(layer, made)
    outs = {name: each[0]().float() for name, each in candidates.items()}
    timings = bench.measure(candidates, rounds=rounds)
    parameters = sum(n * k for n, k in layer.weights.values())
    return [{"name": name, "tokens": tokens, "phase": "decode" if decode else "prefill", "microseconds": timing.seconds * 1e6,
             "spread": timing.spread, "tflops": 2 * tokens * parameters / timing.seconds / 1e12,
             "difference_from_bf16": float((outs[name] - outs["bf16"]).abs().max() / outs["bf16"].abs().max())}
            for name, timing in timings.items()], missing  # fmt: skip
