"""Every key of a source is named in its recipe, and what has another unit or schedule there is converted."""

import pytest

from flowcorr.translate import translate
from flowcorr.translate.flow_factory import TABLE as FLOW_FACTORY
from flowcorr.translate.flow_grpo import TABLE as FLOW_GRPO
from flowcorr.translate.verl_omni import TABLE as VERL_OMNI
from tests.translate.configs import FACTORY, GRPO, OMNI, SCRIPT, factory_yaml, loaded

ASYNC = "trainer.v1.separate_async.parameter_sync_step"


def keys_without_place(table):
    """A key for each pattern of the table."""
    return [pattern.replace("*", "some_key") for pattern in table.no_place]


def test_of_verl_omni(omni):
    """All that it reads with their defaults, and a key for each of those that have no place."""
    given = {key: value for key, value in VERL_OMNI.defaults.items() if key != "main"}
    given = {key: value for key, value in given.items() if key not in SCRIPT and value is not None}
    others = dict.fromkeys(keys_without_place(VERL_OMNI), 1)
    words = [f"'+{key}={value}'" for key, value in {**given, **others, "unheard.of": 1}.items()]
    keep = [f"{OMNI}rollout.algo.sde_window_size=2", f"{OMNI}rollout.pipeline.output_type=latent"]
    _, text = omni(*words, *keep)
    for key in (*given, *others, "unheard.of", "main", f"{OMNI}model.lora_dtype", "data.train_files"):
        assert key in text, key


@pytest.mark.filterwarnings("ignore:no line of the recipe follows")
def test_of_flow_grpo(grpo, tmp_path):
    others = keys_without_place(FLOW_GRPO)
    words = [f"{key}=1" for key in (*others, "unheard_of")]
    read = {
        "rationorm": False,
        "activation_checkpointing": True,
        "sample.sde_type": "sde",
        "sample.sde_window_size": 0,
    }
    read |= {"sample.same_latent": False, "train.algorithm": "grpo", "train.ema": True}
    text = translate(f"{grpo}:get", [*words, *(f"{key}={value}" for key, value in read.items())])
    loaded(tmp_path, text)
    for key in (*FLOW_GRPO.required, *others, *read, "unheard_of", "gpus"):
        assert key in text, key


@pytest.mark.filterwarnings("ignore:no line of the recipe follows")
def test_of_flow_factory(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(factory_yaml(), encoding="utf-8")
    others = keys_without_place(FLOW_FACTORY)
    there = [
        f"{section}.{key}" for section, part in FACTORY.items() if isinstance(part, dict) for key in part
    ]
    given = {
        key: value
        for key, value in FLOW_FACTORY.defaults.items()
        if value is not None and key not in (*there, "model.finetune_type", "rewards")
    }
    words = [
        f"{key}={value}" for key, value in {**given, **dict.fromkeys((*others, "unheard.of"), 1)}.items()
    ]
    text = translate(str(path), words)
    loaded(tmp_path, text)
    for key in (*there, *given, *others, "rewards", "eval_rewards", "unheard.of"):
        assert key in text or key == "eval_rewards", key


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # kB / 500 there, kB here.
        (
            ["reward.custom_reward_function.path=a/jpeg_compressibility.py"],
            '{"name": "jpeg_compressibility", "weight": 0.002}',
        ),
        # Training steps there, updates here.
        ([f"{OMNI}actor.optim.lr_warmup_steps=10"], "warmup_steps: 20  #"),
        # Prompts there, updates here.
        ([f"{OMNI}actor.ppo_mini_batch_size=8"], "mini_batches: 4  #"),
        # None there, the last step here.
        (["trainer.save_freq=-1"], "save_every: 300  # trainer.save_freq (never there; the last step here)"),
        (
            ["trainer.test_freq=-1"],
            "eval_every: 0  # trainer.test_freq (never there; at the start and the end here)",
        ),
        # All of them there, a number here.
        (["data.val_max_samples=-1"], "num_heldout: 100000  # data.val_max_samples (all of them)"),
    ],
)
def test_units_of_verl_omni(omni, overrides, line):
    assert line in omni(*overrides)[1]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"reward_fn": "{'jpeg_compressibility': 2.0}"}, '{"name": "jpeg_compressibility", "weight": 0.004}'),
        # 0.9 at every eighth update there, 4 times.
        ({"train.ema": True}, "ema: 0.948683  # train.ema (0.9 there, 4 times at every 8th update"),
        # A share of the steps there, a range here.
        ({"train.timestep_fraction": 0.5}, "sde_window_range: [0, 5]"),
        ({"sample.num_batches_per_epoch": 4}, "prompts_per_step: 8  #"),
    ],
)
def test_units_of_flow_grpo(grpo, changes, line):
    text = GRPO.replace(
        "    return",
        "".join(f"    config.{key} = {value}\n" for key, value in changes.items()) + "    return",
    )
    grpo.write_text(text, encoding="utf-8")
    assert line in translate(f"{grpo}:get")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "ema: 0.986916  # train.ema_decay, train.ema_update_interval (0.9 every 4 epochs there; this is",
        ),
        (
            {"model__model_type": "z-image", "model__model_name_or_path": "a/Z-Image"},
            "guidance_scale: 5.5  # train.guidance_scale (one more than its pipeline counts)",
        ),
        ({"train__unique_sample_num_per_epoch": 40}, "prompts_per_step: 48  #"),
        ({"log__save_freq": 0}, "save_every: 100000  # log.save_freq (never there; the last step here)"),
    ],
)
def test_units_of_flow_factory(factory, changes, line):
    assert line in factory(**changes)[1]
