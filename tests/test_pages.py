"""The pages: their links lead somewhere, their commands can be typed, and what they repeat from the code is true."""

import importlib.util
import re
import shlex
import tomllib
import warnings
from functools import cache
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

import flowcorr
from flowcorr.cli.app import parse
from flowcorr.config import load, recipe_names
from flowcorr.instruments.plan.devices import find_gpu
from flowcorr.instruments.plan.preflight import check_settings
from flowcorr.instruments.reference.explain import explanation

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


_PLACEHOLDERS = ("RECIPE", "RUN", "FOLDER/config.yaml", "my_recipe.yaml", "my_dump", "...")  # a reader's own
_PROGRAMS = ("flowcorr", "python", "torchrun", "accelerate")


def _commands(shell):
    """The simple commands of a shell text as lists of words, without redirections; every variable is 0."""
    shell = re.sub(r"\$\w+", "0", shell.replace("\\\n", " "))
    for inner in re.findall(r"\$\((.*?)\)", shell):
        yield from _commands(inner)
    for line in re.sub(r"\$\(.*?\)", "", shell).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words = [*lexer, ";"]
        while words:
            end = next(place for place, word in enumerate(words) if set(word) <= set(";&|"))
            command, words = words[:end], words[end + 1 :]
            while command and re.match(r"[A-Z_]+=", command[0]):
                del command[0]
            if ">" in command:
                command = command[: command.index(">")]
            yield command
            if "bash" in command and "-c" in command:
                yield from _commands(command[-1])


def _printed_commands(page):
    """The commands of a page: all in its blocks of shell, and those in its sentences that name their subject."""
    text = page.read_text(encoding="utf-8")
    blocks = r"^ *```bash\n(.*?)^ *```"
    for block in re.findall(blocks, text, flags=re.MULTILINE | re.DOTALL):
        yield from _commands(block)
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", prose):
        if re.match(r"([A-Z_]+=\S+ )*(\S+/)?(flowcorr \w+ [^-]|python |torchrun |accelerate launch )", span):
            yield from _commands(re.sub(r" \[.*\.\.\.\]", "", span).replace("\n", " "))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=f"{page.relative_to(ROOT)}: {' '.join(command)}")
        for page in PAGES
        for command in _printed_commands(page)
        if command and Path(command[0]).name in _PROGRAMS
    ],
)
def test_commands_can_be_typed(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "examples")  # the code of one's own that pages name
    _check(Path(command[0]).name, command[1:])


def _check(program, words):
    if program == "flowcorr":
        _check_flowcorr(parse(words))
    elif program == "torchrun":
        launched = get_args_parser().parse_args(words)
        assert launched.module
        _check_module(launched.training_script, launched.training_script_args)
    elif program == "accelerate":
        assert words[0] == "launch"
        launched = launch_command_parser().parse_args(words[1:])
        assert launched.module
        _check_module(launched.training_script, launched.training_script_args)
    elif words[0] == "-m":
        _check_module(words[1], words[2:])
    else:
        assert (ROOT / words[0]).is_file()


def _check_module(name, words):
    if name == "flowcorr":
        _check_flowcorr(parse(words))
        return
    assert importlib.util.find_spec(name) is not None
    if name == "pytest":
        assert [word for word in words if word.startswith("tests") and not (ROOT / word).exists()] == []


def _check_flowcorr(arguments):
    if getattr(arguments, "gpu", "NAME") != "NAME":
        find_gpu(arguments.gpu)
    for name in getattr(arguments, "names", ()):
        if not name.isupper():
            explanation(name)
    if getattr(arguments, "recipe", None) is not None:
        _check_recipe(arguments.recipe, arguments.overrides)


def _check_recipe(recipe, overrides):
    if recipe not in recipe_names():
        assert recipe in _PLACEHOLDERS or recipe.startswith("runs/")
        recipe = "qwen_image_ocr_lora_decoupled"  # as good as any
    with warnings.catch_warnings(
        record=True
    ) as caught:  # also of the recipe's own keys, which may then do nothing
        warnings.simplefilter("always")
        check_settings(load(recipe, overrides))
    given = {override.partition("=")[0] for override in overrides}
    assert given.isdisjoint(str(warning.message).partition("=")[0] for warning in caught)
