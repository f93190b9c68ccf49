"""The user guide's snippets run, in order, on this machine."""

import re

from hopperlab import stage


def test_every_snippet_of_the_guide_runs(capsys):
    guide = (stage.root() / "docs" / "library.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)
    assert len(snippets) > 10
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/library.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "offsets[4] is 47; a has M = 20" in printed  # the last one shows an error
