"""The lessons' experiments, as far as they can run without a GPU: every function, on tiny shapes, on the simulator or the GPU."""

import json
import math

import pytest
import torch

from hopperlab import stage

FOLDER = next(folder for folder in stage.folders() if folder.name.startswith("05"))


@pytest.fixture(scope="module")
def experiment():
    return stage.load_module(FOLDER / "experiment.py", "stage_05_block_scaled_experiment")


@pytest.fixture(scope="module")
def records(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    experiment.main(folder, small=True)
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


def test_writes_both_records_with_their_origin(records):
    assert set(records) == {"05_accuracy", "05_speed"}
    assert all(record["machine"] and record["versions"] and record["commit"] for record in records.values())


def test_kernels_give_the_models_bits(records):
    accuracy, speed = records["05_accuracy"], records["05_speed"]
    assert all(row["bits"] for row in accuracy["interval"])
    last = [row for row in accuracy["fourteen_bits"] if "never, bits" in row]
    assert last and all(row["never, bits"] and row["every 128, bits"] for row in last)
    assert all(row["same_bits"] for row in speed["blocks"] if not row["name"].startswith(("deep_gemm", "cublas")))


def test_promotion_helps_and_the_error_of_positive_sums_is_toward_zero(records):
    rows = {(row["inputs"], row["interval"]): row for row in records["05_accuracy"]["interval"]}
    assert rows["positive", None]["bias"] < rows["positive", 128]["bias"] < 0
    assert rows["positive", 128]["error"] < rows["positive", None]["error"]


def test_a_threshold_depends_on_the_magnitude_of_the_values(records):
    rows = [row for row in records["05_accuracy"]["threshold"] if row["threshold"]]
    assert all(row["same_as_every_block"] for row in rows if "448" in row["inputs"])
    assert all(row["same_as_never"] for row in rows if "scale 1" in row["inputs"])


def test_online_scaling_never_saturates_and_delayed_scaling_does_after_a_jump(records):
    found = records["05_accuracy"]["delayed"]
    methods = {method["name"]: method for method in found["methods"]}
    assert max(methods["online"]["saturated"]) == 0
    rises = [i for i in range(1, len(found["amax"])) if found["amax"][i] > found["amax"][i - 1]]
    assert rises and all(methods["last 1, margin 0"]["saturated"][i] > 0 for i in rises)


def test_a_product_of_scales_changes_no_bit_and_a_second_factor_does(records):
    rows = records["05_accuracy"]["folding"]["epilogue"]
    assert all(row["offline_product"] == 0 for row in rows)
    assert all((row["second_factor"] > 0) != row["power_of_two"] for row in rows)


def test_block_scales_fold_into_data_exactly_only_as_powers_of_two_in_range(records):
    rows = {(row["spread"], row["power_of_two"], row["kept"]): row for row in records["05_accuracy"]["folding"]["data"]}
    assert rows[0, True, "largest"]["changed"] == 0 == rows[0, True, "largest"]["error"]
    assert rows[4, False, "largest"]["changed"] > 0 and rows[4, False, "largest"]["error"] > 0
    assert all(row["overflow"] == 0 for row in rows.values() if row["kept"] == "largest")


def test_the_report_names_the_block_whose_scale_is_wrong(records):
    for planted in records["05_accuracy"]["bad_block"]:
        assert planted["report"]["suspect"] == planted["k_block"]
        assert f"K block {planted['k_block']} " in planted["text"]


def test_every_figure_is_a_number(records):
    def walk(value):
        if isinstance(value, dict):
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item)
        elif isinstance(value, float):
            yield value

    assert all(math.isfinite(value) for record in records.values() for value in walk(record))


def test_full_size_without_a_gpu_says_what_to_do(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment.capability, "has_hopper", lambda: False)
    with pytest.raises(SystemExit, match="--small"):
        experiment.main(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- stage 06 --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grouped():
    folder = next(folder for folder in stage.folders() if folder.name.startswith("06"))
    return stage.load_module(folder / "experiment.py", "stage_06_moe_grouped_experiment")


@pytest.fixture(scope="module")
def grouped_record(grouped, tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "06_moe.json"
    grouped.main(path, small=True)
    return json.loads(path.read_text())


def test_grouped_record_has_every_family_and_the_models_bits(grouped, grouped_record):
    assert grouped_record["machine"] and grouped_record["versions"] and grouped_record["commit"]
    names = {family: {row["name"] for row in grouped_record[family]} for family in ("contiguous", "masked", "dense", "skew")}
    assert names["contiguous"] >= {"unpadded", "padded"} and names["skew"] >= {"unpadded", "padded", "masked"}
    assert "masked" in names["masked"] and names["dense"] >= {"plan", "not swapped, not split"}
    assert {row["routing"] for row in grouped_record["skew"]} == set(grouped.ROUTINGS)
    bits = [value for family in names for row in grouped_record[family] for key, value in row.items() if key.startswith("same_bits")]
    assert len(bits) > 10 and all(bits)


def test_each_row_says_which_case_it_is_of(grouped, grouped_record):
    made = grouped.cases(grouped.SMALL, torch.device("cpu"))
    families = {row["case"]: family for family in ("contiguous", "masked", "dense", "skew") for row in grouped_record[family]}
    assert families == {name: family for name, (family, _) in made.items()}


def test_counters_are_read_for_the_calls_that_a_case_makes(grouped, grouped_record, monkeypatch):
    """In the order in which the program under Nsight Compute makes them; DeepGEMM's comes last."""
    asked = []
    monkeypatch.setattr(grouped.counters, "read", lambda program, calls: asked.append((program, calls)) or [{}] * len(calls))
    rows = [row for family in ("contiguous", "masked", "dense", "skew") for row in grouped_record[family]]
    for case in {row["case"]: None for row in rows}:
        grouped.counters_of(case)
        (program, calls), ran = asked.pop(), [row["name"] for row in rows if row["case"] == case]
        ours = [name for name in ran if name not in ("deep_gemm", "A not shared")]  # the latter is only timed
        assert calls == [*ours, "deep_gemm"] and program[-2:] == ["--case", case]


def test_slower_cases_are_those_below_one(grouped):
    times = lambda **found: [{"name": name, "microseconds": time} for name, time in found.items()]  # noqa: E731
    library = {"shapes": [{"shape": {"m": 1, "n": 2, "k": 3}, "rows": times(library=2.0, deep_gemm=1.0)},
                          {"shape": {"m": 4, "n": 5, "k": 6}, "rows": times(library=1.0, deep_gemm=2.0)},
                          {"shape": {"m": 7, "n": 8, "k": 9}, "rows": times(library=1.0)}]}  # fmt: skip
    row = lambda case, name, **more: {"case": case, "name": name, **more}  # noqa: E731
    moe = {"contiguous": [row("a", "unpadded", speed_of_deep_gemm=0.9), row("a", "padded", speed_of_deep_gemm=0.8)],
           "masked": [row("b", "masked", speed_of_deep_gemm=1.1), row("c", "masked")], "skew": []}  # fmt: skip
    assert grouped.slower(moe, library) == {"dense, 1×2×3": 0.5, "a": 0.9}


def test_a_missing_peer_is_recorded(grouped_record):
    for family in ("contiguous", "masked", "dense"):
        ran = any(row["name"] == "deep_gemm" for row in grouped_record[family])
        assert ran != (f"deep_gemm, {family}" in grouped_record["missing"])


def test_routings_are_what_their_names_say(grouped):
    tokens, top_k, experts = 1000, 4, 32
    counts = {}
    for kind in grouped.ROUTINGS:
        ids = grouped.routing(kind, tokens, top_k, experts)
        assert all(len(set(row)) == top_k for row in ids.tolist())
        counts[kind] = grouped.counts_of(ids, experts)
        assert sum(counts[kind]) == tokens * top_k
    assert max(counts["uniform"]) < 1.5 * tokens * top_k / experts
    assert counts["zipf"][0] > 3 * counts["zipf"][-1] > 0
    assert counts["hot"][0] > 0.9 * tokens and max(counts["hot"][1:]) < 0.2 * tokens
    assert counts["empty"].count(0) == experts - experts // 8


def test_grouped_at_full_size_without_a_gpu_says_what_to_do(grouped, tmp_path, monkeypatch):
    monkeypatch.setattr(grouped.capability, "has_hopper", lambda: False)
    with pytest.raises(SystemExit, match="--small"):
        grouped.main(tmp_path / "06_moe.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["03_wgmma/experiment.py", "04_warp_specialized/experiment.py", "05_block_scaled/quantize_bench.py"])
def test_what_needs_a_gpu_says_so(program, tmp_path, monkeypatch):
    path = stage.root() / "stages" / program
    module = stage.load_module(path, "stage_" + program.replace("/", "_").removesuffix(".py"))
    monkeypatch.setattr(module.capability, "has_hopper", lambda: False)
    with pytest.raises(SystemExit, match="Hopper GPU is needed for running kernels on hardware"):
        module.main(tmp_path / "record.json")
    assert not list(tmp_path.iterdir())
