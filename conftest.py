"""Options of the exercise tests: which file of a stage they check."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--solution", action="store_true", help="check each stage's finished kernel, not the learner's exercise.cu")


@pytest.fixture
def source(request) -> Path:
    """The file under test: exercise.cu beside the test, or the stage's finished kernel with --solution."""
    from hopperlab import exercise

    folder = request.path.parent
    return exercise.kernel_of(folder) if request.config.getoption("--solution") else folder / "exercise.cu"
