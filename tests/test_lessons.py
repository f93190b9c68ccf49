"""Every lesson runs top to bottom on this machine, and is committed with outputs from an H200."""

import re

import nbformat
import pytest

from hopperlab import lesson, report, stage

LESSONS = [folder / "lesson.ipynb" for folder in stage.folders() if (folder / "lesson.ipynb").exists()]
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=[path.parent.name for path in LESSONS])


@pytest.mark.parametrize("folder", stage.folders(), ids=[folder.name for folder in stage.folders()])
def test_every_stage_has_a_lesson(folder):
    assert folder / "lesson.ipynb" in LESSONS


@each_lesson
def test_runs_top_to_bottom(path, tmp_path):
    report.execute_lesson(path, tmp_path / "executed.ipynb")
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")


@each_lesson
def test_is_kept_with_outputs_from_an_h200(path):
    record = report.published()
    if any(report.published_step(record, path.parent.name, step.name) is None for step in stage.load(path.parent).steps):
        pytest.skip(f"docs/results/{report.LADDER} holds no H200 run of this stage yet, so its lesson has no outputs to keep")
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run: hopperlab report --lessons, on an H200"
    outputs = "".join(str(cell.outputs) for cell in code)
    assert "CUDA kernels run on: H200" in outputs
    assert "'output_type': 'error'" not in outputs and "stderr" not in outputs
    assert not re.search(r"/(home|root|work|tmp)/", outputs)


@each_lesson
def test_shows_code_from_its_files_only(path):
    """CUDA and kernels in Triton are included, never pasted: no markdown or code cell holds device code."""
    for cell in nbformat.read(path, as_version=4).cells:
        assert not re.search(r"__global__|__shared__|@triton\.jit", cell.source), cell.source[:200]


def test_extract_finds_functions_whole(tmp_path):
    source = tmp_path / "k.cu"
    source.write_text("int x;\n// says why\ntemplate <int N>\n__device__ int f(int a) {\n  if (a) { return 1; }\n  return g(a);\n}\nint g(int);\n")
    assert lesson.extract(source, "f") == "// says why\ntemplate <int N>\n__device__ int f(int a) {\n  if (a) { return 1; }\n  return g(a);\n}"
    source.write_text("// a pair\nstruct alignas(8) Pair {\n  int f() const { return x; }\n  int x, y;\n};\nint g(Pair p) { return p.x; }\n")
    assert lesson.extract(source, "Pair") == "// a pair\nstruct alignas(8) Pair {\n  int f() const { return x; }\n  int x, y;\n};"
    source.write_text("int f();\n")
    python = tmp_path / "k.py"
    python.write_text("import a\n\n\n@jit\ndef f(x,\n      y):\n    return x\n\n\ndef g():\n    pass\n")
    assert lesson.extract(python, "f") == "@jit\ndef f(x,\n      y):\n    return x"
    with pytest.raises(ValueError, match="k.cu has no function h"):
        lesson.extract(source, "h")


def test_diff_shows_what_changed(tmp_path):
    (tmp_path / "a.cu").write_text("one\ntwo\n")
    (tmp_path / "b.cu").write_text("one\nthree\n")
    assert "-two\n+three" in lesson.diff(tmp_path, "a.cu", "b.cu").data


def test_figures_formats_nested_values():
    table = lesson.figures([{"a": {"b": 1.234}, "c": "x"}, {"c": "y"}], {"first": "a.b:.1f", "second": "c"}).data
    assert table.splitlines() == ["| first | second |", "| --- | --- |", "| 1.2 | x |", "| - | y |"]
