"""GEMMs of many groups in one launch: the experts of a mixture, and their weight gradients.

Group sizes are tensors on the device: nothing here reads them on the host, so calls neither synchronise nor depend on them
for their launch.
"""

import torch

from fp8_gemm import ops
from fp8_gemm.gemm import start_from
from fp8_gemm.problem import FP8_DTYPES, WIDE_DTYPES, check_c, check_how, check_k_groups, row_groups
from fp8_gemm.quantize import GroupedTensor, ScaledTensor, format_of, quantize, quantize_grouped


def grouped_gemm(
    a: torch.Tensor | ScaledTensor, b: torch.Tensor | GroupedTensor, *, offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None, indices: torch.Tensor | None = None, out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, recipe: tuple[str, str] = ("1x128", "128x128"), interval: int | None = 128,
    backend: str | None = None, grad_format: str = "e4m3", **plan_overrides,
) -> torch.Tensor | ScaledTensor:  # fmt: skip
    """Each group of rows of a times the weight of its group: D[r] = A[r] · B[group of r]ᵀ, (M, N).

    a        (M, K), rows sorted by group: plain (quantised by recipe[0]) or a ScaledTensor
    b        (G, N, K): plain (recipe[1]) or a GroupedTensor
    offsets  (G + 1,) int32: group g is rows offsets[g] … offsets[g + 1] - 1. Groups of any size, 0 included, no padding
    counts   (G,) int32 or int64: the sizes of the groups instead
    indices  (M,) int32: the group of each row instead, ascending; -1 for rows of no group (DeepGEMM's layout)
    out      (M, N) of out_dtype

    Pass exactly one of offsets, counts and indices, on a's device. Rows of no group are not written: they keep what out
    holds, and are unspecified without out, or zero where gradients are recorded. Whatever they hold in a, NaN included,
    reaches no other row (so a plain a cannot have recipe "tensor", one scale for all). Values of group tensors are checked on the CPU; on a GPU by validate_groups, or for every call with
    FP8_GEMM_VALIDATE=1. Other arguments and errors as in gemm. Differentiable in plain a and b.
    """
    if (type(a) is ScaledTensor and type(b) is GroupedTensor and type(offsets) is torch.Tensor and counts is None and indices is None
            and out_dtype in WIDE_DTYPES and not ops.traced(a, b, offsets, out)):  # fmt: skip
        return ops.compute("contiguous", a, b, out_dtype, interval, backend, plan_overrides, out, groups=offsets)  # the short way
    _check_scale_of_rows(a, recipe)
    a, recipe_a = matrix("a", a, recipe, 0)
    b, recipe_b = stack("b", b, recipe, 1)
    check_how(recipe_a, recipe_b, out_dtype, interval, grad_format)
    offsets, ends = row_groups(_shape(b)[0], _shape(a)[0], offsets=offsets, counts=counts, indices=indices)
    fp8 = _fp8(out_dtype, out)
    result = ops.call("grouped", a, b, offsets, ends, recipe_a, recipe_b, torch.float32 if fp8 else out_dtype, interval, backend,
                      grad_format=grad_format, options=plan_overrides, out=out)  # fmt: skip
    return quantize(result, "1x128", fp8) if fp8 else result


def masked_gemm(
    a: torch.Tensor | GroupedTensor, b: torch.Tensor | GroupedTensor, masked_m: torch.Tensor, *, out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, recipe: tuple[str, str] = ("1x128", "128x128"), interval: int | None = 128,
    backend: str | None = None, grad_format: str = "e4m3", **plan_overrides,
) -> torch.Tensor | GroupedTensor:  # fmt: skip
    """The first masked_m[g] rows of each a[g] times b[g] transposed: D (G, max M, N).

    a         (G, max M, K), any max M: plain (recipe[0]) or a GroupedTensor
    b         (G, N, K): plain (recipe[1]) or a GroupedTensor
    masked_m  (G,) int32 on a's device: how many rows of each group count, 0 … max M

    Rows from masked_m[g] on are not written, as in grouped_gemm. Buffers of one size whatever the routing: what CUDA graphs
    of a decoding step need. Other arguments and errors as in gemm. Differentiable in plain a and b.
    """
    if (type(a) is GroupedTensor and type(b) is GroupedTensor and type(masked_m) is torch.Tensor and out_dtype in WIDE_DTYPES
            and not ops.traced(a, b, masked_m, out)):  # fmt: skip
        return ops.compute("masked", a, b, out_dtype, interval, backend, plan_overrides, out, groups=masked_m)  # the short way
    _check_scale_of_rows(a, recipe)
    a, recipe_a = stack("a", a, recipe, 0)
    b, recipe_b = stack("b", b, recipe, 1)
    check_how(recipe_a, recipe_b, out_dtype, interval, grad_format)
    if not isinstance(masked_m, torch.Tensor):
        raise TypeError(f"masked_m is a {type(masked_m).__name__}; it must be an int32 tensor ({_shape(b)[0]},) on a's device")
    fp8 = _fp8(out_dtype, out)
    result = ops.call("masked", a, b, masked_m, recipe_a, recipe_b, torch.float32 if fp8 else out_dtype, interval, backend,
                      grad_format=grad_format, options=plan_overrides, out=out)  # fmt: skip
    return quantize_grouped(result, "1x128", fp8) if fp8 else result


def k_grouped_gemm(
    a: torch.Tensor | ScaledTensor, b: torch.Tensor | ScaledTensor, offsets: torch.Tensor, *, c: torch.Tensor | None = None,
    out: torch.Tensor | None = None, accumulate: bool = False, out_dtype: torch.dtype = torch.float32, backend: str | None = None,
    grad_format: str = "e4m3", **plan_overrides,
) -> torch.Tensor:  # fmt: skip
    """One product for each group of K: D[g] = A[:, group g] · B[:, group g]ᵀ, (G, M, N). Weight gradients of experts.

    a, b        (M, K) and (N, K), K being the groups one after another: tokens, for a weight gradient dYᵀ and Xᵀ. Both plain,
                groups of any sizes (they are moved to multiples of 128 while being quantised); or both the ScaledTensors of
                quantize_k_grouped, with its offsets
    offsets     (G + 1,) int32 on a's device: group g is offsets[g] … offsets[g + 1] - 1 of K
    c           (G, M, N) of out_dtype, added in FP32
    accumulate  add to what out holds: the same as c=out

    A group of size 0 gives zeros, or c. Other arguments and errors as in gemm. Differentiable in plain a and b, and in c.
    """
    a, _ = matrix("a", a, ("1x128", "1x128"), 0)
    b, _ = matrix("b", b, ("1x128", "1x128"), 1)
    check_k_groups(a if isinstance(a, torch.Tensor) else a.data, offsets)
    check_how("1x128", "1x128", out_dtype, grad_format=grad_format)
    if accumulate and (out is None or c is not None):
        raise ValueError(f"accumulate is True, {'without out' if out is None else 'and c is given'}; it adds to what out "
                         "holds: pass out, or only c")  # fmt: skip
    if out_dtype in FP8_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; weight gradients come as bfloat16, float16 or float32")
    shape = (offsets.shape[0] - 1, _shape(a)[0], _shape(b)[0])
    arguments = (a, b, offsets, None, out_dtype, backend)
    options = {"grad_format": grad_format, "options": plan_overrides}
    if c is not None:
        check_c(c, shape, out_dtype, a.device)
    if c is not None and out is None and ops.traced(a, b, c):
        return (ops.call("k_grouped", *arguments[:4], torch.float32, backend, **options) + c).to(out_dtype)
    if c is not None and c is not out:
        out = start_from(c, out)
    return ops.call("k_grouped", *arguments, **options, out=out, accumulate=None if out is None else accumulate or c is not None)


def _check_scale_of_rows(a, recipe) -> None:
    """Refuse a scale for all rows of a plain a: it would depend on those of no group."""
    if isinstance(a, torch.Tensor) and isinstance(recipe, (tuple, list)) and recipe[:1] in (("tensor",), ["tensor"]):
        raise ValueError("recipe[0] is 'tensor', one scale for all rows of a, those of no group as well; use '1x128' or 'row', or pass a "
                         "quantised where every row counts: quantize(a, 'tensor')")  # fmt: skip


def _fp8(out_dtype: torch.dtype, out: torch.Tensor | None):
    if out_dtype not in FP8_DTYPES:
        return None
    if out is not None:
        raise ValueError(f"out_dtype is {out_dtype}, which gives new data and scales; out cannot be given: compute in float32 "
                         "and quantize")  # fmt: skip
    return format_of(out_dtype)


def _shape(operand) -> torch.Size:
    return operand.shape if isinstance(operand, torch.Tensor) else operand.data.shape


def matrix(name: str, operand, recipe, index: int):
    return _operand(name, operand, recipe, index, ScaledTensor, 2, "(rows, K)")


def stack(name: str, operand, recipe, index: int):
    return _operand(name, operand, recipe, index, GroupedTensor, 3, "(groups, rows, K)")


def _operand(name, operand, recipe, index, scaled_type, dimensions, shape):
    """(operand, recipe) of a plain or quantised operand."""
    if isinstance(operand, scaled_type):
        return operand, operand.recipe
    if not isinstance(operand, torch.Tensor):
        raise TypeError(f"{name} is a {type(operand).__name__}; it must be a torch.Tensor or a {scaled_type.__name__}, {shape}")
    if operand.dtype not in WIDE_DTYPES:
        fix = f"{scaled_type.__name__}({name}, scale, recipe)" if operand.dtype in FP8_DTYPES else f"{name}.float()"
        raise TypeError(f"{name} has dtype {operand.dtype}; allowed are bfloat16, float16, float32 and "
                        f"{scaled_type.__name__}: pass {fix}")  # fmt: skip
    if operand.dim() != dimensions or (dimensions == 3 and operand.shape[0] == 0):
        hint = ", with at least one group" if dimensions == 3 else ": pass x.flatten(0, -2)" if operand.dim() > 2 else ""
        raise ValueError(f"{name} has shape {tuple(operand.shape)}; it must be {shape}{hint}")
    if not isinstance(recipe, (tuple, list)) or len(recipe) != 2:
        raise ValueError(f"recipe is {recipe!r}; it must be a pair, one for a and one for b, such as ('1x128', '128x128')")
    return operand, recipe[index]
