"""TMA tensor maps: how the copy engine sees a tensor, checked on the host and encoded for a GPU or for the simulator.

A map names a tensor, a box (the tile that one copy moves) and a swizzle.  Everything is given innermost dimension first,
as the hardware counts: for a row-major (M, K) matrix, dimension 0 is K.  The limits are those of cuTensorMapEncodeTiled
in the CUDA driver API.
"""

import ctypes
import functools
import operator
import struct
from dataclasses import dataclass, field, fields

import torch

SWIZZLES = (0, 32, 64, 128)
BYTES = 128  # of an encoded map
ALIGNMENT = 64  # of a map in memory
_MAGIC = 0x70616D2D616D7431  # marks a map in simulated parameter memory

# Element types of cuTensorMapEncodeTiled.  FP8 is copied as plain bytes.
_TYPES = {
    torch.uint8: "UINT8", torch.int8: "UINT8", torch.bool: "UINT8", torch.float8_e4m3fn: "UINT8", torch.float8_e5m2: "UINT8",
    torch.uint16: "UINT16", torch.int16: "UINT16", torch.uint32: "UINT32", torch.int32: "INT32", torch.uint64: "UINT64",
    torch.int64: "INT64", torch.float16: "FLOAT16", torch.float32: "FLOAT32", torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
}  # fmt: skip


@dataclass(frozen=True)
class MapLayout:
    """A checked map without its address. Tensors of one layout differ in nothing else.

    element_type: a name of CUtensorMapDataType without its prefix.  element_bytes: its size.
    dims, box, element_strides: elements, innermost first.  strides: bytes, for dimension 1 and up.
    swizzle: span in bytes (0, 32, 64 or 128).  fill_nan: out-of-bounds elements read as NaN, not zero.
    """

    element_type: str
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    fill_nan: bool
    l2_promotion: int


@dataclass(frozen=True)
class TensorMap(MapLayout):
    """A checked description of one tensor for the copy engine: its layout and where it is.

    address: bytes.  tensor: kept alive, and the memory that the simulator reads.
    """

    address: int
    tensor: torch.Tensor = field(repr=False, compare=False)

    @classmethod
    def tiled(
        cls,
        tensor: torch.Tensor,
        *,
        box: tuple[int, ...],
        swizzle: int = 0,
        element_strides: tuple[int, ...] | None = None,
        fill_nan: bool = False,
        l2_promotion: int = 128,
    ) -> "TensorMap":
        """Map a strided tensor of 1 to 5 dimensions.

        box: elements per dimension that one copy moves, innermost first (the reverse of the tensor's shape).
        swizzle: bytes of the pattern that the shared-memory tile is stored with, the same that the reader must assume.
        element_strides: take every n-th element.  l2_promotion: 0, 64, 128 or 256 bytes fetched into L2 at a time.
        Raises ValueError or TypeError that name the argument, its value, what is allowed and what to do.
        """
        if tensor.dtype not in _TYPES:
            raise TypeError(f"tensor: dtype {tensor.dtype} is not one that TMA copies; allowed are {sorted(map(str, _TYPES))}."
                            " View it as an integer type of the same size.")  # fmt: skip
        size = tensor.element_size()
        rank = tensor.dim()
        if not 1 <= rank <= 5:
            raise ValueError(f"tensor: {rank} dimensions; TMA maps have 1 to 5. Reshape or flatten it.")
        dims = tuple(reversed(tensor.shape))
        steps = [s * size for s in reversed(tensor.stride())]
        box = _integers("box", box)
        if len(box) != rank:
            raise ValueError(
                f"box: {len(box)} numbers for a tensor of {rank} dimensions; give one per dimension, innermost first"
            )
        element_strides = _integers("element_strides", element_strides or (1,) * rank)
        if len(element_strides) != rank or not all(1 <= s <= 8 for s in element_strides) or element_strides[0] != 1:
            raise ValueError(
                f"element_strides: {element_strides}; {rank} numbers from 1 to 8 are allowed, the innermost 1"
            )
        if any(d == 0 for d in dims):
            raise ValueError(
                f"tensor: shape {tuple(tensor.shape)} is empty; a map needs at least one element. Skip the launch."
            )
        if any(d > 1 << 32 for d in dims):
            raise ValueError(f"tensor: dimension {max(dims)} is over 2**32; split the tensor")
        if steps[0] != size and dims[0] > 1:
            raise ValueError(
                f"tensor: the innermost dimension has a stride of {steps[0] // size} elements; TMA needs 1."
                " Call .contiguous(), or map the transposed tensor and let the reader be MN-major."
            )
        strides = []
        for d in range(1, rank):
            # The stride of a dimension of one element is never used; give the driver one that it accepts.
            step = steps[d] if dims[d] > 1 else -(-max(dims[d - 1] * (strides[-1] if strides else size), 16) // 16) * 16
            if step % 16:
                raise ValueError(
                    f"tensor: the stride of dimension {rank - 1 - d} is {step} bytes; TMA needs a multiple of 16. Pad "
                    f"the rows to a multiple of {16 // size if size < 16 else 1} elements."
                )
            if not 0 <= step < 1 << 40:
                raise ValueError(
                    f"tensor: the stride of dimension {rank - 1 - d} is {step} bytes; 0 to 2**40 - 1 are allowed"
                )
            strides.append(step)
        address = tensor.data_ptr()
        _check_address(address)
        for d, (extent, stride) in enumerate(zip(box, element_strides)):
            if not 1 <= extent <= 256:
                raise ValueError(
                    f"box: {box} has {extent} in dimension {d}; 1 to 256 elements are allowed. Use several copies."
                )
        if isinstance(swizzle, float) or swizzle not in SWIZZLES:
            raise ValueError(f"swizzle: {swizzle} bytes; allowed are {SWIZZLES}")
        inner = box[0] * size
        if inner % 16:
            raise ValueError(
                f"box: the innermost dimension is {inner} bytes ({box[0]} elements of {size}); TMA needs a multiple of "
                f"16. Use a multiple of {max(1, 16 // size)} elements."
            )
        if swizzle and inner > swizzle:
            raise ValueError(
                f"box: the innermost dimension is {inner} bytes, but a {swizzle}-byte swizzle allows at most {swizzle}."
                f" Use {swizzle // size} elements, and several copies side by side for a wider tile."
            )
        if isinstance(l2_promotion, float) or l2_promotion not in (0, 64, 128, 256):
            raise ValueError(f"l2_promotion: {l2_promotion}; allowed are 0, 64, 128 and 256 bytes")
        kind = _TYPES[tensor.dtype]
        if fill_nan and not kind.startswith(("FLOAT", "BFLOAT")):
            raise ValueError(f"fill_nan: only for float16, bfloat16, float32 and float64, not {tensor.dtype}")
        return cls(
            kind, size, dims, tuple(strides), box, element_strides, swizzle, fill_nan, l2_promotion, address, tensor
        )

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy delivers, also where it reaches out of bounds: what a barrier must expect."""
        total = self.element_bytes
        for extent, stride in zip(self.box, self.element_strides):
            total *= -(-extent // stride)
        return total

    @property
    def layout(self) -> MapLayout:
        """All of the map but the tensor's address."""
        return MapLayout(*(getattr(self, each.name) for each in fields(MapLayout)))

    def simulator_bytes(self, index: int) -> bytes:
        """128 bytes that stand for map number index of a simulated launch."""
        return struct.pack("<QQ", _MAGIC, index).ljust(BYTES, b"\0")


@functools.lru_cache(maxsize=16384)
def encoded_at(layout: MapLayout, address: int) -> bytes:
    """The 128 bytes of a map for a tensor of this layout at an address, for a GPU. Needs the CUDA driver.

    A pure function of its arguments, so what is kept for a tensor that is gone is right for the next one at its address.
    Raises ValueError for an address that is no multiple of 16.
    """
    from cuda.bindings import driver

    _check_address(address)
    before, after = _driver_arguments(layout)
    status, encoded = driver.cuTensorMapEncodeTiled(*before, address, *after)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled refused {layout} at {address:#x}: {status.name}")
    return ctypes.string_at(encoded.getPtr(), BYTES)  # a copy: encoded owns the memory


@functools.lru_cache(maxsize=1024)
def _driver_arguments(layout: MapLayout) -> tuple[tuple, tuple]:
    """Arguments of cuTensorMapEncodeTiled before the address and after it."""
    from cuda.bindings import driver

    # A map of rank 1 has no strides, but the driver refuses the null pointer that an empty list becomes.
    strides = layout.strides or (-(-layout.dims[0] * layout.element_bytes // 16) * 16,)

    def name(enum, prefix, value):
        return getattr(enum, f"{prefix}_{value}")

    return (
        name(driver.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE", layout.element_type),
        len(layout.dims),
    ), (
        [driver.cuuint64_t(d) for d in layout.dims],
        [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(b) for b in layout.box],
        [driver.cuuint32_t(s) for s in layout.element_strides],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        name(driver.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE", f"{layout.swizzle}B" if layout.swizzle else "NONE"),
        name(
            driver.CUtensorMapL2promotion,
            "CU_TENSOR_MAP_L2_PROMOTION",
            f"L2_{layout.l2_promotion}B" if layout.l2_promotion else "NONE",
        ),
        name(
            driver.CUtensorMapFloatOOBfill,
            "CU_TENSOR_MAP_FLOAT_OOB_FILL",
            "NAN_REQUEST_ZERO_FMA" if layout.fill_nan else "NONE",
        ),
    )


def _integers(name: str, values) -> tuple[int, ...]:
    """values as plain integers. TypeError for one that would have to be rounded."""
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{name}: {values!r}; it must be a tuple of integers, one per dimension, innermost first") from None


def _check_address(address: int) -> None:
    if address % 16:
        raise ValueError(
            f"tensor: its address {address:#x} is not a multiple of 16 bytes; TMA needs that. A view that starts "
            "inside another tensor must start at a multiple of 16 bytes: copy it with .clone()."
        )


def simulated_index(data: bytes) -> int | None:
    """Number of the map in 16 or more bytes of simulated memory, or None if they hold no map."""
    magic, index = struct.unpack_from("<QQ", data)
    return index if magic == _MAGIC else None
