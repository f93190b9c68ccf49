"""python -m fp8_gemm: smoke, warmup, explain, bench."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import calc_diff

import fp8_gemm
from fp8_gemm import __main__ as program
from hopperlab import bench


def run(capsys, *arguments):
    status = program.main(list(arguments))
    return status, capsys.readouterr().out


def test_smoke_from_the_shell_takes_seconds():
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "fp8_gemm", "smoke", "--device", "cpu"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout and "backend: reference" in done.stdout and "masked groups: every element" in done.stdout
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("name", ["dense 1x128 x 128x128", "contiguous groups", "masked groups", "K groups"])
def test_smoke_finds_wrong_numbers(capsys, monkeypatch, name):
    function = {"dense": "gemm", "contiguous": "grouped_gemm", "masked": "masked_gemm", "K": "k_grouped_gemm"}[name.split()[0]]
    right = getattr(program, function)

    def wrong(*arguments, **options):
        out = right(*arguments, **options)
        out[(0,) * out.dim()] *= 1.1
        return out

    monkeypatch.setattr(program, function, wrong)
    status, text = run(capsys, "smoke", "--device", "cpu")
    assert status == 1 and f"FAIL  {name}: elements beyond" in text and "fix: report it" in text and " failed" in text


def test_smoke_reports_an_exception_and_goes_on(capsys, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(program, "masked_gemm", broken)
    status, text = run(capsys, "smoke", "--device", "cpu")
    assert status == 1 and "FAIL  masked groups: RuntimeError: no such kernel" in text and "ok    K groups" in text


def test_smoke_names_the_fix_for_an_old_package(capsys, monkeypatch):
    monkeypatch.setattr(program.capability, "_version", lambda name: "3.5.0" if name == "triton" else "99.0")
    status, text = run(capsys, "smoke", "--device", "cpu")
    assert status == 1 and "FAIL  Triton: 3.5.0" in text and "fix: Run: pip install 'triton>=3.6'" in text


@pytest.mark.parametrize("driver, nvrtc, built, words", [
    ((13, 0), (13, 5), (12, 8), []),
    ((12, 8), (13, 0), (12, 8), ["too old for NVRTC", "CUDA 13", "580"]),
    ((12, 8), (12, 8), (13, 0), ["too old for torch", "CUDA 13"]),
])  # fmt: skip
def test_mixed_cuda_versions(driver, nvrtc, built, words):
    finding = program.cuda_versions(driver, nvrtc, built)
    assert finding.ok is not bool(words) and all(word in finding.fix for word in words)
    assert f"driver {driver[0]}.{driver[1]}" in str(finding)


@pytest.mark.parametrize("arguments, words", [
    (["explain", "128x4096x7168", "--device", "cpu"], ["dense GEMM, M = 128, N = 4096, K = 7168", "backend: reference"]),
    (["explain", "4096X512", "--device", "cpu"], ["M = 1, N = 4096, K = 512", "M = 4096, N = 4096"]),
    (["explain", "8x16x256", "--device", "cpu", "--kind", "masked", "--groups", "4"], ["masked GEMM", "4 groups"]),
    (["explain", "8x16x256", "--device", "cpu", "--kind", "k_grouped", "--groups", "2"], ["1x128 x e4m3 1x128 -> float32"]),
    (["explain", "8x16x256", "--device", "cpu", "--recipe", "row", "tensor"], ["e4m3 row x e4m3 tensor"]),
    (["warmup", "3x16x256", "5x8x128", "--device", "cpu"], ["M = 3, N = 16, K = 256", "M = 5, N = 8"]),
])  # fmt: skip
def test_shapes_on_the_command_line(capsys, arguments, words):
    status, text = run(capsys, *arguments)
    assert status == 0 and all(word in text for word in words), text


@pytest.mark.parametrize("shape", ["4096", "1x2x3x4", "ax2", ""])
def test_a_wrong_shape_is_refused(capsys, shape):
    with pytest.raises(SystemExit):
        program.main(["explain", shape])
    assert "is no shape: write M x N x K" in capsys.readouterr().err


def test_the_environment_variable_is_obeyed(capsys, monkeypatch):
    monkeypatch.setenv("FP8_GEMM_BACKEND", "reference")
    status, text = run(capsys, "smoke", "--device", "cpu")
    assert status == 0 and "forced by FP8_GEMM_BACKEND" in text


def test_speed_is_not_invented_without_a_gpu():
    assert program.speed(torch.device("cpu"), None).ok is None
    assert fp8_gemm.explain(fp8_gemm.Problem("dense", 1, 1, 1)).seconds is None


@pytest.mark.parametrize("fp8, bf16, backend, ok", [
    (1e-4, 1.8e-4, None, True), (2e-4, 1.8e-4, None, False), (2e-4, 1.8e-4, "cuda", False), (2e-4, 1.8e-4, "triton", None),
])  # fmt: skip
def test_speed_is_judged_beside_bf16(monkeypatch, fp8, bf16, backend, ok):
    monkeypatch.setattr(program, "_seconds", lambda *arguments: (fp8, bf16))
    monkeypatch.setattr(program.capability, "has_hopper", lambda: True)
    finding = program.speed(torch.device("cuda"), backend)
    assert finding.ok is ok and finding.found == f"4096³: FP8 {2 * 4096**3 / fp8 / 1e12:.0f} TFLOP/s, bf16 through torch 764"


def test_speed_is_measured_as_the_benchmarks_measure(monkeypatch):
    """Both calls go to bench.measure, which takes graphs, warm-up and medians, and compute the same product."""
    seen = {}

    def measure(candidates, rounds):
        for name, (call,) in candidates.items():
            seen[name] = call().float().clone()
        return {name: bench.Timing(seconds, [seconds] * rounds, 1) for name, seconds in (("fp8", 1.0), ("bf16", 2.0))}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert program._seconds(torch.device("cpu"), "reference", 128) == (1.0, 2.0)
    assert 0 < calc_diff(seen["fp8"], seen["bf16"]) < 2e-3


# ---------------------------------------------------------------- bench


@pytest.mark.parametrize("arguments, expected", [
    ([], {}), (["--search"], {"search": True}), (["--host"], {"host": True}), (["--layer"], {"layer": True}),
    (["--only", "4096x", "--rounds", "2"], {"only": "4096x", "rounds": 2}),
])  # fmt: skip
def test_bench_hands_its_options_to_the_benchmark(monkeypatch, arguments, expected):
    from fp8_gemm import bench as library_bench

    seen = {}
    monkeypatch.setattr(library_bench, "main", lambda **options: seen.update(options))
    assert program.main(["bench", "record.json", *arguments]) == 0
    defaults = {"path": Path("record.json"), "search": False, "host": False, "layer": False, "rounds": library_bench.ROUNDS, "only": ""}
    assert seen == defaults | expected


def test_a_search_has_fifty_more_shapes_always_the_same_and_of_any_magnitude():
    from fp8_gemm import bench as library_bench

    drawn = library_bench.unseen()
    assert drawn == library_bench.unseen() and len(set(drawn)) == 50 and not set(drawn) & set(library_bench.shapes())
    for few, many in ((8, 512), (512, 8192)):  # rows: a decoding step's and a prefill's
        assert sum(few <= m < many for m, _, _ in drawn) > 10
    assert all(1 <= m <= 8192 and 256 <= n <= 32768 and n % 64 == 0 and 512 <= k <= 16384 and k % 128 == 0 for m, n, k in drawn)


def test_bench_without_a_gpu_says_what_to_do_and_writes_nothing(monkeypatch, tmp_path):
    from fp8_gemm import bench as library_bench

    monkeypatch.setattr(library_bench.capability, "has_hopper", lambda: False)
    with pytest.raises(SystemExit, match="Hopper GPU is needed.*`make run`.*docs/performance.md"):
        program.main(["bench", str(tmp_path / "record.json")])
    assert not list(tmp_path.iterdir())


def test_bench_is_named_beside_the_other_commands(capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    assert "bench    time the library beside its peers" in capsys.readouterr().out
