"""Options of the exercise tests: which file of a stage they check."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--solution", action="store_true", help="check each stage's finished kernel.cu, not the learner's exercise.cu")


@pytest.fixture
def source(request) -> Path:
    """The file under test: exercise.cu beside the test, or kernel.cu with --solution."""
    name = "kernel.cu" if request.config.getoption("--solution") else "exercise.cu"
    return request.path.parent / name
