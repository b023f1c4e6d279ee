"""What Flow-Factory's keys mean together."""

import pytest

from flowcorr.translate.flow_factory import TABLE
from flowcorr.translate.flow_factory_values import MODELS, batches, prompts, updates
from flowcorr.translate.table import Given
from tests.translate.configs import FACTORY

ZERO = {"num_processes": 8, "rewards": FACTORY["rewards"]}


def got(others=None, **changes):
    """A configuration: the defaults with changes of `train`, and others."""
    return Given({**ZERO, "train": changes, **(others or {})}, TABLE.absent, TABLE.name)


@pytest.mark.parametrize(
    ("ranks", "batch", "group", "wanted", "sampler", "found"),
    [
        (8, 8, 24, 48, "auto", 48),
        (8, 8, 18, 64, "auto", 64),  # 64 images of a round, so a multiple of 32 prompts, of two updates 64
        (6, 1, 16, 48, "auto", 48),
        (8, 1, 16, 50, "auto", 50),  # not spread evenly over the ranks, but the images are
        (8, 1, 16, 50, "group_contiguous", 56),
        (8, 8, 24, 50, "distributed_k_repeat", 64),
        (1, 1, 2, 1, "auto", 2),  # a prompt for each of two updates
    ],
)
def test_prompts_are_rounded_up_as_there(ranks, batch, group, wanted, sampler, found):
    others = {"num_processes": ranks, "data": {"sampler_type": sampler}}
    sizes = {"per_device_batch_size": batch, "group_size": group, "unique_sample_num_per_epoch": wanted}
    assert prompts(got(others, **sizes)) == found


@pytest.mark.parametrize("key", ["rewards", "eval_rewards"])
def test_rewards_that_are_scored_while_it_samples_keep_groups_on_a_rank(key):
    sizes = {"per_device_batch_size": 1, "group_size": 16, "unique_sample_num_per_epoch": 50}
    others = {"data": {"sampler_type": "distributed_k_repeat"}}
    asynchronous = {key: [{"reward_model": "a.B", "async_reward": True}]}
    assert prompts(got({**others, **asynchronous}, **sizes)) == 56
    assert prompts(got(others, **sizes)) == 50


def test_updates_by_backward_passes():
    get = got(
        per_device_batch_size=8,
        group_size=24,
        unique_sample_num_per_epoch=48,
        gradient_accumulation_steps=6,
        num_inference_steps=10,
    )
    assert (batches(get), updates(get)) == (18, 3)


@pytest.mark.parametrize(
    ("path", "kind", "key", "value"),
    [
        ("Qwen/Qwen-Image", "qwen-image", "true_cfg_scale", 4.5),
        ("Tongyi-MAI/Z-Image", "z-image", "guidance_scale", 5.5),
        ("black-forest-labs/FLUX.1-dev", "flux1", "guidance_scale", 4.5),
        ("black-forest-labs/FLUX.2-klein-base-4B", "FLUX2-klein", "guidance_scale", 4.5),
        ("a/local/folder", "sd3-5", "guidance_scale", 4.5),
    ],
)
def test_guidance_of_a_family(factory, path, kind, key, value):
    found, _ = factory(model__model_name_or_path=path, model__model_type=kind)
    assert getattr(found.sampling, key) == value
    assert found.model.lora.targets == (*MODELS[kind.lower()].attention, *MODELS[kind.lower()].others)


@pytest.mark.parametrize(("given", "targets"), [("to_q", ("to_q",)), (["to_q", "to_k"], ("to_q", "to_k"))])
def test_layers_by_name(factory, given, targets):
    assert factory(model__target_modules=given)[0].model.lora.targets == targets


def test_a_file_of_prompts_as_it_lies_there(factory, tmp_path):
    (tmp_path / "train.jsonl").write_text("", encoding="utf-8")
    found, _ = factory(data__dataset_dir=str(tmp_path))
    assert (found.data.path, found.data.heldout_path) == (f"{tmp_path}/train.jsonl", f"{tmp_path}/test.txt")
