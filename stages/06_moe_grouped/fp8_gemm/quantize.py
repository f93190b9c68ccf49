"""From plain tensors to FP8 data with scales: one matrix, a stack of matrices, or a matrix whose K is cut into groups.

The arithmetic is that of :mod:`hopperlab.quantize`; this module adds the shapes that grouped GEMMs need.
"""

import functools
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from hopperlab.formats import CASTABLE, E4M3, E5M2, Format, format_of
from hopperlab.quantize import BLOCK, RECIPES, ScaledTensor, dequantize, is_m_major, scale_shape, scale_to_m_major
from hopperlab.quantize import quantize as _quantize

__all__ = ["E4M3", "E5M2", "Format", "GroupedTensor", "GroupedWeight", "RECIPES", "ScaledTensor", "dequantize", "format_of",
           "pack_k_groups", "quantize", "quantize_grouped", "quantize_k_grouped", "swiglu_quantize"]  # fmt: skip


def quantize(
    x: torch.Tensor, recipe: str = "1x128", format: Format | str = "e4m3", margin: int = 0, power_of_two: bool = False
) -> ScaledTensor:
    """Quantise x, shape (rows, K), bfloat16, float16 or float32: data = x / scale in FP8, scale = amax / largest.

    recipe        "tensor", "row", "1x128" (activations, gradients) or "128x128" (weights)
    format        "e4m3" or "e5m2"
    margin        0 … 7: head room, amax lands on largest · 2^-margin
    power_of_two  round each scale up to a power of two

    Scales of 1x128 are M-major: shape (rows, K blocks), those of a K block side by side, as the kernels read them fastest.
    Blocks of zeros get scale 1; NaN and Inf become NaN and spare their block's scale. Not differentiable: a gemm of plain
    tensors quantises them itself and is. Raises TypeError or ValueError.
    """
    check_no_tangent("x", x)
    if _traced(x, 2):
        scaled = torch.ops.fp8_gemm.quantize(x.detach(), recipe, format_of(format).name, margin, power_of_two)
        return ScaledTensor(*scaled, recipe)
    return quantize_now(x, recipe, format, margin, power_of_two)


def check_no_tangent(name: str, x) -> None:
    """Refuse a tensor that carries a forward-mode derivative, which FP8 data cannot. Raises ValueError."""
    if forward_ad._current_level >= 0 and isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(f"{name} has shape {tuple(x.shape)} and carries a forward-mode tangent (torch.func.jvp, forward_ad), "
                         "which FP8 products would lose: differentiate in reverse, by backward(), or detach() it")  # fmt: skip


def _traced(x, dimensions: int) -> bool:
    """Whether quantising x is one operator of a graph that is being traced. What else x may be is refused by those that compute.

    Traced through, the padding of M-major scales would make graphs for each M % 4.
    """
    return torch.compiler.is_compiling() and isinstance(x, torch.Tensor) and x.dim() == dimensions and x.dtype in CASTABLE


def quantize_now(x, recipe, format, margin, power_of_two) -> ScaledTensor:
    """quantize, computed: what its operator runs."""
    if on_hopper(x):
        from fp8_gemm.kernels import quantize as kernels  # one reading of x, the same bits

        return kernels.quantize(x, recipe, format, power_of_two, margin, m_major=recipe == "1x128")
    if isinstance(x, torch.Tensor):
        x = x.contiguous()  # elementwise results keep the strides of their input, and FP8 data must lie along K
    scaled = _quantize(x, recipe, format, power_of_two, margin)
    if recipe != "1x128":
        return scaled
    return ScaledTensor(scaled.data, scale_to_m_major(scaled.scale)[:, : scaled.rows].t(), recipe)


def on_hopper(x) -> bool:
    """Whether x is a tensor that kernels/quantize.cu can quantise on its GPU."""
    return isinstance(x, torch.Tensor) and x.is_cuda and _is_hopper(x.device)


@functools.cache  # torch takes microseconds to say it
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@dataclass(frozen=True, eq=False)
class GroupedTensor:
    """G matrices of one shape in FP8: the weights of all experts, or activations in the masked layout.

    data    float8_e4m3fn or float8_e5m2, shape (G, rows, K)
    scale   float32, contiguous, shape (G, *scale_shape(recipe, rows, K)); 1x128: also M-major
    recipe  "tensor", "row", "1x128" or "128x128", applied to each matrix by itself

    Raises TypeError or ValueError at construction, as ScaledTensor does; never reads values.
    """

    data: torch.Tensor
    scale: torch.Tensor
    recipe: str

    def __post_init__(self):
        for name in ("data", "scale"):
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")
        if self.data.dim() != 3:
            raise ValueError(f"data has shape {tuple(self.data.shape)}; it must have three dimensions, (groups, rows, K): "
                             "torch.stack the matrices of the groups")  # fmt: skip
        if self.data.shape[0] == 0:
            raise ValueError(f"data has shape {tuple(self.data.shape)}; there must be at least one group")
        if self.scale.dim() == 0 or self.scale.shape[0] != self.data.shape[0]:
            wanted = (self.groups, *scale_shape(self.recipe, self.rows, self.k))
            raise ValueError(f"scale has shape {tuple(self.scale.shape)}; recipe {self.recipe!r} of data "
                             f"{tuple(self.data.shape)} needs {wanted}: call quantize_grouped(x, {self.recipe!r})")  # fmt: skip
        self._check_scale_strides()
        self[0]  # checks dtypes, devices and the shape of one group's scales

    def _check_scale_strides(self):
        if not self.scale.is_contiguous() and not (self.recipe == "1x128" and is_m_major(self.scale)):
            raise ValueError(f"scale has strides {self.scale.stride()} for shape {tuple(self.scale.shape)}; it must be contiguous, or, "
                             "1x128 only, M-major: pass scale.contiguous() if its entries are the right ones")  # fmt: skip

    def __getitem__(self, group: int) -> ScaledTensor:
        return ScaledTensor(self.data[group], self.scale[group], self.recipe)

    @property
    def groups(self) -> int:
        """How many matrices."""
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        """Rows of each matrix."""
        return self.data.shape[1]

    @property
    def k(self) -> int:
        """Columns of each matrix."""
        return self.data.shape[2]

    @property
    def format(self) -> Format:
        """E4M3 or E5M2."""
        return format_of(self.data.dtype)

    @property
    def device(self) -> torch.device:
        """Where data and scales are."""
        return self.data.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """data · scale, shape (G, rows, K), float32 (rounded once) or float64 (exact)."""
        return torch.stack([self[group].dequantize(dtype) for group in range(self.groups)])


GroupedWeight = GroupedTensor  # the name for its main use


def quantize_grouped(
    x: torch.Tensor, recipe: str = "128x128", format: Format | str = "e4m3", margin: int = 0, power_of_two: bool = False
) -> GroupedTensor:
    """Quantise each matrix of x, (G, rows, K), by itself. Arguments, arithmetic and errors as quantize."""
    check_no_tangent("x", x)
    if _traced(x, 3) and x.shape[0]:
        scaled = torch.ops.fp8_gemm.quantize_grouped(x.detach(), recipe, format_of(format).name, margin, power_of_two)
        return GroupedTensor(*scaled, recipe)
    return quantize_grouped_now(x, recipe, format, margin, power_of_two)


def quantize_grouped_now(x, recipe, format, margin, power_of_two) -> GroupedTensor:
    """quantize_grouped, computed: what its operator runs."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
    if x.dim() != 3 or x.shape[0] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (groups, rows, K) with at least one group: "
                         "torch.stack the matrices of the groups")  # fmt: skip
    groups, rows, k = x.shape
    if recipe in ("row", "1x128"):  # no scale spans two rows, so the groups can be quantised as one matrix
        flat = quantize_now(x.reshape(groups * rows, k), recipe, format, margin, power_of_two)
        return GroupedTensor(flat.data.view(x.shape), flat.scale.view(groups, *scale_shape(recipe, rows, k)), recipe)
    parts = [quantize_now(matrix, recipe, format, margin, power_of_two) for matrix in x]
    # torch stacks FP8 on no CPU before 2.12 or so; bytes it always can.
    data = torch.stack([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    return GroupedTensor(data, torch.stack([part.scale for part in parts]), recipe)


def pack_k_groups(
    x: torch.Tensor, offsets: torch.Tensor, ends: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, K) with the columns of each group moved so that it starts at a multiple of 128, zeros in between.

    offsets  (G + 1,) int32 on x's device: group g is columns offsets[g] … offsets[g + 1] - 1, any sizes, 0 included
    ends     (G,) int32: group g stops before ends[g] instead

    Returns the packed tensor, (rows, 128 · (K // 128 + G)), and its offsets (G + 1,) int32. Group g starts at column
    128 · (offsets[g] // 128 + g), which leaves room for every group before it: no size is read on the host. Raises TypeError or
    ValueError, as k_grouped_gemm does.
    """
    from fp8_gemm.problem import check_k_groups

    check_k_groups(x, offsets, ends)
    groups, k = offsets.shape[0] - 1, x.shape[1]
    blocks = k // BLOCK + groups
    first = offsets[:-1].long()
    last = offsets[1:].long() if ends is None else ends.long()
    start = BLOCK * (first // BLOCK + torch.arange(groups, device=x.device))
    column = torch.arange(BLOCK * blocks, device=x.device)
    group = (torch.searchsorted(start, column, right=True) - 1).clamp_min(0)
    source = first[group] + column - start[group]
    inside = (source < last[group]) & (column >= start[group])
    if k == 0:
        packed = x.new_zeros(x.shape[0], BLOCK * blocks)
    else:
        packed = torch.where(inside, x.index_select(1, source.clamp(0, k - 1)), 0)
    packed_offsets = torch.cat([start, start.new_full((1,), BLOCK * blocks)]).int()
    return packed, packed_offsets


def quantize_k_grouped(
    x: torch.Tensor, offsets: torch.Tensor, ends: torch.Tensor | None = None, format: Format | str = "e4m3",
    margin: int = 0, power_of_two: bool = False,
) -> tuple[ScaledTensor, torch.Tensor]:  # fmt: skip
    """Quantise x (rows, K) "1x128" for k_grouped_gemm: no scale block spans two groups.

    offsets  (G + 1,) int32 on x's device: group g is columns offsets[g] … offsets[g + 1] - 1, any sizes, 0 included
    ends     (G,) int32: group g stops before ends[g] instead

    Other arguments and errors as in quantize. Returns the ScaledTensor, its groups moved to multiples of 128, zeros in between,
    (rows, 128 · (K // 128 + G)), and its offsets (G + 1,) int32: no size is read on the host.
    """
    packed, packed_offsets = pack_k_groups(x, offsets, ends)
    return quantize(packed, "1x128", format, margin, power_of_two), packed_offsets


def swiglu_quantize(
    x: torch.Tensor, format: Format | str = "e4m3", margin: int = 0, power_of_two: bool = False
) -> ScaledTensor:
    """silu(x[:, :K]) · x[:, K:], computed in FP32 and quantised "1x128": the middle of a gated expert.

    x is (rows, 2 K), bfloat16, float16 or float32; the result (rows, K), its scales M-major. On a Hopper GPU one kernel
    does it, whose exp is its own, so that the simulator gives the same bits; elsewhere, and under torch.compile, torch's silu is
    used, which may round otherwise. Raises TypeError or ValueError.
    """
    check_no_tangent("x", x)
    if on_hopper(x) and not torch.compiler.is_compiling():
        from fp8_gemm.kernels import quantize as kernels

        return kernels.swiglu_quantize(x, format, power_of_two, margin, m_major=True)
    if not isinstance(x, torch.Tensor) or x.dtype not in CASTABLE:
        given = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"x is {given}; it must be a tensor of bfloat16, float16 or float32")
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (rows, 2 K): K gates, then K values")
    gate, value = x.float().chunk(2, dim=1)
    return quantize(torch.nn.functional.silu(gate) * value, "1x128", format, margin, power_of_two)
