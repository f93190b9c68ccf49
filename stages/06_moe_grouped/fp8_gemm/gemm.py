"""The dense GEMM: one call for any shapes, from plain or quantised tensors."""

import math

import torch

from fp8_gemm import ops
from fp8_gemm.problem import FP8_DTYPES, WIDE_DTYPES, check_batch_invariant, check_c, check_how, check_no_grad
from fp8_gemm.quantize import GroupedTensor, ScaledTensor, format_of, quantize

LAYOUTS = {  # (whether A is given transposed, whether B is not)
    "nt": (False, False), "nn": (False, True), "tn": (True, True), "tt": (True, False),
}  # fmt: skip


def gemm(
    a: torch.Tensor | ScaledTensor, b: torch.Tensor | ScaledTensor, *, bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None, out: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, layout: str = "nt",
    recipe: tuple[str, str] = ("1x128", "128x128"), interval: int | None = 128, backend: str | None = None,
    grad_format: str = "e4m3", **plan_overrides,
) -> torch.Tensor | ScaledTensor:  # fmt: skip
    """A · Bᵀ + bias + c with FP8 operands and FP32 accumulation.

    a          (…, K): bfloat16, float16 or float32, quantised here by recipe[0]; or a ScaledTensor (M, K), as it is
    b          (N, K): likewise, by recipe[1]; quantise weights once and pass the ScaledTensor
    bias       (N,) bfloat16, float16 or float32, added in FP32 after scaling
    c          (…, N) of out_dtype, added in FP32 after the bias; pass c=out to accumulate in place
    out        (…, N) of out_dtype, rows contiguous, sharing no memory with the inputs (c=out excepted)
    out_dtype  bfloat16, float16, float32; or an FP8 type: the FP32 result is quantised "1x128", a ScaledTensor is returned
    layout     which operand is given how, A's letter first: "nt" a (M, K), b (N, K) · "nn" b (K, N) · "tn" a (K, M), b (K, N) ·
               "tt" a (K, M), b (N, K). FP8 tensor cores read both along K, so "nn" and "tn" transpose b, "tn" and "tt" a: plain
               tensors before they are quantised (one more pass over them), quantised ones are refused
    interval   K between promotions to FP32: 128 with block scales; else a multiple of 128, or None for never
    backend    "cuda", "simulator", "triton" or "reference"; None lets the device decide (see explain)
    grad_format  "e4m3" or "e5m2": the format of incoming gradients in the backward pass

    Other keywords override the plan of the CUDA kernels (block_m, num_stages, split_k, …); batch_invariant=True pins it, so
    that a row's result does not depend on how many rows there are (nor may its scale: no plain a with "tensor"). Differentiable in plain a and b, in bias and in c. Autocast
    does not touch it: out_dtype says what comes out. Any size may be 0. Raises TypeError, ValueError; RuntimeError for a
    backend that cannot.
    """
    if (isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor) and c is None and layout == "nt" and out_dtype in WIDE_DTYPES
            and not ops.traced(a, b, bias, out)):  # fmt: skip
        return ops.compute("dense", a, b, out_dtype, interval, backend, plan_overrides, out, bias=bias)  # the short way
    given = a
    (a, recipe_a), (b, recipe_b) = matrices(a, b, layout, recipe)
    check_how(recipe_a, recipe_b, out_dtype, interval, grad_format)
    if isinstance(given, torch.Tensor):
        check_batch_invariant(recipe_a, plan_overrides)
    leading = _leading_dimensions(given, LAYOUTS[layout][0])
    n = b.rows if isinstance(b, ScaledTensor) else b.shape[0]
    result = _flat("out", out, leading, n)
    c = result if c is out else _flat("c", c, leading, n)
    fp8 = format_of(out_dtype) if out_dtype in FP8_DTYPES else None
    if fp8 and (out is not None or c is not None):
        raise ValueError(f"out_dtype is {out_dtype}, which gives a new ScaledTensor; {'out' if out is not None else 'c'} "
                         "cannot be given: compute in float32 and quantize the result")  # fmt: skip

    arguments = (a, b, bias, recipe_a, recipe_b, torch.float32 if fp8 else out_dtype, interval, backend)
    accumulate = c is not None
    if accumulate:
        check_c(c, (math.prod(leading), n), out_dtype, a.device)
    if accumulate and out is None and ops.traced(a, b, bias, c):
        # Recorded: the product in FP32, so that adding c rounds once to out_dtype, as the kernel does.
        product = ops.call("gemm", *arguments[:5], torch.float32, interval, backend, grad_format=grad_format,
                           options=plan_overrides)  # fmt: skip
        return (product + c).to(out_dtype).reshape(*leading, n)
    if accumulate and c is not result:
        result = start_from(c, result)
    result = ops.call("gemm", *arguments, grad_format=grad_format, options=plan_overrides, out=result,
                      accumulate=accumulate if result is not None else None)  # fmt: skip
    if fp8:
        return quantize(result, "1x128", fp8)
    return out if out is not None else result.reshape(*leading, n)


def matrices(a, b, layout: str, recipe) -> tuple[tuple, tuple]:
    """((A (M, K), its recipe), (B (N, K), its recipe)) from operands in a layout; plain ones stay plain. Raises TypeError or ValueError."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; allowed are {', '.join(map(repr, LAYOUTS))}: A's letter first, "
                         "'n' as in A (M, K) and B (K, N), 't' transposed")  # fmt: skip
    a_transposed, b_transposed = LAYOUTS[layout]
    return _operand("a", a, a_transposed, layout, recipe, 0), _operand("b", b, b_transposed, layout, recipe, 1)


def start_from(c: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """What a product is added to, holding c's values: out, or a new tensor. Raises before anything is written."""
    if out is None:
        return c.clone(memory_format=torch.contiguous_format)
    check_no_grad("out", out)
    if torch.is_grad_enabled() and c.requires_grad:
        raise ValueError("out is given and c requires grad, but a result written in place has no gradient: call without out, or under "
                         "torch.no_grad()")  # fmt: skip
    check_c(out, tuple(c.shape), c.dtype, c.device, "out")
    return out.copy_(c.detach())


def _leading_dimensions(a, transposed: bool) -> tuple[int, ...]:
    """The dimensions of the result before its last."""
    if isinstance(a, torch.Tensor) and a.dim() >= 2:
        return (a.shape[-1],) if transposed else tuple(a.shape[:-1])
    return (a.rows,) if isinstance(a, ScaledTensor) else ()


def _operand(name: str, operand, transposed: bool, layout: str, recipe, index: int):
    """(operand, recipe): a ScaledTensor as it is, a plain tensor as (rows, K)."""
    if isinstance(operand, ScaledTensor):
        if transposed:
            raise ValueError(f"{name} is a ScaledTensor and layout {layout!r} gives {name} transposed, but FP8 data is read "
                             f"along K, as its scales are: quantise the transposed tensor, quantize(x.t(), {operand.recipe!r}), "
                             "and pass layout='nt'")  # fmt: skip
        return operand, operand.recipe
    if isinstance(operand, GroupedTensor):
        raise TypeError(f"{name} is a GroupedTensor, several matrices: call grouped_gemm or masked_gemm")
    if not isinstance(operand, torch.Tensor):
        raise TypeError(f"{name} is a {type(operand).__name__}; it must be a torch.Tensor or a ScaledTensor")
    if operand.dtype in FP8_DTYPES:
        raise TypeError(f"{name} has dtype {operand.dtype} without scales: pass ScaledTensor({name}, scale, recipe)")
    if operand.dtype not in WIDE_DTYPES:
        raise TypeError(f"{name} has dtype {operand.dtype}; allowed are bfloat16, float16 and float32, or a ScaledTensor: "
                        f"pass {name}.float()")  # fmt: skip
    if operand.dim() < 2 or (operand.dim() > 2 and (name == "b" or transposed)):
        allowed = {("a", False): "(…, K)", ("a", True): "(K, M)", ("b", False): "(N, K)", ("b", True): "(K, N)"}[name, transposed]
        hint = "pass x[None] for one row" if operand.dim() == 1 else "grouped_gemm and masked_gemm take a weight for each group"
        raise ValueError(f"{name} has shape {tuple(operand.shape)}; layout {layout!r} takes {allowed}: {hint}")
    if not isinstance(recipe, (tuple, list)) or len(recipe) != 2:
        raise ValueError(f"recipe is {recipe!r}; it must be a pair, one for a and one for b, such as ('1x128', '128x128')")
    matrix = operand.t() if transposed else operand.flatten(0, -2)
    return matrix, recipe[index]


def _flat(name: str, tensor: torch.Tensor | None, leading: tuple[int, ...], n: int) -> torch.Tensor | None:
    """c or out as (M, N): a view, never a copy."""
    if tensor is None or len(leading) == 1:
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tuple(tensor.shape) != (*leading, n):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; a and b give {(*leading, n)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; with several leading "
                         f"dimensions it must be contiguous: pass {name}.contiguous()")  # fmt: skip
    return tensor.view(-1, n)
