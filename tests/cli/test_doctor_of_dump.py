"""`flowcorr doctor` on a dump with captured samples."""

import json

import pytest
from instruments.doctor.plain_loop import dump_steps
from instruments.foreign_dumps import draw_steps

from flowcorr.cli import main
from tests.shallow import SHALLOW


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return dump_steps(tmp_path_factory.mktemp("clean"), steps=1)


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    return dump_steps(tmp_path_factory.mktemp("swapped"), "swapped_images", steps=1)


def test_a_clean_dump(clean, capsys):
    assert main(["doctor", str(clean), "--model", SHALLOW]) == 0
    judged = set(capsys.readouterr().out.splitlines()[0].replace(",", "").split())
    assert judged >= {"schedule", "before", "log_probs", "after", "noise", "embeddings", "trainer"}


def test_a_fault_is_printed_with_its_evidence(swapped, capsys):
    assert main(["doctor", str(swapped), "--model", SHALLOW]) == 2
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith(": swapped_images")
    assert "serious swapped_images: " in out


def test_json(swapped, capsys):
    assert main(["doctor", str(swapped), "--model", SHALLOW, "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    found, numbers = report["findings"][0], report["findings"][0]["numbers"]
    assert (found["cause"], numbers["check"], numbers["confidence"]) == ("swapped_images", "images", "likely")
    assert len(numbers["samples"]) == 4


def test_a_recipe_brings_its_reward(clean, capsys):
    """A reward of the loop's own is not the recipe's."""
    overrides = [f"model.path={SHALLOW}", "data.num_train=4", "data.num_heldout=2"]
    assert main(["doctor", str(clean), "--model", "tiny_jpeg_lora", *overrides]) == 1
    assert "warning reward: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "is a folder; give --model, the pipeline or recipe"),
        (["--model", SHALLOW, "actor.lr=1"], "actor.lr=1 has no effect on a pipeline"),
        (["--model", SHALLOW, "a.api_key=hidden"], "a.api_key=*** has no effect on a pipeline"),
        (["--model", "./nowhere"], "no such folder"),
    ],
)
def test_what_is_refused(arguments, message, clean, capsys):
    assert main(["doctor", str(clean), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_dump_without_samples_is_refused(tmp_path, capsys):
    assert main(["doctor", str(draw_steps(tmp_path)), "--model", SHALLOW]) == 2
    assert f"{tmp_path} holds no" in capsys.readouterr().err


def test_a_family_that_flowcorr_lacks_is_refused_by_name(clean, tmp_path, capsys):
    (tmp_path / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    assert main(["doctor", str(clean), "--model", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "class='SanaPipeline'" in err
    assert "choose from" in err
    assert "QwenImagePipeline" in err


def test_a_recipe_needs_no_model_of_its_own(capsys):
    assert main(["doctor", "tiny_jpeg_lora", "--model", SHALLOW]) == 2
    assert f"--model {SHALLOW}" in capsys.readouterr().err
