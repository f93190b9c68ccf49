"""Compiles, behind the first call of a new N and K, the kernels that other M need: then no call with another M waits for one.

Threads of the process do it, two kernels at a time. NVRTC needs neither Python's lock nor the GPU, so they can be at work beside
calls, captures of CUDA graphs included. FP8_GEMM_BACKGROUND=0 switches it off; then fp8_gemm.warmup is the way.
"""

import atexit
import logging
import os
import threading

import torch

from fp8_gemm.plan import with_tokens
from fp8_gemm.problem import Problem

VARIABLE = "FP8_GEMM_BACKGROUND"

_begun: dict[tuple, threading.Thread] = {}
_turn = threading.Semaphore(2)
_ending = threading.Event()


def start(problem: Problem, device: torch.device, **overrides) -> None:
    """Begin with what this problem needs for other M, unless that has begun before. For a call that has just been launched on a
    GPU, where CUDA is initialised and nothing is traced. While a graph is captured nothing begins; a later call makes up for it."""
    if os.environ.get(VARIABLE) == "0":
        return
    call = (with_tokens(problem, 0), device, tuple(overrides.items()))
    if call in _begun or torch.cuda.is_current_stream_capturing():
        return
    _begun[call] = threading.Thread(target=_compile, args=(problem, device, overrides), name="fp8_gemm ahead", daemon=True)
    try:
        _begun[call].start()
    except RuntimeError as error:  # no thread is to be had: of no concern to the call
        del _begun[call]
        logging.getLogger("fp8_gemm").debug("nothing is compiled ahead: %s", error)


def _compile(problem: Problem, device: torch.device, overrides: dict) -> None:
    from fp8_gemm import kernels

    try:
        for kernel in kernels.for_every_size(problem, device, **overrides):
            with _turn:
                if _ending.is_set():
                    return
                kernel.compiled  # noqa: B018 - compiles
    except Exception:  # whatever it is, a call that needs the kernel meets it and raises it
        logging.getLogger("fp8_gemm").warning("kernels for other M of %s could not be compiled ahead", problem, exc_info=True)


@atexit.register
def finish() -> None:
    """Wait for kernels that are being compiled, begin no other: a process must not end under a compiler at work."""
    _ending.set()
    for thread in list(_begun.values()):
        if thread.ident is not None:
            thread.join()
