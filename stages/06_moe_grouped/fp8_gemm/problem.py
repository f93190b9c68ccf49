"""What is to be computed: one validated description, made on the host from shapes, strides and types.

Everything behind it (plans, kernels, fallbacks) can rely on it and checks nothing again. Nothing here reads the values of
a GPU tensor, so no check synchronises.
"""

import functools
import os
from dataclasses import dataclass

import torch

from fp8_gemm.quantize import GroupedTensor, ScaledTensor, format_of
from hopperlab.quantize import BLOCK, RECIPES

KINDS = ("dense", "contiguous", "masked", "k_grouped")
RECIPE_PAIRS = (
    ("1x128", "128x128"), ("1x128", "1x128"),
    ("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"),
)  # fmt: skip
WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
VALIDATE_VARIABLE = "FP8_GEMM_VALIDATE"  # "1": check group sizes on the GPU before every call, which waits for the device
LARGEST_SIZE = 2**31 - 1  # TMA coordinates are 32-bit signed integers (PTX ISA, cp.async.bulk.tensor)


@dataclass(frozen=True)
class Problem:
    """One GEMM, D = A · Bᵀ, without its tensors. Hashable: plans are cached by it. Raises ValueError at construction.

    kind         "dense", "contiguous" (rows of A in groups, a weight for each), "masked" (a padded A for each group) or
                 "k_grouped" (K in groups, an output for each)
    m            rows of A; masked: rows of each group's A; k_grouped: rows of each output
    n            rows of B, columns of D
    k            summed over; k_grouped: over all groups together
    recipe_a, b  how A and B are scaled; format_a, b  "e4m3" or "e5m2"
    out_dtype    of D: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2
    bias         whether a vector (N,) is added, in FP32, after scaling
    accumulate   whether D's old content is added, in FP32, after the bias
    interval     K between promotions to FP32; None: one accumulator over all of K (only without block scales)
    """

    kind: str
    m: int
    n: int
    k: int
    groups: int = 1
    recipe_a: str = "1x128"
    recipe_b: str = "128x128"
    format_a: str = "e4m3"
    format_b: str = "e4m3"
    out_dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    accumulate: bool = False
    interval: int | None = BLOCK

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; allowed are {', '.join(map(repr, KINDS))}")
        for name in ("m", "n", "k", "groups"):
            if isinstance(getattr(self, name), (float, bool, str)):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be an integer")
        for name in ("m", "n", "k"):
            size = getattr(self, name)
            if size < 0:
                raise ValueError(f"{name} is {size}; allowed are 0 and more")
            if size > LARGEST_SIZE:
                raise ValueError(f"{name} is {size}; allowed are 0 to 2^31 - 1, the coordinates of a TMA copy: split the {name} "
                                 "dimension over several calls")  # fmt: skip
        if self.groups < 1 or (self.kind == "dense" and self.groups != 1):
            raise ValueError(f"groups is {self.groups}; a dense problem has 1, a grouped one at least 1")
        if self.kind == "masked" and self.groups * self.m > LARGEST_SIZE:
            raise ValueError(f"groups is {self.groups} and m {self.m}; their product must stay below 2^31: split the groups")
        for name in ("recipe_a", "recipe_b"):
            if getattr(self, name) not in RECIPES:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(map(repr, RECIPES))}")
        if (self.recipe_a, self.recipe_b) not in RECIPE_PAIRS:
            raise ValueError(f"recipe is ({self.recipe_a!r}, {self.recipe_b!r}); allowed are "
                             + ", ".join(f"({a!r}, {b!r})" for a, b in RECIPE_PAIRS)
                             + ": quantise a and b by one of these pairs")  # fmt: skip
        if self.kind == "k_grouped" and (self.recipe_a, self.recipe_b) != ("1x128", "1x128"):
            raise ValueError(f"recipe is ({self.recipe_a!r}, {self.recipe_b!r}); a k_grouped problem takes ('1x128', '1x128'), "
                             "both scaled along K: quantize_k_grouped(x, offsets) makes such operands")  # fmt: skip
        format_of(self.format_a), format_of(self.format_b)
        self._check_interval()
        if self.out_dtype not in WIDE_DTYPES + FP8_DTYPES:
            raise ValueError(f"out_dtype is {self.out_dtype}; allowed are {', '.join(map(str, WIDE_DTYPES + FP8_DTYPES))}")
        if self.accumulate and self.out_dtype in FP8_DTYPES:
            raise ValueError(f"out_dtype is {self.out_dtype} while accumulating; FP8 is too coarse to add to: "
                             "accumulate in float32 and quantize the result")  # fmt: skip
        if self.bias and self.kind != "dense":
            raise ValueError(f"bias is given for a {self.kind} problem; only dense ones take it: add it to the result")

    def _check_interval(self):
        if self.interval is None:
            if self.block_scaled:
                raise ValueError(f"interval is None, but scales change every {BLOCK} of K, where the accumulator must be "
                                 f"promoted: pass interval={BLOCK}, or quantise per tensor or per row")  # fmt: skip
            return
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1 or self.interval % BLOCK:
            raise ValueError(f"interval is {self.interval!r}; allowed are multiples of {BLOCK}"
                             + ("" if self.block_scaled else " and None"))  # fmt: skip
        if self.block_scaled and self.interval != BLOCK:
            raise ValueError(f"interval is {self.interval}, but scales change every {BLOCK} of K: pass interval={BLOCK}")

    @property
    def block_scaled(self) -> bool:
        """Whether scales change along K."""
        return self.recipe_a == "1x128"

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(M, N), or (groups, M, N) for masked and k_grouped problems."""
        return (self.groups, self.m, self.n) if self.kind in ("masked", "k_grouped") else (self.m, self.n)

    @property
    def flops(self) -> int:
        """2 · M · N · K; masked: as if every row of every group counted."""
        return 2 * self.m * self.n * self.k * (self.groups if self.kind == "masked" else 1)


def check_how(recipe_a: str, recipe_b: str, out_dtype: torch.dtype = torch.bfloat16, interval: int | None = BLOCK,
              grad_format: str = "e4m3") -> None:  # fmt: skip
    """Check what a call says besides its tensors, as Problem does. Raises TypeError or ValueError."""
    if not torch.compiler.is_compiling():  # where the operators check it
        _check_how(recipe_a, recipe_b, out_dtype, interval, grad_format)


@functools.lru_cache(maxsize=256, typed=True)
def _check_how(recipe_a, recipe_b, out_dtype, interval, grad_format) -> None:
    Problem("dense", 1, 1, 1, recipe_a=recipe_a, recipe_b=recipe_b, out_dtype=out_dtype, interval=interval)
    format_of(grad_format)


def check_batch_invariant(recipe_a: str, options: dict) -> None:
    """Refuse what cannot be batch invariant, for an a that the call quantises. Raises ValueError."""
    if recipe_a == "tensor" and options.get("batch_invariant"):
        raise ValueError("batch_invariant is True, but recipe[0] is 'tensor': one scale for all rows of a depends on every one of them; "
                         "use '1x128' or 'row'")  # fmt: skip


@dataclass(slots=True, eq=False)
class Operands:
    """The tensors of one problem, plain and on one device. Elements lie side by side along K; rows may have any pitch.

    a, a_scale  (M, K), masked (G, M, K); scales in the shape of its recipe (masked: for each group), strides any
    b, b_scale  (N, K); contiguous and masked problems (G, N, K), and scales for each group
    bias        (N,) float32, contiguous
    offsets     (G + 1,) int32. contiguous: group g is rows offsets[g] … offsets[g + 1] - 1 of A, later rows belong to none.
                k_grouped: the same of K, and every offset is a multiple of 128 or K itself
    ends        (G,) int32, contiguous problems only: group g stops before row ends[g] instead of offsets[g + 1]
    masked_m    (G,) int32: group g is rows 0 … masked_m[g] - 1

    Rows of the output that belong to no group are left as they are.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    masked_m: torch.Tensor | None = None

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of those that are given."""
        return [(name, tensor) for name in self.__slots__ if (tensor := getattr(self, name)) is not None]


# The type each kind's operands must have, and what makes it.
_OPERAND_TYPES = {
    "dense": (ScaledTensor, ScaledTensor), "contiguous": (ScaledTensor, GroupedTensor),
    "masked": (GroupedTensor, GroupedTensor), "k_grouped": (ScaledTensor, ScaledTensor),
}  # fmt: skip
_MAKER = {ScaledTensor: "quantize", GroupedTensor: "quantize_grouped"}


def describe(
    kind: str, a, b, *, bias: torch.Tensor | None = None, offsets: torch.Tensor | None = None,
    ends: torch.Tensor | None = None, masked_m: torch.Tensor | None = None, accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16, interval: int | None = BLOCK,
) -> tuple[Problem, Operands]:  # fmt: skip
    """The problem that quantised operands pose, and their tensors; everything about them checked.

    a and b are ScaledTensors (M, K) and (N, K); b of a contiguous problem, and both of a masked one, are GroupedTensors.
    offsets, ends and masked_m as in Operands. Where group tensors are on the CPU their values are checked as well.
    Raises TypeError or ValueError that names the argument, what was given, what is allowed, and the fix.
    """
    if not isinstance(a, (ScaledTensor, GroupedTensor)) or not isinstance(b, (ScaledTensor, GroupedTensor)):
        _check_operand_types(kind, a, b)
    key = (
        kind, type(a), type(b), a.recipe, b.recipe, accumulate, out_dtype, type(interval), interval, layout(a.data), layout(b.data),
        layout(bias), layout(offsets), layout(ends), layout(masked_m),
    )  # fmt: skip
    problem = _described.get(key)
    if problem is None:
        problem = _checked(kind, a, b, bias, offsets, ends, masked_m, accumulate, out_dtype, interval)
        if len(_described) >= MOST_DESCRIBED:
            _described.clear()
        _described[key] = problem
    if bias is not None:
        bias = plain_bias(bias)
    operands = Operands(a.data, b.data, a.scale, b.scale, bias, offsets, ends, masked_m)
    if problem.kind != "dense" and is_readable(a.data):
        check_group_values(problem, offsets, ends, masked_m)
    return problem, operands


# Problems by all that decides them, values excepted. Serving repeats a few calls for ever: they are checked once.
_described: dict[tuple, Problem] = {}
MOST_DESCRIBED = 4096


def layout(tensor: torch.Tensor | None) -> tuple | None:
    """All that a check of a tensor looks at, but its values and address. Hashable, for anything that is given as one."""
    if not isinstance(tensor, torch.Tensor):
        return None if tensor is None else (type(tensor),)
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def plain_bias(bias: torch.Tensor) -> torch.Tensor:
    """As kernels read it: float32, side by side. Itself, detached, if it is so already."""
    return bias.detach().float().contiguous()


def _checked(kind, a, b, bias, offsets, ends, masked_m, accumulate, out_dtype, interval) -> Problem:
    """describe, when it sees such operands for the first time."""
    _check_operand_types(kind, a, b)
    for name, operand in (("a", a), ("b", b)):
        _check_k_major(f"{name}.data", operand.data)
    if a.k != b.k:
        raise ValueError(f"b has shape {tuple(b.data.shape)} and a {tuple(a.data.shape)}; their last dimension, K, must be "
                         "equal: A is (M, K), B is (N, K); transpose b before quantising it")  # fmt: skip
    for name, tensor in (("b", b.data), ("bias", bias), ("offsets", offsets), ("ends", ends), ("masked_m", masked_m)):
        if tensor is not None:
            check_device(name, tensor, a.device)
    groups = _count_groups(kind, a, b, offsets)
    if kind in ("contiguous", "k_grouped"):
        check_group_tensor("offsets", offsets, groups + 1)
        if ends is not None:
            check_group_tensor("ends", ends, groups)
    if kind == "masked":
        check_group_tensor("masked_m", masked_m, groups)
    if bias is not None:
        check_bias(bias, b.rows)
    return Problem(
        kind, a.rows, b.rows, a.k, groups, a.recipe, b.recipe, a.format.name, b.format.name, out_dtype,
        bias is not None, accumulate, interval,
    )  # fmt: skip


def _check_operand_types(kind: str, a, b) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed are {', '.join(map(repr, KINDS))}")
    for name, operand, wanted in zip("ab", (a, b), _OPERAND_TYPES[kind]):
        if not isinstance(operand, wanted):
            raise TypeError(f"{name} is a {type(operand).__name__}; a {kind} problem takes a {wanted.__name__}: "
                            f"{_MAKER[wanted]}({name}, recipe)")  # fmt: skip


def row_groups(
    groups: int, rows: int, *, offsets: torch.Tensor | None = None, counts: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(offsets, ends) as in Operands from any one of the three ways to say which rows belong to which group.

    offsets  (groups + 1,) int32: cumulated sizes with a 0 in front; returned as they are
    counts   (groups,) int32 or int64: the sizes
    indices  (rows,) int32: the group of each row, ascending, rows of a group side by side; -1 for rows of no group

    Everything is computed on the device. Raises TypeError or ValueError; values are checked on the CPU only.
    """
    given = {"offsets": offsets, "counts": counts, "indices": indices}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"{', '.join(names) or 'none of offsets, counts, indices'} given; pass exactly one of offsets, "
                         "counts, indices")  # fmt: skip
    if not isinstance(given[names[0]], torch.Tensor):
        raise TypeError(f"{names[0]} is a {type(given[names[0]]).__name__}; it must be a tensor on the device of a: "
                        f"torch.tensor({names[0]}, dtype=torch.int32, device=a.device)")  # fmt: skip
    if offsets is not None:
        return offsets, None
    if counts is not None:
        if counts.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"counts has dtype {counts.dtype}; it must be int32 or int64: pass counts.int()")
        if tuple(counts.shape) != (groups,):
            raise ValueError(f"counts has shape {tuple(counts.shape)}; b has {groups} groups: it must be ({groups},)")
        if is_readable(counts) and (counts < 0).any():
            group = int((counts < 0).nonzero()[0])
            raise ValueError(f"counts[{group}] is {int(counts[group])}; sizes are 0 or more")
        if is_readable(counts) and int(counts.sum()) > rows:
            raise ValueError(f"counts add up to {int(counts.sum())}; a has M = {rows}: allowed are 0 to {rows}")
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), None
    check_group_tensor("indices", indices, rows, what=f"a has {rows} rows")
    if is_readable(indices):
        _check_indices(indices, groups)
    # A row of no group belongs, as far as the order goes, to the group before it.
    reached = indices.cummax(0).values if rows else indices
    group = torch.arange(groups, dtype=torch.int32, device=indices.device)
    starts = torch.searchsorted(reached, group, out_int32=True)
    sizes = torch.zeros(groups, dtype=torch.int32, device=indices.device)
    sizes.scatter_add_(0, indices.clamp_min(0).long(), (indices >= 0).int())
    return torch.cat([starts, starts.new_full((1,), rows)]), starts + sizes


def check_k_groups(x: torch.Tensor, offsets: torch.Tensor, ends: torch.Tensor | None = None) -> None:
    """Check groups of the columns of x (rows, K), and their values on the CPU or with FP8_GEMM_VALIDATE=1. Raises TypeError, ValueError."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (rows, K)")
    groups = _count_groups("k_grouped", x, x, offsets)
    check_device("offsets", offsets, x.device)
    check_group_tensor("offsets", offsets, groups + 1)
    if ends is not None:
        check_device("ends", ends, x.device)
        check_group_tensor("ends", ends, groups)
    asked = os.environ.get(VALIDATE_VARIABLE) == "1" and offsets.is_cuda and not torch.compiler.is_compiling() and type(offsets) is torch.Tensor
    if asked or is_readable(offsets):
        _check_offsets("K", x.shape[1], offsets.tolist(), None if ends is None else ends.tolist())


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether values can be looked at without waiting for a device, and at all: not while tracing."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and type(tensor) is torch.Tensor


def _check_indices(indices: torch.Tensor, groups: int) -> None:
    outside = ((indices < -1) | (indices >= groups)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise ValueError(f"indices[{row}] is {int(indices[row])}; b has {groups} groups: allowed are -1 (no group) and 0 to "
                         f"{groups - 1}")  # fmt: skip
    previous, gap = -1, False
    for row, value in enumerate(indices.tolist()):
        if value == -1:
            gap = True
            continue
        if value < previous:
            raise ValueError(f"indices[{row}] is {value} after {previous}; rows must be sorted by group: "
                             "order = indices.argsort(stable=True), a[order], indices[order]")  # fmt: skip
        if value == previous and gap:
            raise ValueError(f"indices[{row}] is {value}, as before a -1; rows of a group must be neighbours: "
                             "put its padding after its last row")  # fmt: skip
        previous, gap = value, False


def _count_groups(kind, a, b, offsets) -> int:
    if kind == "dense":
        return 1
    if kind == "k_grouped":
        if not isinstance(offsets, torch.Tensor) or offsets.dim() != 1 or offsets.shape[0] < 2:
            given = f"shape {tuple(offsets.shape)}" if isinstance(offsets, torch.Tensor) else type(offsets).__name__
            raise ValueError(f"offsets is {given}; it must be an int32 tensor (groups + 1,) with at least one group")
        return offsets.shape[0] - 1
    if kind == "masked" and a.groups != b.groups:
        raise ValueError(f"a has {a.groups} groups and b {b.groups}; every group of rows needs a weight: "
                         f"a is (groups, max M, K), b is (groups, N, K)")  # fmt: skip
    return b.groups


def _check_k_major(name: str, data: torch.Tensor) -> None:
    """Elements side by side along K, rows and groups one after another without overlap."""
    steps = [(size, stride) for size, stride in zip(data.shape, data.stride())]
    (k, k_step), rows = steps[-1], steps[:-1]
    extent = k
    plain = k <= 1 or k_step == 1
    for size, stride in reversed(rows):
        plain &= size <= 1 or stride >= extent
        extent = max(extent, size * stride)
    if data.numel() and not plain:
        what = f"{name} has strides {data.stride()} for shape {tuple(data.shape)}"
        if k > 1 and data.stride(-2) == 1:
            raise ValueError(f"{what}: it is a transposed view, but FP8 wgmma reads both operands along K (K-major): "
                             f"quantise x.t() itself, or pass {name}.contiguous() with the scales it has")  # fmt: skip
        raise ValueError(f"{what}; elements must be side by side along K (stride 1) and rows must not overlap: "
                         f"pass {name}.contiguous()")  # fmt: skip


def check_device(name: str, tensor, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor on {device}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and a on {device}; they must be on one device: pass "
                         f"{name}.to('{device}')")  # fmt: skip


def check_group_tensor(name: str, tensor: torch.Tensor | None, length: int, what: str = "") -> None:
    if tensor is None:
        raise ValueError(f"{name} is None; it must be an int32 tensor ({length},) that tells the groups apart")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be int32: pass {name}.int()")
    if tuple(tensor.shape) != (length,):
        what = what or f"there are {length - (name == 'offsets')} groups"
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {what}: it must be ({length},)")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride(0)}; it must be contiguous: pass {name}.contiguous()")


def check_bias(bias: torch.Tensor, n: int) -> None:
    if bias.dtype not in WIDE_DTYPES:
        raise TypeError(f"bias has dtype {bias.dtype}; allowed are bfloat16, float16 and float32: pass bias.float()")
    if tuple(bias.shape) != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({n},), one number for each column of the output: "
                         "pass bias.reshape(-1) or check b")  # fmt: skip


def check_c(c, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = "c") -> None:
    """Refuse an addend that is not like the output it is added to, or an output that is not like the addend."""
    check_device(name, c, device)
    if c.dtype != dtype:
        raise TypeError(f"{name} has dtype {c.dtype} and out_dtype is {dtype}; they must be equal: pass out_dtype={c.dtype}, or "
                        f"{name}.to({dtype})")  # fmt: skip
    if tuple(c.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(c.shape)}; a and b give {shape}: c is added element by element")


def check_out(problem: Problem, operands: Operands, out: torch.Tensor, name: str = "out") -> None:
    """Refuse an output tensor that a kernel cannot write: type, shape, strides, device, memory shared with an input."""
    check_device(name, out, operands.a.device)
    check_no_grad(name, out)
    _check_out_layout(name, out.dtype, out.shape, out.stride(), problem)
    inputs = {other: (tensor.data_ptr(), bytes_spanned(tensor)) for other, tensor in operands.named()}
    check_disjoint(name, out.data_ptr(), bytes_spanned(out), inputs)


def check_no_grad(name: str, out: torch.Tensor) -> None:
    """Refuse an output whose gradient is recorded. Raises ValueError."""
    if isinstance(out, torch.Tensor) and out.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, but a result written in place has no gradient: pass {name}.detach(), or none")


def check_disjoint(name: str, start: int, size: int, inputs: dict[str, tuple[int, int]]) -> None:
    """Refuse an output of ``size`` bytes at ``start`` that overlaps an input, (address, bytes) by name. Raises ValueError."""
    for other, (other_start, other_size) in inputs.items():
        if size and other_start < start + size and start < other_start + other_size:
            raise ValueError(f"{name} shares memory with {other}, which the kernel reads while it writes {name}: "
                             f"pass {name}=torch.empty(...) of its own")  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _check_out_layout(name: str, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], problem: Problem) -> None:
    if dtype != problem.out_dtype:
        raise TypeError(f"{name} has dtype {dtype}; this call computes {problem.out_dtype}: pass out_dtype={dtype}, "
                        f"or {name}.to({problem.out_dtype})")  # fmt: skip
    if tuple(shape) != problem.out_shape:
        hint = ": it is transposed, pass a row-major (M, N)" if tuple(shape) == problem.out_shape[::-1] else ""
        raise ValueError(f"{name} has shape {tuple(shape)}; a and b give {problem.out_shape}{hint}")
    extent = 1
    for size, stride in reversed(list(zip(shape, strides))):
        if size > 1 and (stride < extent or (extent == 1 and stride != 1 and shape[-1] > 1)):
            raise ValueError(f"{name} has strides {strides} for shape {tuple(shape)}; a row's elements must be side by side "
                             f"and rows must not overlap: pass a {name}.contiguous() and copy back")  # fmt: skip
        extent = max(extent, size * stride)


def bytes_spanned(x: torch.Tensor) -> int:
    """From the first element to after the last. Views that interleave count as shared memory."""
    if x.is_contiguous():
        return x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return (last + 1) * x.element_size() * (x.numel() > 0)


def check_group_values(
    problem: Problem, offsets: torch.Tensor | None, ends: torch.Tensor | None, masked_m: torch.Tensor | None
) -> None:
    """Check the numbers in Operands' group tensors. Reads them, so on a GPU it waits for the device. Raises ValueError."""
    if problem.kind in ("contiguous", "k_grouped"):
        name, limit = ("M", problem.m) if problem.kind == "contiguous" else ("K", problem.k)
        _check_offsets(name, limit, offsets.tolist(), None if ends is None else ends.tolist())
        for group, start in enumerate(offsets.tolist() if problem.kind == "k_grouped" else ()):
            if start % BLOCK and start != problem.k:
                raise ValueError(f"offsets[{group}] is {start}, no multiple of {BLOCK}, so a scale block would span two groups: "
                                 "quantize_k_grouped(x, offsets) moves groups apart, or pass plain tensors")  # fmt: skip
    if problem.kind == "masked":
        for group, rows in enumerate(masked_m.tolist()):
            if not 0 <= rows <= problem.m:
                raise ValueError(f"masked_m[{group}] is {rows}; a has {problem.m} rows for each group: allowed are 0 to "
                                 f"{problem.m}, make a larger or drop rows")  # fmt: skip


def _check_offsets(name: str, limit: int, offsets: list[int], ends: list[int] | None) -> None:
    if offsets[0] < 0 or (offsets[0] != 0 and ends is None):
        raise ValueError(f"offsets[0] is {offsets[0]}; the first group starts at 0: offsets are the cumulated sizes with a 0 "
                         "in front")  # fmt: skip
    for group, (start, stop) in enumerate(zip(offsets, offsets[1:])):
        if stop < start:
            raise ValueError(f"offsets[{group + 1}] is {stop} and offsets[{group}] {start}; offsets must not decrease: "
                             "pass the cumulated sizes, or counts= for sizes")  # fmt: skip
        if ends is not None and not start <= ends[group] <= stop:
            raise ValueError(f"ends[{group}] is {ends[group]}; group {group} lies in {start} to {stop}: allowed are these")
    if offsets[-1] > limit:
        raise ValueError(f"offsets[{len(offsets) - 1}] is {offsets[-1]}; a has {name} = {limit}: allowed are 0 to {limit}")
