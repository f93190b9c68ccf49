"""Exercises, made from the finished kernels: the same file with its answers taken out.

``kernel.cu`` marks what a learner writes:

    // BLANK 2: read and decode the element, if it lies inside the matrix
    ...the answer...
    // END BLANK

``exercise.cu`` is that file without the answers. Solving only ever adds lines between the two marks, so a learner's
file can always be compared with the one it came from.

A stage whose finished kernel is another file names it in its ``stage.py``: ``KERNEL = FOLDER / "…"``.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from hopperlab import capability
from hopperlab import stage as stages
from hopperlab.sim import SimulatorError

_BLANK = re.compile(r"^(?P<indent>[ \t]*)// BLANK (?P<number>\d+): (?P<task>.*)\n(?P<body>(?:.*\n)*?)[ \t]*// END BLANK.*\n", re.M)


@dataclass(frozen=True)
class Blank:
    """One place to fill in."""

    number: int
    task: str
    body: str

    @property
    def lines(self) -> int:
        """Lines of code in it, comments and empty lines left out."""
        code = [re.sub(r"//.*", "", line).strip() for line in self.body.splitlines()]
        return sum(1 for line in code if line)

    @property
    def empty(self) -> bool:
        return self.lines == 0


def blanks(text: str) -> list[Blank]:
    """The blanks of a kernel or an exercise, in order."""
    found = [Blank(int(match["number"]), match["task"].split("  (about")[0], match["body"]) for match in _BLANK.finditer(text)]
    if [blank.number for blank in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"blanks are numbered {[blank.number for blank in found]}; they must count up from 1")
    return found


def make(kernel: str, stage_number: str) -> str:
    """The exercise for a finished kernel's text."""
    blanks(kernel)  # refuses wrong numbering

    def emptied(match: re.Match) -> str:
        lines = Blank(0, "", match["body"]).lines
        about = f"  (about {lines} line{'s' * (lines > 1)}; stuck? hopperlab hint {stage_number} {match['number']})"
        return f"{match['indent']}// BLANK {match['number']}: {match['task']}{about}\n{match['indent']}// END BLANK\n"

    return _BLANK.sub(emptied, kernel)


def strip(exercise: str) -> str:
    """A learner's file with what they wrote in the blanks taken out again."""

    def emptied(match: re.Match) -> str:
        head, tail = match.start("body") - match.start(), match.end("body") - match.start()
        return match[0][:head] + match[0][tail:]

    return _BLANK.sub(emptied, exercise)


def hints(folder: Path) -> dict[int, list[str]]:
    """Hints of a stage by blank, each a list from gentle to plain, read from its ``hints.md``.

    The file has a heading ``## Blank N`` for each blank and a list item for each hint.
    """
    found: dict[int, list[str]] = {}
    for section in re.split(r"^## Blank ", (folder / "hints.md").read_text(), flags=re.M)[1:]:
        number, _, body = section.partition("\n")
        items = re.split(r"^- ", body, flags=re.M)[1:]
        found[int(number.split()[0])] = [item.strip() for item in items]
    return found


def devices() -> list[torch.device]:
    """Where a learner's kernel is tested: the simulator first, which explains what is wrong, then the Hopper GPU if there is one.

    In this order a stray address is a sentence from the simulator, not a GPU context that no later test can use.
    """
    return [torch.device("cpu")] + ([capability.device()] if capability.has_hopper() else [])


@contextlib.contextmanager
def explained(number: int, stage_number: str, where: str = ""):
    """Turn the simulator's findings into the failure of one blank's test, with its hint."""
    import pytest

    try:
        yield
    except SimulatorError as error:
        message = f"BLANK {number}{where}: {error} Hint: hopperlab hint {stage_number} {number}"
        raise pytest.fail.Exception(message, pytrace=False) from None  # or pytest prints the finding twice


def require_filled(source: Path, number: int, stage_number: str) -> None:
    """Fail the running test when a blank of the learner's file is still empty, naming it and its hint."""
    import pytest

    blank = blanks(source.read_text())[number - 1]
    if blank.empty:
        pytest.fail(f"BLANK {number} of {source.name} is still empty: {blank.task}. "
                    f"Stuck? hopperlab hint {stage_number} {number}", pytrace=False)  # fmt: skip


def kernel_of(folder: Path) -> Path:
    """The finished kernel that a stage's exercise is made from: its ``kernel.cu``, else what its ``stage.py`` calls KERNEL."""
    kernel = folder / "kernel.cu"
    return kernel if kernel.exists() else stages.load(folder).module.KERNEL


def write(folder: Path, reset: bool = False) -> str:
    """Write a stage's exercise.cu from its finished kernel. A file with answers in it is kept unless ``reset``. Says what it did."""
    target = folder / "exercise.cu"
    text = make(kernel_of(folder).read_text(), folder.name[:2])
    if target.exists() and not reset:
        current = target.read_text()
        if current == text:
            return f"{target.name} is up to date"
        if any(not blank.empty for blank in blanks(current)):
            return f"{target.name} holds answers and was kept; --reset replaces it"
    target.write_text(text)
    return f"wrote {target}"


def progress(selector: str = "") -> list[tuple[str, list[Blank]]]:
    """(stage folder name, blanks of its exercise.cu) for every stage that has one and whose name starts with ``selector``."""
    return [
        (folder.name, blanks((folder / "exercise.cu").read_text()))
        for folder in stages.matching(selector)
        if (folder / "exercise.cu").exists()
    ]
