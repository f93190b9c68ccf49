"""Layers spread over the ranks of a torch.distributed group: tensor-parallel Linear, expert-parallel Experts.

    up = ColumnParallelLinear.from_linear(up, group)      # each rank has a slice of the output features
    down = RowParallelLinear.from_linear(down, group)     # each rank has a slice of the input features; results are summed
    moe = ExpertParallelExperts.from_experts(moe, group)  # each rank has some experts; tokens travel to them in FP8

Every rank of the group calls a layer's forward (and backward) as often as the others, tokens or not, and under no_grad where
they do. If one fails, the others raise RuntimeError when its connection closes or the group's timeout is over, as the backend
does: gloo raises in the call, NCCL's watchdog ends the process unless TORCH_NCCL_BLOCKING_WAIT=1. Eager only: collectives are
not traced.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fp8_gemm.nn import Experts, Layer, Linear, Permutation, Recipe, _result_dtype, combine
from fp8_gemm.quantize import ScaledTensor, quantize

# ---------------------------------------------------------------- collectives


def _place(group) -> tuple[int, int]:
    """(rank, size) of this process in the group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("torch.distributed is not initialised, and parallel layers need a group: call "
                           "torch.distributed.init_process_group first, under python -m torch.distributed.run")  # fmt: skip
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not hold this process: build the layer on the group's ranks only")
    return rank, dist.get_world_size(group)


def _collective(name: str, group, call: Callable):
    """call(), its failure told in terms of the group.

    Collectives are started with async_op=True and waited for. Others return before they are done (NCCL's, since torch 2.8),
    and the next thing that waits for the device would hang, TORCH_NCCL_BLOCKING_WAIT or not, where this wait raises.
    """
    try:
        return call()
    except RuntimeError as error:  # of which DistBackendError is one
        rank, size = _place(group)
        message = (f"{name} failed on rank {rank} of {size}: another rank failed, did not call it within the group's timeout, or "
                   f"called it with other sizes. Look for the first error among the ranks. Here: {error}")  # fmt: skip
        raise RuntimeError(message) from error


def _all_reduce(x: torch.Tensor, group) -> torch.Tensor:
    """The sum over ranks, in x's place."""
    _collective("all_reduce", group, lambda: dist.all_reduce(x, group=group, async_op=True).wait())
    return x


def _all_gather_last(x: torch.Tensor, group) -> torch.Tensor:
    """(…, n) of each rank to (…, size · n), in the order of ranks."""
    _, size = _place(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    _collective("all_gather", group, lambda: dist.all_gather(parts, x.contiguous(), group=group, async_op=True).wait())
    return torch.cat(parts, dim=-1)


def _slice_last(x: torch.Tensor, group) -> torch.Tensor:
    rank, size = _place(group)
    return x.chunk(size, dim=-1)[rank].contiguous()


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient, the same on every rank, goes to each."""

    @staticmethod
    def forward(ctx, x, group):
        return _all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Share(torch.autograd.Function):
    """What every rank has already; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Gather(torch.autograd.Function):
    """Slices of the last dimension put together; each rank's gradient is its slice."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_gather_last(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _slice_last(grad, ctx.group), None


class _Slice(torch.autograd.Function):
    """This rank's slice of the last dimension; the gradient is put together from all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _slice_last(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather_last(grad, ctx.group), None


def _share_of(name: str, features: int, size: int) -> int:
    if features % size:
        raise ValueError(f"{name} is {features}, which {size} ranks cannot share evenly; pad it to a multiple of {size}")
    return features // size


# ---------------------------------------------------------------- what parallel layers share


class _Group:
    """A layer's group on its way into a copy, which shares it."""

    def __init__(self, group):
        self.group = group

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("group is a torch.distributed group of this process, which cannot be pickled: save layer.state_dict() "
                        "and load it into a layer made with a group there, or make layers with group=None, the default")  # fmt: skip


class _Parallel(Layer):
    """A layer of a group: how it starts, and how it is copied."""

    def __getstate__(self):
        state = super().__getstate__()
        return state if self.group is None else {**state, "group": _Group(self.group)}

    def __setstate__(self, state):
        group = state["group"]
        super().__setstate__({**state, "group": group.group} if isinstance(group, _Group) else state)

    def _trains(self) -> bool:
        """Whether gradients of this rank's weights are recorded."""
        weights = [] if self.frozen else [getattr(self, name) for name in self.WEIGHTS]
        return torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)

    def _draw(self, parameter: torch.Tensor, fan_in: int) -> None:
        """Fill this rank's slice of a weight as nn.Linear fills a weight of fan_in input features, no two ranks alike.

        torch's own generator gives one number, the same on ranks that were seeded alike, and so stays the same on them for what
        other layers draw; the slice comes from a generator seeded with that number and the rank.
        """
        seed = int(torch.randint(2**62, (), device="cpu")) + _place(self.group)[0]
        if not parameter.is_meta:
            bound, generator = 1 / math.sqrt(max(fan_in, 1)), torch.Generator(parameter.device).manual_seed(seed)
            with torch.no_grad():
                parameter.uniform_(-bound, bound, generator=generator)


def _check_not_frozen(layer: torch.nn.Module) -> None:
    if getattr(layer, "frozen", False):
        raise ValueError("layer is frozen: it has no weight that could be sliced. Slice first, then freeze() each rank's layer")


def _taking_part(x: torch.Tensor, recorded: bool) -> torch.Tensor:
    """x, with a gradient where gradients are recorded: without, this rank would leave out a collective of the backward pass."""
    recorded = recorded and torch.is_grad_enabled()
    return x.detach().requires_grad_() if recorded and not x.requires_grad and x.is_floating_point() else x


# ---------------------------------------------------------------- tensor-parallel Linear


class ColumnParallelLinear(_Parallel, Linear):
    """A Linear whose output features are shared out: rank r computes features r · out/size … (r + 1) · out/size - 1.

    in_features, out_features  of the whole layer; weight is (out_features / size, in_features), bias (out_features / size,)
    group          a torch.distributed group; None for the default one
    gather_output  whether every rank gets all output features (one all_gather), or its slice, for a RowParallelLinear to take

    x is the same on all ranks; its gradient is summed over them, and computed whenever the weight's is. Each feature's bits are
    those of one process where the slices are multiples of 128 features, so that scaling blocks stay whole. New slices differ, on
    ranks with one seed too, and together are distributed as nn.Linear's weight. Other arguments and errors as in Linear.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, *, group=None,
                 gather_output: bool = False, precision: Recipe | str = "fp8"):  # fmt: skip
        _, size = _place(group)
        self.group, self.gather_output = group, gather_output  # first: the parameters are drawn by it
        super().__init__(in_features, _share_of("out_features", out_features, size), bias, device, dtype, precision=precision)

    def reset_parameters(self) -> None:
        """Draw this rank's slices anew. On all ranks."""
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                self._draw(parameter, self.in_features)

    @classmethod
    def from_linear(cls, layer: torch.nn.Linear, group=None, *, gather_output: bool = False,
                    precision: Recipe | str = "fp8") -> "ColumnParallelLinear":  # fmt: skip
        """This rank's slice of a layer that every rank has whole. Raises ValueError for a frozen one."""
        _check_not_frozen(layer)
        rank, size = _place(group)
        new = cls(layer.in_features, layer.out_features, layer.bias is not None, layer.weight.device, layer.weight.dtype,
                  group=group, gather_output=gather_output, precision=precision)  # fmt: skip
        with torch.no_grad():
            new.weight.copy_(layer.weight.chunk(size)[rank])
            if layer.bias is not None:
                new.bias.copy_(layer.bias.chunk(size)[rank])
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) to (…, out_features), or this rank's slice of them. RuntimeError if another rank fails."""
        y = super().forward(_Share.apply(_taking_part(x, self._trains()), self.group))
        return _Gather.apply(y, self.group) if self.gather_output else y


class RowParallelLinear(_Parallel, Linear):
    """A Linear whose input features are shared out: each rank multiplies its slice, and the products are summed.

    in_features, out_features  of the whole layer; weight is (out_features, in_features / size), bias (out_features,)
    group        a torch.distributed group; None for the default one
    input_is_parallel  whether x is the rank's slice already (what a ColumnParallelLinear returns), or whole
    reduce_dtype  in what partial products travel and are summed: None for the result's type; float32 doubles bfloat16's bytes
                 and rounds once

    Every rank gets the whole result, the bias added after the sum. A new bias starts at zero, alike on all ranks; new slices of
    the weight differ and together are distributed as nn.Linear's weight. The gradient of a whole x is computed whenever the
    weight's is. Two ranks' sums have the bits of a + b whatever the order; with more, the backend's order decides. Other
    arguments and errors as in Linear.
    """

    bias_in_gemm = False

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, *, group=None,
        input_is_parallel: bool = True, reduce_dtype: torch.dtype | None = None, precision: Recipe | str = "fp8",
    ):  # fmt: skip
        _, size = _place(group)
        self.group, self.input_is_parallel, self.reduce_dtype = group, input_is_parallel, reduce_dtype  # first, as above
        super().__init__(_share_of("in_features", in_features, size), out_features, bias, device, dtype, precision=precision)

    def reset_parameters(self) -> None:
        """Draw this rank's slice of the weight anew, and set the bias to zero. On all ranks."""
        self._draw(self.weight, self.in_features * _place(self.group)[1])
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    @classmethod
    def from_linear(cls, layer: torch.nn.Linear, group=None, *, input_is_parallel: bool = True,
                    reduce_dtype: torch.dtype | None = None, precision: Recipe | str = "fp8") -> "RowParallelLinear":  # fmt: skip
        """This rank's slice of a layer that every rank has whole. Raises ValueError for a frozen one."""
        _check_not_frozen(layer)
        rank, size = _place(group)
        new = cls(layer.in_features, layer.out_features, layer.bias is not None, layer.weight.device, layer.weight.dtype,
                  group=group, input_is_parallel=input_is_parallel, reduce_dtype=reduce_dtype, precision=precision)  # fmt: skip
        with torch.no_grad():
            new.weight.copy_(layer.weight.chunk(size, dim=1)[rank])
            if layer.bias is not None:
                new.bias.copy_(layer.bias)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features), or this rank's slice of it, to (…, out_features). Raises ValueError for another size, RuntimeError if another
        rank fails."""
        out_dtype = _result_dtype(x)
        wanted = self.in_features * (1 if self.input_is_parallel else _place(self.group)[1])
        if x.dim() == 0 or x.shape[-1] != wanted:
            what = "this rank's slice: input_is_parallel=False takes all" if self.input_is_parallel else "all ranks' features"
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be (…, {wanted}), {what}")
        if not self.input_is_parallel:
            x = _Slice.apply(_taking_part(x, self._trains()), self.group)
        part = self.compute(x, precision=self.precision, out_dtype=self.reduce_dtype or out_dtype)
        if self.monitor is not None:
            self.monitor(part, x)
        y = _Sum.apply(part, self.group) if part.requires_grad else _all_reduce(part, self.group)
        return (y if self.bias is None else y + self.bias.to(y.dtype)).to(out_dtype)


# ---------------------------------------------------------------- moving rows between ranks


@dataclass(frozen=True)
class Routes:
    """Rows to send to each rank and to receive from each; rows lie in the order of ranks."""

    sent: list[int]
    received: list[int]

    def back(self) -> "Routes":
        """The way back: what was received is sent."""
        return Routes(self.received, self.sent)


def _exchange(rows: torch.Tensor, routes: Routes, group) -> tuple[torch.Tensor, Callable[[], None]]:
    """Start all_to_all of rows (R, width). Returns the rows to come and what to call before reading them."""
    result = rows.new_empty(sum(routes.received), rows.shape[1])
    source = rows.contiguous()
    work = _collective("all_to_all", group, lambda: dist.all_to_all_single(
        result, source, routes.received, routes.sent, group=group, async_op=True))  # fmt: skip

    def wait(sent_from=source):  # which must live until then
        _collective("all_to_all", group, work.wait)

    return result, wait


def pack(scaled: ScaledTensor) -> torch.Tensor:
    """FP8 rows with their scales behind them: one message, uint8 (rows, K + 4 · scales per row).

    scaled  (rows, K), scaled "1x128" (ceil(K / 128) scales per row) or "row" (one)
    """
    scale = scaled.scale[:, None] if scaled.recipe == "row" else scaled.scale
    scale = scale.clone(memory_format=torch.contiguous_format)  # contiguous() leaves the strides of one column, M-major, as they are
    return torch.cat([scaled.data.view(torch.uint8), scale.view(torch.uint8)], dim=1)


def unpack(packed: torch.Tensor, k: int, recipe: str, dtype: torch.dtype) -> ScaledTensor:
    """Undo pack, (rows, bytes) to a ScaledTensor (rows, k): K and the FP8 type are not in the message."""
    data, scale = packed[:, :k].contiguous().view(dtype), packed[:, k:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return ScaledTensor(data, scale.flatten() if recipe == "row" else scale, recipe)


class _Move(torch.autograd.Function):
    """Rows to other ranks; the gradients come back the same way. With a recipe the rows travel in FP8.

    They arrive in their own type again, data · scale. Quantising that gives the same FP8 data, with scales rounded to the
    type, and the gradient passes through as if nothing had been rounded.
    """

    @staticmethod
    def forward(ctx, rows, routes, group, recipe):
        ctx.routes, ctx.group = routes, group
        scaled = None if recipe is None else quantize(rows, recipe)
        moved, wait = _exchange(rows if scaled is None else pack(scaled), routes, group)
        wait()
        return moved if scaled is None else unpack(moved, rows.shape[1], recipe, scaled.data.dtype).dequantize().to(rows.dtype)

    @staticmethod
    def backward(ctx, grad):
        moved, wait = _exchange(grad, ctx.routes.back(), ctx.group)
        wait()
        return moved, None, None, None


# ---------------------------------------------------------------- expert-parallel Experts


class ExpertParallelExperts(_Parallel, Experts):
    """Experts shared out over the ranks of a group: rank r has experts r · experts/size … (r + 1) · experts/size - 1.

    experts  of the whole layer, a multiple of the group's size; gate_up and down are this rank's, drawn unlike those of others
             that have its seed; the router is whole and, when built, broadcast from the group's first rank
    group    a torch.distributed group; None for the default one
    chunks   split each rank's tokens into so many parts, so that one travels while another is computed (without gradients
             only). The same on all ranks

    Each rank brings its own tokens, any number, 0 included, with ids of the whole layer's experts, and gets their results.
    Rows travel to their experts in FP8 with their scales, K + K/32 bytes instead of bfloat16's 2 K, and results back in the
    result's type. Each row has the bits that one process would give where the backend's result for a row does not depend on
    how many there are (batch_invariant=True in the Recipe). Group sizes are read on the host once for each call, because
    all_to_all needs them there. set_precision must be called alike on all ranks.

    With gradients, those of the router are of this rank's tokens alone: average them over ranks with the other replicated
    parameters. gate_up's gradient sees its inputs quantised twice: for the way, row by row, and where they arrive, along the
    tokens. Where x or weights of any rank require gradients, every rank takes part in the backward pass. Other arguments and
    errors as in Experts; layout is "contiguous".
    """

    watchable = False  # a monitor would repeat collectives that other ranks do not

    def __init__(
        self, experts: int, hidden: int, intermediate: int, *, group=None, chunks: int = 1, top_k: int = 2, router: bool = True,
        normalize: bool = True, precision: Recipe | str = "fp8", device=None, dtype=None,
    ):  # fmt: skip
        _, size = _place(group)
        if isinstance(chunks, bool) or not isinstance(chunks, int):
            raise TypeError(f"chunks is {chunks!r}; it must be an integer, at least 1")
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}; it must be at least 1")
        held = _share_of("experts", experts, size)
        self.group, self.chunks, self.held, self.ranks = group, chunks, held, size  # first, as above
        super().__init__(experts, hidden, intermediate, top_k=top_k, router=router, normalize=normalize, precision=precision,
                         device=device, dtype=dtype, held=held)  # fmt: skip

    def reset_parameters(self) -> None:
        """Draw this rank's experts anew, and a router for all ranks. On all of them."""
        for parameter in self.parameters():
            self._draw(parameter, parameter.shape[-1])
        if self.router is not None:
            _collective("broadcast", self.group, lambda: dist.broadcast(
                self.router.detach(), group=self.group, group_src=0, async_op=True).wait())  # fmt: skip

    @classmethod
    def from_experts(cls, layer: Experts, group=None, *, chunks: int = 1) -> "ExpertParallelExperts":
        """This rank's experts of a layer that every rank has whole, with its precision. Raises ValueError for a frozen one."""
        _check_not_frozen(layer)
        rank, size = _place(group)
        new = cls(layer.experts, layer.hidden, layer.intermediate, group=group, chunks=chunks, top_k=layer.top_k,
                  router=layer.router is not None, normalize=layer.normalize, precision=layer.precision,
                  device=layer.gate_up.device, dtype=layer.gate_up.dtype)  # fmt: skip
        with torch.no_grad():
            new.gate_up.copy_(layer.gate_up.chunk(size)[rank])
            new.down.copy_(layer.down.chunk(size)[rank])
            if layer.router is not None:
                new.router.copy_(layer.router)
        return new

    def compute(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, precision: Recipe | str,
                backend: str | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:  # fmt: skip
        """As Experts.compute, with all ranks of the group."""
        out_dtype = out_dtype or _result_dtype(x)
        recorded = self._trains() or (torch.is_grad_enabled() and x.requires_grad)
        permutations = [Permutation(part, self.experts) for part in ids.tensor_split(1 if recorded else self.chunks)]
        trips, recorded = self._trips(permutations, recorded)
        if len(trips) < len(permutations):  # another rank records gradients
            permutations = [Permutation(ids, self.experts)]
        x = _taking_part(x, recorded)
        xs, all_ids, all_weights = (tensor.tensor_split(len(trips)) for tensor in (x, ids, weights))

        arriving = [self._send(part, permutation, trip, precision, recorded)
                    for part, permutation, trip in zip(xs, permutations, trips)]  # fmt: skip
        returning = []
        for trip, arrived in zip(trips, arriving):
            rows = self._compute_rows(arrived(), trip, precision, backend, out_dtype, packed=not recorded)
            if recorded:
                pairs = _Move.apply(rows, trip.routes.back(), self.group, None)
                returning.append((pairs, None))
            else:
                returning.append(_exchange(rows, trip.routes.back(), self.group))
        results = []
        for permutation, (pairs, wait), part_ids, part_weights in zip(permutations, returning, all_ids, all_weights):
            if wait is not None:
                wait()
            # Pairs of no expert stayed here, last in the order: rows of zeros stand for them.
            pairs = torch.nn.functional.pad(pairs, (0, 0, 0, permutation.tokens.shape[0] - pairs.shape[0]))
            results.append(combine(pairs[permutation.inverse], part_ids, part_weights, self.experts, out_dtype))
        return torch.cat(results)

    def _trips(self, permutations: list[Permutation], recorded: bool) -> tuple[list["_Trip"], bool]:
        """Where the rows of each chunk go and come from, in one chunk if any rank records gradients; and whether one does.

        One exchange of counts, one wait for the device. A rank that records gradients sends ~counts, which are negative.
        """
        counts = torch.stack([p.counts.view(self.ranks, self.held) for p in permutations], dim=1)  # (ranks, chunks, held)
        if len(permutations) < self.chunks:  # other ranks may split, and sizes must agree
            counts = torch.nn.functional.pad(counts, (0, 0, 0, self.chunks - len(permutations)))
        message, others = ~counts if recorded else counts, torch.empty_like(counts)
        _collective("all_to_all", self.group, lambda: dist.all_to_all_single(
            others, message, group=self.group, async_op=True).wait())  # fmt: skip
        sizes = torch.stack([counts.sum(2), others.sum(2)]).tolist()  # of both directions: [rank][chunk]
        recorded = min(map(min, sizes[1])) < 0
        if recorded:
            sizes = [[[sum(n if n >= 0 else -n - self.held for n in chunks)] for chunks in direction] for direction in sizes]
            others = torch.where(others < 0, ~others, others).sum(1, keepdim=True, dtype=others.dtype)
        sent, received = (list(zip(*direction)) for direction in sizes)  # by chunk
        trips = [_Trip(Routes(*map(list, routes)), others[:, chunk]) for chunk, routes in enumerate(zip(sent, received))]
        return trips, recorded

    def _send(self, x, permutation, trip, precision, recorded) -> Callable[[], torch.Tensor]:
        """Send a chunk's rows. Returns what waits for the rows of other ranks and gives them: packed, if FP8 and not recorded."""
        tokens = permutation.tokens[: sum(trip.routes.sent)]
        recipe = precision.activation if isinstance(precision, Recipe) else None
        if recorded:
            moved = _Move.apply(x[tokens], trip.routes, self.group, recipe)
            return lambda: moved
        # Quantised once for each token, not for each of its experts.
        rows = x if recipe is None else pack(quantize(x, recipe))
        moved, wait = _exchange(rows[tokens], trip.routes, self.group)

        def arrived():
            wait()
            return moved

        return arrived

    def _compute_rows(self, rows, trip, precision, backend, out_dtype, packed) -> torch.Tensor:
        """This rank's experts on rows as they arrived: by rank, within a rank by expert."""
        expert = torch.arange(self.held, device=trip.counts.device).repeat(self.ranks)
        expert = expert.repeat_interleave(trip.counts.flatten().long(), output_size=sum(trip.routes.received))
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        counts = trip.counts.sum(0, dtype=torch.int32)
        rows = rows[order]
        if not isinstance(precision, Recipe):
            return self.run_plain(rows, counts, precision, out_dtype)[inverse]
        if packed:
            rows = unpack(rows, self.hidden, precision.activation, torch.float8_e4m3fn)
        return self.run_rows(rows, counts, precision, backend, out_dtype)[inverse]


@dataclass(frozen=True)
class _Trip:
    """One chunk's way to its experts: the rows' routes, and counts (ranks, held): rows from each rank for each expert here."""

    routes: Routes
    counts: torch.Tensor
