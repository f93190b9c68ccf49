"""The timeline of a pipelined kernel: what must come first does come first, and the files can be read."""

import json

import gemms
import matplotlib
import pytest
import torch

from hopperlab import sim
from hopperlab.sim import trace

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def spans(tmp_path_factory):
    ptx, inputs = gemms.compile_variant("cluster"), gemms.inputs(256, 128, 1024)
    out = torch.zeros(256, 128, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("trace") / "cluster.json"
    report = sim.launch(ptx, "gemm", gemms.arguments("cluster", *inputs, out), trace=path, **gemms.launch_options("cluster", 256, 128))
    return report.trace, path


def test_every_copy_and_wgmma_is_there(spans):
    recorded, _ = spans
    kinds = {kind: [s for s in recorded if s.kind == kind] for kind in ("load", "wgmma", "store", "phase")}
    # 2 CTAs x 8 k blocks x (A, and two halves of B), one wgmma group per consumer and k block, two stores per consumer
    assert [len(kinds[k]) for k in ("load", "wgmma", "store")] == [2 * 8 * 3, 2 * 8 * 2, 2 * 2 * 2]
    assert {s.block for s in recorded} == {(0, 0, 0), (1, 0, 0)}


def test_causes_come_before_effects(spans):
    recorded, _ = spans
    for span in recorded:
        assert span.start <= span.end
    for row in trace.phases(recorded, "full[0]"):
        loads = [s for s in recorded if s.kind == "load" and s.block == row["block"] and s.details["barrier"] == "full[0]"]
        waits = [s for s in recorded if s.kind == "wait" and s.block == row["block"] and s.name == "wait full[0]" and s.details["phase"] == row["phase"]]
        assert len(waits) == 2 and all(w.end >= row["completed at"] for w in waits)
        assert sum(s.end <= row["completed at"] for s in loads) == 3 * (row["phase"] + 1)
        assert row["arrivals"] == ["warpgroup 2: arrive full[0], expect 32768 bytes"]


def test_the_chrome_trace_can_be_read(spans):
    recorded, path = spans
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(recorded)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"warpgroup 0", "warpgroup 1", "warpgroup 2", "copy engine", "tensor core", "barrier full[0]"} <= names


def test_drawing(spans):
    recorded, _ = spans
    axes = trace.draw(recorded, block=(1, 0, 0), tracks=["warpgroup", "copy engine", "tensor core"], until=60)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["warpgroup 0", "warpgroup 1", "warpgroup 2", "copy engine", "tensor core"]
    with pytest.raises(ValueError, match="trace=True"):
        trace.draw([])
