"""Launches kernels/quantize.cu. Quantisation by kernels: the same bits as hopperlab.quantize.quantize, reading the input once.

    quantize(x, "1x128", m_major=True)      # CUDA tensors: quantize.cu on the GPU; CPU tensors: the same on the simulator

Only the recipe "tensor" must read twice: its scale is known when everything was seen.
"""

import functools
import math
from pathlib import Path

import torch

from hopperlab.formats import CASTABLE, Format, format_of
from hopperlab.kernel import Kernel
from hopperlab.quantize import BLOCK, MAX_MARGIN, ScaledTensor, scale_shape

FOLDER = Path(__file__).resolve().parent
INPUT_TYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}  # as quantize.cu calls them
LOAD_BYTES = 16  # of a load where addresses allow it, and what a thread holds side by side
ROWS = 8  # of a CTA of blocks_1x128; vectors per thread of the tensor kernels
ROWS_SWIGLU = 4  # of a CTA of swiglu_1x128
THREADS_1X128, THREADS_ROW, THREADS_TENSOR = 128, 256, 256
MOST_HELD = 8  # vectors of a row that a thread keeps in registers
ENTRIES = {  # of quantize.cu
    "tensor": ("tensor_amax", "tensor_cast"), "row": ("whole_rows",), "128x128": ("blocks_128x128",), "1x128": ("blocks_1x128",),
}  # fmt: skip


@functools.cache
def kernel(entry: str, input_type: str, format_name: str, load_bytes: int, m_major: bool = False, held: int = 1) -> Kernel:
    """The kernel for one kind of input. Rows, K, margin and power_of_two are arguments: they compile nothing."""
    constants = {"INPUT": input_type, "FORMAT": format_name, "LOAD_BYTES": load_bytes, "M_MAJOR": m_major, "HELD": held}
    return Kernel(FOLDER / "quantize.cu", entry, constants)


def kernels_for(
    dtype: torch.dtype, recipe: str, format_name: str, k: int, width: int | None = None, m_major: bool = False
) -> list[Kernel]:
    """What quantises rows of k elements by one recipe, in the order of the launches. width as load_width gives it; by default
    that of a tensor without gaps."""
    size = dtype.itemsize
    width = width or math.gcd(LOAD_BYTES, k * size)
    held = 1
    while recipe == "row" and held < MOST_HELD and THREADS_ROW * LOAD_BYTES // size * held < k:
        held *= 2
    return [kernel(entry, INPUT_TYPE[dtype], format_name, width, m_major, held) for entry in ENTRIES[recipe]]


def check_arguments(x: torch.Tensor, recipe: str, margin: int, m_major: bool) -> None:
    """Refuse what no quantisation kernel takes, naming the argument. Raises TypeError or ValueError."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
    if x.dtype not in CASTABLE:
        raise TypeError(f"x has dtype {x.dtype}; allowed are bfloat16, float16 and float32: call x.float() first")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must have two dimensions, (rows, K): "
                         "reshape leading dimensions into rows")  # fmt: skip
    if isinstance(margin, bool) or not isinstance(margin, int) or not 0 <= margin <= MAX_MARGIN:
        raise ValueError(f"margin is {margin!r}; it must be an integer from 0 to {MAX_MARGIN} (powers of two)")
    if m_major and recipe != "1x128":
        raise ValueError(f"m_major is True with recipe {recipe!r}; only '1x128' has scales to lay out M-major")


def row_pitch(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x with its elements side by side along K, copied only if they are not, and the step from row to row in elements."""
    x = x.detach()
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    return x, x.stride(0)


def load_width(x: torch.Tensor, *steps: int) -> int:
    """Bytes of the widest load that is aligned everywhere: rows start and end at multiples of ``steps`` elements."""
    width = math.gcd(LOAD_BYTES, x.data_ptr(), *(step * x.element_size() for step in steps))
    if width < x.element_size():
        raise ValueError(f"x starts at address {x.data_ptr():#x}, no multiple of {x.element_size()} bytes: pass x.clone()")
    return width


def empty_m_major(x: torch.Tensor) -> torch.Tensor:
    """Room for the 1x128 scales of x as TMA wants them: (K blocks, rows padded to 4), float32."""
    return torch.empty(-(-x.shape[1] // BLOCK), -(-x.shape[0] // 4) * 4, dtype=torch.float32, device=x.device)


def quantize(x: torch.Tensor, recipe: str, format: Format | str = "e4m3", power_of_two: bool = False, margin: int = 0,
             m_major: bool = False) -> ScaledTensor | tuple[ScaledTensor, torch.Tensor]:  # fmt: skip
    """Quantise x, (rows, K), bfloat16, float16 or float32. Arguments, errors and every bit as hopperlab.quantize.quantize.

    m_major  only "1x128": also return the scales as (K blocks, rows padded to 4), what scale_to_m_major would make of them.

    Rows may lie apart (a slice of columns); elements of a row may not, or a copy is made. Asynchronous on a GPU.
    """
    fmt = format_of(format)
    check_arguments(x, recipe, margin, m_major)
    rows, k = x.shape
    data = torch.empty(rows, k, dtype=fmt.dtype, device=x.device)
    scale = torch.empty(scale_shape(recipe, rows, k), dtype=torch.float32, device=x.device)
    transposed = empty_m_major(x) if m_major else scale
    if x.numel() == 0:
        scale.fill_(1)
    else:
        _launch(x, recipe, fmt, fmt.max * 2.0**-margin, power_of_two, data, scale, transposed, m_major)
    scaled = ScaledTensor(data, scale, recipe)
    return (scaled, transposed) if m_major else scaled


def _launch(x, recipe, fmt, largest, power_of_two, data, scale, transposed, m_major):
    rows, k = x.shape
    vector = LOAD_BYTES // x.element_size()
    if recipe == "tensor":
        x = x.detach().contiguous()
        find_amax, cast = kernels_for(x.dtype, recipe, fmt.name, k, load_width(x, x.numel()))
        ctas = -(-x.numel() // (THREADS_TENSOR * vector * ROWS))
        amax = torch.zeros(1, dtype=torch.float32, device=x.device)
        find_amax[ctas, THREADS_TENSOR](x, amax, x.numel())
        cast[ctas, THREADS_TENSOR](x, data, amax, scale, x.numel(), largest, power_of_two)
        return
    x, pitch = row_pitch(x)
    (run,) = kernels_for(x.dtype, recipe, fmt.name, k, load_width(x, pitch if rows > 1 else 0, k), m_major)
    if recipe == "row":
        run[rows, THREADS_ROW](x, data, scale, k, pitch, largest, power_of_two)
    elif recipe == "128x128":
        run[scale.numel(), BLOCK // vector * BLOCK // ROWS](x, data, scale, rows, k, pitch, largest, power_of_two)
    else:
        run[_grid_1x128(x, scale, ROWS), THREADS_1X128](x, data, scale, transposed, rows, k, pitch, largest, power_of_two)


def _grid_1x128(x, scale, rows_of_group) -> int:
    """CTAs: groups of lanes side by side along K, `rows_of_group` rows each."""
    groups = THREADS_1X128 * LOAD_BYTES // (BLOCK * x.element_size())
    return -(-scale.shape[0] // rows_of_group) * -(-scale.shape[1] // groups)


def swiglu_quantize(x: torch.Tensor, format: Format | str = "e4m3", power_of_two: bool = False, margin: int = 0,
                    m_major: bool = False) -> ScaledTensor | tuple[ScaledTensor, torch.Tensor]:  # fmt: skip
    """silu(x[:, :K]) * x[:, K:], quantised "1x128", in one kernel: x is (rows, 2 K), bfloat16, float16 or float32.

    The product is never rounded to x's type: gate * (1 / (1 + exp(-gate))) * up in FP32, with an exp made of multiply-adds, so
    that every machine gives the same bits (quantize.cu has the steps). silu(-inf) is NaN, as torch's is. Other arguments as
    in quantize. Raises TypeError or ValueError.
    """
    fmt = format_of(format)
    check_arguments(x, "1x128", margin, m_major)
    if x.shape[1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; its second dimension must be even: K gates, then K values")
    x, pitch = row_pitch(x)
    rows, k = x.shape[0], x.shape[1] // 2
    data = torch.empty(rows, k, dtype=fmt.dtype, device=x.device)
    scale = torch.empty(scale_shape("1x128", rows, k), dtype=torch.float32, device=x.device)
    transposed = empty_m_major(data) if m_major else scale
    if data.numel():
        width = load_width(x, pitch if rows > 1 else 0, k)
        run = kernel("swiglu_1x128", INPUT_TYPE[x.dtype], fmt.name, width, m_major)
        run[_grid_1x128(x, scale, ROWS_SWIGLU), THREADS_1X128](
            x, data, scale, transposed, rows, k, pitch, fmt.max * 2.0**-margin, power_of_two
        )
    scaled = ScaledTensor(data, scale, "1x128")
    return (scaled, transposed) if m_major else scaled
