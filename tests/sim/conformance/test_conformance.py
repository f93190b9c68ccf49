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


@pytest.mark.parametrize("x", [-5, 1, 9])
@pytest.mark.parametrize("entry", ["tma_load", "tma_store", "tma_reduce"])
def test_refuses_innermost_coordinate_off_16_bytes(entry, x):
    """An H200 answers these with "illegal instruction", inside of the tensor and out of it."""
    tensor = np.zeros((24, 80), "uint32" if entry == "tma_reduce" else "uint8")
    itemsize = tensor.itemsize
    mapped = Map(Out(tensor.shape, tensor.dtype.name, tensor), (32 // itemsize, 8))
    arguments = {
        "tma_load": [mapped, Out((128,)), 256, 512, 0, x, 4, 0, 0, 0],
        "tma_store": [mapped, np.zeros(64, "uint32"), 256, 0, x, 4, 0, 0, 0],
        "tma_reduce": [mapped, np.zeros(64, "uint32"), 256, x, 4],
    }[entry]
    constants = {"RANK": 2} | ({"OPERATION": "add"} if entry == "tma_reduce" else {})
    case = Case(f"refused/{entry}", "tma.cu", entry, lambda rng: arguments, block=128, shared_bytes=2048, constants=constants)
    kind = "load" if entry == "tma_load" else "store"
    expected = rf"line \d+ of \S+.*innermost coordinate of the TMA {kind} is {x}, which is {x * itemsize} bytes.*multiple of 16"
    with pytest.raises(Hazard, match=expected):
        run(case)


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
    assert sorted(RECORDED) == sorted(case.name for case in CASES), f"recorded.json is out of date; run: {COMMAND}"


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)
    assert REFUSED <= {case.name for case in CASES}
