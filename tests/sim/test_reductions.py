"""Asynchronous reductions: integers against Python, float32, refusals."""

import numpy as np
import pytest
from hopperlab.sim import UnknownInstruction
from hopperlab.sim.reductions import OPERATIONS, combination, tensor_combination

EXPECTED = {
    "add": lambda old, new: old + new, "min": min, "max": max,
    "and": lambda old, new: old & new, "or": lambda old, new: old | new, "xor": lambda old, new: old ^ new, "inc": lambda old, new: 0 if old >= new else old + 1,
    "dec": lambda old, new: new if old == 0 or old > new else old - 1,
}  # fmt: skip
INTEGERS = [(operation, kind) for operation, kinds in OPERATIONS.items() for kind in sorted(kinds) if "f" not in kind]


@pytest.mark.parametrize("operation, kind", INTEGERS)
def test_integers(operation, kind):
    dtype = np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
    limits = np.iinfo(dtype)
    rng = np.random.default_rng(7)
    corners = np.array([limits.min, limits.min + 1, 0, 1, 2, limits.max - 1, limits.max], dtype)
    random = rng.integers(limits.min, limits.max, (2, 64), dtype, endpoint=True)
    old, new = (np.concatenate([x.reshape(-1), r]) for x, r in zip(np.meshgrid(corners, corners), random))
    result = combination(operation, kind, "here")(old.view("uint8"), new.view("uint8")).view(dtype)
    mask = (1 << 8 * dtype.itemsize) - 1
    assert [int(r) & mask for r in result] == [EXPECTED[operation](int(a), int(b)) & mask for a, b in zip(old, new)]


def test_float32_keeps_subnormals_and_makes_one_nan():
    old, new = (np.array(x, "<u4") for x in ([1, 0x7F800001, 0x7F800000], [0x80000003, 0, 0xFF800000]))
    with np.errstate(invalid="ignore"):
        result = combination("add", "f32", "here")(old.view("uint8"), new.view("uint8")).view("<u4")
    assert result.tolist() == [0x80000002, 0x7FFFFFFF, 0x7FFFFFFF]


@pytest.mark.parametrize("operation, kind", [("inc", "s32"), ("min", "f32"), ("and", "u32"), ("max", "f64"), ("add", "s64")])
def test_refused_types(operation, kind):
    with pytest.raises(UnknownInstruction, match=rf"line 5.*{operation} of {kind}.*takes"):
        combination(operation, kind, "line 5")


def test_tensor_maps():
    old, new = np.array([3, 12], "uint32"), np.array([6, 10], "uint32")
    xor = tensor_combination("xor", "UINT32", "here")
    assert xor(old.view("uint8"), new.view("uint8")).view("uint32").tolist() == [5, 6]
    with pytest.raises(UnknownInstruction, match="UINT8 elements; map the tensor as"):
        tensor_combination("add", "UINT8", "here")
