"""What lessons show: code taken from the files they teach, the diff between two steps, and recorded figures with their origin."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from hopperlab import report, stage


def extract(path: Path, name: str) -> str:
    """The function, struct or class ``name`` of a CUDA or Python file, with the comment lines right above it.

    Raises ValueError if missing.
    """
    lines = path.read_text().splitlines()
    if path.suffix == ".py":
        starts = [i for i, line in enumerate(lines) if re.match(rf"(def|class) {re.escape(name)}\b", line)]
    else:
        starts = [i for i, line in enumerate(lines) if re.search(rf"\b{re.escape(name)}\s*\(|^struct .*\b{re.escape(name)} {{", line)
                  and not line.startswith((" ", "//"))]  # fmt: skip
    if not starts:
        raise ValueError(f"{path.name} has no function {name}")
    first = last = starts[0]
    above = ("#", "@") if path.suffix == ".py" else ("//", "template", "extern", "__device__")
    while first and lines[first - 1].startswith(above):
        first -= 1
    if path.suffix == ".py":
        while last + 1 < len(lines) and (not lines[last + 1] or lines[last + 1][0] in " )"):
            last += 1
    else:
        depth = opened = 0
        for last in range(starts[0], len(lines)):
            code = re.sub(r"//.*", "", lines[last])
            depth += code.count("{") - code.count("}")
            opened += code.count("{")
            if opened and depth == 0:
                break
    return "\n".join(lines[first : last + 1]).rstrip()


def _without_marks(text: str) -> str:
    return re.sub(r"^[ \t]*// (END )?BLANK.*\n", "", text, flags=re.M)


def code(folder: Path, file: str, name: str):
    """Show one function of a stage's file, as it is in the file now, without the marks of the exercise."""
    language = "python" if file.endswith(".py") else "cpp"
    return _markdown(f"`{file}`\n```{language}\n{_without_marks(extract(folder / file, name))}\n```")


def diff(folder: Path, old: str, new: str):
    """Show what changed from one file to the next, without the marks of the exercise."""
    before, after = (_without_marks((folder / file).read_text()).splitlines() for file in (old, new))
    lines = difflib.unified_diff(before, after, old, new, n=1, lineterm="")
    return _markdown("```diff\n" + "\n".join(lines) + "\n```")


def origin(record: dict):
    """The line that belongs beside every recorded figure: card, driver, clocks, date, commit."""
    parts = [record["machine"]["name"], f"driver {record['machine']['driver']}"]
    if "telemetry" in record:
        parts.append(f"SM clock {record['telemetry']['sm_clock_mhz']['median']} MHz (median)")
    return _markdown(f"*Recorded on an {', '.join(parts)}, {record['date'][:10]}, commit {record['commit']}.*")


def figures(rows: list[dict], columns: dict[str, str]):
    """A table of recorded rows: column title -> key, nested keys joined by a dot, with an optional format after a colon."""

    def cell(row: dict, spec: str) -> str:
        key, _, fmt = spec.partition(":")
        value = row
        for part in key.split("."):
            value = value.get(part, "-") if isinstance(value, dict) else "-"
        return value if isinstance(value, str) else format(value, fmt)

    head = "| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns) + "\n"
    return _markdown(head + "\n".join("| " + " | ".join(cell(row, spec) for spec in columns.values()) + " |" for row in rows))


def ladder(number: str) -> tuple[dict, list[dict]]:
    """The published record, and its timed rows of the stages up to ``number``."""
    record = report.published()
    return record, [row for row in record["steps"] if row["stage"][:2] <= number]


def run_here(number: str):
    """Check the stage's steps on this machine and show the result as a table."""
    from hopperlab import capability
    from hopperlab.cli import check_step

    rows = []
    for found in stage.find(number):
        for step in found.steps:
            row = check_step(found, step, list(stage.cases(step)))
            rows.append({**row, "verdict": "correct" if row["ok"] else "WRONG", "passed": f"{sum(c['ok'] for c in row['cases'])}/{len(row['cases'])}",
                         "error": max(case["max_rel_error"] for case in row["cases"])})  # fmt: skip
    print(f"CUDA kernels run on: {capability.machine()}")
    return figures(rows, {"step": "step", "machine": "machine", "result": "verdict", "shapes": "passed", "largest relative error": "error:.1e"})


def _markdown(text: str):
    from IPython.display import Markdown

    return Markdown(text)
