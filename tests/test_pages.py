"""The pages: their links lead somewhere, and what they repeat from the code is true."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import flowcorr

ROOT = Path(flowcorr.__file__).parent.parent
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        ".github/*.md",
        "examples/**/*.md",
        "recipes/*.md",
        "flowcorr/**/*.md",
        "tests/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^()\s]+)\)")


@cache
def _anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else (page.parent / name).resolve()
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == flowcorr.__version__
    assert citation["license"] == _project()["license"]


def test_every_constraint_lies_within_its_range():
    lines = (ROOT / "examples" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    needed = [Requirement(text) for text in _project()["dependencies"]]
    assert {requirement.name.lower() for requirement in needed} <= pinned.keys()
    extras = [Requirement(text) for extra in ("ocr", "tensorboard", "ray") for text in _extras()[extra]]
    outside = [
        str(requirement)
        for requirement in (*needed, *extras)
        if not requirement.specifier.contains(pinned[requirement.name.lower()])
    ]
    assert outside == []


def _project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _extras():
    return _project()["optional-dependencies"]


def test_the_code_of_the_readme_runs_as_printed(capsys):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "rollout_corr/" in capsys.readouterr().out
