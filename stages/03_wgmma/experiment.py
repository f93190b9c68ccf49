"""The lesson's sweep: speed of the ring against its number of slots.   python stages/03_wgmma/experiment.py RECORD.json

Needs a Hopper GPU. The published record is docs/results/03_slots.json.
"""

import sys
from pathlib import Path

import torch

from hopperlab import bench, capability, report, stage, telemetry
from hopperlab.kernel import MAX_SHARED_BYTES

SHAPE = (4096, 4096, 4096)
SLOTS = (2, 3, 4, 5, 6)  # with one, the block that everyone waits for would only be asked for after the wait


def main(path: str) -> None:
    capability.require_hopper()
    module = stage.load(Path(__file__).resolve().parent).module
    m, n, k = SHAPE
    sets = bench.input_sets(m, n, k)
    operands = [inputs.quantised("tensor", "tensor") for inputs in sets]
    outs = [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in sets]
    calls = {}
    for slots in SLOTS:
        calls[slots] = [lambda a=a, b=b, out=out, s=slots: module.ring(a, b, out, num_stages=s) for (a, b), out in zip(operands, outs)]
    with telemetry.Recorder() as recorder:
        timings = bench.measure({str(slots): made for slots, made in calls.items()})
    rows = []
    for slots in SLOTS:
        shared = stage.shared_bytes(slots * (module.BLOCK_M + module.BLOCK_N) * module.BLOCK_K, 16 * slots)
        row = bench.row(str(slots), timings[str(slots)], m, n, k, error=0.0, launches=1)
        del row["max_rel_error"]  # not looked at here: the ladder checks every bit
        registers = module.kernel(module.FOLDER / "kernel.cu", "ring", slots, "e4m3", "e4m3", torch.bfloat16).resources.registers
        rows.append(row | {"slots": slots, "shared_kb": shared / 1024, "ctas_by_shared_memory": MAX_SHARED_BYTES // (shared + 1024),
                           "ctas_by_registers": 65536 // (registers * module.THREADS)})  # fmt: skip
    record = {"kind": "sweep", **report.environment(), "telemetry": recorder.summary(), "shape": dict(zip("mnk", SHAPE)), "rows": rows}
    print(report.save(record, Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
