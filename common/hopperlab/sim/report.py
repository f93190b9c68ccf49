"""What a simulated launch reports: counts and coverage.  None of it is time."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """Result of hopperlab.sim.launch.

    instructions: thread instructions executed, by opcode without type (the instruction mix).
    lines: thread instructions executed by (file, line); every line with code is there, also with 0.
    bank_conflicts: (file, line) -> (accesses of a warp, wavefronts they took); equal numbers mean no conflict.
    trace: spans of trace.py, if the launch recorded them; approximate: instructions executed whose last bits PTX leaves open.
    printed: lines that printf wrote.  seconds: how long the simulation took, not how long a GPU would.
    """

    kernel: str
    instructions: Counter
    lines: dict
    bank_conflicts: dict
    counters: Counter
    printed: list[str]
    seconds: float
    approximate: list[str] = field(default_factory=list)
    trace: list = field(default_factory=list)

    @property
    def thread_instructions(self) -> int:
        return sum(self.instructions.values())

    def __str__(self) -> str:
        """A few lines: size, instruction mix, uncovered lines, bank conflicts."""
        total = max(1, self.thread_instructions)
        mix = ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in self.instructions.most_common(8))
        lines = [
            f"{self.kernel}: {self.thread_instructions} thread instructions ({mix}), simulated in {self.seconds:.2f} s "
            "(not GPU time)"
        ]
        lines += [f"{name}: {count}" for name, count in self.counters.items()]
        missed = self.not_covered()
        if missed:
            lines.append(
                "lines that no thread executed: "
                + ", ".join(f"{file.rsplit('/', 1)[-1]}:{line}" for file, line in missed)
            )
        for (file, line), (accesses, wavefronts) in sorted(self.bank_conflicts.items()):
            if wavefronts > accesses:
                lines.append(f"bank conflicts at {file}:{line}: {accesses} accesses took {wavefronts} wavefronts")
        if self.approximate:
            lines.append("last bits may differ from a GPU's: " + "; ".join(self.approximate))
        return "\n".join(lines)

    def not_covered(self) -> list[tuple[str, int]]:
        """Source lines with code that no thread executed."""
        return sorted(line for line, count in self.lines.items() if not count)


APPROXIMATE = ("approx", "full")


def make_report(machine, seconds) -> Report:
    mix, lines, approximate = Counter(), Counter(), []
    for segment, threads in zip(machine.program.segments, machine.segment_threads.tolist()):
        for instruction in segment.instructions:
            mix[instruction.parts[0]] += threads
            if instruction.location:
                lines[instruction.location] += threads
            if threads and any(p in APPROXIMATE for p in instruction.parts[1:]):
                approximate.append(f"{instruction.opcode} at {instruction.where()}")
    conflicts = {}
    for index, (accesses, wavefronts) in machine.bank_conflicts.items():
        location = machine.program.instructions[index].location
        old = conflicts.get(location, (0, 0))
        conflicts[location] = old[0] + accesses, old[1] + wavefronts
    mix = Counter({name: count for name, count in mix.items() if count})
    return Report(
        machine.program.kernel.name,
        mix,
        dict(lines),
        conflicts,
        machine.counters,
        machine.printed,
        seconds,
        approximate,
        machine.trace.spans if machine.trace else [],
    )
