"""The harness finds stages by what lies on disk and knows none by name."""

import torch

from hopperlab import stage


def test_finds_a_stage_it_has_never_heard_of(tmp_path, monkeypatch):
    folder = tmp_path / "stages" / "07_new"
    folder.mkdir(parents=True)
    (folder / "stage.py").write_text(
        "from hopperlab.stage import Step\nTITLE = 'new'\n"
        "STEPS = [Step('one', 'a step', 'one.cu', 'cuda', lambda a, b, out: None)]\n"
    )
    (tmp_path / "stages" / "not_a_stage").mkdir()
    monkeypatch.setattr(stage, "root", lambda: tmp_path)
    (found,) = stage.find()
    assert (found.number, found.name, found.title, found.steps[0].name) == ("07", "07_new", "new", "one")


def test_cases_go_round_recipes_formats_and_output_types():
    step = stage.Step("s", "", "s.cu", "cuda", None, recipes=(("tensor", "tensor"), ("row", "row")))
    cases = list(stage.cases(step))
    assert {case.out_dtype for case in cases} == {torch.bfloat16, torch.float32, torch.float16}
    assert len({case.formats for case in cases}) == 4 and len({case.recipes for case in cases}) == 2
    assert len({str(case) for case in cases}) == len(cases)


def test_no_stage_is_named_in_the_harness():
    names = [folder.name for folder in stage.folders()]
    for path in (stage.root() / "common").rglob("*.py"):
        assert not [name for name in names if name in path.read_text()], path
