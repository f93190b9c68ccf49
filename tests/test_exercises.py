"""Exercises: made from the kernels, red until solved, green with the solution, and wrong answers get a message that helps."""

import re
import shutil

import pytest

from hopperlab import exercise, stage
from hopperlab.sim import SimulatorError

from wrong_answers import WRONG

# K that is no multiple of 16 is copied for TMA, with a warning: right here, where every K is tried.
pytestmark = pytest.mark.filterwarnings("ignore:.*which TMA needs:UserWarning")

FOLDERS = [folder for folder in stage.folders() if (folder / "hints.md").exists()]
each_stage = pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])


def run_tests(folder, source, tmp_path, beginning="test_") -> dict[str, str | None]:
    """The tests of a stage's test_exercise.py on one source file: name -> None when it passes, else its message."""
    module = stage.load_module(folder / "test_exercise.py", f"exercise_test_{folder.name}")
    results = {}
    for name, test in list(vars(module).items()):
        if name.startswith(beginning):
            arguments = {"source": source, "tmp_path": tmp_path}
            wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
            try:
                test(**{key: arguments[key] for key in wanted})
                results[name] = None
            except BaseException as error:  # pytest.fail raises a BaseException
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                results[name] = f"{type(error).__name__}: {error}"
    assert results
    return results


@each_stage
def test_exercise_is_the_kernel_without_its_answers(folder):
    """Whatever a learner has written into their blanks by now."""
    made = exercise.make(exercise.kernel_of(folder).read_text(), folder.name[:2])
    assert exercise.strip((folder / "exercise.cu").read_text()) == made
    assert all(blank.empty for blank in exercise.blanks(made))
    kept = [line for line in made.splitlines() if "// BLANK" not in line]
    kernel = [line for line in exercise.kernel_of(folder).read_text().splitlines() if "// BLANK" not in line]
    remaining = iter(kernel)
    assert all(line in remaining for line in kept), "solving must only ever add lines"


@each_stage
def test_unsolved_compiles_and_fails_naming_the_blank_and_its_hint(folder, tmp_path):
    from hopperlab.compile import compile_file

    source = tmp_path / "exercise.cu"
    source.write_text(exercise.make(exercise.kernel_of(folder).read_text(), folder.name[:2]))
    module = stage.load(folder).module
    assert compile_file(source, module.EXERCISE_CONSTANTS).cubin
    for name, message in run_tests(folder, source, tmp_path).items():
        assert message is not None, f"{name} passes without an answer"
        match = re.search(rf"BLANK (\d+) of exercise.cu is still empty: .*hopperlab hint {folder.name[:2]} (\d+)", message)
        assert match and match[1] == match[2], message


@each_stage
def test_solution_passes(folder, tmp_path):
    results = run_tests(folder, exercise.kernel_of(folder), tmp_path)
    assert set(results.values()) == {None}, results


@each_stage
def test_every_blank_has_hints(folder):
    numbers = [blank.number for blank in exercise.blanks(exercise.kernel_of(folder).read_text())]
    hints = exercise.hints(folder)
    assert list(hints) == numbers
    assert all(len(found) >= 2 for found in hints.values())


@pytest.mark.parametrize("number, right, wrong, failing, message", WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_plausible_wrong_answers_get_a_message_that_helps(number, right, wrong, failing, message, tmp_path):
    folder = next(folder for folder in FOLDERS if folder.name.startswith(number))
    text = exercise.kernel_of(folder).read_text()
    assert text.count(right) == 1, right
    source = tmp_path / "exercise.cu"
    source.write_text(text.replace(right, wrong))
    results = run_tests(folder, source, tmp_path, failing)
    assert all(results.values()), f"{failing} accepted a wrong answer"
    assert all(re.search(message, text) for text in results.values()), results


def test_a_finding_is_printed_once(tmp_path):
    """What the simulator found is the message of the failure, and not once more what led to it."""
    with pytest.raises(pytest.fail.Exception, match="BLANK 3 there: found. Hint: hopperlab hint 05 3") as caught:
        with exercise.explained(3, "05", " there"):
            raise SimulatorError("found.")
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_blanks_must_count_up():
    with pytest.raises(ValueError, match=r"numbered \[2\]"):
        exercise.blanks("// BLANK 2: x\n// END BLANK\n")


def test_writing_keeps_answers_unless_reset(tmp_path):
    folder = tmp_path / "01_naive"
    folder.mkdir()
    shutil.copy(FOLDERS[0] / "kernel.cu", folder / "kernel.cu")
    assert exercise.write(folder).startswith("wrote")
    assert exercise.write(folder) == "exercise.cu is up to date"
    target = folder / "exercise.cu"
    target.write_text(target.read_text().replace("  // END BLANK", "  value = 1.0f;\n  // END BLANK", 1))
    assert "was kept" in exercise.write(folder) and "value = 1.0f;" in target.read_text()
    assert exercise.write(folder, reset=True).startswith("wrote") and "value = 1.0f;" not in target.read_text()
