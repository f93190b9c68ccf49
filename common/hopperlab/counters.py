"""Hardware counters of the steps, read by Nsight Compute (``ncu``): what limits a kernel, as the chip saw it."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys

# Nsight Compute's name -> (key in the record, what it says). Percentages are of the unit's own peak.
METRICS = {
    "gpu__time_duration.sum": ("time_ns", "run time under the profiler"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy", "resident warps"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue", "cycles in which a warp scheduler issues an instruction"),
    "smsp__inst_executed.sum": ("warp_instructions", "instructions, counted once per warp"),
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": ("fma_pipe", "FP32 multiply-add pipe"),
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": ("alu_pipe", "integer and logic pipe"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("tensor_pipe", "tensor cores, busy cycles"),
    "l1tex__throughput.avg.pct_of_peak_sustained_active": ("l1", "L1 and shared memory"),
    "l1tex__lsuin_requests.avg.pct_of_peak_sustained_active": ("l1_requests", "load/store instructions entering L1"),
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active": ("l1_wavefronts", "passes through L1's data stage"),
    "l1tex__t_sector_hit_rate.pct": ("l1_hit_rate", "sectors found in L1"),
    "lts__t_sector_hit_rate.pct": ("l2_hit_rate", "sectors found in L2"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("hbm", "HBM"),
    "sm__cycles_active.max": ("cycles", "cycles of the busiest SM"),
    "lts__t_bytes.sum": ("l2_bytes", "bytes through L2"),
    "dram__bytes.sum": ("hbm_bytes", "bytes from and to HBM"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("bank_conflicts", "extra shared-memory passes"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("stall_global", "warps waiting for global memory, per issue"),
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": ("stall_shared", "… for shared memory"),
    "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio": ("stall_load_queue", "… for room in the load queue"),
    "smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio": ("stall_mio_queue", "… for room in the shared-memory queue"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("stall_barrier", "… at __syncthreads"),
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": ("stall_math", "… for a busy arithmetic pipe"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("stall_fixed_latency", "… for the last instruction's fixed latency"),
}  # fmt: skip


def find_ncu() -> str:
    """Path of Nsight Compute's command line. Raises RuntimeError with the fix when it is missing."""
    for candidate in (shutil.which("ncu"), "/usr/local/cuda/bin/ncu"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise RuntimeError("ncu is not on the PATH; it comes with the CUDA toolkit, or alone as Nsight Compute")


def profile(stage: str, steps: list[str], shape: tuple[int, int, int]) -> list[dict[str, float]]:
    """Counters of one call of each step, in a process of its own. Raises RuntimeError with ncu's words when it refuses."""
    return read([sys.executable, "-m", "hopperlab.counters", stage, *map(str, shape), *steps], steps)


def read(program: list[str], calls: list[str]) -> list[dict[str, float]]:
    """Counters of the kernels that a program launches between profiler marks: one kernel for each of these calls.

    The clocks are left alone; most counters are ratios to peaks, so they do not depend on them. Raises RuntimeError with ncu's words
    when it refuses.
    """
    command = [find_ncu(), "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off",
               "--metrics", ",".join(METRICS), *program]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        raise RuntimeError(f"ncu: {' '.join((done.stdout + done.stderr).split())[-600:]}")
    names, _units, *kernels = csv.reader(io.StringIO("\n".join(lines[start:])))
    if len(kernels) != len(calls):
        raise RuntimeError(f"ncu saw {len(kernels)} kernels in one call each of {', '.join(calls)}; one for each was expected")
    return [{key: float(value.replace(",", "")) for name, value in zip(names, kernel) for key, _ in [METRICS.get(name, (None, None))]
             if key and value} for kernel in kernels]  # fmt: skip


def main(stage_name: str, m: str, n: str, k: str, *step_names: str) -> None:
    """Run some steps between profiler marks: the program that ``profile`` puts under ncu."""
    import torch

    from hopperlab import bench, stage

    found = stage.find(stage_name)[0]
    inputs = bench.InputSet(*(torch.randn(rows, int(k), device="cuda", dtype=torch.bfloat16) for rows in (int(m), int(n))))
    for step in (step for name in step_names for step in found.steps if step.name == name):
        a, b = inputs.quantised(*step.recipes[0])
        more = step.prepare(a, b) if step.prepare else {}
        out = torch.empty(int(m), int(n), device="cuda", dtype=step.out_dtypes[0])
        step.gemm(a, b, out, **more)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        step.gemm(a, b, out, **more)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def record(selector: str, shape: tuple[int, int, int]) -> dict:
    """A record of the counters of every step of the chosen stages, each with the error of ncu where it refused."""
    from hopperlab import report, stage

    rows = []
    for found in stage.find(selector):
        made = [{"stage": found.name, "step": step.name, "language": step.language} for step in found.steps]
        try:
            for row, counters in zip(made, profile(found.name, [step.name for step in found.steps], shape)):
                row["counters"] = counters
        except RuntimeError as error:
            for row in made:
                row["error"] = str(error)
        rows += made
    meaning = {key: text for key, text in METRICS.values()}
    return {"kind": "counters", **report.environment(), "shape": dict(zip("mnk", shape)), "meaning": meaning, "steps": rows}


if __name__ == "__main__":
    main(*sys.argv[1:])
