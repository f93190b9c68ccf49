"""Snippets of the documentation run, each page's in order, on this machine, and print what the page says they print."""

import re

import pytest

from hopperlab import stage

DOCS = stage.root() / "docs"
# A snippet, and the text block right behind it, if there is one: what it prints.
SNIPPET = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.M | re.S)
PAGES = sorted(path.name for path in DOCS.glob("*.md") if SNIPPET.search(path.read_text()))


def test_the_pages_for_users_have_snippets():
    assert set(PAGES) >= {"library.md", "integration.md", "tuning.md", "parallel.md"}


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_runs(page, capsys, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = (DOCS / page).read_text()
    names: dict = {"__name__": f"docs/{page}"}
    for found in SNIPPET.finditer(text):
        line = text[: found.start()].count("\n") + 1
        exec(compile("\n" * line + found[1], f"docs/{page}", "exec"), names)  # errors name the page's own lines
        printed = capsys.readouterr().out
        assert found[2] in (None, printed), f"docs/{page}, line {line}, prints:\n{printed}"


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`(?!\])", "", (DOCS / page).read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (DOCS / target).exists(), f"docs/{page} links to {target}"
