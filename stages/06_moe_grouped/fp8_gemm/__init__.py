"""FP8 GEMM for NVIDIA Hopper: dense, grouped (mixtures of experts) and weight gradients, from plain tensors to answers.

    import fp8_gemm

    y = fp8_gemm.gemm(x, w)                                   # x (M, K), w (N, K): quantised on the fly
    w8 = fp8_gemm.quantize(w, "128x128")                      # or once
    y = fp8_gemm.gemm(x, w8)
    y = fp8_gemm.grouped_gemm(x, experts, counts=counts)      # experts (G, N, K), rows of x sorted by expert
    print(fp8_gemm.explain(x, w))                             # what runs, and why

On a Hopper GPU this runs the library's CUDA kernels, on other GPUs with FP8 Triton, everywhere else torch. nn, parallel,
monitor and deep_gemm (DeepGEMM's names) are loaded when they are first used.
"""

import importlib

from fp8_gemm.dispatch import BACKENDS, Explanation, explain, warmup
from fp8_gemm.gemm import gemm
from fp8_gemm.grouped import grouped_gemm, k_grouped_gemm, masked_gemm
from fp8_gemm.problem import Operands, Problem, describe
from fp8_gemm.quantize import (
    E4M3,
    E5M2,
    Format,
    GroupedTensor,
    GroupedWeight,
    ScaledTensor,
    dequantize,
    format_of,
    quantize,
    quantize_grouped,
    quantize_k_grouped,
    swiglu_quantize,
)
from fp8_gemm.routing import RoutingReport, routing_report, validate_groups
from fp8_gemm.tune import Tuned, tune

__all__ = [
    "BACKENDS", "E4M3", "E5M2", "Explanation", "Format", "GroupedTensor", "GroupedWeight", "Operands", "Problem",
    "RoutingReport", "ScaledTensor", "Tuned", "dequantize", "describe", "explain", "format_of", "gemm", "grouped_gemm", "k_grouped_gemm",
    "masked_gemm", "quantize", "quantize_grouped", "quantize_k_grouped", "routing_report", "swiglu_quantize", "tune",
    "validate_groups", "warmup",
]  # fmt: skip
__version__ = "0.1.0"

_LAZY = ("deep_gemm", "monitor", "nn", "parallel")


def __getattr__(name: str):
    if name in _LAZY:
        return importlib.import_module(f"fp8_gemm.{name}")
    raise AttributeError(f"module 'fp8_gemm' has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_LAZY])
