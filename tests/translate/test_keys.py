"""Every key of a source is named in its recipe, and what has another unit or schedule there is converted."""

import pytest

from flowcorr.translate import translate
from flowcorr.translate.table import set_values
from flowcorr.translate.verl_omni import TABLE as VERL_OMNI
from tests.translate.configs import FACTORY, GRPO, OMNI, RESOLVED, factory_yaml, loaded


def named(text, values):
    """The keys of a configuration that its recipe does not name."""
    return [
        key
        for key, _ in set_values(values)
        if key not in text and key.partition(".")[0] not in ("rewards", "reward_fn")
    ]


def keys_without_place(table):
    """A key for each pattern of the table."""
    return [
        pattern.replace("*", "some_key") for pattern in (*(rule.pattern for rule in table.left), *table.apart)
    ]


def test_of_verl_omni(omni):
    others = [
        key for key in keys_without_place(VERL_OMNI) if not key.endswith(("lr_some_key", "v1.trainer_mode"))
    ]
    _, text = omni(*(f"{key}=5" for key in others if "use_v1" not in key), "unheard.of=1", all_keys=True)
    assert named(text, RESOLVED) == []
    assert [key for key in (*others, "unheard.of") if key not in text] == []


def test_of_flow_grpo(grpo, tmp_path):
    text = translate(grpo, gpus=4, all_keys=True)
    loaded(tmp_path, text)
    assert named(text, GRPO) == []
    assert "gpus" in text


def test_of_flow_factory(factory):
    path_text = factory_yaml(unheard_of=1)
    assert "unheard_of" in path_text
    _, text = factory(unheard_of=1)
    lost = named(text, FACTORY)
    assert [key for key in lost if not key.startswith(("launcher", "data.max", "rewards"))] == []
    assert "unheard_of=1" in text


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
        (["trainer.save_freq=-1"], "save_every: 300  # trainer.save_freq (-1 there is never;"),
        (
            ["trainer.test_freq=-1"],
            "eval_every: 0  # trainer.test_freq (-1 there is never;",
        ),
        # All of them there, a number here.
        (
            ["data.val_max_samples=-1"],
            "num_heldout: 100000  # data.val_max_samples (-1 there is all of them)",
        ),
    ],
)
def test_units_of_verl_omni(omni, overrides, line):
    assert line in omni(*overrides)[1]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"reward_fn": "{jpeg_compressibility: 2.0}"},
            '{"name": "jpeg_compressibility", "weight": 0.004}',
        ),
        # 0.9 at every eighth update there, 4 times.
        ({"train.ema": True}, "ema: 0.948683  # train.ema (0.9 there at every 8th update"),
        # A share of the steps there, a range here.
        ({"train.timestep_fraction": 0.5}, "sde_window_range: [0, 5]"),
        ({"sample.num_batches_per_epoch": 4}, "prompts_per_step: 8  #"),
    ],
)
def test_units_of_flow_grpo(grpo, changes, line):
    words = [f"{key}={value}" for key, value in changes.items()]
    assert line in translate(grpo, words, gpus=4)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "ema: 0.986916  # train.ema_decay, train.ema_update_interval (of every few epochs there",
        ),
        (
            {"model__model_type": "z-image", "model__model_name_or_path": "a/Z-Image"},
            "guidance_scale: 5.5  # train.guidance_scale (of Z-Image one more than its pipeline counts)",
        ),
        ({"train__unique_sample_num_per_epoch": 40}, "prompts_per_step: 48  #"),
        ({"log__save_freq": 0}, "save_every: 100000  # log.save_freq (epochs; 0 there is never"),
    ],
)
def test_units_of_flow_factory(factory, changes, line):
    assert line in factory(**changes)[1]
