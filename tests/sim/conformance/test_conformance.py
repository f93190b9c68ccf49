"""The simulator computes, bit for bit, what an H200 computed for every conformance case, in every order of events."""

import json

import pytest
from cases import CASES, REFUSED
from suite import COMMAND, RECORD, run

from hopperlab.sim import UnknownInstruction

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
        wrong = [label for label in results if results[label].sha256 != expected[label]["sha256"]]
        report = "\n".join(f"{label}\n  simulator {results[label].first}\n  hardware  {expected[label]['first']}" for label in wrong)
        assert not wrong, f"{order}: {len(wrong)} of {len(results)} results differ from the hardware's in their bits\n{report}"


@pytest.mark.parametrize("case", [case for case in CASES if case.name in REFUSED], ids=lambda case: case.name)
def test_refused_by_name(case):
    with pytest.raises(UnknownInstruction):
        run(case)


def test_record_fits_the_list():
    assert sorted(RECORDED) == sorted(case.name for case in CASES), f"recorded.json is out of date; run: {COMMAND}"


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)
    assert REFUSED <= {case.name for case in CASES}
