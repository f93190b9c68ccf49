"""What the library's tests share: random tensors, and an assertion about refusals."""

import re

import pytest
import torch

from fp8_gemm import GroupedTensor, ScaledTensor
from hopperlab.reference import calc_diff, error_bound, matmul_exact


def random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def refused(error, *words):
    """The call raises ``error`` with every word: the argument's name, what was given, the fix."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(word)})" for word in words) + "(?s:.*)")


def assert_right(got: torch.Tensor, a: ScaledTensor, b: ScaledTensor, **addends):
    """Every element of got within the error of an FP32 product of these operands."""
    exact = matmul_exact(a, b, **addends)
    bound = error_bound(a, b, got.dtype, arithmetic="fp32", **addends)
    # A product of dequantised operands rounds each operand once more, and adds K in any order.
    bound = bound + (a.dequantize().double().abs() @ b.dequantize().double().abs().t()) * max(a.k, 2) * 2.0**-23
    assert got.shape == exact.shape
    excess = (got.double() - exact).abs() - bound
    assert not torch.isnan(got).any() and (excess <= 0).all(), f"off by {excess.max() if excess.numel() else 0} beyond the bound"


def part(x: ScaledTensor, start: int, stop: int) -> ScaledTensor:
    """Rows start … stop - 1."""
    return ScaledTensor(x.data[start:stop], x.scale if x.recipe == "tensor" else x.scale[start:stop], x.recipe)


__all__ = ["GroupedTensor", "assert_right", "calc_diff", "ints", "part", "random", "refused"]
