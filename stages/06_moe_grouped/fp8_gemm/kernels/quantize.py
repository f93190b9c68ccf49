"""Launches kernels/quantize.cu. Quantisation by kernels: the same bits as hopperlab.quantize.quantize, reading the input once.

    quantize(x, "1x128", m_major=True)      # CUDA tensors: quantize.cu on the GPU; CPU tensors: the same on the simulator

Only the recipe "tensor" must read twice: its scale is known when everything was seen.
"""

from __future__ import annotations

import functools
import math
import operator
from pathlib import Path

import torch

from hopperlab.formats import CASTABLE, Format, format_of
from hopperlab.kernel import Arguments, GpuLaunch, Kernel
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
def kernel(entry: str, input_type: str, format_name: str, load_bytes: int, held: int = 1) -> Kernel:
    """The kernel for one kind of input. Rows, K, margin, power_of_two and m_major are arguments: they compile nothing."""
    constants = {"INPUT": input_type, "FORMAT": format_name, "LOAD_BYTES": load_bytes, "HELD": held}
    return Kernel(FOLDER / "quantize.cu", entry, constants)


def kernels_for(dtype: torch.dtype, recipe: str, format_name: str, k: int, width: int | None = None) -> list[Kernel]:
    """What quantises rows of k elements by one recipe, in the order of the launches. width as load_width gives it; by default
    that of a tensor without gaps."""
    size = dtype.itemsize
    width = width or math.gcd(LOAD_BYTES, k * size)
    held = 1
    while recipe == "row" and held < MOST_HELD and THREADS_ROW * LOAD_BYTES // size * held < k:
        held *= 2
    return [kernel(entry, INPUT_TYPE[dtype], format_name, width, held) for entry in ENTRIES[recipe]]


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


def scale_layout(recipe: str, rows: int, k: int, m_major: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of a new tensor for the scales. m_major: with rows padded to 4, [:rows] of it are scales of "1x128" as
    kernels and TMA read them fastest, those of a K block side by side."""
    shape = scale_shape(recipe, rows, k)
    if m_major:
        padded = -(-rows // 4) * 4
        return (padded, shape[1]), (1, max(padded, 1))
    return shape, (max(shape[1], 1), 1) if len(shape) == 2 else (1,)


def quantize(x: torch.Tensor, recipe: str, format: Format | str = "e4m3", power_of_two: bool = False, margin: int = 0,
             m_major: bool = False) -> ScaledTensor:  # fmt: skip
    """Quantise x, (rows, K), bfloat16, float16 or float32. Arguments, errors and every bit as hopperlab.quantize.quantize.

    m_major  only "1x128": the scales lie M-major, a view of what scale_to_m_major would make of them, padding included.

    Rows may lie apart (a slice of columns); elements of a row may not, or a copy is made. Asynchronous on a GPU.
    """
    return _quantize(x, False, recipe, format, power_of_two, margin, m_major)


def swiglu_quantize(x: torch.Tensor, format: Format | str = "e4m3", power_of_two: bool = False, margin: int = 0,
                    m_major: bool = False) -> ScaledTensor:  # fmt: skip
    """silu(x[:, :K]) * x[:, K:], quantised "1x128", in one kernel: x is (rows, 2 K), bfloat16, float16 or float32.

    The product is never rounded to x's type: gate * (1 / (1 + exp(-gate))) * up in FP32, with an exp made of multiply-adds, so
    that every machine gives the same bits (quantize.cu has the steps). silu(-inf) is NaN, as torch's is. Other arguments as
    in quantize. Raises TypeError or ValueError.
    """
    return _quantize(x, True, "1x128", format, power_of_two, margin, m_major)


# ---- what does not change from call to call ----------------------------------------------------------------------------

_known: dict[tuple, Quantisation] = {}
MOST_KNOWN = 4096


def _quantize(x, swiglu, recipe, format, power_of_two, margin, m_major) -> ScaledTensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
    strides = x.stride()
    if strides[-1:] != (1,) or recipe == "tensor":  # rows may lie apart, elements of a row may not; nor rows of a whole tensor
        x = x.detach().contiguous()
        strides = x.stride()
    address = x.data_ptr()
    # The type of margin too, because True equals 1.
    key = (x.shape, strides, x.dtype, x.device, address % LOAD_BYTES,
           swiglu, recipe, format, power_of_two, margin, type(margin), m_major)  # fmt: skip
    try:
        known = _known.get(key)
    except TypeError:  # an argument that has no hash is refused below, by its name
        known = None
    if known is None:
        known = Quantisation(x, swiglu, recipe, format, power_of_two, margin, m_major)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known(x, address)


class Quantisation:
    """How tensors of one layout are quantised: checked once, and what is then the same in every call. Calling it quantises one.

    x is rows that may lie apart, each without gaps; for the recipe "tensor", all of it without gaps.
    """

    __slots__ = ("data", "device", "dtype", "padded", "recipe", "rows", "scale", "steps")

    def __init__(self, x, swiglu, recipe, format, power_of_two, margin, m_major):
        fmt = format_of(format)
        check_arguments(x, recipe, margin, m_major)
        if swiglu and x.shape[1] % 2:
            raise ValueError(f"x has shape {tuple(x.shape)}; its second dimension must be even: K gates, then K values")
        rows, k = x.shape[0], x.shape[1] // (1 + swiglu)
        self.recipe, self.device, self.dtype, self.rows = recipe, x.device, fmt.dtype, rows
        self.data, self.scale = ((rows, k), (max(k, 1), 1)), scale_layout(recipe, rows, k, m_major)
        self.padded = bool(m_major and rows % 4)
        largest = fmt.max * 2.0**-margin
        self.steps = _steps(x, k, swiglu, recipe, fmt.name, (largest, bool(power_of_two)), bool(m_major)) if rows * k else ()

    def __call__(self, x: torch.Tensor, address: int) -> ScaledTensor:
        # Not torch.empty, whose arguments take a microsecond longer to read.
        data = torch.empty_strided(*self.data, dtype=self.dtype, device=self.device)
        scale = torch.empty_strided(*self.scale, dtype=torch.float32, device=self.device)
        amax = torch.zeros(1, dtype=torch.float32, device=self.device) if self.recipe == "tensor" else scale
        for step in self.steps:
            step(x, address, data, scale, amax)
        if not self.steps:
            scale.fill_(1)
        if self.padded:
            scale = scale[: self.rows]
        return _scaled(data, scale, self.recipe)


def _scaled(data: torch.Tensor, scale: torch.Tensor, recipe: str) -> ScaledTensor:
    """A ScaledTensor of parts that were made to fit: its checks take 5 µs, more than all else here."""
    made = object.__new__(ScaledTensor)
    made.__dict__.update(data=data, scale=scale, recipe=recipe)
    return made


def _steps(x, k, swiglu, recipe, format_name, rounding, m_major) -> tuple[Step, ...]:
    """The launches. rounding: (largest, power_of_two)."""
    rows, pitch = x.shape[0], x.stride(0)
    vector = LOAD_BYTES // x.element_size()
    if recipe == "tensor":
        count = x.numel()
        find_amax, cast = kernels_for(x.dtype, recipe, format_name, k, load_width(x, count))
        ctas = -(-count // (THREADS_TENSOR * vector * ROWS))
        return (Step(find_amax, x.device, ctas, THREADS_TENSOR, "x amax", (count,)),
                Step(cast, x.device, ctas, THREADS_TENSOR, "x data amax scale", (count, *rounding)))  # fmt: skip
    width = load_width(x, pitch if rows > 1 else 0, k)
    if swiglu:
        run = kernel("swiglu_1x128", INPUT_TYPE[x.dtype], format_name, width)
    else:
        (run,) = kernels_for(x.dtype, recipe, format_name, k, width)
    if recipe == "row":
        ctas, threads, numbers = rows, THREADS_ROW, (k, pitch, *rounding)
    elif recipe == "128x128":
        ctas, threads = math.prod(scale_shape(recipe, rows, k)), BLOCK // vector * BLOCK // ROWS
        numbers = (rows, k, pitch, *rounding)
    else:  # groups of lanes side by side along K, some rows each
        groups, rows_of_group = THREADS_1X128 * vector // BLOCK, ROWS_SWIGLU if swiglu else ROWS
        ctas = -(-rows // rows_of_group) * -(-scale_shape(recipe, rows, k)[1] // groups)
        threads, numbers = THREADS_1X128, (rows, k, pitch, *rounding, m_major)
    return (Step(run, x.device, ctas, threads, "x data scale", numbers),)


class Step:
    """One launch: of a kernel's parameters, the tensors come first, those named in ``takes``; then the numbers."""

    __slots__ = ("ctas", "gpu", "kernel", "numbers", "takes", "threads", "values")

    def __init__(self, kernel: Kernel, device: torch.device, ctas: int, threads: int, takes: str, numbers: tuple):
        self.kernel, self.ctas, self.threads, self.numbers = kernel, ctas, threads, numbers
        self.takes = operator.itemgetter(*(("x", "data", "scale", "amax").index(name) for name in takes.split()))
        self.gpu = gpu_launch(kernel, device, ctas, threads)
        self.values = [kernel.value(number, parameter) for number, parameter in zip(numbers, kernel.parameters[-len(numbers) :])]

    def __call__(self, x, address, data, scale, amax) -> None:
        if self.gpu is None:
            self.kernel[self.ctas, self.threads](*self.takes((x.detach(), data, scale, amax)), *self.numbers)
        else:
            self.gpu(packed(self, address, data.data_ptr(), scale.data_ptr(), amax.data_ptr()))


def gpu_launch(kernel: Kernel, device: torch.device, ctas: int, threads: int) -> GpuLaunch | None:
    """What launches the kernel on this GPU; None for the CPU, where the simulator runs it. early: each kernel waits for the one
    before it."""
    return kernel.prepare(device.index, ctas, threads, early=True) if device.type == "cuda" else None


@functools.lru_cache(maxsize=8192)
def packed(step: Step, *addresses: int) -> Arguments:
    """The arguments of a launch with x, data, scale and amax at these addresses, which come again and again."""
    return Arguments(step.kernel.packing, [*step.takes(addresses), *step.values])
