"""Verl's older keys, functions and names of metrics."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from flowcorr.config import older_verl
from flowcorr.correction import RolloutCorrectionConfig
from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.errors import ConfigError

FIRST = {"rollout_is_level": "sequence", "rollout_is_mode": "truncate", "rollout_is_threshold": 3.0}
MASK = {"rollout_is_mode": "mask", "rollout_is_threshold": 2.0}
UNCAPPED = {"rollout_is_threshold": math.inf}
ONLY_MEASURED = {"rollout_is_apply": False}

DIALECTS = [
    (FIRST, {"rollout_is": "sequence", "rollout_is_threshold": 3.0, **ONLY_MEASURED}),
    (FIRST | {"rollout_is": True}, {"rollout_is": "sequence", "rollout_is_threshold": 3.0}),
    (
        FIRST | {"rollout_is": False},
        {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_apply": False},
    ),
    (FIRST | {"rollout_is_threshold": None}, {}),
    (
        FIRST | {"rollout_is_threshold_lower": 0.1, "rollout_is": True},
        {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
    ),
    (
        FIRST | {"rollout_is_veto_threshold": 1e-4, "rollout_is": True},
        {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_token_veto_threshold": 1e-4},
    ),
    (
        MASK | {"rollout_is_level": "token", "rollout_is": True},
        {"rollout_is": "token", **UNCAPPED, "rollout_rs": "token_k1", "rollout_rs_threshold": (0.5, 2.0)},
    ),
    (
        MASK | {"rollout_is_level": "sequence", "rollout_is_threshold_lower": 0.8},
        {
            "rollout_is": "sequence",
            **UNCAPPED,
            **ONLY_MEASURED,
            "rollout_rs": "seq_sum_k1",
            "rollout_rs_threshold": (0.8, 2.0),
        },
    ),
    (
        MASK | {"rollout_is_level": "geometric"},
        {
            "rollout_is": "geometric",
            **UNCAPPED,
            **ONLY_MEASURED,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": 2.0,
        },
    ),
    (
        {"rollout_rs": "geometric", "rollout_rs_threshold": 1.01, "rollout_rs_threshold_lower": 0.98},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": (0.98, 1.01)},
    ),
    (
        {"rollout_rs": "sequence", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": None},
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": (0.5, 2.0)},
    ),
    (
        {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": (sys.float_info.min, 2.0)},
    ),
    ({"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": False}, {"bypass_mode": True}),
    (
        {
            "bypass_old_logprob_for_rollout": True,
            "use_pure_rollout_correction": True,
            "rollout_is": "sequence",
        },
        {
            "bypass_mode": True,
            "loss_type": "reinforce",
            "rollout_is": "sequence",
            "bypass_scope": "trajectory",
        },
    ),
    (
        {"bypass_mode": True, "use_policy_gradient": True, "rollout_is": "token"},
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
    ),
]


def canonical(values):
    """Bands as both bounds, so that `2.0` equals `[0.5, 2.0]`."""
    config = RolloutCorrectionConfig(**values)
    return config.criteria, [
        getattr(config, k) for k in vars(config) if k not in ("preset", "rollout_rs_threshold")
    ]


@pytest.mark.parametrize(("old", "new"), DIALECTS)
def test_older_keys_equal_their_translation_wherever_they_stand(old, new):
    with pytest.warns(FutureWarning, match="older dialect"):
        config = older_verl.from_older(old)
    values = {field: value for field, value in vars(config).items() if field != "preset"}
    assert canonical(values) == canonical(new)
    for algorithm in (old, {"rollout_correction": old}):
        with pytest.warns(FutureWarning):
            translated = older_verl.translate_algorithm({"advantage_std": "group", **algorithm})
        assert set(translated) == {"advantage_std", "rollout_correction"}
        assert canonical(translated["rollout_correction"]) == canonical(new)


def test_a_bare_threshold_under_algorithm_switches_weights_on_or_off():
    with pytest.warns(FutureWarning):
        on = older_verl.translate_algorithm({"rollout_is_threshold": 2.5})["rollout_correction"]
    assert on == {"rollout_is": "token", "rollout_is_threshold": 2.5, "rollout_is_apply": False}
    with pytest.warns(FutureWarning):
        off = older_verl.translate_algorithm({"rollout_is_threshold": None, "rollout_is": True})[
            "rollout_correction"
        ]
    assert off == {"rollout_is": None}


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"rollout_correction": None}, {"rollout_correction": {"rollout_is": "token", "rollout_rs": None}}],
)
def test_todays_keys_are_left_alone_in_silence(algorithm):
    assert older_verl.translate_algorithm(algorithm) == algorithm


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (
            FIRST | {"preset": "seq_is"},
            "rollout_is_level, rollout_is_mode, rollout_is_threshold are of an older dialect; "
            "write {rollout_is: sequence, rollout_is_threshold: 3.0, rollout_is_apply: false} instead",
        ),
        (
            FIRST | {"rollout_is": True},
            "rollout_is_level, rollout_is_mode, rollout_is_threshold, rollout_is are of an older dialect; "
            "write {rollout_is: sequence, rollout_is_threshold: 3.0} instead. verl 0.6.0 also rejected samples with a "
            "ratio below 1e-4: add rollout_token_veto_threshold: 1e-4 for that",
        ),
        (
            FIRST | {"rollout_is": True, "rollout_is_veto_threshold": None},
            "rollout_is_level, rollout_is_mode, rollout_is_threshold, rollout_is, rollout_is_veto_threshold are of an "
            "older dialect; write {rollout_is: sequence, rollout_is_threshold: 3.0} instead",
        ),
        (
            MASK,
            "rollout_is_mode, rollout_is_threshold are of an older dialect; write {rollout_is: token, "
            "rollout_is_threshold: .inf, rollout_rs: token_k1, rollout_rs_threshold: 0.5_2.0, "
            "rollout_is_apply: false} instead",
        ),
        (
            {"bypass_mode": True, "use_policy_gradient": True},
            "use_policy_gradient is of an older dialect; write {loss_type: reinforce} instead",
        ),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "use_policy_gradient": False},
            "use_policy_gradient is of an older dialect; write nothing instead",
        ),
    ],
)
def test_the_warning_names_only_what_was_translated(old, message):
    with pytest.warns(FutureWarning) as caught:
        older_verl.translate_section(old)
    assert [str(warning.message) for warning in caught] == [f"algorithm.rollout_correction: {message}"]


def test_todays_keys_under_algorithm_are_only_misplaced():
    with pytest.warns(FutureWarning) as caught:
        translated = older_verl.translate_algorithm(
            {"bypass_mode": True, "rollout_correction": {"preset": "disabled"}}
        )
    assert translated == {"rollout_correction": {"bypass_mode": True, "preset": "disabled"}}
    (told,) = [str(warning.message).split() for warning in caught]
    assert (told[0], told[-1]) == ("algorithm.bypass_mode", "algorithm.rollout_correction")
    with pytest.warns(FutureWarning) as caught:
        older_verl.translate_algorithm(
            {"rollout_is": "token", "rollout_rs": "token", "use_policy_gradient": False}
        )
    older, misplaced = (str(warning.message) for warning in caught)
    assert older.startswith("algorithm.rollout_correction: use_policy_gradient")
    assert misplaced.startswith("algorithm.rollout_is, algorithm.rollout_rs ")
    assert misplaced.endswith("algorithm.rollout_correction")


@pytest.mark.parametrize(
    ("old", "named"),
    [
        ({"rollout_is_mode": "clip", "rollout_is_threshold": 2.0}, "rollout_is_mode='clip' "),
        ({"rollout_is_level": "seq", "rollout_is_threshold": 2.0}, "rollout_is_level='seq' "),
        (
            {"use_pure_rollout_correction": True},
            "use_pure_rollout_correction=True .*bypass_old_logprob_for_rollout: true",
        ),
        (MASK | {"rollout_is": 1}, "rollout_is=1 "),
        (
            {"bypass_old_logprob_for_rollout": "off"},
            "bypass_old_logprob_for_rollout='off' ",
        ),
        (
            {"bypass_mode": True, "use_policy_gradient": "no"},
            "use_policy_gradient='no' ",
        ),
        (
            {"bypass_mode": True, "use_pure_rollout_correction": "False"},
            "use_pure_rollout_correction='False' ",
        ),
        (
            {"bypass_mode": True, "bypass_old_logprob_for_rollout": False},
            "bypass_mode=True .*bypass_old_logprob_for_rollout=False",
        ),
        (
            {"bypass_mode": True, "loss_type": "ppo_clip", "use_policy_gradient": True},
            "loss_type='ppo_clip' .*use_policy_gradient",
        ),
        (MASK | {"rollout_rs": "token_k1"}, r"rollout_rs='token_k1' .*rollout_is_\*"),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": "0.5_2", "rollout_rs_threshold_lower": 0.5},
            "rollout_rs_threshold='0.5_2' ",
        ),
        (
            MASK | {"rollout_is_threshold_lower": "low"},
            "rollout_is_threshold_lower='low' .*rollout_is_threshold=2,",
        ),
        (MASK | {"rollout_is_threshold_lower": True}, "rollout_is_threshold_lower=True "),
        (MASK | {"rollout_is_threshold_lower": -0.5}, r"rollout_is_threshold_lower=-0\.5 .* 0 "),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": "none"},
            "rollout_rs_threshold_lower='none' .*rollout_rs_threshold=2, .*null",
        ),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 3.0},
            r"rollout_rs_threshold_lower=3\.0 .*rollout_rs_threshold=2,",
        ),
    ],
)
def test_values_that_no_dialect_knew(old, named):
    with pytest.raises(ConfigError, match=named):
        older_verl.from_older(old)


@pytest.mark.parametrize("read", [older_verl.translate_section, older_verl.from_older])
@pytest.mark.parametrize(
    ("criteria", "named"),
    [
        ({"rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": 1.5}, "seq_mean_k1 rejects"),
        (
            {"rollout_is": "token", "rollout_rs": "geometric", "rollout_rs_threshold": 1.5},
            "seq_mean_k1 rejects",
        ),
        ({"rollout_is": "token", "rollout_token_veto_threshold": 1e-4}, "the veto rejects"),
    ],
)
def test_where_verl_rejects_whole_samples_the_scope_is_asked_for(read, criteria, named):
    section = {"bypass_mode": True, "loss_type": "reinforce", **criteria}
    with pytest.warns(UserWarning, match=f"{named} .* verl"):
        read(section)
    with pytest.warns(UserWarning, match="write bypass_scope: trajectory"):
        older_verl.translate_algorithm({"rollout_correction": section})
    for scope in ("step", "trajectory"):
        read({**section, "bypass_scope": scope})
    token = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    assert older_verl.translate_section(token) == token


def test_an_older_section_with_reinforce_rejects_whole_samples():
    bypass = {"bypass_mode": True, "loss_type": "reinforce", "rollout_rs": "geometric"}
    with pytest.warns(FutureWarning, match="bypass_scope: trajectory"):
        config = older_verl.from_older(
            {**bypass, "rollout_rs_threshold": 1.01, "rollout_rs_threshold_lower": 0.98}
        )
    assert (config.rollout_rs, config.bypass_scope) == ("seq_mean_k1", "trajectory")


def test_a_key_in_both_places_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_is and"):
        older_verl.translate_algorithm({"rollout_is": "token", "rollout_correction": {"rollout_is": "token"}})


@pytest.fixture
def drift():
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(16, 3, generator=generator)
    return rollout + 0.5 * torch.randn(16, 3, generator=generator), rollout, torch.ones(16, 3)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_shim(drift, level):
    old, rollout, mask = drift
    weights, kept, metrics = older_verl.compute_rollout_importance_weights(
        old, rollout, mask, rollout_is_level=level, rollout_is_mode="mask", rollout_is_threshold=1.5
    )
    rejection = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[level]
    today = correct(
        old,
        rollout,
        mask,
        rollout_is=level,
        rollout_is_threshold=math.inf,
        rollout_rs=rejection,
        rollout_rs_threshold=1.5,
    )
    assert torch.equal(weights, today.weights)
    assert torch.equal(kept, today.keep.float())
    assert 0 < kept.sum() < kept.numel()
    assert metrics["mismatch/rollout_is_masked_fraction"] == pytest.approx(1 - float(kept.mean()))
    assert all(name.startswith("mismatch/") for name in metrics)


def test_importance_weights_shim_is_off_without_a_threshold(drift):
    assert older_verl.compute_rollout_importance_weights(*drift) == (None, drift[2], {})


def test_offpolicy_metrics_shim(drift):
    old, rollout, mask = drift
    metrics = older_verl.compute_offpolicy_metrics(old, rollout, mask)
    assert metrics["kl"] == pytest.approx(float((rollout - old).double().mean()), rel=1e-6)
    assert {"k3_kl", "training_ppl", "ppl_ratio", "chi2_token", "chi2_seq"} <= set(metrics)
    alone = older_verl.compute_offpolicy_metrics(old, None, mask)
    expected = {name: metrics[name] for name in ("training_ppl", "training_log_ppl")}
    assert alone == pytest.approx(expected, rel=1e-12)


def test_rejection_mask_shim(drift):
    old, rollout, mask = drift
    kept, metrics = older_verl.compute_rollout_rejection_mask(old - rollout, mask, "seq_mean_k3", 0.1)
    today = correct(old - rollout, torch.zeros_like(old), rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1)
    assert torch.equal(kept, today.keep.float())
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(
        float((kept.sum(1) == 0).float().mean())
    )


def named(delta, **keys):
    """All metrics of a correction, under today's names and those of the first dialect."""
    config = RolloutCorrectionConfig(**keys)
    log_probs = (delta, torch.zeros_like(delta), None)
    metrics = correct(*log_probs, **config.options).metrics
    return metrics.merge(older_verl.older_metrics(metrics, *log_probs, config)).compute()


def test_metrics_have_the_names_of_the_first_dialect_too():
    values = named(torch.tensor([[0.1, 0.2]]), rollout_is="token", rollout_is_batch_normalize=True)
    assert values["mismatch/mismatch_kl"] == values["rollout_corr/kl"]
    assert values["mismatch/rollout_is_mean"] == values["rollout_corr/rollout_is_mean"]
    assert values["mismatch/rollout_is_masked_fraction"] == values["rollout_corr/rollout_rs_masked_fraction"]
    assert {"mismatch/rollout_is_batch_norm_factor", "mismatch/chi2_token"}.isdisjoint(values)


def test_fractions_of_the_first_dialect_count_against_the_band_of_mode_mask():
    delta = torch.tensor([[1.0, 2.5], [0.4, 1.0]]).log()
    mask = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    values = named(delta, rollout_is="token", rollout_is_threshold=math.inf, **mask)
    assert values["mismatch/rollout_is_ratio_fraction_high"] == 0.25
    assert values["mismatch/rollout_is_ratio_fraction_low"] == 0.25
    assert values["mismatch/rollout_is_seq_fraction_high"] == 0.0
    assert values["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0
