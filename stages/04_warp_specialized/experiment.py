"""The lesson's sweeps: waves predicted and measured, cluster sizes, and both large cubes beside cuBLAS.

    python stages/04_warp_specialized/experiment.py RECORD.json

Needs a Hopper GPU. The published record is docs/results/04_waves.json.
"""

import sys
from pathlib import Path

import torch

from hopperlab import bench, capability, report, stage, telemetry

WIDTHS = range(1024, 8193, 512)  # N; M = K = 4096
CUBES = (4096, 8192)
CONFIGURATIONS = {  # options of overlapped()
    "one CTA": {"block_n": 256, "cluster": 1},
    "clusters of two": {"block_n": 256, "cluster": 2},
    "one CTA, groups of 16": {"block_n": 256, "cluster": 1, "group_m": 16},
    "one CTA, 192 wide": {"block_n": 192, "cluster": 1},
    "one CTA, 128 wide": {"block_n": 128, "cluster": 1},
    "plan": {},
}


def calls_for(shape, makers):
    """name -> one call per input set, for name -> function(a, b, out)."""
    m, n, k = shape
    sets = bench.input_sets(m, n, k)[:8]
    operands = [inputs.quantised("tensor", "tensor") for inputs in sets]
    outs = [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in sets]
    made = {name: [lambda a=a, b=b, out=out, f=f: f(a, b, out) for (a, b), out in zip(operands, outs)] for name, f in makers.items()}
    return made, sets, outs


def main(path: str) -> None:
    capability.require_hopper()
    module = stage.load(Path(__file__).resolve().parent).module
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    waves, cubes = [], []
    with telemetry.Recorder() as recorder:
        for n in WIDTHS:
            m = k = 4096
            made, _, _ = calls_for((m, n, k), {"persistent": lambda a, b, out: module.persistent(a, b, out, block_n=256)})
            timing = bench.measure(made, rounds=3)["persistent"]
            chosen = module.plan(m, n, k, sms, 256, 1)
            waves.append({"n": n, "tiles": chosen.tiles, "waves": chosen.waves, "cycles": chosen.cycles, "microseconds": timing.seconds * 1e6,
                          "tflops": 2 * m * n * k / timing.seconds / 1e12})  # fmt: skip
        for size in CUBES:
            makers = {name: lambda a, b, out, o=options: module.overlapped(a, b, out, **o) for name, options in CONFIGURATIONS.items()}
            made, sets, outs = calls_for((size,) * 3, makers)
            peer, _ = bench.PEERS["cublas tensor"]
            made["cublas tensor"] = [peer(inputs, out) for inputs, out in zip(sets, outs)]
            timings = bench.measure(made)
            for name, timing in timings.items():
                cubes.append({"size": size, "name": name, "microseconds": timing.seconds * 1e6, "spread": timing.spread,
                              "tflops": 2 * size**3 / timing.seconds / 1e12,
                              "speed_of_cublas": timings["cublas tensor"].seconds / timing.seconds})  # fmt: skip
            del made, sets, outs
            torch.cuda.empty_cache()
    record = {"kind": "sweep", **report.environment(), "telemetry": recorder.summary(), "waves": waves, "cubes": cubes}
    for row in cubes:
        print(f"{row['size']} {row['name']:32} {row['microseconds']:8.1f} µs {row['tflops']:6.0f} TFLOP/s {row['speed_of_cublas']:.3f}")
    print(report.save(record, Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
