"""Hopper on a CPU: runs the PTX of sm_90a kernels, bit for bit, and explains mistakes in words.

    report = sim.launch(ptx, "gemm", [a, b, c, m, n, k], grid=(8, 8, 1), block=(16, 16, 1))

It models what a kernel computes and which orders of events are possible.  It models no time: not caches, not issue
slots, not bandwidth.
"""

from .errors import Deadlock, Hazard, LaunchRefused, MemoryFault, SimulatorError, UnknownInstruction
from .launcher import launch
from .report import Report

__all__ = [
    "Deadlock",
    "Hazard",
    "LaunchRefused",
    "MemoryFault",
    "Report",
    "SimulatorError",
    "UnknownInstruction",
    "launch",
]
