"""Values that a section of the configuration refuses, and what follows from those it takes."""

from dataclasses import fields, is_dataclass

import pytest

from flowcorr.config import load, load_mapping
from flowcorr.config.schema import ActorConfig, Config, SamplingConfig
from flowcorr.errors import ConfigError


def test_cps_noise_level_above_one(bare):
    with pytest.raises(ConfigError, match=r"sampling\.noise_level=1\.2 .*sde_type=cps"):
        load(bare, ["sampling.sde_type=cps", "sampling.noise_level=1.2"])


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({}, [*range(10)]),
        ({"post_window_stride": 2}, [0, 1, 2, 3, 4, 6, 8]),
        ({"post_window_stride": 4}, [0, 1, 2, 3, 4, 8]),  # the last step covers the two that are left
        ({"post_window_stride": 6}, [0, 1, 2, 3, 4]),
        ({"post_window_stride": 2, "sde_noise_range": (2, 7)}, [0, 1, 2, 3, 4, 5, 6, 7, 9]),
        ({"post_window_stride": 2, "sde_noise_range": (0, 2)}, [0, 1, 2, 3, 4, 6, 8]),
    ],
)
def test_steps_after_the_last_stochastic_one_may_be_longer(keys, taken):
    assert list(SamplingConfig(**keys).rollout_steps) == taken


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"post_window_stride": 0}, r"sampling\.post_window_stride=0 "),
        (
            {"post_window_stride": 7},
            r"^sampling\.post_window_stride=7 .* 6 .*window_range .* 6$",
        ),
        (
            {"post_window_stride": 2, "sde_window_range": (0, 10)},
            r"=2 .* 0 .* 1, .*sampling\.sde_window_range ",
        ),
        (
            {"post_window_stride": 2, "sde_noise_range": (0, 9)},
            r"=2 .* 1 .* 1, .*sampling\.sde_noise_range ",
        ),
    ],
)
def test_a_stride_that_leaves_nothing_to_shorten_is_refused(keys, named):
    with pytest.raises(ConfigError, match=named):
        SamplingConfig(**keys)


@pytest.mark.parametrize(
    ("section", "keys", "named"),
    [
        (ActorConfig, {"lr_min_ratio": 1.5}, r"^actor\.lr_min_ratio=1\.5 .*\[0, 1\]$"),
        (ActorConfig, {"betas": (0.9, 1.0)}, r"^actor\.betas=\[0\.9, 1\.0\] "),
        (ActorConfig, {"ema": 1.0}, r"^actor\.ema=1\.0 .*\(0, 1\), or null$"),
        (ActorConfig, {"clip_ratio": (1e-4, 0.0)}, r"^actor\.clip_ratio=0\.0 "),
    ],
)  # fmt: skip
def test_values_out_of_range(section, keys, named):
    with pytest.raises(ConfigError, match=named):
        section(**keys)


def test_a_mini_batch_holds_what_is_learned_from():
    keys = {"prompts_per_step": 6, "n": 24}
    whole, chosen = (load_mapping({"rollout": {**keys, **more}}) for more in ({}, {"n_learned": 8}))
    assert (whole.rollout.learned_per_prompt, chosen.rollout.learned_per_prompt) == (24, 8)
    assert (whole.mini_batch_size, chosen.mini_batch_size) == (3 * 24, 3 * 8)


def test_clip_ranges_by_step_may_be_given_as_a_list():
    assert ActorConfig(clip_ratio=[1e-3, 2e-3]) == ActorConfig(clip_ratio=(1e-3, 2e-3))


def numbers(section, prefix=""):
    for entry in fields(section):
        value = getattr(section, entry.name)
        if is_dataclass(value):
            yield from numbers(value, f"{prefix}{entry.name}.")
        elif "float" in str(entry.type) or "int" in str(entry.type):
            yield prefix + entry.name


@pytest.mark.parametrize("key", list(numbers(Config())))
def test_no_number_of_a_configuration_is_nan(bare, key):
    with pytest.raises(ConfigError):
        load(bare, [f"{key}=.nan"])
