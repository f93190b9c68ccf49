"""docs/pitfalls.md names tests that exist, and one for every fault that a test can show."""

import ast
import re

import pytest

from hopperlab import stage

TESTS = stage.root() / "tests"
TEXT = (stage.root() / "docs" / "pitfalls.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT)))
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "| ---"))]
WITHOUT_A_TEST = {"Forked workers", "Unexplained constants and metrics"}


@pytest.mark.parametrize("file, name", NAMED)
def test_the_named_test_exists(file, name):
    functions = [node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions, f"docs/pitfalls.md names {file}::{name}, and tests/{file} has no such test"


def test_every_fault_names_a_test():
    assert len(ROWS) >= 30 and len(NAMED) > 60
    for row in ROWS:
        fault, here, shown_by = (cell.strip() for cell in row.strip("|").split("|"))
        assert here and (re.search(r"`[\w/]+\.py::\w+`", shown_by) or fault in WITHOUT_A_TEST), fault


def test_what_looks_like_a_test_was_read_as_one():
    assert TEXT.count("::test_") == len(re.findall(r"`[\w/]+\.py::\w+`", TEXT))


def test_tests_marked_gpu_are_those_that_need_one():
    needs_gpu = {name for file, name in NAMED if file == "library/test_cuda.py"}
    assert set(re.findall(r"::(\w+)` \(GPU\)", TEXT)) == needs_gpu
