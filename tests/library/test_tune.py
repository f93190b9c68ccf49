"""The table of tuned plans: what is measured, kept, found again and refused. The GPU's name and its clock are invented here."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from helpers import calc_diff, random, refused

import fp8_gemm
from fp8_gemm import Problem, dispatch, gemm, quantize
from fp8_gemm import __main__ as program
from fp8_gemm.plan import plan, promising
from hopperlab import capability

tuning = import_module("fp8_gemm.tune")
GPU = torch.device("cuda", 0)
DENSE = Problem("dense", 100, 512, 1024)
PROBLEMS = [
    DENSE, Problem("dense", 4096, 4096, 7168), Problem("dense", 1, 2112, 7168, bias=True),
    Problem("contiguous", 512, 256, 512, 8), Problem("masked", 64, 256, 512, 4),
    Problem("k_grouped", 256, 128, 1024, 4, "1x128", "1x128", out_dtype=torch.float32),
    Problem("dense", 300, 512, 1024, 1, "tensor", "row", interval=None),
]  # fmt: skip


def start_process():
    """As a new process would: nothing of the table in memory, nor of plans."""
    tuning._table.cache_clear()
    tuning.plan_anew()


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine with one H200 and a cache of its own, on which plan number ``fastest`` of the promising ones runs fastest."""
    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path))
    monkeypatch.delenv("FP8_GEMM_TUNED", raising=False)
    start_process()
    monkeypatch.setattr(tuning, "machine", lambda index: ("NVIDIA H200", 132))
    monkeypatch.setattr(tuning, "_hopper", lambda device: GPU)
    monkeypatch.setattr(tuning.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tuning, "operand_sets", lambda *arguments: [None])
    monkeypatch.setattr(tuning, "_check_same_result", lambda *arguments: None)

    def measure(problem, plans, sets, rounds, fastest=5):
        wanted = promising(problem, 132, 24)[fastest]
        return {one: 10e-6 if one == wanted else 20e-6 for one in plans}

    monkeypatch.setattr(tuning, "_measure", measure)
    yield tmp_path
    start_process()


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- the search


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_plan_is_made_again_from_its_overrides(problem):
    """The table keeps options of plan(), not plans: they must tell all candidates apart."""
    for one in promising(problem, 132, 200):
        assert plan(problem, 132, **tuning.overrides_of(one)) == one


def test_the_second_pass_decides():
    """A plan that was fastest by luck in the first pass loses; the model's plan is always in the final."""
    model, *others = promising(DENSE, 132, 24)
    passes = []

    def measure(plans, rounds):
        passes.append((len(plans), rounds))
        lucky = {others[10]: 1e-6, others[3]: 2e-6, others[4]: 2.1e-6}
        if len(passes) == 1:
            return {one: lucky.get(one, 5e-6) for one in plans}
        return {one: 2e-6 if one == others[4] else 3e-6 for one in plans}

    fastest, seconds, timed = tuning.search(DENSE, 132, measure)
    assert fastest == others[4] and timed == 24 and passes == [(24, 3), (4, 11)] and model in seconds


def test_a_gain_within_the_noise_changes_nothing():
    model, other = promising(DENSE, 132, 2)
    for lead, want in ((0.005, model), (0.02, other)):
        assert tuning.search(DENSE, 132, lambda plans, _, lead=lead: {one: 1 - lead * (one == other) for one in plans})[0] == want


def test_a_wrong_result_is_not_kept(monkeypatch):
    model, other = promising(DENSE, 132, 2)
    operand_set = (None, torch.empty(4, 4))

    def calls(error):
        def made(problem, chosen, sets):
            return [lambda: sets[0][1].copy_(torch.ones(4, 4)).view(-1)[3:4].add_(error * (chosen == other))]

        return made

    monkeypatch.setattr(tuning, "_calls", calls(2.0**-8))
    tuning._check_same_result(DENSE, model, other, operand_set)
    for error in (0.1, float("nan")):
        monkeypatch.setattr(tuning, "_calls", calls(error))
        with refused(RuntimeError, "differ by", "nothing is kept"):
            tuning._check_same_result(DENSE, model, other, operand_set)


def test_plans_are_compiled_before_they_are_timed(tmp_path, monkeypatch):
    """All of them, by the method of the benchmarks: one entry for each plan, and the seconds go back to their plans."""
    from fp8_gemm import kernels
    from hopperlab import bench

    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path))
    kernels.kernel.cache_clear()
    plans, seen = promising(DENSE, 132, 3), []

    def measure(candidates, rounds):
        seen.extend(len(list((tmp_path / "entries").rglob("*/*"))) for _ in candidates)
        return {name: bench.Timing(float(name) + 1, [], 1) for name in candidates}

    monkeypatch.setattr(bench, "measure", measure)
    assert tuning._measure(DENSE, plans, [(None, None)], 2) == dict(zip(plans, (1.0, 2.0, 3.0)))
    assert seen == [3, 3, 3]


@pytest.mark.parametrize("problem", PROBLEMS[3:], ids=str)
def test_operands_are_random_and_calls_take_the_plans_overrides(problem, monkeypatch):
    """On the CPU: the sets have the problem's shapes, and each call is kernels.run with the plan's options."""
    kernels = import_module("fp8_gemm.kernels")
    seen = []
    monkeypatch.setattr(tuning, "MOST_SETS", 2)
    sets = tuning.operand_sets(problem, torch.device("cpu"), 7 if problem.kind == "masked" else None)
    monkeypatch.setattr(kernels, "run", lambda *arguments, **overrides: seen.append((*arguments, overrides)))
    chosen = promising(problem, 132, 3)[2]
    for call in tuning._calls(problem, chosen, sets):
        call()
    assert len(seen) == 2 and seen[0][3] == tuning.overrides_of(chosen)
    for (operands, out), call in zip(sets, seen):
        assert call[:3] == (problem, operands, out) and out.shape == problem.out_shape
        assert operands.a.float().std() > 0.9 and operands.b.float().std() > 0.9
        assert problem.kind != "masked" or operands.masked_m.tolist() == [7] * 4
    assert not torch.equal(sets[0][0].a.float(), sets[1][0].a.float())


# ---------------------------------------------------------------- keeping and finding


def test_what_was_tuned_is_found_by_this_process_and_the_next(gpu):
    (done,) = fp8_gemm.tune([DENSE])
    assert done.plan == promising(DENSE, 132, 24)[5] and done.seconds == 10e-6 and done.model_seconds == 20e-6
    assert done.path.is_file() and gpu in done.path.parents and "NVIDIA-H200_132sms_" in str(done.path)
    for words in ("10.0 µs, the best of 24 plans", "the model's takes 20.0 µs", f"kept in {done.path}"):
        assert words in str(done)
    for _ in range(2):
        assert plan(DENSE, 132, **tuning.lookup(DENSE, GPU)) == done.plan
        start_process()
    assert len(files(gpu)) == 1  # no temporary file is left


def test_tuning_again_replaces_the_entry(gpu, monkeypatch):
    fp8_gemm.tune([DENSE])
    monkeypatch.setattr(tuning, "_measure", lambda problem, plans, sets, rounds: {one: 7e-6 for one in plans})
    (done,) = fp8_gemm.tune([DENSE])
    assert done.plan == done.model_plan and "the model's own" in str(done)
    assert tuning.found(DENSE, GPU).seconds == 7e-6 and json.loads(done.path.read_text())["seconds"] == 7e-6


def test_neighbours_share_an_entry_and_others_do_not(gpu):
    fp8_gemm.tune([DENSE])  # M = 100, rounded up to 104
    assert tuning.lookup(replace(DENSE, m=97), GPU) == tuning.lookup(DENSE, GPU) is not None
    for change in ({"m": 96}, {"m": 105}, {"n": 513}, {"k": 1000}, {"bias": True}, {"accumulate": True}, {"format_b": "e5m2"},
                   {"recipe_b": "1x128"}, {"out_dtype": torch.float32}):  # fmt: skip
        assert tuning.lookup(replace(DENSE, **change), GPU) is None, change
    assert tuning.lookup(DENSE, torch.device("cpu")) is None  # the simulator's plans are the model's


def test_every_field_of_a_problem_is_in_its_name():
    names = {tuning.name_of(problem) for problem in PROBLEMS}
    assert len(names) == len(PROBLEMS)
    tokens = Problem("k_grouped", 256, 128, 1000, 4, "1x128", "1x128", out_dtype=torch.float32)
    assert tuning.name_of(tokens) == tuning.name_of(PROBLEMS[5]) and "256x128x1024" in tuning.name_of(tokens)
    unscaled = PROBLEMS[6]
    assert tuning.name_of(replace(unscaled, interval=256)) != tuning.name_of(unscaled)
    assert all(name == name.replace("/", "").replace(" ", "") for name in names)  # file names


def test_another_gpu_or_other_kernels_have_another_table(gpu, monkeypatch):
    fp8_gemm.tune([DENSE])
    with monkeypatch.context() as changed:
        changed.setattr(tuning, "machine", lambda index: ("NVIDIA H20", 78))
        assert tuning.lookup(DENSE, GPU) is None
    with monkeypatch.context() as changed:
        changed.setattr(tuning, "_sources", lambda: "0123456789ab")
        assert tuning.lookup(DENSE, GPU) is None
    assert tuning.lookup(DENSE, GPU)


def test_the_variable_leaves_the_table_unread(gpu, monkeypatch):
    fp8_gemm.tune([DENSE])
    monkeypatch.setenv("FP8_GEMM_TUNED", "0")
    start_process()
    assert tuning.lookup(DENSE, GPU) is None


def test_calls_take_the_tuned_plan(gpu, monkeypatch):
    """From the next call on, although the call was planned before."""
    kernels, ops = import_module("fp8_gemm.kernels"), import_module("fp8_gemm.ops")
    monkeypatch.setattr(kernels, "_sms", lambda index: 132)
    before = kernels.plan_for(DENSE, GPU)
    monkeypatch.setitem(ops._calls, "a call", "with its launch")
    (done,) = fp8_gemm.tune([DENSE])
    assert kernels.plan_for(DENSE, GPU) == done.plan != before == plan(DENSE, 132)
    assert "a call" not in ops._calls
    assert kernels.plan_for(DENSE, GPU, batch_invariant=True) == plan(DENSE, 132, batch_invariant=True)
    assert kernels.plan_for(DENSE, torch.device("cpu")) == before  # the simulator's plans are the model's


def test_a_planned_call_does_not_read_the_table(gpu, monkeypatch):
    kernels = import_module("fp8_gemm.kernels")
    monkeypatch.setattr(kernels, "_sms", lambda index: 132)
    fp8_gemm.tune([DENSE])
    first = kernels.plan_for(DENSE, GPU)
    monkeypatch.setattr(tuning, "found", lambda *arguments: pytest.fail("looked up again"))
    assert kernels.plan_for(DENSE, GPU) is first


def test_explain_says_that_a_plan_was_tuned(gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("H200", (), {"multi_processor_count": 132}))
    before = fp8_gemm.explain(DENSE, device=GPU)
    (done,) = fp8_gemm.tune([DENSE])
    after = fp8_gemm.explain(DENSE, device=GPU)
    assert "tuned" not in str(before) and before.plan == done.model_plan
    assert after.plan == done.plan and "from the table of tuned plans: 10.0 µs measured" in str(after)
    overridden = fp8_gemm.explain(DENSE, device=GPU, batch_invariant=True)
    assert "tuned" not in str(overridden) and overridden.plan == plan(DENSE, 132, batch_invariant=True)


# ---------------------------------------------------------------- on a GPU


@pytest.fixture
def real_gpu(tmp_path, monkeypatch):
    if not capability.has_hopper():
        pytest.skip(capability.hopper().sentence())
    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path))
    monkeypatch.delenv("FP8_GEMM_TUNED", raising=False)
    start_process()
    yield torch.device("cuda", torch.cuda.current_device())
    start_process()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_kind_is_tuned_on_a_gpu(real_gpu, monkeypatch, problem):
    monkeypatch.setattr(tuning, "CANDIDATES", 4)
    (done,) = fp8_gemm.tune([problem], expected_m=20 if problem.kind == "masked" else None)
    assert done.path.is_file() and 0 < done.seconds <= done.model_seconds < 1e-2
    explanation = fp8_gemm.explain(problem, device=real_gpu)
    assert explanation.plan == done.plan and "from the table of tuned plans" in str(explanation)


def test_a_plan_of_the_table_computes_the_same_on_a_gpu(real_gpu):
    kernels = import_module("fp8_gemm.kernels")
    problem = Problem("dense", 64, 512, 2048)
    a, b = quantize(random(64, 2048, device=real_gpu)), quantize(random(512, 2048, seed=1, device=real_gpu), "128x128")
    by_model = gemm(a, b)
    for other in promising(problem, tuning.machine(real_gpu.index)[1], 24)[5::6]:
        tuning._store(problem, real_gpu, tuning.Entry(tuning.overrides_of(other), 1e-6))
        assert kernels.plan_for(problem, real_gpu) == other
        assert calc_diff(gemm(a, b), by_model) < 1e-5


# ---------------------------------------------------------------- what can be wrong with a file


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"overrides": {}}', b'{"overrides": {"swap_ab": true}, "seconds": 1}',
    b'{"overrides": {"swap_ab": 1, "block_m": 64, "block_n": 64, "split_k": 1, "multicast": 1, "ctas_per_sm": 1}, "seconds": 1}',
    b'{"overrides": {"swap_ab": false, "block_m": 64, "block_n": 64, "split_k": 1, "multicast": 1, "ctas_per_sm": 1}, "seconds": "fast"}',
    b'{"overrides": {"swap_ab": false, "block_m": 100, "block_n": 60, "split_k": 1, "multicast": 1, "ctas_per_sm": 1}, "seconds": 1}',
    *(b'{"overrides": {"swap_ab": false, "block_m": 64, "block_n": 64, "split_k": 1, "multicast": 1, "ctas_per_sm": 1}, "seconds": %s}' % seconds
      for seconds in (b"1" + 400 * b"0", b"1" + 5000 * b"0", b"true", b"Infinity", b"NaN", b"1e999", b"0")),
    100_000 * b"[",
], ids=lambda content: str(content[:100]))  # fmt: skip
def test_a_damaged_file_is_a_warning_and_costs_only_itself(gpu, content):
    done, other = fp8_gemm.tune([DENSE, PROBLEMS[1]])
    done.path.write_bytes(content)
    start_process()
    with pytest.warns(UserWarning, match=f"{done.path.name}.*(cannot be used|cannot be made).*tune the shape again"):
        assert tuning.lookup(DENSE, GPU) is None
    assert tuning.lookup(PROBLEMS[1], GPU) == tuning.overrides_of(other.plan)
    fp8_gemm.tune([DENSE])
    start_process()
    assert tuning.lookup(DENSE, GPU) == tuning.overrides_of(done.plan)


def test_a_folder_that_cannot_be_written_keeps_the_plan_for_this_process(gpu, monkeypatch):
    (gpu / "tuned").write_text("a file where the folder should be")  # also refuses root, whom permissions do not
    with pytest.warns(UserWarning, match="could not be stored.*this process only.*HOPPERLAB_CACHE"):
        (done,) = fp8_gemm.tune([DENSE])
    assert done.path is None and "this process only" in str(done)
    assert tuning.lookup(DENSE, GPU) == tuning.overrides_of(done.plan)


def test_a_crash_while_writing_leaves_the_old_entry(gpu, monkeypatch):
    (done,) = fp8_gemm.tune([DENSE])
    before = done.path.read_text()

    def broken(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(tuning.json, "dump", broken)
    with pytest.warns(UserWarning, match="disk full"):
        fp8_gemm.tune([DENSE])
    assert done.path.read_text() == before and files(gpu) == [done.path]


def test_many_processes_and_threads_write_at_once(gpu):
    """Each entry is whole whenever it is read, and none is lost."""
    script = (
        "import sys, torch; from importlib import import_module; from fp8_gemm import Problem\n"
        "t = import_module('fp8_gemm.tune')\n"
        "t.machine = lambda index: ('NVIDIA H200', 132)\n"
        "entry = t.Entry({'swap_ab': False, 'block_m': 64, 'block_n': 64, 'split_k': 1, 'multicast': 1, 'ctas_per_sm': 1}, 1e-6)\n"
        "for i in range(50): t._store(Problem('dense', 8, 8, 128), torch.device('cuda', 0), entry)\n"
        "t._store(Problem('dense', 8, int(sys.argv[1]), 128), torch.device('cuda', 0), entry)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen([sys.executable, "-c", script, str(n)], env=environment) for n in (16, 24)]
    folder, failures = tuning.table_folder(0), []

    def read_until_done():
        while any(writer.poll() is None for writer in writers):
            for path in folder.glob("*.json"):
                try:
                    tuning._parse(json.loads(path.read_text()))
                except (OSError, ValueError) as error:
                    failures.append(error)

    readers = [threading.Thread(target=read_until_done) for _ in range(2)]
    [reader.start() for reader in readers]
    [reader.join() for reader in readers]
    assert [writer.wait() for writer in writers] == [0, 0] and not failures
    assert len(tuning._table(folder)) == 3 and len(files(gpu)) == 3


# ---------------------------------------------------------------- refusals, command line


@pytest.mark.parametrize("shapes, options, words", [
    ([(0, 8, 128)], {}, ["shapes", "0 x 8 x 128", "nothing can be tuned"]),
    ([(8, 8, 128)], {"expected_m": 4}, ["expected_m is 4", "masked"]),
    ([Problem("masked", 8, 8, 128, 2)], {"expected_m": 9}, ["expected_m is 9", "1 to M"]),
    ([(8,)], {}, ["(8,)", "(M, N, K)"]),
])  # fmt: skip
def test_shapes_that_cannot_be_tuned(gpu, shapes, options, words):
    with refused(ValueError, *words):
        fp8_gemm.tune(shapes, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_timed(capsys):
    with refused(RuntimeError, "timed on a Hopper GPU"):
        fp8_gemm.tune([DENSE])
    assert program.main(["tune", "8x128x256"]) == 1
    assert "timed on a Hopper GPU" in capsys.readouterr().err


def test_the_command_line(gpu, capsys):
    assert program.main(["tune", "100x512x1024", "8x256x512"]) == 0
    text = capsys.readouterr().out
    assert text.count("best of 24 plans") == 2 and "M = 8, N = 256" in text and len(files(gpu)) == 2
    assert program.main(["tune", "64x256x512", "--kind", "masked", "--groups", "4", "--expected-m", "70"]) == 1
    assert "expected_m is 70" in capsys.readouterr().err


def test_fp8_results_are_tuned_as_the_kernel_computes_them(gpu):
    (done,) = fp8_gemm.tune([replace(DENSE, out_dtype=torch.float8_e4m3fn)])
    assert done.problem.out_dtype == torch.float32
