"""What the README shows is what the record says; records are written whole or not at all."""

import json
import re

import pytest

from hopperlab import report, stage

RECORD = report.published()


STEPS = [(found, step) for found in stage.find() for step in found.steps]


@pytest.mark.parametrize("found, step", STEPS, ids=[f"{found.name}-{step.name}" for found, step in STEPS])
def test_the_h200_record_of_a_step_is_right_and_timed(found, step):
    row = report.published_step(RECORD, found.name, step.name)
    if row is None:
        pytest.skip(f"docs/results/{report.LADDER} holds no H200 run of this step yet")
    assert row["ok"] and all(case["ok"] for case in row["cases"]) and row["timing"]["microseconds"] > 0


def test_the_record_names_the_card_and_what_it_did():
    assert RECORD["machine"]["name"].startswith("NVIDIA H") and RECORD["commit"] and "uncommitted" not in RECORD["commit"]
    assert {"sm_clock_mhz", "power_w", "temperature_c"} <= set(RECORD["telemetry"])


def test_the_readme_shows_the_record():
    text = (stage.root() / "README.md").read_text()
    shown = re.search(r"<!-- ladder:begin -->\n(.*?)\n<!-- ladder:end -->", text, re.S)[1]
    assert shown == report.ladder_markdown(RECORD), "run: make docs"


def test_the_page_on_parallel_layers_shows_the_record():
    text = (stage.root() / "docs" / "parallel.md").read_text()
    shown = re.search(r"<!-- parallel:begin -->\n(.*?)\n<!-- parallel:end -->", text, re.S)[1]
    assert shown == report.parallel_markdown(report.published(report.PARALLEL)), "run: make docs"


def test_update_readme_replaces_only_what_lies_between_the_marks(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- ladder:begin -->\nold\n<!-- ladder:end -->\nafter\n")
    assert report.update_readme(path, RECORD)
    assert path.read_text().startswith("before\n<!-- ladder:begin -->\n| stage") and path.read_text().endswith("end -->\nafter\n")
    assert not report.update_readme(path, RECORD)
    path.write_text("no marks")
    with pytest.raises(ValueError, match="no <!-- ladder:begin -->"):
        report.update_readme(path, RECORD)


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = report.save({"a": 1}, tmp_path / "deep" / "record.json")
    with pytest.raises(TypeError):
        report.save({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}


def test_every_published_record_names_its_card_and_commit():
    for path in (stage.root() / "docs" / "results").glob("*.json"):
        record = json.loads(path.read_text())
        assert record["machine"]["driver"] and record["commit"] and record["date"] and record["versions"], path


def test_steps_are_compared_with_the_last_one_that_computes_the_same_kind_of_output():
    cases = lambda output: [{"case": f"64x64x128 e4m3, tensor -> {output}"}]  # noqa: E731
    rows = [{"step": str(i), "language": language, "cases": cases(output), "timing": {"tflops": 1}}
            for i, (language, output) in enumerate([("cuda", "bfloat16"), ("triton", "bfloat16"), ("cuda", "float32"), ("cuda", "bfloat16")])]  # fmt: skip
    assert [report.last_step(rows, row) for row in rows] == [None, None, None, rows[0]]


@pytest.mark.parametrize("plot", [report.plot_ladder, report.plot_roofline])
def test_plots_draw_every_timed_step(plot):
    import matplotlib

    matplotlib.use("Agg")
    figure = plot(RECORD)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts + axes.get_yticklabels()]
    for row in RECORD["steps"]:
        assert any(row["step"] in text for text in texts), (row["step"], texts)
