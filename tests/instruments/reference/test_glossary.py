"""Words of the tools."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import flowcorr
from flowcorr.health.table import find_metric
from flowcorr.instruments.reference.explain import explanation
from flowcorr.instruments.reference.glossary import SYNONYMS, WATCHED, WORDS, find_word

ROOT = Path(flowcorr.__file__).parent.parent


@pytest.mark.parametrize("name", WATCHED)
def test_a_word_says_when_to_worry_or_its_first_metric_does(name):
    assert name in WORDS
    watched = WATCHED[name]
    rows = [find_metric(metric) for metric in watched.metrics]
    assert all(rows)
    assert bool(watched.worry) == bool(watched.remedy)
    assert watched.worry or rows[0].rule is not None


def test_synonyms_lead_to_words():
    assert set(SYNONYMS.values()) <= WORDS.keys()
    assert all(name == name.lower() for name in (*WORDS, *SYNONYMS))


@pytest.mark.parametrize("name", ["SDE window", "sde-windows", "Sde_Window", " SDE  window "])
def test_a_word_is_known_in_every_spelling(name):
    assert find_word(name) == "sde window"


MARKED = re.compile(r"\*\*([A-Za-z][a-z -]{1,30})\*\*")


@cache
def marked(page):
    """Words that a page marks as terms; marked sentences and answers are none."""
    text = page.read_text(encoding="utf-8")
    others = {
        "no",
        "editing",
        "Your own",
        "What we found",
        "Several nodes",
        "Videos",
        "An add-on",
        "A trainer",
    }
    words = {word for word in MARKED.findall(text) if len(word.split()) < 3} - others
    return sorted(words)


PAGES = [ROOT / "README.md", *sorted((ROOT / "flowcorr").glob("*/README.md"))]


def test_every_word_that_a_page_marks_is_known():
    words = {word for page in PAGES for word in marked(page)}
    assert {"clip range", "decoupled", "rollout"} <= words
    assert [word for word in sorted(words) if not explanation(word)] == []


VOCABULARY = """
clip range; noise floor; SDE window; r; group; rejection; probe; ratio; log-prob; old; current; band; threshold;
residual; advantage; sigma; noise level; step index; exact KL; KL; k3; actor; held out; dump; finding; recompute; latent
element; scale; cosine; norm; changed; outside clip; clip needed; witness; digest; IS; RS; TIS; IcePop; adapter; CFG;
precision; peak; phase; mini-batch; micro-batch; token; sequence; geometric; member; term; score centering; filler
sample; cps; grpo_guard
"""


@pytest.mark.parametrize("name", [" ".join(name.split()) for name in VOCABULARY.split(";")])
def test_the_vocabulary_of_pages_is_known(name):
    assert explanation(name)


def test_every_cause_that_a_finding_names_is_known():
    """Causes that are written where a finding is made; rules, checks and faults have tables."""
    causes = {
        keyword.value.value
        for path in sorted((ROOT / "flowcorr" / "instruments").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "cause" and isinstance(keyword.value, ast.Constant) and keyword.value.value
    }
    assert {"trainer_memory", "learning", "ending"} <= causes
    assert [cause for cause in sorted(causes) if not explanation(cause)] == []
