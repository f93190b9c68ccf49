"""The GEMMs as PyTorch operators: fp8_gemm::gemm, grouped, masked and k_grouped, with shapes for tracing and gradients.

The functions of the first part compute; their registered forms are for autograd, torch.compile and FakeTensor. Operators know
tensors only: there an operand is a pair, FP8 data with its scale, or a plain tensor with None, which is quantised by the recipe.
Those named …_out write into a tensor they are given.

A plain operand has a gradient, a quantised one has none. Gradients are FP8 GEMMs too: dA from gradients scaled 1x128 and
weights scaled 128x128, dB in FP32 from two operands scaled 1x128 along the dimension that is summed over.
"""

import ast
import math
import os
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fp8_gemm import dispatch
from fp8_gemm.problem import check_bias, check_device, check_no_grad, check_out, describe, layout, plain_bias
from fp8_gemm.quantize import (
    GroupedTensor, ScaledTensor, check_no_tangent, pack_k_groups, quantize_grouped_now, quantize_k_grouped, quantize_now,
)  # fmt: skip
from hopperlab.quantize import BLOCK, RECIPES, scale_shape

ACTIVATION, WEIGHT = "1x128", "128x128"  # recipes of gradients, and of the weights they are multiplied with


# ---------------------------------------------------------------- computing


def _matrix(operand: torch.Tensor | ScaledTensor, recipe: str) -> ScaledTensor:
    return quantize_now(operand, recipe, "e4m3", 0, False) if isinstance(operand, torch.Tensor) else operand


def _stack(operand: torch.Tensor | GroupedTensor, recipe: str) -> GroupedTensor:
    return quantize_grouped_now(operand, recipe, "e4m3", 0, False) if isinstance(operand, torch.Tensor) else operand


@dataclass(slots=True, eq=False)
class _Call:
    """What is known of every call with operands, options and output of one layout."""

    launch: object | None  # kernels.Launch; None: go through describe and dispatch each time
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]  # of an output made here
    bias_as_it_is: bool  # float32, side by side


# What lies behind os.environ: os.environ.get takes 1.3 µs to say that a variable is not set, and every call asks for two.
_variable = os.environ._data.get
_BACKEND, _VALIDATE = os.fsencode(dispatch.BACKEND_VARIABLE), os.fsencode(dispatch.VALIDATE_VARIABLE)

# Calls by all that decides them, addresses and values excepted. Serving repeats a few calls for ever: they are checked and
# planned once.
_calls: dict[tuple, _Call] = {}
MOST_CALLS = 4096


def forget() -> None:
    """Plan every call anew, after a change of what plans are made from."""
    _calls.clear()


def compute(kind, a, b, out_dtype, interval, backend, options, out, accumulate=False, bias=None, groups=None, ends=None) -> torch.Tensor:
    """The product of quantised operands, nothing traced. groups: offsets, or masked_m."""
    x, y, a_scale, b_scale = a.data, b.data, a.scale, b.scale
    device = x.device
    key = (
        kind, a.recipe, b.recipe, out_dtype, interval, accumulate, backend, _variable(_BACKEND), _variable(_VALIDATE), device, y.device,
        x.dtype, y.dtype, x.shape, y.shape, x.stride(), y.stride(), a_scale.stride(), b_scale.stride(),
        None if out is None else layout(out), None if bias is None else layout(bias), None if groups is None else layout(groups),
        None if ends is None else layout(ends), tuple(options.items()) if options else None,
    )  # fmt: skip
    try:
        known = _calls.get(key)
    except TypeError:  # an option that has no hash: it is named where options are checked
        known = None
    if known is None or known.launch is None:
        return _compute_checked(key, kind, a, b, out_dtype, interval, backend, options, out, accumulate, bias, groups, ends)
    if out is None:
        # Not torch.empty, whose arguments take a microsecond longer to read.
        out = torch.empty_strided(known.out_shape, known.out_strides, dtype=out_dtype, device=device)
    if not known.bias_as_it_is:
        bias = plain_bias(bias)
    known.launch(x, a_scale, y, b_scale, bias, groups, ends, out)
    return out


def _compute_checked(key, kind, a, b, out_dtype, interval, backend, options, out, accumulate, bias, groups, ends) -> torch.Tensor:
    """A call seen for the first time, or one that is no launch of a kernel on a GPU."""
    offsets, masked_m = (None, groups) if kind == "masked" else (groups, None)
    problem, operands = describe(kind, a, b, bias=bias, offsets=offsets, ends=ends, masked_m=masked_m, accumulate=accumulate,
                                 out_dtype=out_dtype, interval=interval)  # fmt: skip
    if out is None:
        out = torch.empty(problem.out_shape, dtype=out_dtype, device=operands.a.device)
    else:
        check_out(problem, operands, out)
    dispatch.run(problem, operands, out, backend, **options)
    if key not in _calls:
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        launch = dispatch.launch_for(problem, operands, out, backend, **options)
        as_it_is = bias is None or operands.bias.data_ptr() == bias.data_ptr()
        strides = (problem.m * problem.n, problem.n, 1)[-len(problem.out_shape) :]
        _calls[key] = _Call(launch, problem.out_shape, strides, as_it_is)
    return out


def gemm(a, b, bias, recipe_a, recipe_b, out_dtype, interval, backend, options, out=None, accumulate=False):
    """D (M, N) = A (M, K) · B (N, K)ᵀ + bias; with accumulate, + what out holds."""
    a, b = _matrix(a, recipe_a), _matrix(b, recipe_b)
    return compute("dense", a, b, out_dtype, interval, backend, options, out, accumulate, bias)


def grouped(a, b, offsets, ends, recipe_a, recipe_b, out_dtype, interval, backend, options, out=None):
    """D (M, N): each group of rows of A (M, K) times its own B[g] (N, K) transposed."""
    a, b = _matrix(a, recipe_a), _stack(b, recipe_b)
    return compute("contiguous", a, b, out_dtype, interval, backend, options, out, groups=offsets, ends=ends)


def masked(a, b, masked_m, recipe_a, recipe_b, out_dtype, interval, backend, options, out=None):
    """D (G, max M, N): the first masked_m[g] rows of A[g] (max M, K) times B[g] (N, K) transposed."""
    a, b = _stack(a, recipe_a), _stack(b, recipe_b)
    return compute("masked", a, b, out_dtype, interval, backend, options, out, groups=masked_m)


def k_grouped(a, b, offsets, ends, out_dtype, backend, options, out=None, accumulate=False):
    """D (G, M, N): A (M, K of group g) times B (N, K of group g) transposed; with accumulate, + what out holds."""
    plain = [isinstance(operand, torch.Tensor) for operand in (a, b)]
    if any(plain) and not all(plain):
        raise TypeError("a, b: one is quantised and the other is not, but their K groups must lie alike: quantise both by "
                        "quantize_k_grouped(x, offsets), or neither")  # fmt: skip
    if all(plain):
        a, _ = quantize_k_grouped(a, offsets, ends)
        b, offsets = quantize_k_grouped(b, offsets, ends)
    return compute("k_grouped", a, b, out_dtype, BLOCK, backend, options, out, accumulate, groups=offsets)


# ---------------------------------------------------------------- registering
# options (plan overrides, exact, batch_invariant) travel as text, because operators take no dictionaries.

_OPERANDS = "Tensor a, Tensor? a_scale, Tensor b, Tensor? b_scale"
_HOW = "str recipe_a, str recipe_b, ScalarType out_dtype, int? interval, str? backend, str options"
_GEMMS = {  # name: (function, what tells it apart in the schema, whether it can accumulate)
    "gemm": (gemm, f"{_OPERANDS}, Tensor? bias, {_HOW}", True),
    "grouped": (grouped, f"{_OPERANDS}, Tensor offsets, Tensor? ends, {_HOW}", False),
    "masked": (masked, f"{_OPERANDS}, Tensor masked_m, {_HOW}", False),
    "k_grouped": (k_grouped, f"{_OPERANDS}, Tensor offsets, Tensor? ends, ScalarType out_dtype, str? backend, str options", True),
}


def encode(options: dict) -> str:
    """"name=literal; name=literal". Not JSON: torch.compile can trace this."""
    return "; ".join([f"{name}={value!r}" for name, value in options.items()])


def decode(text: str) -> dict:
    return {name: ast.literal_eval(value) for name, value in (item.split("=", 1) for item in text.split("; ") if item)}


def _joined(data: torch.Tensor, scale: torch.Tensor | None, recipe: str) -> torch.Tensor | ScaledTensor | GroupedTensor:
    """An operand from its pair; plain if there is no scale."""
    if scale is None:
        return data
    return (ScaledTensor if data.dim() == 2 else GroupedTensor)(data, scale, recipe)


def _split(operand: torch.Tensor | ScaledTensor | GroupedTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (operand, None) if isinstance(operand, torch.Tensor) else (operand.data, operand.scale)


def _empty_result(name, a, b, group_tensor, out_dtype, others):
    """The result's shape and type, for tracing. Raises ValueError where devices, K or groups cannot match."""
    for what, tensor in (("b", b), ("bias" if name == "gemm" else "masked_m" if name == "masked" else "offsets", group_tensor), *others):
        if tensor is not None:
            check_device(what, tensor, a.device)
    if name == "gemm" and group_tensor is not None:
        check_bias(group_tensor, b.shape[-2])
    if name != "k_grouped" and a.shape[-1] != b.shape[-1]:
        raise ValueError(f"b has shape {tuple(b.shape)} and a {tuple(a.shape)}; their last dimension, K, must be equal")
    if name == "k_grouped":
        shape = (group_tensor.shape[0] - 1, a.shape[0], b.shape[0])
    else:
        shape = (*a.shape[:-1], b.shape[-2])
    return a.new_empty(shape, dtype=out_dtype)


def _register(name: str) -> None:
    function, schema, accumulates = _GEMMS[name]

    def operands(a, a_scale, b, b_scale, rest):
        recipes = [value for value in rest if isinstance(value, str) and value in RECIPES] or [ACTIVATION, ACTIVATION]
        return _joined(a, a_scale, recipes[0]), _joined(b, b_scale, recipes[1])

    def compute(a, a_scale, b, b_scale, group_tensor, *rest):
        *how, grad_format, options = rest
        out = None
        if name in ("grouped", "masked"):
            # Rows of no group: zeros, since what a loss reads of them must not be arbitrary where gradients are recorded.
            out = torch.zeros_like(fake(a, a_scale, b, b_scale, group_tensor, *rest))
        return function(*operands(a, a_scale, b, b_scale, how), group_tensor, *how, decode(options), out)

    def fake(a, a_scale, b, b_scale, group_tensor, *rest):
        out_dtype = next(value for value in rest if isinstance(value, torch.dtype))
        others = [("a.scale", a_scale), ("b.scale", b_scale), *(("ends", value) for value in rest if isinstance(value, torch.Tensor))]
        return _empty_result(name, a, b, group_tensor, out_dtype, others)

    def compute_out(a, a_scale, b, b_scale, group_tensor, *rest):
        *how, options, out = rest
        extra = [how.pop()] if accumulates else []
        function(*operands(a, a_scale, b, b_scale, how), group_tensor, *how, decode(options), out, *extra)

    with_grad_format = schema.replace("str options", "str grad_format, str options")
    operator = torch.library.custom_op(f"fp8_gemm::{name}", compute, mutates_args=(), schema=f"({with_grad_format}) -> Tensor")
    operator.register_fake(fake)
    operator.register_autograd(_BACKWARD[name], setup_context=_save_inputs)

    out_schema = schema.replace("str options", ("bool accumulate, " if accumulates else "") + "str options, Tensor(a!) out")
    writes = torch.library.custom_op(f"fp8_gemm::{name}_out", compute_out, mutates_args=("out",), schema=f"({out_schema}) -> ()")
    writes.register_fake(lambda *arguments: None)


def _register_quantize(name: str, function) -> None:
    def compute(x, recipe, format, margin, power_of_two):
        scaled = function(x, recipe, format, margin, power_of_two)
        return scaled.data, scaled.scale

    schema = "(Tensor x, str recipe, str format, int margin, bool power_of_two) -> (Tensor, Tensor)"
    operator = torch.library.custom_op(f"fp8_gemm::{name}", compute, mutates_args=(), schema=schema)

    def fake(x, recipe, format, margin, power_of_two):
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
        data, shape = torch.empty(x.shape, dtype=dtype, device=x.device), (*x.shape[:-2], *scale_shape(recipe, *x.shape[-2:]))
        if recipe != "1x128":
            return data, torch.empty(shape, dtype=torch.float32, device=x.device)
        # M-major, the matrices of a stack one after another. Rounded up in a form of which the tracer knows that it is not less.
        rows = math.prod(x.shape[:-1])
        strides = (*x.shape[1:-1], 1, rows + -rows % 4)
        return data, torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)

    operator.register_fake(fake)


def _register_packing() -> None:
    """pack_k_groups for weight gradients: one operator, since torch.compile's Inductor fails on the look-ups it consists of."""
    schema = "(Tensor x, Tensor offsets, Tensor? ends) -> (Tensor, Tensor)"
    operator = torch.library.custom_op("fp8_gemm::pack_k_groups", pack_k_groups, mutates_args=(), schema=schema)

    def fake(x, offsets, ends):
        groups = offsets.shape[0] - 1
        return x.new_empty(x.shape[0], BLOCK * (x.shape[1] // BLOCK + groups)), torch.empty_like(offsets, dtype=torch.int32)

    operator.register_fake(fake)


# ---------------------------------------------------------------- gradients


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor) or value is None))
    ctx.inputs = [None if isinstance(value, torch.Tensor) else value for value in inputs]
    ctx.tensors = [isinstance(value, torch.Tensor) for value in inputs]


def _inputs(ctx) -> list:
    saved = iter([tensor for tensor in ctx.saved_tensors if tensor is not None])
    return [next(saved) if is_tensor else value for is_tensor, value in zip(ctx.tensors, ctx.inputs)]


def _shared_options(options: str) -> str:
    """What a gradient inherits of the options: not the plan, which was made for another shape."""
    return encode({name: value for name, value in decode(options).items() if name in ("exact", "batch_invariant")})


def _plain(data, scale, recipe):
    """A plain (rows, K) or (G, rows, K) tensor for an operand of either kind."""
    return data if scale is None else _joined(data, scale, recipe).dequantize()


def _transposed_weight(data, scale, recipe):
    """(data, scale) of B transposed in its last two dimensions, scaled 128x128: its blocks are those of B."""
    if scale is not None and recipe == WEIGHT:
        return data.mT.contiguous(), scale.mT.contiguous()
    quantize_op = torch.ops.fp8_gemm.quantize if data.dim() == 2 else torch.ops.fp8_gemm.quantize_grouped
    return quantize_op(_plain(data, scale, recipe).mT, WEIGHT, "e4m3", 0, False)


def _gemm_backward(ctx, grad):
    a, a_scale, b, b_scale, bias, recipe_a, recipe_b, _, _, backend, grad_format, options = _inputs(ctx)
    quantize_op, gemm_op = torch.ops.fp8_gemm.quantize, torch.ops.fp8_gemm.gemm
    shared = _shared_options(options)
    grad_a = grad_b = grad_bias = None
    if ctx.needs_input_grad[0]:  # dA (M, K) = dD (M, N) · B
        grad_a = gemm_op(*quantize_op(grad, ACTIVATION, grad_format, 0, False), *_transposed_weight(b, b_scale, recipe_b), None,
                         ACTIVATION, WEIGHT, a.dtype, 128, backend, grad_format, shared)  # fmt: skip
    if ctx.needs_input_grad[2]:  # dB (N, K) = dDᵀ · A, summed over M
        source = _plain(a, a_scale, recipe_a)
        grad_b = gemm_op(*quantize_op(grad.t(), ACTIVATION, grad_format, 0, False), source.t(), None, None,
                         ACTIVATION, ACTIVATION, torch.float32, 128, backend, grad_format, shared).to(b.dtype)  # fmt: skip
    if ctx.needs_input_grad[4]:
        grad_bias = grad.sum(0, dtype=torch.float32).to(bias.dtype)
    return grad_a, None, grad_b, None, grad_bias, *[None] * 7


def _weight_gradient(grad, source, offsets, ends, dtype, backend, grad_format, shared):
    """dB (G, N, K): for each group of rows, dDᵀ · A."""
    pack_op, quantize_op = torch.ops.fp8_gemm.pack_k_groups, torch.ops.fp8_gemm.quantize
    packed_grad, packed_offsets = pack_op(grad.t(), offsets, ends)
    packed_source, _ = pack_op(source.t(), offsets, ends)
    return torch.ops.fp8_gemm.k_grouped(
        *quantize_op(packed_grad, ACTIVATION, grad_format, 0, False), *quantize_op(packed_source, ACTIVATION, "e4m3", 0, False),
        packed_offsets, None, torch.float32, backend, grad_format, shared,
    ).to(dtype)  # fmt: skip


def _grouped_backward(ctx, grad):
    a, a_scale, b, b_scale, offsets, ends, recipe_a, recipe_b, _, _, backend, grad_format, options = _inputs(ctx)
    shared = _shared_options(options)
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.fp8_gemm.grouped(
            *torch.ops.fp8_gemm.quantize(grad, ACTIVATION, grad_format, 0, False), *_transposed_weight(b, b_scale, recipe_b),
            offsets, ends, ACTIVATION, WEIGHT, a.dtype, 128, backend, grad_format, shared,
        )  # fmt: skip
    if ctx.needs_input_grad[2]:
        grad_b = _weight_gradient(grad, _plain(a, a_scale, recipe_a), offsets, ends, b.dtype, backend, grad_format, shared)
    return grad_a, None, grad_b, *[None] * 10


def _masked_backward(ctx, grad):
    a, a_scale, b, b_scale, masked_m, recipe_a, recipe_b, _, _, backend, grad_format, options = _inputs(ctx)
    shared = _shared_options(options)
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.fp8_gemm.masked(
            *torch.ops.fp8_gemm.quantize_grouped(grad, ACTIVATION, grad_format, 0, False),
            *_transposed_weight(b, b_scale, recipe_b),
            masked_m, ACTIVATION, WEIGHT, a.dtype, 128, backend, grad_format, shared,
        )  # fmt: skip
    if ctx.needs_input_grad[2]:
        groups, rows = a.shape[:2]
        offsets = torch.arange(groups + 1, dtype=torch.int32, device=a.device) * rows
        source = _plain(a, a_scale, recipe_a)
        grad_b = _weight_gradient(grad.flatten(0, 1), source.flatten(0, 1), offsets, offsets[:-1] + masked_m, b.dtype, backend,
                                  grad_format, shared)  # fmt: skip
    return grad_a, None, grad_b, *[None] * 9


def _k_grouped_backward(ctx, grad):
    """dA's columns of group g are dD[g] · B: with K as rows, a GEMM of contiguous groups. dB likewise."""
    a, a_scale, b, b_scale, offsets, ends, _, backend, grad_format, options = _inputs(ctx)
    shared = _shared_options(options)

    def gradient(other, weights):
        return torch.ops.fp8_gemm.grouped(
            other.t(), None, *torch.ops.fp8_gemm.quantize_grouped(weights, WEIGHT, grad_format, 0, False), offsets, ends,
            ACTIVATION, WEIGHT, a.dtype, 128, backend, grad_format, shared,
        ).t()  # fmt: skip

    grad_a = gradient(b, grad) if ctx.needs_input_grad[0] else None
    grad_b = gradient(a, grad.mT) if ctx.needs_input_grad[2] else None
    return grad_a, None, grad_b, *[None] * 7


_BACKWARD = {"gemm": _gemm_backward, "grouped": _grouped_backward, "masked": _masked_backward, "k_grouped": _k_grouped_backward}
for _name in _GEMMS:
    _register(_name)
_register_quantize("quantize", quantize_now)
_register_quantize("quantize_grouped", quantize_grouped_now)
_register_packing()


# ---------------------------------------------------------------- calling


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def traced(*operands) -> bool:
    """Whether a call must go through the operators: gradients, tracing, fake or meta tensors. Plain calls save the detour.

    Raises ValueError for an operand that carries a forward-mode tangent.
    """
    if forward_ad._current_level >= 0:
        for operand in operands:
            check_no_tangent("an operand", operand)
    if torch.compiler.is_compiling():
        return True
    recording = torch.is_grad_enabled()
    for operand in operands:
        if operand is None:
            continue
        kind = type(operand)
        if kind is ScaledTensor or kind is GroupedTensor:
            operand = operand.data
            kind = type(operand)
        if kind in _PLAIN_TENSORS:
            if operand.is_meta or (recording and operand.requires_grad):
                return True
        elif isinstance(operand, torch.Tensor):  # FakeTensor and other subclasses
            return True
    return False


def call(name: str, a, b, *arguments, grad_format: str, options: dict, out: torch.Tensor | None = None,
         accumulate: bool | None = None):  # fmt: skip
    """Run the function or the operator ``name``. accumulate only for those that can, and with out."""
    extra = () if accumulate is None else (accumulate,)
    if not traced(a, b, arguments[0], out):  # of the arguments, only the first can have a gradient
        return _GEMMS[name][0](a, b, *arguments, options, out, *extra)
    arguments = (*_split(a), *_split(b), *arguments)
    if out is None:
        return getattr(torch.ops.fp8_gemm, name)(*arguments, grad_format, encode(options))
    check_no_grad("out", out)  # operators run where no gradient is recorded, and would not see it
    if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in arguments):
        raise ValueError("out is given and an input requires grad, but a result written in place has no gradient: call without "
                         "out, or under torch.no_grad()")  # fmt: skip
    getattr(torch.ops.fp8_gemm, f"{name}_out")(*arguments, *extra, encode(options), out)
    return out
