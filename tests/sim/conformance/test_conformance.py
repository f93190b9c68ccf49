"""The simulator computes, bit for bit, what an H200 computed for every conformance case, in every order of events.

Approximate instructions are held to the bounds of hopperlab.sim.approximations instead.
"""

import json

import numpy as np
import pytest
from cases import CASES, REFUSED
from suite import COMMAND, RECORD, Case, Map, Out, Result, agrees, bound, recorded, run

from hopperlab.sim import Hazard, UnknownInstruction

RECORDED = json.loads(RECORD.read_text())["cases"] if RECORD.exists() else {}
ORDERS = {"lazy": {"order": "lazy"}, "eager": {"order": "eager"}, "seed 1": {"seed": 1}, "seed 2": {"seed": 2}}
# One thread's arithmetic, or one warp's: no event can be early or late.
WITHOUT_EVENTS = ("integer", "float", "convert", "approx", "matrix", "mma_sync")


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in REFUSED], ids=lambda case: case.name)
def test_equals_hardware(case):
    assert case.name in RECORDED, f"{case.name} has no record; on a Hopper GPU run: {COMMAND} --only {case.name}"
    expected = RECORDED[case.name]
    for order in ("lazy",) if case.group in WITHOUT_EVENTS else ORDERS:
        results = run(case, **ORDERS[order])
        assert results.keys() == expected.keys(), f"the case has changed since it was recorded; run: {COMMAND} --only {case.name}"
        wrong = [label for label in results if not agrees(label, results[label], expected[label])]
        report = "\n".join(f"{label}\n  simulator {results[label].first}\n  hardware  {expected[label]['first']}" for label in wrong)
        assert not wrong, f"{order}: {len(wrong)} of {len(results)} results differ from the hardware's in their bits\n{report}"


@pytest.mark.parametrize("case", [case for case in CASES if case.name in REFUSED], ids=lambda case: case.name)
def test_refused_by_name(case):
    with pytest.raises(UnknownInstruction):
        run(case)


def tensor_copy(entry, shape, box, at) -> Case:
    """One copy of a box: words for tma_reduce, bytes otherwise. box, at: elements, innermost first."""
    dtype = "uint32" if entry == "tma_reduce" else "uint8"
    mapped, size = Map(Out(shape, dtype, np.zeros(shape)), box), int(np.prod(box)) * np.dtype(dtype).itemsize
    source, coordinates = np.zeros(size // 4, "uint32"), (*at, 0, 0, 0, 0)[:5]
    arguments = {
        "tma_load": [mapped, Out((128,)), size, 512, 0, *coordinates],
        "tma_store": [mapped, source, size, 0, *coordinates],
        "tma_reduce": [mapped, source, size, *at],
    }[entry]
    constants = {"RANK": len(box)} | ({"OPERATION": "add"} if entry == "tma_reduce" else {})
    return Case(f"refused/{entry}", "tma.cu", entry, lambda rng: arguments, block=128, shared_bytes=2048, constants=constants)


@pytest.mark.parametrize("x", [-5, 1, 9])
@pytest.mark.parametrize("entry", ["tma_load", "tma_store", "tma_reduce"])
def test_refuses_innermost_coordinate_off_16_bytes(entry, x):
    """An H200 answers these with "illegal instruction", inside of the tensor and out of it."""
    itemsize = 4 if entry == "tma_reduce" else 1
    kind = "load" if entry == "tma_load" else "store"
    expected = rf"line \d+ of \S+.*innermost coordinate of the TMA {kind} is {x}, which is {x * itemsize} bytes.*multiple of 16"
    with pytest.raises(Hazard, match=expected):
        run(tensor_copy(entry, (24, 80), (32 // itemsize, 8), (x, 4)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("entry, shape, box, at, name", [
    ("tma_store", (24, 80), (32, 8), (-16, 4), "x"),
    ("tma_store", (24, 80), (32, 8), (16, -3), "y"),
    ("tma_store", (24, 80), (32, 8), (-16, -7), "x"),
    ("tma_store", (24, 80), (32, 8), (-4096, 0), "x"),  # nothing of the box in the tensor
    ("tma_store", (300,), (64,), (-16,), "x"),
    ("tma_store", (4, 6, 32), (16, 3, 2), (16, 4, -1), "z"),
    ("tma_store", (3, 4, 5, 32), (16, 3, 2, 2), (16, 3, 1, -2), "w"),
    ("tma_store", (3, 2, 4, 5, 32), (16, 3, 2, 2, 1), (16, 3, 3, 1, -1), "v"),
    ("tma_reduce", (24, 80), (8, 8), (-4, 4), "x"),
    ("tma_reduce", (24, 80), (8, 8), (4, -1), "y"),
])  # fmt: skip
def test_refuses_negative_coordinates_of_stores(entry, shape, box, at, name, order):
    """An H200 answers stores like these with "illegal instruction"; loads may begin before the tensor."""
    value = at["xyzwv".index(name)]
    with pytest.raises(Hazard, match=rf"line \d+ of tma.cu.*: coordinate {name} of the TMA store is {value}\..*must not be negative"):
        run(tensor_copy(entry, shape, box, at), **ORDERS[order])


def test_bounds_hold_for_approximate_instructions_only():
    one, near, far = (Result(np.array([x], "<f4").view("uint8")) for x in (1.0, 1.0 + 2**-23, 1.0 + 2**-20))
    assert agrees("rcp.approx.f32", near, recorded("rcp.approx.f32", one))
    assert not agrees("rcp.approx.f32", far, recorded("rcp.approx.f32", one))
    assert not agrees("add.rn.f32", near, recorded("add.rn.f32", one))
    nan, zero, minus_zero = (Result(np.array([x], "<f4").view("uint8")) for x in (np.nan, 0.0, -0.0))
    for other in (one, nan, minus_zero):
        assert not agrees("rcp.approx.f32", zero, recorded("rcp.approx.f32", other))
    bounded = {label for results in RECORDED.values() for label in results if bound(label)}
    assert all("approx" in label or ".full." in label for label in bounded)


def test_record_fits_the_list():
    assert RECORDED.keys() == {case.name for case in CASES}, f"recorded.json is out of date; run: {COMMAND}"


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)
    assert REFUSED <= {case.name for case in CASES}
