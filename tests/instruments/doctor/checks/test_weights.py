import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from instruments.doctor.faults import (
    GUIDED,
    SHORT,
    SMALL,
    WHOLE,
    another_checkpoint,
    assert_named,
    check,
    coarse,
    finding_of,
    one_block_missing,
    separate,
)

from flowcorr.instruments.doctor import examine
from flowcorr.instruments.doctor.checks.weights import check_lora
from flowcorr.instruments.doctor.trials import Trial
from flowcorr.records import Scores
from flowcorr.rollout import InProcessEngine
from tests.planted.mistakes import head_missing
from tests.planted.plants import (
    deaf_after_the_first_sync,
    in_some_images,
    merging,
    one_sync_behind,
    returning,
    scaled_up,
    without_adapters,
)


def half_of_the_layers(name):
    return "blocks.0" in name or "blocks.1" in name


FAULTS = {
    "one sync behind": ("sync", one_sync_behind, {}, {"weights": "previous"}),
    "deaf after the first sync": ("sync", deaf_after_the_first_sync, {}, {"weights": "current"}),
    "another checkpoint": ("weights", merging(another_checkpoint), {}, {}),
    "another checkpoint under guidance": ("weights", merging(another_checkpoint), {"sampling": GUIDED}, {}),
    "a block's feed-forward lost": ("weights", merging(one_block_missing), {"model": WHOLE}, {}),
    "an attention head lost": ("weights", merging(head_missing), {"sampling": GUIDED}, {}),
    "a checkpoint quantised unasked": (
        "weights",
        lambda engine: setattr(engine, "config", replace(engine.config, emulate="int8")),
        {},
        {},
    ),
    "an adapter on misnamed layers": (
        "lora",
        merging(without_adapters(lambda name: False)),
        {},
        {"lost": "all"},
    ),
    "an adapter on half of the layers": (
        "lora",
        merging(without_adapters(half_of_the_layers)),
        {"model": WHOLE},
        {"lost": "layers"},
    ),
    "an adapter without alpha over rank": ("lora", merging(scaled_up(0.5)), {}, {"lost": "scale"}),
    "an adapter applied twice": ("lora", merging(scaled_up(2.0)), {}, {"lost": "scale"}),
    "half an adapter, int4": (
        "lora",
        merging(without_adapters(half_of_the_layers)),
        {"model": WHOLE, "rollout": {"emulate": "int4"}},
        {},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_weights(small_run, fault):
    name, plant, sections, numbers = FAULTS[fault]
    run = small_run(**sections)
    engine = separate(run)
    plant(engine)
    assert_named(check(run, engine, float32=False), name, **numbers)


def test_a_gap_of_some_images_alone_says_which(small_run):
    """The first image of each prompt agrees to the bit, and so tells nothing of the others."""
    run = small_run(rollout={"n": 3})
    engine = separate(run)
    in_some_images(lambda group, member: member == 1, lambda velocity, *rest: 1.05 * velocity(*rest))(engine)
    assert_named(check(run, engine, float32=False), "weights", samples=[1, 4])


@pytest.mark.parametrize("change", [1, -1])
def test_a_version_that_is_not_that_of_the_weights_that_sampled_is_named(change, small_run):
    run = small_run()
    engine = separate(run)
    returning(policy_versions=lambda rollout: rollout.policy_versions + change)(engine)
    told = run.actor.weights.version + 2
    assert_named(check(run, engine), "sync", sent_version=told, sampled_version=told + change)


def test_a_coarse_engine_warns(small_run):
    run = small_run(model=WHOLE)
    engine = separate(run)
    merging(coarse)(engine)
    report = check(run, engine)
    assert report.causes() == []
    assert report.causes("warning") == ["weights"]


@pytest.mark.parametrize(("precision", "status"), [(0.3, "healthy"), (0.01, "warning")])
def test_how_much_of_a_change_arrives_is_known_as_well_as_precision_allows(precision, status):
    """A change of 15 % of the velocity, of which the engine lacks a fifth."""
    draw = torch.Generator().manual_seed(0)
    without, change, *errors = torch.randn(4, 1, 1, 10_000, generator=draw)
    change, coarse = 0.15 * change, [precision * error for error in errors]

    def trial(means, engine):
        window = SimpleNamespace(means=engine, stds=torch.ones(1, 1))
        rollout = SimpleNamespace(window=window)
        scores = Scores(log_probs=torch.zeros(1, 1), means=means, stds=torch.ones(1, 1))
        made = Trial(rollout=rollout, actor=None, training_step=0, given_scores=scores)
        vars(made).update(still=torch.zeros_like(means), stds=torch.ones(1, 1))
        return made

    trials = SimpleNamespace(
        bare=trial(without, without + coarse[0]),
        moved=trial(without + change, without + 0.8 * change + 0.8 * coarse[1]),
        moved_under={"bare": without},
    )
    config = SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(rank=4)))
    assert check_lora(SimpleNamespace(config=config, trials=trials, usual_gap=precision)).level == status


@pytest.fixture(scope="module")
def distilled_run(make_config, tmp_path_factory):
    """A model with guidance as an input, which bfloat16 rounds from 3 to 3.008."""
    height, width = tiny_pipelines.FLUX_SIZE
    path = tiny_pipelines.build_tiny_flux(tmp_path_factory.mktemp("flux"), torch.bfloat16)
    config = make_config(
        model={"path": str(path), "max_sequence_length": 16, "dtype": "bfloat16"},
        sampling={**SHORT, "height": height, "width": width, "guidance_scale": 3.0},
        rollout={**SMALL, "dtype": "bfloat16"},
    )
    _, actor, engine, conditioning = tiny_pipelines.connect(config, ["cat", "dog"])
    tiny_pipelines.stir(actor)
    engine.sync(actor.weights.snapshot())
    return actor, engine, conditioning


def test_guidance_that_both_stacks_round_alike_is_no_error_of_either(distilled_run, monkeypatch):
    actor, engine, conditioning = distilled_run
    assert actor.guidance.guidance_scale == 3.008
    assert examine(actor, engine, conditioning, float32=False).causes() == []
    velocity = engine.family.velocity
    monkeypatch.setattr(engine, "family", copy.copy(engine.family))
    monkeypatch.setattr(engine.family, "velocity", lambda *arguments: 1.015 * velocity(*arguments))
    report = examine(actor, engine, conditioning, float32=False)
    assert report.causes() == ["weights"]
    finding = finding_of(report, "weights")
    assert finding.numbers["value"] > 2 * finding.numbers["limit"]


def test_a_fresh_adapter_that_never_arrives(small_run):
    run = small_run(stirred=False)
    engine = separate(run)
    deaf_after_the_first_sync(engine)
    report = check(run, engine)
    assert report.causes() == ["lora"]
    assert finding_of(report, "lora").numbers["lost"] == "all"


@pytest.mark.parametrize(
    ("plant", "weights"), [(one_sync_behind, "previous"), (deaf_after_the_first_sync, "current")]
)
def test_full_weights_from_before(full_run, plant, weights):
    engine = separate(full_run)
    plant(engine)
    report = check(full_run, engine, float32=False)
    assert report.causes() == ["sync"]
    assert finding_of(report, "sync").numbers["weights"] == weights


def test_full_weights_of_which_half_arrive(full_run):
    engine, first = separate(full_run), full_run.actor.weights.snapshot().tensors

    def half(tensors, merge):
        return merge({name: first[name] if "blocks.1" in name else value for name, value in tensors.items()})

    merging(half)(engine)
    report = check(full_run, engine, float32=False)
    assert report.causes() == ["sync"]
    assert finding_of(report, "sync").numbers["lost"] == "layers"


@pytest.mark.parametrize(("attention", "asked"), [("FLASH_ATTN", ["attention"]), ("SDPA", [])])
def test_an_engine_may_describe_itself(attention, asked, small_run):
    """Plain attention is not asked for where the engine has it."""

    class Described(InProcessEngine):
        def describe(self):
            return {"attention": attention, "dtype": "float32"}

    run = small_run(model=WHOLE)
    engine = separate(run)
    engine.__class__ = Described
    merging(coarse)(engine)
    report = check(run, engine)
    assert report.causes("warning") == ["weights", *asked]
    numbers = finding_of(report, "attention").numbers
    assert (numbers["engine_attention"], numbers["engine_dtype"]) == (attention, "float32")
    assert numbers["actor_attention"] == "JointAttnProcessor2_0"
