import copy
import re

import pytest
import torch

from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import LoraConfig
from flowcorr.errors import BatchError
from flowcorr.models import load_family
from tests.actor.updates import FULL, assert_same, weights
from tests.tolerances import MEANS


@pytest.mark.parametrize(
    ("rollout", "rank", "kl_coef", "kept"),
    [
        ({}, 4, 0.1, {"synced": False, "base": False, "reference": False}),
        ({"dtype": "bfloat16"}, 4, 0.0, {"synced": True, "base": True, "reference": False}),
        ({"staleness": 1}, 0, 0.1, {"synced": True, "base": True, "reference": True}),
        ({"placement": "ray"}, 4, 0.0, {"synced": True, "base": False, "reference": False}),
        (
            {"name": "vllm_omni", "dtype": "bfloat16", "staleness": 1},
            4,
            0.1,
            {"synced": True, "base": False, "reference": False},
        ),
        ({"name": "vllm_omni"}, 0, 0.1, {"synced": True, "base": False, "reference": True}),
    ],
)
def test_weights_are_copied_only_where_a_copy_is_needed(make_config, rollout, rank, kl_coef, kept):
    config = make_config(model={"lora": LoraConfig(rank=rank)}, rollout=rollout, actor={"kl_coef": kl_coef})
    actor = DiffusionActor(load_family(config.model), config)
    weights = actor.weights
    assert kept == {
        "synced": len(weights.for_engine().tensors) > 0,
        "base": weights.untrained is not weights.transformer,
        "reference": weights.reference is not weights.transformer,
    }


@pytest.mark.filterwarnings("ignore:model.lora.dtype=bfloat16")
def test_an_average_of_bfloat16_weights_moves_by_thousandths(make_run):
    run = make_run(actor={"ema": 0.999}, model={"lora": LoraConfig(rank=4, dtype="bfloat16")})
    run.stir()
    run.actor.weights.average = {name: value.float() for name, value in weights(run).items()}
    before = {name: value.clone() for name, value in run.actor.weights.average.items()}
    with torch.no_grad():
        for parameter in run.actor.weights.parameters.values():
            parameter.mul_(1.0625)
    run.actor.weights.update_average()
    after = weights(run)
    expected = {name: value + 0.001 * (after[name].float() - value) for name, value in before.items()}
    assert_same(run.actor.weights.average, expected, rtol=2e-7, atol=0)
    assert any((run.actor.weights.average[name] != value).any() for name, value in before.items())
    with run.actor.weights.averaged():
        assert {value.dtype for value in weights(run).values()} == {torch.bfloat16}


def test_the_average_follows_the_weights(make_run):
    run = make_run(actor={"ema": 0.75, "lr": 1e-2})
    before = weights(run)
    run.update(run.batch(), training_step=1)
    after = weights(run)
    assert_same(run.actor.weights.average, {name: 0.75 * before[name] + 0.25 * after[name] for name in after})
    with run.actor.weights.averaged():
        assert_same(weights(run), run.actor.weights.average, rtol=0, atol=0)
    assert_same(weights(run), after, rtol=0, atol=0)


def test_the_average_is_left_when_an_evaluation_fails(make_run):
    run = make_run(actor={"ema": 0.75, "lr": 1e-2})
    run.update(run.batch(), training_step=1)
    after = weights(run)
    with pytest.raises(KeyError), run.actor.weights.averaged():
        raise KeyError
    assert_same(weights(run), after, rtol=0, atol=0)


def test_full_fine_tuning_moves_every_weight(make_run, tmp_path):
    run = make_run(model=FULL)
    names = {name for name, _ in run.family.transformer.named_parameters()}
    assert run.actor.weights.parameters.keys() == names
    before = weights(run)
    run.update(run.batch(), training_step=1)
    moved = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
    # The last block's text stream ends in the block: its query and what follows it have no effect.
    assert len(moved) > 0.9 * len(names)
    assert_same(dict(run.actor.weights.merged({})), dict(run.family.transformer.state_dict()), rtol=0, atol=0)

    run.actor.weights.save(tmp_path)
    loaded = type(run.family.transformer).from_pretrained(tmp_path / "transformer")
    assert_same(dict(loaded.state_dict()), dict(run.family.transformer.state_dict()), rtol=0, atol=0)


def test_a_saved_adapter_holds_the_average(make_run, tmp_path):
    run = make_run(model={"lora": LoraConfig(rank=4, alpha=2.0)}, actor={"ema": 0.5, "lr": 1e-2})
    run.update(run.batch(), training_step=1)
    run.actor.weights.save(tmp_path)
    other = load_family(run.config.model)
    other.pipeline.load_lora_weights(str(tmp_path))
    rollout = run.sample()
    inputs = (
        rollout.window.latents[:, 0],
        rollout.window.timesteps[:, 0],
        rollout.sample_conditioning(),
        run.actor.guidance,
    )
    with torch.no_grad():
        got = other.velocity(other.transformer, *inputs)
        current = run.family.velocity(run.actor.weights.transformer, *inputs)
        with run.actor.weights.averaged():
            expected = run.family.velocity(run.actor.weights.transformer, *inputs)
    torch.testing.assert_close(got, expected, **MEANS)
    assert (got - current).abs().max() > 1e-4


def test_snapshots_are_copies_and_can_be_put_back(make_run):
    run = make_run()
    start = run.actor.weights.snapshot()
    kept = copy.deepcopy(dict(start.tensors))
    run.update(run.batch(), training_step=1)
    assert_same(dict(start.tensors), kept, rtol=0, atol=0)
    assert (start.version, run.actor.weights.snapshot().version) == (0, 1)
    run.actor.weights.load(start.tensors)
    assert_same(weights(run), kept, rtol=0, atol=0)


def test_weights_of_another_adapter_are_an_error(make_run):
    run = make_run()
    tensors = dict(run.actor.weights.snapshot().tensors)
    name = next(iter(tensors))
    for changed, named in (
        ({"nonsense": tensors[name]}, " 1 names .* nonsense$"),
        ({name: torch.zeros(3)}, rf"{re.escape(name)} .* \[3\] "),
    ):
        with pytest.raises(BatchError, match=named):
            run.actor.weights.load({**tensors, **changed})
