"""Layers on top of the GEMMs: Linear in nn.Linear's place, Experts of a mixture, and a policy that says which layer is FP8.

    layer = fp8_gemm.nn.Linear(4096, 7168)                                 # parameters and state dict of nn.Linear
    fp8_gemm.nn.convert(model, Policy({"lm_head": "keep", "*.mlp.*": "fp8", "*": "bf16"}))

Parameters stay in their own type (float32, bfloat16, float16): optimisers and checkpoints see nothing of FP8. Where no
gradient of a weight is recorded (torch.no_grad, inference_mode, requires_grad_(False)), its FP8 form is kept until the weight
changes or a gradient of it is recorded again; otherwise each call quantises it. freeze() drops the weight and keeps the FP8
form alone.
"""

import contextlib
import fnmatch
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from fp8_gemm import ops
from fp8_gemm.dispatch import BACKENDS
from fp8_gemm.gemm import gemm
from fp8_gemm.grouped import grouped_gemm, masked_gemm
from fp8_gemm.problem import VALIDATE_VARIABLE, check_batch_invariant, check_how
from fp8_gemm.quantize import GroupedTensor, ScaledTensor, quantize, quantize_grouped, swiglu_quantize

PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}  # precisions without FP8, and the type their products are computed in
LAYOUTS = ("contiguous", "masked")


@dataclass(frozen=True)
class Recipe:
    """How a layer computes in FP8. Raises ValueError at construction.

    activation, weight  recipes of quantize, a pair that gemm takes
    grad_format         "e4m3" or "e5m2": the format of gradients in the backward pass
    interval            K between promotions to FP32, as in gemm
    backend             as in gemm; None lets the device decide
    batch_invariant     a row's result does not depend on how many rows there are (slower)
    """

    activation: str = "1x128"
    weight: str = "128x128"
    grad_format: str = "e4m3"
    interval: int | None = 128
    backend: str | None = None
    batch_invariant: bool = False

    def __post_init__(self):
        check_how(self.activation, self.weight, interval=self.interval, grad_format=self.grad_format)
        check_batch_invariant(self.activation, {"batch_invariant": self.batch_invariant})
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; allowed are None, {', '.join(map(repr, BACKENDS))}")

    def arguments(self, backend: str | None) -> dict:
        """Keywords of gemm, grouped_gemm and masked_gemm."""
        options = {"batch_invariant": True} if self.batch_invariant else {}
        return {"recipe": (self.activation, self.weight), "interval": self.interval, "grad_format": self.grad_format,
                "backend": backend or self.backend, **options}  # fmt: skip


def check_precision(precision: "Recipe | str") -> "Recipe | str":
    """A Recipe (for "fp8" the default one), "bf16" or "fp32". Raises ValueError for anything else."""
    if precision == "fp8":
        return Recipe()
    if isinstance(precision, Recipe) or precision in PLAIN:
        return precision
    raise ValueError(f"precision is {precision!r}; allowed are 'fp8', 'bf16', 'fp32' and a Recipe")


def _result_dtype(x: torch.Tensor) -> torch.dtype:
    """What nn.Linear would return for x: autocast's type, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if _has_autocast(kind) and torch.is_autocast_enabled(kind) else x.dtype


def _has_autocast(kind: str) -> bool:
    return kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind)  # not for meta tensors, which fake results are made of


def _no_autocast(x: torch.Tensor):
    """A context in which products have the types of their operands."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else contextlib.nullcontext()


# ---------------------------------------------------------------- weights and their FP8 form

# Steps of fused optimisers, by parameter: they change it without counting that in its _version.
_fused_steps = WeakIdKeyDictionary()


def _count_fused_steps(optimiser, arguments, keywords) -> None:
    for group in optimiser.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                _fused_steps[parameter] = _fused_steps.get(parameter, 0) + 1


register_optimizer_step_post_hook(_count_fused_steps)


class Layer(torch.nn.Module):
    """A module whose weights have an FP8 form: cached while they do not change, or in their place (frozen)."""

    WEIGHTS: tuple[str, ...]
    precision: Recipe | str
    frozen = False
    monitor = None  # set by fp8_gemm.monitor: called after each forward pass
    watchable = True  # whether compute() can be repeated on some of the rows, by this process alone
    _cache: dict | None = None

    def set_precision(self, precision: Recipe | str) -> None:
        """Compute in another precision from now on: a Recipe, "fp8", "bf16" or "fp32".

        Raises ValueError for anything else, and for a Recipe with other weight scales than a layer was frozen with.
        """
        self.precision = self.checked(precision)

    def checked(self, precision: Recipe | str) -> Recipe | str:
        """The precision, if this layer can have it. Raises as set_precision."""
        precision = check_precision(precision)
        if self.frozen and isinstance(precision, Recipe) and precision.weight != self._frozen_recipe:
            raise ValueError(f"precision has weights scaled {precision.weight!r}, but this layer was frozen with {self._frozen_recipe!r} "
                             "and has no other weights: set the precision before freeze()")  # fmt: skip
        return precision

    def refresh(self) -> None:
        """Forget cached FP8 weights. Needed after writes that PyTorch does not count, such as weight.data.copy_(…) or a CUDA graph's."""
        self._cache = None

    def freeze(self) -> "Layer":
        """Keep the FP8 weights alone, for inference: half the memory of bfloat16, and nothing to quantise under torch.compile.

        Parameters become buffers <name>_data and <name>_scale, which the state dict then holds. Returns the layer. Raises
        ValueError for a layer that is not FP8.
        """
        if not isinstance(self.precision, Recipe):
            raise ValueError(f"precision is {self.precision!r}; only FP8 layers freeze: set_precision('fp8') first")
        if not self.frozen:
            for name in self.WEIGHTS:
                scaled = _quantize_weight(getattr(self, name), self.precision.weight)
                delattr(self, name)
                self.register_buffer(f"{name}_data", scaled.data)
                self.register_buffer(f"{name}_scale", scaled.scale)
            self.frozen, self._cache = True, None
            self._frozen_recipe = self.precision.weight
        return self

    def operand(self, name: str, recipe: Recipe) -> torch.Tensor | ScaledTensor | GroupedTensor:
        """A weight for a GEMM: FP8, or plain where a gradient is recorded or the call is traced."""
        if self.frozen:
            return self._frozen_operand(name)
        weight = getattr(self, name)
        if ops.traced(weight) or weight.is_inference():  # inference tensors do not say when they change
            if not torch.compiler.is_compiling() and self._cache:  # in this order, or a compiled layer would depend on the cache
                self._cache = None  # a step will follow, by an optimiser that may not say so
            return weight
        state = (weight._version, weight.data_ptr(), _fused_steps.get(weight, 0), recipe.weight)
        cache = self._cache or {}
        kept = cache.get(name)
        if kept is None or kept[0] is not weight or kept[1] != state:
            # With the weight's memory, so that no other can come to lie there (after weight.data = …).
            kept = (weight, state, _quantize_weight(weight, recipe.weight), weight.detach())
            self._cache = {**cache, name: kept}
        return kept[2]

    def plain_weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A weight in dtype; of a frozen layer, dequantised."""
        return (self._frozen_operand(name).dequantize() if self.frozen else getattr(self, name)).to(dtype)

    def _frozen_operand(self, name: str) -> ScaledTensor | GroupedTensor:
        data, scale = getattr(self, f"{name}_data"), getattr(self, f"{name}_scale")
        return (ScaledTensor if data.dim() == 2 else GroupedTensor)(data, scale, self._frozen_recipe)

    def _apply(self, fn, recurse=True):
        self._cache = None
        kept = {key: self._buffers[key] for name in self.WEIGHTS if self.frozen for key in (f"{name}_data", f"{name}_scale")}
        super()._apply(fn, recurse)
        for key, before in kept.items():  # model.to(bfloat16) is not meant for FP8 data and its scales: their device alone moves
            if self._buffers[key].dtype != before.dtype:
                self._buffers[key] = before.to(self._buffers[key].device)
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        for name in self.WEIGHTS:
            key = prefix + name
            if self.frozen and key in state_dict:  # a checkpoint from before freezing
                scaled = _quantize_weight(state_dict.pop(key), self._frozen_recipe)
                state_dict[f"{key}_data"], state_dict[f"{key}_scale"] = scaled.data, scaled.scale
            elif not self.frozen and f"{key}_data" in state_dict:
                errors.append(f"{key}_data comes from a frozen layer and this one is not: call freeze() before loading")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def __getstate__(self):
        return {**self.__dict__, "_cache": None, "monitor": None}  # copies and pickles quantise for themselves, unwatched


def _quantize_weight(weight: torch.Tensor, recipe: str) -> ScaledTensor | GroupedTensor:
    # Never inference tensors: the result is kept, and may be saved for a backward pass later.
    with torch.inference_mode(False), torch.no_grad():
        return (quantize if weight.dim() == 2 else quantize_grouped)(weight, recipe)


# ---------------------------------------------------------------- Linear


class Linear(Layer, torch.nn.Linear):
    """nn.Linear whose products are FP8: x (…, in_features) to (…, out_features), in x's type (autocast's under autocast).

    Arguments, parameters, initialisation and state dict are nn.Linear's; precision is a Recipe, "fp8", "bf16" or "fp32".
    x is bfloat16, float16 or float32, whatever the type of the parameters. Differentiable in x, weight and bias.
    """

    WEIGHTS = ("weight",)
    bias_in_gemm = True  # False where partial products are summed before the bias

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, *,
                 precision: Recipe | str = "fp8"):  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_precision(precision)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) to (…, out_features). Raises as gemm does."""
        y = self.compute(x, precision=self.precision)
        if self.monitor is not None:
            self.monitor(y, x)
        return y

    def compute(self, x: torch.Tensor, *, precision: Recipe | str, backend: str | None = None,
                out_dtype: torch.dtype | None = None) -> torch.Tensor:  # fmt: skip
        """The layer's result in any precision, unobserved: forward() without its monitor."""
        out_dtype = out_dtype or _result_dtype(x)
        if not isinstance(precision, Recipe):
            return self._plain(x, PLAIN[check_precision(precision)], out_dtype)
        matrix, bias = x[None] if x.dim() == 1 else x, self.bias if self.bias_in_gemm else None
        y = gemm(matrix, self.operand("weight", precision), bias=bias, out_dtype=out_dtype, **precision.arguments(backend))
        return y[0] if x.dim() == 1 else y

    def _plain(self, x, dtype, out_dtype):
        with _no_autocast(x):
            bias = self.bias.to(dtype) if self.bias is not None and self.bias_in_gemm else None
            return F.linear(x.to(dtype), self.plain_weight("weight", dtype), bias).to(out_dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision!r}{', frozen' if self.frozen else ''}"


# ---------------------------------------------------------------- Experts


class Permutation:
    """Token-expert pairs sorted by expert, on the device of the ids, nothing read on the host.

    ids      (T, k) integers: the experts of each token; outside 0 … experts - 1 for none
    group    (T·k,) the expert of each sorted pair, ``experts`` for none: those come last
    tokens   (T·k,) the token of each sorted pair
    inverse  (T·k,) where each pair of ids, row by row, went
    counts   (experts,) int32: pairs of each expert
    """

    def __init__(self, ids: torch.Tensor, experts: int):
        flat = ids.flatten().long()
        flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
        order = flat.argsort(stable=True)
        self.group = flat[order]
        self.tokens = order // max(ids.shape[1], 1)
        self.inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=ids.device))
        self.counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
        self.counts = self.counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))[:experts]


def combine(pairs: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Σ_j weights[t, j] · pairs[t · k + j], (T, H): in FP32, in the order of j, pairs of no expert left out.

    One product after another rather than a sum over a dimension, whose order PyTorch does not promise.
    """
    tokens, k = ids.shape
    pairs = pairs.view(tokens, k, pairs.shape[-1])
    inside = (ids >= 0) & (ids < experts)
    total = torch.zeros(tokens, pairs.shape[-1], dtype=torch.float32, device=pairs.device)
    for j in range(k):
        part = pairs[:, j].float() * weights[:, j, None].float()
        total = total + torch.where(inside[:, j, None], part, 0)
    return total.to(out_dtype)


class Experts(Layer):
    """A mixture of gated experts: y = Σ_j w_j · down_e(silu(gate_e(x)) · up_e(x)) over the k experts e of each token.

    experts, hidden, intermediate   parameters gate_up (experts, 2 · intermediate, hidden), gates first, and
                                    down (experts, hidden, intermediate), without biases
    top_k      experts of each token when the layer routes; router=False for a layer that is always given its routing
    normalize  whether the k weights of a token are divided by their sum
    layout     "contiguous": rows sorted by expert, any number of tokens. "masked": a buffer of (experts, tokens) rows for
               few tokens, such as a decoding step
    precision  a Recipe with "1x128" or "row" activations, "fp8", "bf16" or "fp32". The latter two read group sizes on the host
    held       how many experts' weights this module has; all, except in parallel.ExpertParallelExperts

    The router is a parameter (experts, hidden), its product and softmax FP32 in every precision. Raises TypeError, ValueError.
    """

    WEIGHTS = ("gate_up", "down")

    def __init__(
        self, experts: int, hidden: int, intermediate: int, *, top_k: int = 2, router: bool = True, normalize: bool = True,
        layout: str = "contiguous", precision: Recipe | str = "fp8", device=None, dtype=None, held: int | None = None,
    ):  # fmt: skip
        super().__init__()
        for name, value in (("experts", experts), ("hidden", hidden), ("intermediate", intermediate)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k is {top_k}; allowed are 1 to {experts}, the number of experts")
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}; allowed are {', '.join(map(repr, LAYOUTS))}")
        self.experts, self.hidden, self.intermediate, self.top_k = experts, hidden, intermediate, top_k
        self.normalize, self.layout = normalize, layout

        def parameter(*shape):
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        held = held or experts
        self.gate_up, self.down = parameter(held, 2 * intermediate, hidden), parameter(held, hidden, intermediate)
        self.router = parameter(experts, hidden) if router else None
        self.reset_parameters()
        self.set_precision(precision)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as nn.Linear draws its weight."""
        for parameter in self.parameters():
            bound = 1 / math.sqrt(parameter.shape[-1])
            torch.nn.init.uniform_(parameter, -bound, bound)

    def checked(self, precision: Recipe | str) -> Recipe | str:
        """As Linear's; rows of no expert must not reach a scale, so activations are scaled "1x128" or "row".

        Raises ValueError for a Recipe with "tensor" activations as well.
        """
        precision = super().checked(precision)
        if isinstance(precision, Recipe) and precision.activation == "tensor":
            raise ValueError("activation is 'tensor', one scale for the rows of all experts; Experts take '1x128' or 'row'")
        return precision

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids (T, k) int64, weights (T, k) float32) of tokens x (T, hidden): softmax over all experts, then the top k.

        Raises ValueError for a layer made with router=False.
        """
        if self.router is None:
            raise ValueError("topk_ids is None, but this layer has no router: pass topk_ids and topk_weights, or make it with "
                             "router=True")  # fmt: skip
        with _no_autocast(x):
            weights, ids = F.linear(x.float(), self.router.float()).softmax(-1).topk(self.top_k)
        return ids, weights / weights.sum(-1, keepdim=True) if self.normalize else weights

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor | None = None,
                topk_weights: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        """x (…, hidden) to (…, hidden), in x's type (autocast's under autocast).

        topk_ids      (tokens, k) integers, the experts of each token, all different; -1 for none. By default the router's
        topk_weights  (tokens, k) floats; by default the router's

        Ids are checked on the CPU, and on a GPU with FP8_GEMM_VALIDATE=1; otherwise ids out of range count as none there.
        """
        flat, ids, weights = self._inputs(x, topk_ids, topk_weights)
        y = self.compute(flat, ids, weights, precision=self.precision)
        if self.monitor is not None:
            self.monitor(y, flat, ids, weights)
        return y.reshape(x.shape)

    def _inputs(self, x, topk_ids, topk_weights):
        """(x (T, hidden), ids, weights), checked."""
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be (…, {self.hidden})")
        flat = x.reshape(-1, self.hidden)
        if (topk_ids is None) != (topk_weights is None):
            raise ValueError("topk_ids and topk_weights: one is given and the other is not; pass both, or neither to use the "
                             "router")  # fmt: skip
        if topk_ids is None:
            return flat, *self.route(flat)
        check_ids(topk_ids, topk_weights, flat.shape[0], self.experts)
        return flat, topk_ids, topk_weights

    def compute(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, precision: Recipe | str,
                backend: str | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:  # fmt: skip
        """The layer's result for x (T, hidden) and its routing in any precision, unobserved."""
        out_dtype = out_dtype or _result_dtype(x)
        permutation = Permutation(ids, self.experts)
        if not isinstance(precision, Recipe):
            pairs = self.run_plain(x[permutation.tokens], permutation.counts, precision, out_dtype)
        elif self.layout == "masked":
            pairs = self._masked(x, permutation, precision, backend, out_dtype)
        else:
            rows = self._gather(x, permutation.tokens, precision)
            pairs = self.run_rows(rows, permutation.counts, precision, backend, out_dtype)
        return combine(pairs[permutation.inverse], ids, weights, self.experts, out_dtype)

    def run_rows(self, rows: torch.Tensor | ScaledTensor, counts: torch.Tensor, recipe: Recipe, backend: str | None,
                 out_dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
        """Every expert on its rows: rows (R, hidden) sorted by expert, counts (experts,) on the device, to (R, hidden)."""
        arguments = recipe.arguments(backend)
        middle = grouped_gemm(rows, self.operand("gate_up", recipe), counts=counts, out_dtype=out_dtype, **arguments)
        gated = self._gated(middle, recipe)
        return grouped_gemm(gated, self.operand("down", recipe), counts=counts, out_dtype=out_dtype, **arguments)

    def _gather(self, x, tokens, recipe) -> torch.Tensor | ScaledTensor:
        """x[tokens]; without gradients quantised first, once for each token, so that half the bytes are gathered."""
        if ops.traced(x, *(getattr(self, name) for name in self.WEIGHTS if not self.frozen)):
            return x[tokens]
        scaled = quantize(x, recipe.activation)
        data = scaled.data.view(torch.uint8)[tokens].view(scaled.data.dtype)
        return ScaledTensor(data, scaled.scale[tokens], recipe.activation)

    def _gated(self, middle: torch.Tensor, recipe: Recipe) -> torch.Tensor | ScaledTensor:
        """silu(gates) · values in FP32, quantised in the same pass where nothing needs it plain."""
        if recipe.activation == "1x128" and not ops.traced(middle):
            return swiglu_quantize(middle)
        gate, value = middle.float().chunk(2, dim=-1)
        return F.silu(gate) * value

    def _masked(self, x, permutation, recipe, backend, out_dtype) -> torch.Tensor:
        """As run_rows, through a buffer (experts, tokens, hidden): room for every token at every expert."""
        rows, arguments = x.shape[0], recipe.arguments(backend)
        starts = F.pad(permutation.counts.cumsum(0), (1, 0))
        slot = torch.arange(permutation.group.shape[0], device=x.device) - starts[permutation.group]
        spare = self.experts * rows  # a last row for pairs of no expert
        place = torch.where(permutation.group < self.experts, permutation.group * rows + slot, spare)
        buffer = x.new_zeros(spare + 1, self.hidden).index_copy(0, place, x[permutation.tokens])[:spare]
        buffer = buffer.view(self.experts, rows, self.hidden)
        middle = masked_gemm(buffer, self.operand("gate_up", recipe), permutation.counts, out_dtype=out_dtype, **arguments)
        gated = self._gated(middle.flatten(0, 1), recipe)
        if isinstance(gated, ScaledTensor):
            gated = GroupedTensor(*(t.view(self.experts, rows, -1) for t in (gated.data, gated.scale)), gated.recipe)
        else:
            gated = gated.view(self.experts, rows, self.intermediate)
        result = masked_gemm(gated, self.operand("down", recipe), permutation.counts, out_dtype=out_dtype, **arguments)
        return F.pad(result.flatten(0, 1), (0, 0, 0, 1))[place]

    def run_plain(self, rows: torch.Tensor, counts: torch.Tensor, precision: str, out_dtype: torch.dtype) -> torch.Tensor:
        """As run_rows in "bf16" or "fp32", expert by expert in torch. Reads counts on the host."""
        dtype, sizes = PLAIN[check_precision(precision)], counts.tolist()
        gate_up, down = self.plain_weight("gate_up", dtype), self.plain_weight("down", dtype)
        with _no_autocast(rows):
            parts = []
            for expert, part in enumerate(rows[: sum(sizes)].to(dtype).split(sizes)):
                gate, value = F.linear(part, gate_up[expert]).float().chunk(2, dim=-1)
                parts.append(F.linear((F.silu(gate) * value).to(dtype), down[expert]).to(out_dtype))
            return torch.cat([*parts, rows.new_zeros(rows.shape[0] - sum(sizes), self.hidden, dtype=out_dtype)])

    def extra_repr(self) -> str:
        routing = f"top_k={self.top_k}" if self.router is not None else "router=False"
        return (f"{self.experts}, {self.hidden}, {self.intermediate}, {routing}, layout={self.layout!r}, "
                f"precision={self.precision!r}{', frozen' if self.frozen else ''}")  # fmt: skip


def check_ids(ids: torch.Tensor, weights: torch.Tensor, tokens: int, experts: int) -> None:
    """Check that ids and weights, both (tokens, k), are a routing: integers, -1 or an expert, the experts of a token different.

    Reads values on the CPU only, or everywhere with FP8_GEMM_VALIDATE=1. Raises TypeError or ValueError.
    """
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"topk_ids is {ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__}; it must be a tensor "
                        "of integers (tokens, k)")  # fmt: skip
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point():
        given = weights.dtype if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise TypeError(f"topk_weights is {given}; it must be a tensor of floats (tokens, k)")
    if ids.dim() != 2 or ids.shape[0] != tokens:
        raise ValueError(f"topk_ids has shape {tuple(ids.shape)}; x has {tokens} tokens: it must be ({tokens}, k)")
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights has shape {tuple(weights.shape)} and topk_ids {tuple(ids.shape)}; they must be equal")
    if torch.compiler.is_compiling() or ids.is_meta or (ids.device.type != "cpu" and os.environ.get(VALIDATE_VARIABLE) != "1"):
        return
    ids = ids.long()  # unsigned ones know no -1
    outside = ((ids < -1) | (ids >= experts)).nonzero()
    if len(outside):
        token, j = outside[0].tolist()
        raise ValueError(f"topk_ids[{token}, {j}] is {int(ids[token, j])}; allowed are -1 (none) and 0 to {experts - 1}")
    ordered = ids.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if len(twice):
        token = int(twice[0, 0])
        raise ValueError(f"topk_ids[{token}] is {ids[token].tolist()}; the experts of a token must differ: add up their weights")


# ---------------------------------------------------------------- policy


class Policy:
    """Which layer computes how: {pattern: precision}, the first pattern that matches a layer's name decides.

    Patterns are those of fnmatch ("layers.*.mlp.*", "lm_head"); precisions "fp8", a Recipe, "bf16", "fp32", and "keep" for
    layers that stay what they are. Layers no pattern matches stay, too. Raises TypeError or ValueError.
    """

    def __init__(self, rules: Mapping[str, Recipe | str]):
        if not isinstance(rules, Mapping) or not rules:
            raise TypeError(f"rules is {rules!r}; it must be a dict of at least one pattern, such as {{'*': 'fp8'}}")
        self.rules = {pattern: rule if rule == "keep" else check_precision(rule) for pattern, rule in rules.items()}

    def precision_of(self, name: str) -> Recipe | str | None:
        """The precision for a layer of that name; None where no pattern matches."""
        return next((rule for pattern, rule in self.rules.items() if fnmatch.fnmatchcase(name, pattern)), None)

    def __repr__(self) -> str:
        return f"Policy({self.rules})"


def convert(model: torch.nn.Module, policy: Policy | Mapping[str, Recipe | str]) -> dict[str, Recipe | str]:
    """Make the model's nn.Linear layers, and Linear and Experts of this module, compute as the policy says. In place.

    Modules, parameters, hooks, ties and state dict keys stay the same objects: an nn.Linear changes its class only. Subclasses
    of nn.Linear stay, because they may not compute through forward (as in nn.MultiheadAttention). An nn.TransformerEncoderLayer
    with such a layer computes by its layers from then on, without PyTorch's fused path for inference, which reads their weights.
    Returns {name: precision} of what it set; a layer under several names is listed by its first. Raises ValueError for a
    pattern that matches no layer, and for a precision that a layer cannot have: then nothing is changed.
    """
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    layers = {name: module for name, module in model.named_modules()
              if type(module) is torch.nn.Linear or isinstance(module, Layer)}  # fmt: skip
    for pattern in policy.rules:
        if not fnmatch.filter(layers, pattern):
            raise ValueError(f"policy has the pattern {pattern!r}, which matches none of the model's layers: "
                             f"{', '.join(map(repr, layers)) or 'it has no nn.Linear, Linear or Experts'}")  # fmt: skip
    chosen = {name: policy.precision_of(name) for name in layers}
    chosen = {name: precision for name, precision in chosen.items() if precision not in (None, "keep")}
    for name, precision in chosen.items():
        if isinstance(layers[name], Layer):
            layers[name].checked(precision)
    for name, precision in chosen.items():
        layer = layers[name]
        if type(layer) is torch.nn.Linear:
            layer.__class__ = Linear
        layer.set_precision(precision)
    for module in model.modules():  # what the fused paths ask for first
        if isinstance(module, torch.nn.TransformerEncoderLayer) and any(isinstance(child, Layer) for child in module.children()):
            module.activation_relu_or_gelu = 0
        if isinstance(module, torch.nn.TransformerEncoder) and any(isinstance(child, Layer) for child in module.modules()):
            module.use_nested_tensor = False
    return chosen
