"""Kernels for other M are compiled behind the first call. CPU tensors stand for a GPU's: compiling needs none."""

import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from fp8_gemm import Problem, kernels
from fp8_gemm.kernels import ahead
from hopperlab import compile as compiler

DEVICE = torch.device("cpu")
PROBLEM = Problem("dense", 40, 256, 512)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The constants of each compilation, which takes no time here. Nothing is on disk nor in memory."""
    seen = []

    def compile_nothing(source, name, headers, options, dense_ffma):
        seen.append(tuple(option for option in options if option.startswith("-D")))
        return compiler.Compiled("", b"", "")

    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path))
    monkeypatch.delenv(ahead.VARIABLE)
    monkeypatch.setattr(compiler, "_nvrtc", compile_nothing)
    monkeypatch.setattr(ahead, "_begun", {})
    monkeypatch.setattr(ahead, "_ending", threading.Event())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels.kernel.cache_clear()
    yield seen
    ahead.finish()
    kernels.kernel.cache_clear()


def join():
    for thread in ahead._begun.values():
        thread.join()


@pytest.mark.parametrize("problem", [
    PROBLEM, replace(PROBLEM, out_dtype=torch.float32, bias=True), Problem("masked", 40, 256, 512, 4),
    Problem("contiguous", 40, 256, 512, 4),
], ids=str)  # fmt: skip
def test_after_it_no_m_compiles(compiled, problem):
    ahead.start(problem, DEVICE)
    join()
    assert 4 <= len(compiled) == len(set(compiled)) <= 16
    before = len(compiled)
    for m in range(1, 8193):
        sized = replace(problem, m=m)
        assert kernels.kernel_of(sized, kernels.plan_for(sized, DEVICE)).compiled is not None
    assert len(compiled) == before


def test_it_begins_once_for_an_n_and_k(compiled):
    for m in (40, 1, 4096):
        ahead.start(replace(PROBLEM, m=m), DEVICE)
    assert len(ahead._begun) == 1
    for other in (replace(PROBLEM, n=264), replace(PROBLEM, k=640), replace(PROBLEM, bias=True)):
        ahead.start(other, DEVICE)
    ahead.start(PROBLEM, DEVICE, num_sms=100)
    assert len(ahead._begun) == 5


def test_what_a_call_has_compiled_is_not_compiled_again(compiled):
    assert kernels.kernel_of(PROBLEM, kernels.plan_for(PROBLEM, DEVICE)).compiled is not None and len(compiled) == 1
    ahead.start(PROBLEM, DEVICE)
    join()
    assert len(compiled) == len(set(compiled)) > 1


def test_it_can_be_switched_off(compiled, monkeypatch):
    monkeypatch.setenv(ahead.VARIABLE, "0")
    ahead.start(PROBLEM, DEVICE)
    assert not ahead._begun


def test_it_waits_for_a_call_outside_of_a_capture(compiled, monkeypatch):
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        ahead.start(PROBLEM, DEVICE)
        assert not ahead._begun
    ahead.start(PROBLEM, DEVICE)
    assert len(ahead._begun) == 1


def test_a_failure_is_logged_once_and_raised_nowhere(compiled, monkeypatch, caplog):
    def fail(*arguments):
        raise compiler.CompileError("no such instruction")

    monkeypatch.setattr(compiler, "_nvrtc", fail)
    with caplog.at_level(logging.WARNING, "fp8_gemm"):
        for m in (40, 4096):
            ahead.start(replace(PROBLEM, m=m), DEVICE)
            join()
    (record,) = caplog.records
    assert "could not be compiled ahead" in record.getMessage() and "no such instruction" in record.exc_text


def test_without_a_thread_to_be_had_the_call_goes_on(compiled, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead.start(PROBLEM, DEVICE)
    assert not ahead._begun and not compiled


def test_at_the_end_no_kernel_is_begun(compiled, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()

    def slowly(*arguments):
        compiled.append(arguments)
        reached.set()
        assert go_on.wait(30)
        return compiler.Compiled("", b"", "")

    monkeypatch.setattr(compiler, "_nvrtc", slowly)
    ahead.start(PROBLEM, DEVICE)
    assert reached.wait(30)
    ending = threading.Thread(target=ahead.finish)
    ending.start()
    assert ahead._ending.wait(30)
    go_on.set()
    ending.join(30)
    assert not ending.is_alive() and len(compiled) == 1
    assert not any(thread.is_alive() for thread in ahead._begun.values())


def test_a_process_ends_well_while_the_compiler_is_at_work(tmp_path):
    script = (
        "import time, torch\n"
        "from fp8_gemm import Problem\n"
        "from fp8_gemm.kernels import ahead\n"
        "torch.cuda.is_current_stream_capturing = lambda: False\n"
        "ahead.start(Problem('dense', 40, 2112, 7168), torch.device('cpu'))\n"
        "time.sleep(1)\n"
        "print(any(thread.is_alive() for thread in ahead._begun.values()))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HOPPERLAB_CACHE": str(tmp_path), ahead.VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "True" and not done.stderr, done.stderr
