"""The command line as a user meets it: exit codes, tables, refusals in words."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from hopperlab import capability, check, cli, reference, report, stage

runner = CliRunner()


def invoke(*words: str):
    return runner.invoke(cli.app, list(words), env={"COLUMNS": "160"})


def fake_stage(monkeypatch, gemm):
    """A course of one stage with one step, from the real naive step's description."""
    import dataclasses

    real = stage.find("01")[0]
    step = dataclasses.replace(real.steps[0], gemm=gemm)
    monkeypatch.setattr(stage, "find", lambda selector="": [dataclasses.replace(real, steps=[step])])
    return real.steps[0]


def test_run_prints_the_ladder_and_writes_a_whole_record(tmp_path, monkeypatch):
    if capability.has_hopper():
        pytest.skip("times every step for a minute on a GPU; hopperlab run itself is the test there")
    step = fake_stage(monkeypatch, stage.find("01")[0].steps[0].gemm)
    result = invoke("run", "--record", str(tmp_path / "record.json"))
    assert result.exit_code == 0, result.output
    assert "The ladder" in result.output and "simulator" in result.output and "yes 5/5" in result.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert set(record) >= {"kind", "date", "commit", "machine", "versions", "steps", "peers"}
    (row,) = record["steps"]
    assert row["step"] == step.name and row["ok"] and len(row["cases"]) == 5
    assert all(re.fullmatch(r"[0-9a-f]{16}", case["digest"]) for case in row["cases"])


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_wrong_kernel_fails_the_command_and_is_described(command, tmp_path, monkeypatch):
    real = stage.find("01")[0].steps[0].gemm

    def last_column_missing(a, b, out):
        keep = out.clone()
        real(a, b, out)
        out[:, -1] = keep[:, -1]

    fake_stage(monkeypatch, last_column_missing)
    monkeypatch.setattr(capability, "has_hopper", lambda: False)
    extra = ("--record", str(tmp_path / "r.json")) if command == "run" else ()
    result = invoke(command, *extra)
    assert result.exit_code == 1
    assert "never written" in result.output.replace("\n", " ")


def test_a_kernel_that_raises_does_not_hide_the_others(tmp_path, monkeypatch):
    def broken(a, b, out):
        raise RuntimeError("planted")

    fake_stage(monkeypatch, broken)
    monkeypatch.setattr(capability, "has_hopper", lambda: False)
    result = invoke("run", "--record", str(tmp_path / "r.json"))
    assert result.exit_code == 1 and "RuntimeError: planted" in result.output and "NO 0/5" in result.output


def test_bits_that_differ_from_the_h200s_fail_the_run(tmp_path, monkeypatch):
    """The comparison with the record works: one digest changed in it is noticed."""
    if capability.has_hopper():
        pytest.skip("compares a machine with no Hopper GPU against the record")
    fake_stage(monkeypatch, stage.find("01")[0].steps[0].gemm)
    recorded = report.published()
    row = report.published_step(recorded, "01_naive", "naive")
    row["cases"][2]["digest"] = "0" * 16
    monkeypatch.setattr(report, "published", lambda name=report.LADDER: recorded)
    result = invoke("run", "--record", str(tmp_path / "r.json"))
    assert result.exit_code == 1 and "differ from the bits an H200 wrote" in result.output.replace("\n", " ")


@pytest.mark.parametrize("words, message", [
    (("run", "--stage", "77"), "stage: got '77', there are"),
    (("run", "--shape", "12"), "allowed is MxNxK"),
    (("hint", "01", "9"), "blank: got 9"),
    (("hint", "01", "1", "7"), "level: got 7"),
    (("hint", "55", "1"), "stage: got '55'"),
])  # fmt: skip
def test_bad_input_is_refused_in_words(words, message):
    result = invoke(*words)
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.output)


@pytest.mark.parametrize("recipe", ("tensor", "row", "1x128"))
def test_rows_of_a_large_product_can_be_checked_alone(recipe):
    a, b = check.problem(9, 16, 256, recipes=(recipe, "tensor"))
    expected = reference.matmul_hopper(a, b)
    assert torch.equal(reference.matmul_hopper(cli.every_row(a, 4), b), expected[::4])
    assert cli.every_row(a, 1) is a


def test_bench_says_why_it_needs_a_gpu(monkeypatch):
    missing = capability.Capability("Hopper GPU", "running kernels", False, "no GPU", "Kernels run on the simulator.", False)
    monkeypatch.setattr(capability, "hopper", lambda: missing)
    for command in ("bench", "profile"):
        result = invoke(command)
        assert result.exit_code == 2 and "Kernels run on the simulator" in result.output


def test_doctor_fits_a_screen_and_names_the_fix(monkeypatch):
    result = invoke("doctor")
    assert result.exit_code == 0 and len(result.output.splitlines()) <= 40
    broken = capability.Capability("Triton", "the Triton steps", False, "2.1.0", "Run: pip install 'triton>=3.6'")
    monkeypatch.setattr(capability, "triton", lambda: broken)
    result = invoke("doctor")
    assert result.exit_code == 1 and "fix Triton: Run: pip install 'triton>=3.6'" in result.output


def test_trace_writes_a_chrome_trace_and_a_drawing(tmp_path):
    result = invoke("trace", "--stage", "03", "--step", "ring", "--record", str(tmp_path / "t.json"), "--draw", str(tmp_path / "t.png"))
    assert result.exit_code == 0, result.output
    tracks = {event["args"]["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["name"] == "thread_name"}
    assert {"copy engine", "tensor core", "warpgroup 0"} <= tracks
    assert (tmp_path / "t.png").stat().st_size > 10_000
    assert invoke("trace", "--stage", "03", "--step", "nothing").exit_code == 2


@pytest.mark.parametrize("number", ["02", "04", "05", "06"])
def test_the_last_step_of_every_stage_can_be_traced(number, tmp_path):
    result = invoke("trace", "--stage", number, "--record", str(tmp_path / "t.json"))
    assert result.exit_code == 0 and json.loads((tmp_path / "t.json").read_text())["traceEvents"], result.output


def test_exercises_and_hints():
    assert "exercise.cu" in invoke("exercises").output
    shown = invoke("exercises", "--stage", "02").output
    assert "02_tma" in shown and "01_naive" not in shown
    first = invoke("hint", "01", "1")
    assert first.exit_code == 0 and "hopperlab hint 01 1 2" in first.output


@pytest.mark.parametrize("arguments, message", [
    (("exercises", "--stage", "9"), "stage: got '9', there are"),
    (("exercises", "--reset"), "--reset: it replaces what --write writes; give both"),
    (("trace", "--stage", "01"), "--step: tiled of 01_naive has nothing to draw: no copy, no mbarrier and no wgmma works beside its threads"),
    (("trace", "--stage", "0"), "stage: got '0', one stage is needed, and it fits 6 of"),
    (("hint", "0", "1"), "stage: got '0', one stage is needed, and it fits 6 of"),
    (("report", "--lessons", "--stage", "9"), "stage: got '9', there are"),
])  # fmt: skip
def test_stages_that_cannot_be_meant_are_refused(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("version, ok", [("3.5.1", False), ("3.6.0", True), ("3.10.0", True), ("4.0", True), (None, False)])
def test_versions_compare_as_numbers(version, ok):
    assert capability._at_least(version, (3, 6)) is ok


def test_check_and_record_use_one_digest():
    a, b = check.problem(4, 4, 4)
    import torch

    out = torch.arange(16, dtype=torch.bfloat16).reshape(4, 4)
    flipped = out.clone()
    flipped.view(torch.int16)[3, 3] ^= 1
    assert check.digest(out) == check.digest(out.clone()) != check.digest(flipped)
