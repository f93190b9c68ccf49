"""What asynchronous reductions compute: old (+) new, element by element (PTX ISA 9.7.9.25.4.2, 9.7.9.25.5.3, 9.7.13.8).

TMA and bulk reductions to global memory, bulk reductions and red.async to shared memory share this arithmetic.  An H200
keeps subnormal float32 numbers here, unlike red.global.add.f32.
"""

import numpy as np

from .arithmetic import canonical_nan, half_operation
from .errors import UnknownInstruction

_DTYPES = {
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
    "f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
_TYPE_OF_ELEMENT = {"UINT32": "u32", "INT32": "s32", "UINT64": "u64", "INT64": "s64",
                    "FLOAT16": "f16", "BFLOAT16": "bf16", "FLOAT32": "f32", "FLOAT64": "f64"}  # fmt: skip
OPERATIONS = {  # and the types each takes
    "add": {"u32", "s32", "u64", "f16", "bf16", "f32", "f64"},
    "min": {"u32", "s32", "u64", "s64", "f16", "bf16"}, "max": {"u32", "s32", "u64", "s64", "f16", "bf16"},
    "inc": {"u32"}, "dec": {"u32"},
    "and": {"b32", "b64"}, "or": {"b32", "b64"}, "xor": {"b32", "b64"},
}  # fmt: skip
_INTEGERS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "inc": lambda old, limit: np.where(old >= limit, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - np.uint32(1)),
}  # fmt: skip


def combination(operation: str, type_name: str, where: str):
    """Function(old bytes, new bytes) -> result bytes, all contiguous uint8, for elements of a PTX type."""
    if type_name not in OPERATIONS[operation]:
        allowed = ", ".join(sorted(OPERATIONS[operation]))
        raise UnknownInstruction(f"{where}: reduction {operation} of {type_name} elements is not modelled; {operation} takes"
                                 f" {allowed}")  # fmt: skip
    dtype = _DTYPES[type_name]

    def combine(old, new):
        a, b = np.ascontiguousarray(old).view(dtype), np.ascontiguousarray(new).view(dtype)
        if type_name in ("f16", "bf16"):
            result = half_operation(operation, type_name, a, b)
        elif type_name == "f32":
            result = canonical_nan(a + b)
        else:
            result = _INTEGERS[operation](a, b)
        return np.ascontiguousarray(result).view(np.uint8)

    return combine


def tensor_combination(operation: str, element_type: str, where: str):
    """The same for the element type of a tensor map."""
    type_name = _TYPE_OF_ELEMENT.get(element_type)
    if type_name is None:
        raise UnknownInstruction(f"{where}: TMA reduction of {element_type} elements; map the tensor as a type of 32 or 64 bits,"
                                 " or as float16 or bfloat16")  # fmt: skip
    if operation in ("and", "or", "xor"):
        type_name = "b" + type_name[1:] if type_name[0] in "us" else type_name
    return combination(operation, type_name, where)
