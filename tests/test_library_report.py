"""What docs/performance.md and the README say of the library's speed is what the records say, and nothing else."""

import itertools
import json
import re
import shutil

import pytest

from hopperlab import bench, library_report, report, stage

ORIGIN = {
    "date": "2026-01-02T03:04:05Z", "commit": "0123456789ab",
    "machine": {"machine": "H200", "name": "NVIDIA H200", "driver": "580.1"}, "versions": {"python": "3.12.3", "torch": "2.11.0"},
}  # fmt: skip
TELEMETRY = {"telemetry": {"sm_clock_mhz": {"median": 1755}, "power_w": {"max": 612.3}}}
PLAN = "tiles of 8 x 64, A and B swapped, K in 2 parts, 8 pipeline stages, 112 tiles in 1 wave on 132 SMs; predicted 7.5 µs"
SHORT = "8×64, swapped, K in 2 parts, 8 stages, 112 tiles in 1 wave"
OTHER = "tiles of 64 x 64, 6 pipeline stages, 112 tiles in 1 wave on 132 SMs; predicted 8.5 µs"


def rows_of(m, n, k, times):
    """Rows as the benchmark writes them. times: name -> µs."""
    rows = []
    for name, time in times.items():
        timing = bench.Timing(time / 1e6, [time / 1e6 * factor for factor in (0.99, 1, 1.01)], 1)
        row = bench.row(name, timing, m, n, k, error=1e-3, launches=0)
        del row["kernel_launches"]
        if name != next(iter(times)):
            del row["max_rel_error"]
        rows.append(row)
    return rows


def shapes_record(kind, shapes):
    """shapes: (m, n, k) -> {name: µs}."""
    refused = {"cublas block": "RuntimeError: M must be more than 1"}
    missing = lambda times: refused if kind == "library" and "cublas block" not in times else {}
    entries = [{"shape": dict(zip("mnk", shape)), "plan": PLAN, "predicted_us": 7.5, "rows": rows_of(*shape, times),
                "missing": missing(times)} for shape, times in shapes.items()]  # fmt: skip
    return {"kind": kind, **ORIGIN, "rounds": 3, "shapes": entries, **TELEMETRY}


def library_times(ours, deep_gemm, block, tensor):
    times = {"library": ours, "library, quantising A": ours + 2, "library, batch invariant": 1.5 * ours, "deep_gemm": deep_gemm, "cublas block": block,
             "cublas tensor": tensor}  # fmt: skip
    return {name: time for name, time in times.items() if time is not None}


def grouped_rows(description, times):
    return [{**description, "name": name, "microseconds": time, "spread": 0.01, "tflops": 1e3 / time, "gbytes_per_s": 1e5 / time}
            for name, time in times.items()]  # fmt: skip


LIBRARY = shapes_record("library", {
    (4096, 4096, 4096): {**library_times(100, 110, 120, 95), "library, Triton": 125},
    (4096, 2112, 7168): library_times(100, 99.5, 108, 98),
    (1, 7168, 16384): library_times(30, 38, None, 36),
    (128, 7168, 16384): library_times(35, 45, 49, 35),
    (128, 4096, 7168): library_times(10, 14, 23, 12),
})  # fmt: skip
HOST = {"kind": "host", **ORIGIN, "shape": {"m": 16, "n": 512, "k": 512}, "processor": "Some CPU", "rows": [
    {"name": "gemm, out given", "microseconds": 10.5, "rounds_us": [10.2, 10.5, 11.9]},
    {"name": "torch: _scaled_mm, out given", "microseconds": 18.3, "rounds_us": [17.1, 18.3, 30.0]},
], "first_calls": [{"shape": {"m": 8, "n": 64, "k": 128}, "milliseconds": 212.3}, {"shape": {"m": 9, "n": 64, "k": 128}, "milliseconds": 312.3}]}  # fmt: skip
WAVES = {"cubes": [{"size": size, "name": name, "microseconds": time, "spread": 0.01}
                   for size, name, time in ((4096, "plan", 90), (4096, "one CTA", 80), (4096, "cublas tensor", 91.8), (8192, "plan", 100),
                                            (8192, "cublas tensor", 99))]}  # fmt: skip
SIZES = {"groups": 4, "n": 4096, "k": 7168, "same_bits_unpadded": True, "same_bits_padded": True}
SKEWED = {"groups": 64, "n": 4096, "k": 2048, "rows": 32768, "same_bits_masked": False}
MOE = {"kind": "sweep", **ORIGIN, **TELEMETRY, "missing": {"deep_gemm, masked": "AttributeError: gone"}, "dense": [],
       "contiguous": grouped_rows({"tokens": 256, **SIZES, "rows": 1024, "rows_padded": 1024},
                                  {"unpadded": 90, "padded": 90, "deep_gemm": 99})
       + grouped_rows({"tokens": 8192, **SIZES, "rows": 32768, "rows_padded": 32768},
                      {"unpadded": 100, "padded": 100, "deep_gemm": 98}),
       "masked": grouped_rows({"tokens": 4, **SIZES, "rows": 16, "max_m": 8}, {"masked": 40, "deep_gemm": 50}),
       "skew": grouped_rows({"routing": "uniform", "layout": "contiguous", **SKEWED, "rows_padded": 36864},
                            {"unpadded": 200, "padded": 220, "deep_gemm": 230})
       + grouped_rows({"routing": "uniform", "layout": "masked", **SKEWED, "max_m": 600}, {"masked": 250, "deep_gemm": 300})
       + grouped_rows({"routing": "zipf", "layout": "contiguous", **SKEWED, "rows_padded": 36992},
                      {"unpadded": 210, "padded": 215, "deep_gemm": 220})
       + grouped_rows({"routing": "zipf", "layout": "masked", **SKEWED, "max_m": 4096},
                      {"masked": 500, "deep_gemm": 450})}  # fmt: skip
SEARCH = shapes_record("search", {
    (16, 4096, 7168): {"plan": 11.0, OTHER: 10.0, OTHER.replace("64 x 64", "64 x 32"): 12.0},
    (1, 4096, 7168): {"plan": 9.0, OTHER: 9.5},
})  # fmt: skip
WAYS = (("bf16", 120.0, 0.0), ("library", 80.0, 2e-2), ("deep_gemm", 88.0, 2e-2))
LAYER = {"kind": "layer", **ORIGIN, **TELEMETRY, "layer": {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8}, "missing": {},
         "rows": [{"name": name, "tokens": 16, "phase": "decode", "microseconds": time, "spread": 0.01, "tflops": 1.0,
                   "difference_from_bf16": error} for name, time, error in WAYS]}  # fmt: skip

COUNTERS = {"kind": "slower", **ORIGIN, "cases": [
    {"case": "contiguous, 2 groups", "speed_of_deep_gemm": 0.98, "rows": [
        {"name": name, "counters": {"cycles": cycles, "tensor_pipe": 84.61, "issue": 35.0, "l2_bytes": 8.054e9, "hbm_bytes": 0.5e9, "hbm": 12.4}}
        for name, cycles in (("unpadded", 120_400), ("padded", 1), ("deep_gemm", 118_000))]},
    {"case": "masked, 2 groups", "speed_of_deep_gemm": 0.99, "rows": [], "error": "ncu: no"},
]}  # fmt: skip


def cells(markdown, start):
    """The cells of the one table row that begins so."""
    found = [line for line in markdown.splitlines() if line.startswith(f"| {start}")]
    assert len(found) == 1, (start, found)
    return [cell.strip() for cell in found[0].strip("|").split("|")]


# ---------------------------------------------------------------- what is committed


@pytest.mark.parametrize("file, mark", library_report.generated(), ids=lambda part: part)
def test_the_pages_show_the_records(file, mark):
    text = (stage.root() / file).read_text()
    shown = re.search(rf"<!-- {mark}:begin -->\n(.*?)\n<!-- {mark}:end -->", text, re.S)[1]
    assert shown == library_report.generated()[file, mark], "run: make docs"


def test_every_image_on_the_page_exists():
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (stage.root() / library_report.PAGE).read_text()):
        assert (stage.root() / "docs" / image).exists(), f"{image} is missing: run make docs"


def test_no_figure_of_the_page_is_written_by_hand():
    """Outside of the generated parts there are limits of the hardware and the formats, but no times, rates or ratios."""
    prose = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", (stage.root() / library_report.PAGE).read_text(), flags=re.S)
    assert not re.findall(r"\d[\d.]*\s?(?:µs|ms|TFLOP/s|TB/s|GB/s|×)(?!\d)", prose)
    assert not re.findall(r"\d+\.\d+", re.sub(r"stages/\S+|docs/\S+", "", prose))


# ---------------------------------------------------------------- tables


def test_without_records_the_page_says_so():
    assert library_report.targets_markdown(None, None, None) == library_report.MISSING
    for table in ("dense", "decode", "moe", "host", "search", "invariant", "layer", "slower"):
        assert getattr(library_report, f"{table}_markdown")(None) == library_report.MISSING
    assert library_report.readme_markdown(None, MOE) == library_report.MISSING


def test_a_shape_stands_beside_each_peer():
    table = library_report.dense_markdown(LIBRARY)
    assert cells(table, "128 | 4096")[:4] == ["128", "4096", "7168", "10.0"]
    assert cells(table, "128 | 4096")[4:] == ["12.0", "752", "3133", "1.400", "2.300", "1.200", SHORT]
    assert cells(table, "1 | 7168")[7:10] == ["1.266", "-", "1.200"]
    assert "Where a peer has no figure: cublas block, `RuntimeError: M must be more than 1`" in table
    shown = [line.split(" | ")[0] for line in table.splitlines() if re.match(r"\| \d", line)]
    assert shown == ["| 1", "| 128", "| 128", "| 4096", "| 4096"]  # few rows first
    assert "1.0e-03" in table and "1755 MHz" in table and "docs/results/07_library.json" in table


def test_targets_are_judged_by_the_records():
    found = {target.what: target for target in library_report.targets(LIBRARY, MOE, HOST, WAVES)}
    assert len(found) == 15
    dense = found["dense kernel of stage 04 against cuBLAS tensor, each"]
    assert dense.value == pytest.approx(0.99) and dense.where == "8192³; 1 of 2 below"
    triton = found["Triton path against the CUDA path, M = 4096 and cubes, each"]
    assert triton.value == pytest.approx(0.8) and triton.where == "4096³; 0 of 1 below"
    assert "| ≤ 500 ms | 312.3 ms | 9×64×128 | met |" in str(found["first call of new weights, nothing compiled yet"])
    slowest = found["against DeepGEMM, each"]
    assert slowest.value == pytest.approx(0.995) and slowest.where == "4096×2112×7168; 1 of 5 below"
    assert slowest.verdict == "**missed**, by less than the spread of its rounds (2.0%)"
    assert found["against DeepGEMM, M = 4096, geometric mean"].value == pytest.approx((1.1 * 0.995) ** 0.5)
    assert found["against DeepGEMM, M ≤ 128, geometric mean"].value == pytest.approx((38 / 30 * 45 / 35 * 1.4) ** (1 / 3))
    assert found["against DeepGEMM, M ≤ 128, geometric mean"].verdict == "met"
    block = found["against cuBLAS block, each"]
    assert block.value == pytest.approx(1.08) and block.where.endswith("0 of 4 below")
    assert found["against cuBLAS tensor, M = 4096 and cubes, geometric mean"].verdict == "met"
    read = found["share of the reading ceiling, M ≤ 128, weights of 100 MB and more, each"]
    moved = (128 + 7168) * 16384 + 2 * 128 * 7168
    assert read.value == pytest.approx(100 * moved / 35e-6 / bench.READ_BYTES_PER_S) and read.verdict == "**missed**"
    assert "128×7168×16384" in str(read) and "≥ 85 %" in str(read) and "| 81.2 % |" in str(read)
    assert found["against DeepGEMM, contiguous groups, each"].where == "4 groups of 8192, 4096×7168; 1 of 2 below"
    unpadded = found["unpadded groups against padded ones, each"]
    assert unpadded.value == 1 and unpadded.verdict == "met" and unpadded.where.endswith("0 of 4 below")
    assert found["against DeepGEMM, masked groups, geometric mean"].value == pytest.approx(1.25)
    host = found["host time of `gemm`, output given"]
    assert host.verdict == "**missed**" and "| ≤ 10 µs | 10.5 µs |" in str(host)


def test_a_miss_is_noise_only_if_every_case_that_misses_is():
    noisy, sure = library_report.Speed("noisy", 0.97, 0.05), library_report.Speed("sure", 0.98, 0.001)
    assert library_report.each("", 1.0, [noisy]).verdict == "**missed**, by less than the spread of its rounds (5.0%)"
    assert library_report.each("", 1.0, [noisy, sure]).verdict == "**missed**"


def test_rounding_never_makes_a_goal_look_reached():
    speeds = [library_report.Speed("here", 0.9999, 0.0), library_report.Speed("there", 1.2, 0.0)]
    target = library_report.each("DeepGEMM", 1.0, speeds)
    assert str(target) == "| DeepGEMM, each | ≥ 1.00 | 0.999 | here; 1 of 2 below | **missed** |"
    assert library_report.towards_a_miss(10.01, 1, at_most=True) == "10.1" and library_report.towards_a_miss(1.03, 2) == "1.03"


def test_a_target_whose_record_is_missing_is_neither_met_nor_missed():
    verdicts = [target.verdict for target in library_report.targets(LIBRARY, None, None)]
    assert verdicts.count("not recorded") == 8 and "not recorded" in library_report.targets_markdown(LIBRARY, None, None)
    others = lambda entry: [row for row in entry["rows"] if row["name"] != "deep_gemm"]
    without = {**LIBRARY, "shapes": [{**entry, "rows": others(entry)} for entry in LIBRARY["shapes"]]}
    assert [target.verdict for target in library_report.targets(without, None, None)][:4] == ["not recorded"] * 4
    assert cells(library_report.readme_markdown(without, None), "DeepGEMM") == ["DeepGEMM", "-", "-", "-"]


def test_only_heavy_weights_and_few_tokens_count_as_decoding():
    table = library_report.decode_markdown(LIBRARY)
    assert cells(table, "1 |")[3:6] == ["117", "91.7 %", "72.4 %"] and cells(table, "128 |")[1] == "7168"
    assert "4096 | 7168" not in table and "100 % is 4.27 TB/s" in table
    light = shapes_record("library", {(1, 4096, 7168): library_times(8, 9, None, 8)})
    assert library_report.decode_markdown(light) == library_report.MISSING


def test_groups_and_skewed_routing():
    table = library_report.moe_markdown(MOE)
    contiguous, masked, skewed = table.split("**")[2::2]
    assert cells(contiguous, "4 | 256") == ["4", "256", "4096", "7168", "90.0", "90.0", "99.0", "11.1", "1.000", "1.100"]
    assert cells(masked, "4 | 4 ") == ["4", "4", "4096", "7168", "40.0", "50.0", "25.0", "2500", "1.250"]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in skewed.splitlines() if line.startswith("| 32768")]
    assert lines[0] == ["32768", "36864", "200.0", "1.00", "1.100", "1.150", "contiguous", "uniform"]
    assert "those of the model of the hardware in 6 of 10 outputs" in table and "deep_gemm, masked, `AttributeError: gone`" in table
    assert lines[3] == ["32768", "-", "500.0", "2.00", "-", "0.900", "masked", "zipf"]


def test_host_times():
    table = library_report.host_markdown(HOST)
    assert cells(table, "10.5") == ["10.5", "10.2", "gemm, out given"]
    assert "16×512×512, Some CPU, Python 3.12.3, torch 2.11.0. NVIDIA H200, driver 580.1, 2026-01-02" in table


def test_what_the_planner_loses():
    table = library_report.search_markdown(SEARCH)
    assert cells(table, "16 |")[3:] == ["11.0", "10.0", "10.0%", "2.0%", SHORT, "64×64, 6 stages, 112 tiles in 1 wave"]
    assert cells(table, "1 |")[5] == "0.0%" and cells(table, "1 |")[-1] == "the same"
    known = ("Shapes of the tables above: the planner's choice takes 4.9% longer than the fastest plan (geometric mean of 2 shapes), "
             "at most 3% longer for 1 of them, at worst 10.0%.")  # fmt: skip
    assert table.startswith(known) and "drawn at random" not in table
    new = {**SEARCH, "shapes": [SEARCH["shapes"][0], SEARCH["shapes"][1] | {"unseen": True}]}
    assert ("Shapes drawn at random: the planner's choice takes 0.0% longer than the fastest plan (geometric mean of 1 shapes), "
            "at most 3% longer for 1 of them, at worst 0.0%.") in library_report.search_markdown(new)  # fmt: skip


def test_what_batch_invariance_costs():
    table = library_report.invariant_markdown(LIBRARY)
    assert cells(table, "N")[2:] == ["M = 1", "M = 128", "M = 4096"]
    assert cells(table, "7168")[1:] == ["16384", "1.50", "1.50", "-"]
    for entry in (older := json.loads(json.dumps(LIBRARY)))["shapes"]:
        entry["rows"] = [row for row in entry["rows"] if "invariant" not in row["name"]]
    assert library_report.invariant_markdown(older) == library_report.MISSING


def test_counters_where_deep_gemm_is_faster():
    table = library_report.slower_markdown(COUNTERS)
    assert cells(table, "0.980") == ["0.980", "120.4", "84.6", "35.0", "8.05", "0.50", "12", "library", "contiguous, 2 groups"]
    assert cells(table, " | 118.0")[-2:] == ["DeepGEMM", ""] and "| 0.0 |" not in table
    assert "No counters: masked, 2 groups, `ncu: no`" in table
    assert library_report.slower_markdown({**COUNTERS, "cases": []}).startswith("In none of them.")


def test_a_layer_by_the_way_its_linears_are_computed():
    table = library_report.layer_markdown(LAYER)
    assert cells(table, "16") == ["16", "120.0", "80.0", "88.0", "1.500", "1.100", "2.0e-02", "decode"]
    assert "Hidden size 4096" in table and "docs/results/07_layer.json" in table
    alone = {**LAYER, "rows": LAYER["rows"][:2], "missing": {"deep_gemm": "ImportError: gone"}}
    assert cells(library_report.layer_markdown(alone), "16")[3:6] == ["-", "1.500", "-"]
    assert "`ImportError: gone`" in library_report.layer_markdown(alone)


def test_the_readme_holds_the_means():
    text = library_report.readme_markdown(LIBRARY, MOE)
    assert cells(text, "DeepGEMM") == ["DeepGEMM", "1.31", "1.04", "0.99"]
    assert cells(text, "cuBLAS tensor") == ["cuBLAS tensor", "1.12", "0.96", "0.95"]
    assert "Against DeepGEMM 1.03 with contiguous groups and 1.25 with masked groups." in text and "5 shapes" in text
    assert "Against DeepGEMM" not in library_report.readme_markdown(LIBRARY, None)


# ---------------------------------------------------------------- plots and files


def figure_texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts + axes.get_yticklabels() + axes.get_xticklabels()]


def test_plots_draw_every_shape():
    import matplotlib

    matplotlib.use("Agg")
    speed = library_report.plot_speed(LIBRARY)
    texts = figure_texts(speed)
    assert {"1.26", "1.28", "1.40", "1.10", "0.99", "4096³", "2112×7168"} <= set(texts)
    assert [axes.get_title() for axes in speed.axes] == ["M = 1", "M = 128", "M = 4096"]
    points = [line for line in library_report.plot_roofline(LIBRARY).axes[0].lines if len(line.get_xdata()) == 1]
    assert len(points) == 2 * len(LIBRARY["shapes"])  # the library and DeepGEMM
    reading = library_report.plot_reading(LIBRARY).axes[0]
    thick = [line for line in reading.lines if line.get_linewidth() == 3]
    assert len(thick) == 1 and list(thick[0].get_xdata()) == [1, 128]


def test_all_is_written_into_the_pages(tmp_path, monkeypatch):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for name, record in (("LIBRARY", LIBRARY), ("HOST", HOST), ("MOE", MOE), ("SEARCH", SEARCH), ("LAYER", LAYER), ("COUNTERS", COUNTERS)):
        (tmp_path / "docs" / "results" / getattr(library_report, name)).write_text(json.dumps(record))
    for file in ("README.md", library_report.PAGE):
        shutil.copy(stage.root() / file, tmp_path / file)
    monkeypatch.setattr(stage, "root", lambda: tmp_path)
    written = library_report.write_docs()
    assert written == ["README.md", "docs/performance.md", *(f"docs/plots/{name}" for name in library_report.PLOTS)]
    assert all((tmp_path / name).stat().st_size for name in written)
    texts = [(tmp_path / file).read_text() for file in written[:2]]
    assert "| 1.31 |" in texts[0] and not any(library_report.MISSING in text for text in texts[1:])
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", texts[1]):
        assert (tmp_path / "docs" / image).exists()
    before = [(tmp_path / name).read_bytes() for name in written]
    library_report.write_docs()
    assert before == [(tmp_path / name).read_bytes() for name in written]


def test_tables_have_as_many_cells_as_columns():
    parts = (library_report.targets_markdown(LIBRARY, MOE, HOST), library_report.dense_markdown(LIBRARY),
             library_report.decode_markdown(LIBRARY), library_report.moe_markdown(MOE), library_report.host_markdown(HOST),
             library_report.search_markdown(SEARCH), library_report.readme_markdown(LIBRARY, MOE))  # fmt: skip
    for part in parts:
        for is_table, lines in itertools.groupby(part.splitlines(), key=lambda line: line.startswith("|")):
            widths = {line.count("|") for line in lines}
            assert not is_table or len(widths) == 1, part


def test_a_record_of_host_times_has_no_clocks_to_show():
    assert report.origin(HOST) == "NVIDIA H200, driver 580.1, 2026-01-02, commit 0123456789ab"
    run = "SM clock 1755 MHz (median), 612 W (max)"
    assert report.origin(HOST | TELEMETRY) == f"NVIDIA H200, driver 580.1, {run}, 2026-01-02, commit 0123456789ab"
