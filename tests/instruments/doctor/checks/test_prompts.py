import copy
from types import SimpleNamespace

import pytest
import torch
from instruments.doctor.faults import (
    GUIDED,
    SHORT,
    SMALL,
    another_checkpoint,
    assert_named,
    blank,
    check,
    cut,
    finding_of,
    other_words,
    separate,
    shorter,
)
from PIL import Image
from tiny_pipelines import FLUX_SIZE, build_tiny_flux_kontext, connect, make_sensitive, stir

from flowcorr.instruments.doctor import examine
from tests.planted.mistakes import (
    no_references,
    one_image_of_another,
    pooled_of_another,
    references_reversed,
    rolled,
)
from tests.planted.plants import (
    conditioned,
    merging,
    misplaced,
    on_references,
    own_engine,
    perturbed,
    seeing,
)
from tests.prompts import prompts_of

POOLED = {"fits": "another's", "field": "pooled_prompt_embeds"}
FAULTS = {
    "other prompts": (conditioned(other_words, told=True), {}, {"field": "pooled_prompt_embeds"}),
    "another sequence length": (
        conditioned(shorter, told=True),
        {},
        {"field": "prompt_embeds", "engine_shape": [4, 15, 64], "shape": [4, 16, 64]},
    ),
    "mixed up unnoticed": (conditioned(rolled, told=False), {}, {"fits": "others"}),
    "cut after two tokens unnoticed": (conditioned(cut(2), told=False), {}, {"fits": "cut", "tokens": 2}),
    "cut after four tokens unnoticed": (conditioned(cut(4), told=False), {}, {"fits": "cut", "tokens": 4}),
    "blank after two tokens, guided": (
        conditioned(blank(2), told=False),
        {"sampling": GUIDED},
        {"fits": "blank", "tokens": 2},
    ),
    "blank after four tokens, bfloat16": (
        conditioned(blank(4), told=False),
        {"rollout": {"dtype": "bfloat16"}},
        {"fits": "blank", "tokens": 4},
    ),
    "pooled of another": (conditioned(pooled_of_another, told=False), {}, POOLED),
    "pooled of another, guided": (
        conditioned(pooled_of_another, told=False),
        {"sampling": GUIDED},
        POOLED,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_prompts(small_run, fault):
    plant, sections, numbers = FAULTS[fault]
    run = small_run(**sections)
    engine = separate(run)
    plant(engine)
    assert_named(check(run, engine, float32=False), "embeddings", **numbers)


def test_one_image_with_the_prompt_of_another(small_run):
    run = small_run(rollout={"n": 8})
    engine = separate(run)
    one_image_of_another(engine)
    assert_named(check(run, engine, float32=False), "embeddings", fits="others", samples=[1])


# Reference images --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def editing(tmp_path_factory, make_config):
    """A FLUX.1 Kontext whose velocities change by a half without the reference image: run and prompts."""
    path = make_sensitive(build_tiny_flux_kontext(tmp_path_factory.mktemp("kontext")))
    height, width = FLUX_SIZE
    config = make_config(
        model={"path": str(path), "max_sequence_length": 8},
        sampling={**SHORT, "height": height, "width": width},
        rollout=SMALL,
    )
    prompts = prompts_of(["cat", "dog"], images=1)
    _, actor, _, conditioning = connect(config, prompts)
    stir(actor, 0.02)
    return SimpleNamespace(config=config, actor=actor, conditioning=conditioning, prompts=prompts)


def examined(run, plant, **options):
    engine = own_engine(run.actor, run.config)
    plant(engine)
    engine.sync(run.actor.weights.snapshot())
    return examine(run.actor, engine, run.conditioning, float32=False, **options)


def test_healthy_reference_images(editing):
    report = examined(editing, lambda engine: None, prompts=editing.prompts)
    assert report.causes() == report.causes("warning") == []
    assert "references" in report.causes("healthy")


REFERENCES = {
    "missing": (conditioned(no_references, told=False), {"fits": "none"}),
    "zeros": (on_references(torch.zeros_like), {"fits": "zeros"}),
    "of another": (on_references(lambda rows: rows.roll(1, 0)), {"fits": "others"}),
    "unscaled": (on_references(lambda rows: rows / 0.3611 + 0.1159), {"fits": "without the VAE's scaling"}),
    "one per cent too large": (on_references(lambda rows: 1.01 * rows), {"fits": "scaled"}),
    "misplaced": (seeing(misplaced), {"fits": "at the places of the image that is drawn"}),
    "noisy": (
        on_references(lambda rows: perturbed(rows, 0.2, torch.Generator().manual_seed(1))),
        {"fits": "unknown"},
    ),
}


@pytest.mark.parametrize("fault", REFERENCES)
def test_other_references(fault, editing):
    plant, numbers = REFERENCES[fault]
    assert_named(examined(editing, plant, prompts=editing.prompts), "references", **numbers)


def test_the_scale_of_references_is_measured(editing):
    report = examined(editing, on_references(lambda rows: 1.2 * rows + 0.1))
    assert_named(report, "references", fits="scaled")
    found = finding_of(report, "references").numbers
    assert (found["scale"], found["shift"]) == pytest.approx((1.2, 0.1), rel=1e-3)


@pytest.mark.parametrize("known", [True, False], ids=["images known", "images not known"])
def test_red_and_blue_of_references_exchanged(known, editing):
    family = editing.actor.family

    def encoded(prompt):
        return [Image.merge("RGB", image.split()[::-1]) for image in family.fitted_references(prompt)]

    other = copy.copy(family)
    other.fitted_references = encoded
    wrong = other.encode_references(editing.prompts)["references"]

    def change(engine, conditioning):
        return {**conditioning, "references": wrong[-len(conditioning["references"]) :]}

    if known:
        report = examined(editing, conditioned(change, told=False), prompts=editing.prompts)
    else:
        report = examined(editing, references_reversed)
    assert_named(report, "references", fits="with red and blue exchanged")


def test_other_weights_are_no_other_references(editing):
    report = examined(editing, merging(another_checkpoint), prompts=editing.prompts)
    assert report.causes() == ["weights"]
