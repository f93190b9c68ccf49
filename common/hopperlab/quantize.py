"""FP8 quantisation with scales: per tensor, per row, per 1x128 block, per 128x128 block.

The arithmetic, exactly, so that a GPU kernel can reproduce every bit (all of it FP32, round to nearest even):

    amax  = max |x| over the finite elements of the block
    scale = 1                                           if amax == 0
          = max(amax / (fp8_max · 2^-margin), 2^-126)   otherwise; rounded up to a power of two if asked
    data  = cast(clamp(x / scale, ±fp8_max))            round to nearest even; NaN where x is NaN or ±Inf

Both divisions are IEEE divisions, each rounded once, not multiplications by a rounded reciprocal. In a kernel that is
``__fdiv_rn``, or ``/`` compiled without fast-math. The value a scaled tensor stands for is
``data · scale``.
"""

from dataclasses import dataclass

import torch

from hopperlab.formats import CASTABLE, FORMATS, Format, cast_saturating, format_of

BLOCK = 128  # edge of a scaling block: four k = 32 wgmma steps, the unit of promotion
RECIPES = ("tensor", "row", "1x128", "128x128")
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal  # 2^-126; below it FP32 loses precision, or is flushed
MAX_MARGIN = 7  # with one more, the power-of-two scale of FLT_MAX would overflow
TMA_ALIGNMENT = 16  # bytes; every stride of a TMA tensor map is a multiple (CUDA driver API, cuTensorMapEncodeTiled)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def scale_shape(recipe: str, rows: int, k: int) -> tuple[int, ...]:
    """Shape of the scales of a (rows, k) tensor.

    tensor: (1,) · row: (rows,) · 1x128: (rows, ceil(k/128)) · 128x128: (ceil(rows/128), ceil(k/128)).
    """
    _check_recipe(recipe)
    return {
        "tensor": (1,),
        "row": (rows,),
        "1x128": (rows, _ceil_div(k, BLOCK)),
        "128x128": (_ceil_div(rows, BLOCK), _ceil_div(k, BLOCK)),
    }[recipe]


def _check_recipe(recipe: str) -> None:
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; allowed are {', '.join(map(repr, RECIPES))}")


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """FP8 data with the scales that give it its values: ``value = data · scale``.

    data    float8_e4m3fn or float8_e5m2, shape (rows, K)
    scale   float32, contiguous, on data's device, shape scale_shape(recipe, rows, K); 1x128: also M-major, a view of the
            result of scale_to_m_major, which kernels read faster
    recipe  "tensor", "row", "1x128" or "128x128"

    The last block of a ragged K or rows is a block like any other. Construction checks types, shapes and strides and
    raises TypeError or ValueError; it never reads the values, so it costs no GPU synchronisation.
    """

    data: torch.Tensor
    scale: torch.Tensor
    recipe: str

    def __post_init__(self):
        _check_recipe(self.recipe)
        for name in ("data", "scale"):
            value = getattr(self, name)
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")
        if self.data.dtype not in [fmt.dtype for fmt in FORMATS]:
            raise TypeError(
                f"data has dtype {self.data.dtype}; allowed are float8_e4m3fn and float8_e5m2: "
                "call quantize(x, recipe) to make a ScaledTensor from wider values"
            )
        if self.data.dim() != 2:
            raise ValueError(
                f"data has shape {tuple(self.data.shape)}; it must have two dimensions, (rows, K): "
                "reshape leading dimensions into rows"
            )
        if self.scale.dtype != torch.float32:
            raise TypeError(f"scale has dtype {self.scale.dtype}; it must be float32: call scale.float()")
        if self.scale.device != self.data.device:
            raise ValueError(
                f"scale is on {self.scale.device} and data on {self.data.device}; they must be on one device: "
                f"call scale.to('{self.data.device}')"
            )
        self._check_scale_layout()

    def _check_scale_layout(self):
        given, wanted = tuple(self.scale.shape), scale_shape(self.recipe, self.rows, self.k)
        if given != wanted:
            what = f"scale has shape {given}; recipe {self.recipe!r} of data {tuple(self.data.shape)} needs {wanted}"
            if given == wanted[::-1]:
                raise ValueError(f"{what}: it is transposed, pass scale.t().contiguous()")
            if self.scale.numel() == torch.Size(wanted).numel():
                raise ValueError(f"{what}: the number of scales is right, pass scale.reshape({wanted})")
            raise ValueError(f"{what}: quantize(x, {self.recipe!r}) makes scales of that shape")
        self._check_scale_strides()

    def _check_scale_strides(self):
        if not self.scale.is_contiguous() and not (self.recipe == "1x128" and is_m_major(self.scale)):
            raise ValueError(
                f"scale has strides {self.scale.stride()} for shape {tuple(self.scale.shape)}; it must be contiguous (row-major), "
                "or, 1x128 only, M-major. "
                "A transposed view of a square scale has such strides: if it is one, pass the tensor it came from; "
                "if entry [row block, K block] is already the right scale, pass scale.contiguous()"
            )

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.data.shape[0]

    @property
    def k(self) -> int:
        """Columns of the matrix."""
        return self.data.shape[1]

    @property
    def format(self) -> Format:
        """E4M3 or E5M2."""
        return format_of(self.data.dtype)

    @property
    def device(self) -> torch.device:
        """Where data and scales are."""
        return self.data.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """data · scale, shape (rows, K). Exact in float64; rounded once, to nearest even, in float32.

        Raises TypeError for another dtype.
        """
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype is {dtype}; allowed are float32 and float64: narrow the result with .to({dtype})")
        return self.data.to(dtype) * expand_scale(self).to(dtype)


def quantize(
    x: torch.Tensor, recipe: str, format: Format | str = "e4m3", power_of_two: bool = False, margin: int = 0
) -> ScaledTensor:
    """Quantise x, shape (rows, K), bfloat16, float16 or float32, any strides. The arithmetic is in the module's text.

    recipe        "tensor", "row", "1x128" (activations) or "128x128" (weights)
    format        "e4m3" or "e5m2"
    power_of_two  round each scale up to a power of two: multiplying by it is then exact
    margin        0 … 7: leave head room, so that amax lands on fp8_max · 2^-margin

    A block of zeros gets scale 1. A NaN or Inf becomes NaN in the data and does not touch its block's scale, so only
    outputs that depend on that element are lost. Zero-sized dimensions are allowed. Raises TypeError or ValueError.
    """
    fmt = format_of(format)
    _check_recipe(recipe)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
    if x.dtype not in CASTABLE:
        raise TypeError(f"x has dtype {x.dtype}; allowed are bfloat16, float16 and float32: call x.float() first")
    if x.dim() != 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must have two dimensions, (rows, K): "
            "reshape leading dimensions into rows"
        )
    if isinstance(margin, bool) or not isinstance(margin, int) or not 0 <= margin <= MAX_MARGIN:
        raise ValueError(f"margin is {margin!r}; it must be an integer from 0 to {MAX_MARGIN} (powers of two)")

    x = x.detach().float()
    amax = _block_amax(torch.where(torch.isfinite(x), x, 0.0), recipe)
    # A tensor as divisor, not a Python number: torch on CUDA turns division by a number into a multiplication.
    scale = (amax / torch.full_like(amax, fmt.max * 2.0**-margin)).clamp_min(SMALLEST_SCALE)
    if power_of_two:
        scale = _round_up_to_power_of_two(scale)
    scale = torch.where(amax == 0, 1.0, scale)
    return ScaledTensor(cast_saturating(x / _expand(scale, recipe, *x.shape), fmt), scale, recipe)


def dequantize(scaled: ScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """data · scale, shape (rows, K), float32 (rounded once) or float64 (exact)."""
    return scaled.dequantize(dtype)


def _block_amax(x: torch.Tensor, recipe: str) -> torch.Tensor:
    """max |x| of each block, in the shape of the scales. An empty block has amax 0."""
    rows, k = x.shape
    shape = scale_shape(recipe, rows, k)
    if x.numel() == 0:
        return x.new_zeros(shape)
    magnitude = x.abs()
    if recipe == "tensor":
        return magnitude.amax().reshape(shape)
    if recipe == "row":
        return magnitude.amax(dim=1)
    row_block = BLOCK if recipe == "128x128" else 1
    magnitude = torch.nn.functional.pad(magnitude, (0, -k % BLOCK, 0, -rows % row_block))
    return magnitude.reshape(shape[0], row_block, shape[1], BLOCK).amax(dim=(1, 3))


def _round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= scale, for normal FP32: add just under one binade, drop the mantissa bits."""
    return ((scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _expand(scale: torch.Tensor, recipe: str, rows: int, k: int) -> torch.Tensor:
    """Scales as (rows, k), a view where the recipe allows it."""
    if recipe == "tensor":
        return scale.expand(rows, k)
    if recipe == "row":
        return scale[:, None].expand(rows, k)
    if recipe == "128x128":
        scale = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    return scale.repeat_interleave(BLOCK, dim=1)[:, :k]


def expand_scale(scaled: ScaledTensor) -> torch.Tensor:
    """The scale of every element: float32, shape (rows, K). May be a view; do not write to it."""
    return _expand(scaled.scale, scaled.recipe, scaled.rows, scaled.k)


def scale_of_k_block(scaled: ScaledTensor, k_block: int) -> torch.Tensor:
    """The scale of each row within K block ``k_block`` (elements 128·k_block … 128·k_block + 127): float32, (rows,)."""
    if scaled.recipe == "tensor":
        return scaled.scale.expand(scaled.rows)
    if scaled.recipe == "row":
        return scaled.scale
    column = scaled.scale[:, k_block]
    return column if scaled.recipe == "1x128" else column.repeat_interleave(BLOCK)[: scaled.rows]


def scale_to_m_major(scale: torch.Tensor) -> torch.Tensor:
    """1x128 scales as TMA wants them: (rows, K blocks) float32 to a contiguous (K blocks, padded rows).

    A K block's scales then lie side by side in memory, one bulk copy for a whole tile. Rows are padded with zeros to
    a multiple of four so that the row pitch is a multiple of 16 bytes. scale_from_m_major undoes it.
    """
    if scale.dim() != 2 or scale.dtype != torch.float32:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)} and dtype {scale.dtype}; it must be float32 (rows, ceil(K/128)): "
            'the scale of quantize(x, "1x128")'
        )
    rows, k_blocks = scale.shape
    per_line = TMA_ALIGNMENT // scale.element_size()
    out = scale.new_zeros(k_blocks, _ceil_div(rows, per_line) * per_line)
    out[:, :rows] = scale.t()
    return out


def is_m_major(scale: torch.Tensor) -> bool:
    """Whether 1x128 scales (…, rows, K blocks) lie side by side along the rows, those of K blocks apart."""
    if scale.dim() < 2:
        return False
    (rows, k_blocks), (row_step, block_step) = scale.shape[-2:], scale.stride()[-2:]
    return (row_step == 1 or rows <= 1) and (block_step >= rows or k_blocks <= 1)


def scale_from_m_major(m_major: torch.Tensor, rows: int) -> torch.Tensor:
    """Undo scale_to_m_major: (K blocks, padded rows) to a contiguous (rows, K blocks)."""
    if m_major.dim() != 2 or not m_major.shape[1] - TMA_ALIGNMENT // m_major.element_size() < rows <= m_major.shape[1]:
        raise ValueError(
            f"m_major has shape {tuple(m_major.shape)}, which is no padded layout of rows = {rows}; "
            "pass the result of scale_to_m_major and the number of rows it was made from"
        )
    return m_major[:, :rows].t().contiguous()
