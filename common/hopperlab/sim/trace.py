"""The pipeline as a picture: who did what in which order.  It shows order, not time.

Every group of threads has a logical clock.  An instruction that synchronises advances it by one; passing a wait moves it
up to the event waited for; a copy takes COPY_STEPS, a wgmma WGMMA_STEPS.  Things that overlap here may overlap on the
hardware, and whatever must come first does come first, but lengths mean nothing.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

COPY_STEPS, WGMMA_STEPS = 8, 2
_COLORS = {
    "wait": "#d9d9d9",
    "load": "#4c78a8",
    "store": "#72b7b2",
    "wgmma": "#e45756",
    "phase": "#eeca3b",
    "arrive": "#54a24b",
}


@dataclass
class Span:
    """Something that track of block was busy with, from start to end in logical steps."""

    block: tuple[int, int, int]
    track: str
    kind: str
    name: str
    start: int
    end: int
    details: dict = field(default_factory=dict)


class Trace:
    """Collects spans while a kernel runs; the machine, the barriers and the engines call it."""

    def __init__(self):
        self.spans: list[Span] = []
        self._tensor_core_free: dict[tuple, int] = {}
        self._phase_start: dict[int, int] = {}

    @staticmethod
    def _track(fragment) -> tuple:
        unit = fragment.unit
        return unit.cluster.cta_ids[unit.cta], f"warpgroup {unit.first // 128}"

    def wait_passed(self, fragment, barrier):
        start = fragment.now
        fragment.now = max(start + 1, barrier.completed_at)
        self.spans.append(
            Span(
                *self._track(fragment),
                "wait",
                f"wait {barrier.label}",
                start,
                fragment.now,
                {"phase": barrier.phase - 1},
            )
        )

    def arrive(self, fragment, barrier, byte_count):
        fragment.now += 1
        barrier.latest = max(barrier.latest, fragment.now)
        name = f"arrive {barrier.label}" + (f", expect {byte_count} bytes" if byte_count else "")
        self.spans.append(
            Span(*self._track(fragment), "arrive", name, fragment.now - 1, fragment.now, {"phase": barrier.phase})
        )

    def phase_complete(self, barrier):
        block = barrier.cluster.cta_ids[barrier.place // barrier.cluster.shared_stride]
        barrier.completed_at = barrier.latest
        start = self._phase_start.get(id(barrier), 0)
        self.spans.append(
            Span(block, "barrier " + barrier.label.removeprefix("the mbarrier "), "phase", f"phase {barrier.phase - 1}", start, barrier.completed_at)
        )
        self._phase_start[id(barrier)] = barrier.completed_at

    def load(self, fragment, barrier, byte_count, coordinates, target):
        """A copy into block target of the cluster, issued now."""
        end = fragment.now + COPY_STEPS
        barrier.latest = max(barrier.latest, end)
        block = fragment.unit.cluster.cta_ids[target]
        details = {
            "bytes": byte_count,
            "coordinates": list(coordinates),
            "barrier": barrier.label,
            "issued by": fragment.who(),
        }
        self.spans.append(Span(block, "copy engine", "load", f"load {tuple(coordinates)}", fragment.now, end, details))

    def store(self, fragment, byte_count, coordinates):
        details = {"bytes": byte_count, "issued by": fragment.who()}
        block = self._track(fragment)[0]
        self.spans.append(
            Span(
                block,
                "copy engine",
                "store",
                f"store {tuple(coordinates)}",
                fragment.now,
                fragment.now + COPY_STEPS,
                details,
            )
        )

    def wgmma_group(self, fragment, group):
        block, name = self._track(fragment)
        start = max(fragment.now, self._tensor_core_free.get(block, 0))
        end = self._tensor_core_free[block] = start + WGMMA_STEPS * len(group)
        self.spans.append(Span(block, "tensor core", "wgmma", f"{name}: {len(group)} wgmma", start, end))
        return end

    def wgmma_wait(self, fragment, end):
        if end > fragment.now:
            self.spans.append(Span(*self._track(fragment), "wait", "wait for wgmma", fragment.now, end))
            fragment.now = end


def chrome_trace(spans: list[Span]) -> dict:
    """Spans as Chrome trace JSON: open it in Perfetto (ui.perfetto.dev). One process per block, one row per track."""
    processes, threads, events = {}, {}, []
    for span in spans:
        process = processes.setdefault(span.block, len(processes) + 1)
        thread = threads.setdefault((span.block, span.track), len(threads) + 1)
        events.append(dict(name=span.name, cat=span.kind, ph="X", ts=span.start, dur=max(1, span.end - span.start), pid=process,
                           tid=thread, args=span.details))  # fmt: skip
    for block, number in processes.items():
        events.append(dict(name="process_name", ph="M", pid=number, args={"name": f"block {block}"}))
    for (block, track), number in threads.items():
        events.append(dict(name="thread_name", ph="M", pid=processes[block], tid=number, args={"name": track}))
        events.append(
            dict(name="thread_sort_index", ph="M", pid=processes[block], tid=number, args={"sort_index": _rank(track)})
        )
    return {"traceEvents": events, "otherData": {"note": "order of events, not time: lengths mean nothing"}}


def _rank(track: str) -> tuple:
    order = ("warpgroup", "copy engine", "tensor core", "barrier")
    return next(i for i, name in enumerate(order) if track.startswith(name)) * 100 + int(
        "0" + "".join(c for c in track if c.isdigit())
    )


def save(spans: list[Span], path: str | Path) -> Path:
    """Write a Chrome trace; returns the path."""
    path = Path(path)
    path.write_text(json.dumps(chrome_trace(spans)))
    return path


def draw(spans: list[Span], *, block=None, tracks=None, until: int | None = None, axes=None):
    """Draw the spans of one block (the first by default) as a timeline; returns the matplotlib axes.

    tracks: names or beginnings of names to show, top to bottom.  until: last logical step to show.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    if not spans:
        raise ValueError("spans: nothing was recorded. Launch with trace=True and draw report.trace.")
    block = spans[0].block if block is None else tuple(block)
    chosen = [s for s in spans if s.block == block and (until is None or s.start < until)]
    names = sorted({s.track for s in chosen}, key=_rank)
    if tracks is not None:
        names = [n for n in names if any(n.startswith(t) for t in tracks)]
    if axes is None:
        width = 12
        _, axes = plt.subplots(figsize=(width, 0.45 * len(names) + 1))
    for row, name in enumerate(names):
        for kind, color in _COLORS.items():
            bars = [(s.start, max(1, s.end - s.start)) for s in chosen if s.track == name and s.kind == kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("logical steps: order, not time")
    if until is not None:
        axes.set_xlim(0, until)
    kinds = [k for k in _COLORS if any(s.kind == k and s.track in names for s in chosen)]
    axes.legend(
        handles=[Patch(color=_COLORS[k], label=k) for k in kinds],
        ncol=len(kinds),
        loc="upper center",
        bbox_to_anchor=(0.5, 1.2),
        frameon=False,
    )
    axes.set_title(f"block {block}", loc="left")
    return axes


def phases(spans: list[Span], barrier: str | None = None) -> list[dict]:
    """Step view of barriers: one row per phase with what arrived, what landed and who waited, in order."""
    rows = []
    for span in spans:
        if span.kind != "phase" or barrier is not None and span.track != f"barrier {barrier}":
            continue
        label, number = span.track.removeprefix("barrier "), int(span.name.split()[-1])
        same = [s for s in spans if s.block == span.block and s.details.get("phase") == number]
        rows.append(
            {
                "block": span.block,
                "barrier": label,
                "phase": number,
                "completed at": span.end,
                "arrivals": [
                    f"{s.track}: {s.name}"
                    for s in same
                    if s.kind == "arrive" and s.name.split(",")[0] == f"arrive {label}"
                ],
                "loads": [
                    s.name
                    for s in spans
                    if s.block == span.block
                    and s.kind == "load"
                    and s.details["barrier"] == label
                    and span.start <= s.start
                    and s.end <= span.end
                ],
                "waits": [s.track for s in same if s.kind == "wait" and s.name == f"wait {label}"],
            }
        )
    return rows
