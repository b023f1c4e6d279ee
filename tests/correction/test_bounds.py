from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flowcorr.correction import RS_MODES
from flowcorr.correction.bounds import (
    Criterion,
    idle_modes,
    parse_band,
    parse_criteria,
    parse_modes,
    parse_veto,
)
from flowcorr.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (2, 2.0),
        ("2.0", 2.0),
        ("inf", math.inf),
        ("0.5_2", (0.5, 2.0)),
        ("1e-3_2", (1e-3, 2.0)),
        ([0.5, 2], (0.5, 2.0)),
        ((0.5, math.inf), (0.5, math.inf)),
    ],
)
def test_bands_as_users_write_them(written, value):
    assert parse_band(written) == value


@pytest.mark.parametrize(
    "written",
    [
        "2.0_0.5",
        "1_1",
        "nan",
        math.nan,
        0,
        "0_2",
        -1.0,
        "-1_2",
        "",
        "a",
        "1_2_3",
        [1],
        [1, 2, 3],
        True,
        None,
        {},
    ],
)
def test_bad_bands_name_their_key(written):
    named = re.escape(f"rollout_is_threshold={written!r} ")
    with pytest.raises(ConfigError, match=rf"^algorithm\.rollout_correction\.{named}"):
        parse_band(written, "rollout_is_threshold")


def test_a_reversed_band_shows_how_to_write_it():
    with pytest.raises(ConfigError, match=r"='2\.0_0\.5' .* 0\.5_2$"):
        parse_band("2.0_0.5")


def test_modes_resolve_aliases_and_drop_repeats():
    assert parse_modes(None) == {}
    assert list(parse_modes("token, sequence,geometric,token_k1")) == [
        "token_k1",
        "seq_sum_k1",
        "seq_mean_k1",
    ]


@pytest.mark.parametrize(
    ("chain", "named"), [("", "''"), ("token,", "''"), ("seq_max_k1", "'seq_max_k1'"), (3, "3")]
)
def test_unknown_modes_are_refused(chain, named):
    with pytest.raises(ConfigError, match=f"rollout_rs={named} "):
        parse_modes(chain)


def test_thresholds_go_with_modes_in_order():
    ratios = Criterion("token_k1", RS_MODES["token_k1"], -math.log(2.0), -math.log(0.5))
    both = (ratios, Criterion("seq_mean_k3", RS_MODES["seq_mean_k3"], -math.inf, 0.01))
    for threshold in ("0.5_2,0.01", ["0.5_2", 0.01], [[0.5, 2], 0.01], ("2", "0.01")):
        assert parse_criteria("token_k1,seq_mean_k3", threshold) == both
    two_bands = parse_criteria("token_k1,seq_mean_k1", [0.5, 2.0])
    assert [(one.lower, one.upper) for one in two_bands] == [(-math.log(2.0), -math.log(0.5))] * 2
    one_for_all = parse_criteria("token_k1,seq_mean_k3", 2.0)
    assert one_for_all == (ratios, replace(both[1], upper=2.0))


@pytest.mark.parametrize(
    ("modes", "threshold", "named"),
    [
        ("token_k1", None, ".*missing .*rollout_rs='token_k1'"),
        ("token_k1,token_k2,token_k3", "2,1", "='2,1' .* 2 .* 3 "),
        ("token_k2", "0.5_2", "='0.5_2' .*token_k2 "),
        ("step_z", "0.5_2", "='0.5_2' .*step_z .* 6, or auto$"),
        ("token_k1", 0.5, "=0.5 .*token_k1 .* 1;"),
        ("token_k1", {}, "={} "),
        ("token_k1,token_k3", "0.5_2", "='0.5_2' .*token_k3 "),
        ("token_k1,token_k3", [0.5, 2], r"=\[0.5, 2\] .* 0.5,2, "),
        ("token_k1,token_k3", [2, 0.01], r"=\[2, 0.01\] .* 2,0.01, "),
        # As one band, these would reject every term of equal policies.
        ("token_k1,seq_sum_k1", [2.0, 3.0], r"=\[2.0, 3.0\] .* 2.0,3.0, "),
    ],
)
def test_thresholds_that_do_not_fit_their_modes(modes, threshold, named):
    with pytest.raises(ConfigError, match=f"rollout_rs_threshold{named}"):
        parse_criteria(modes, threshold)


@pytest.mark.parametrize("other", ["other_modes:far", "far"])
def test_two_modes_of_one_name_are_refused(other, monkeypatch):
    for name in ("my_modes", "other_modes"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(far=RS_MODES["token_k2"]))
    monkeypatch.setitem(RS_MODES, "far", RS_MODES["token_k3"])
    assert [one.name for one in parse_criteria("my_modes:far,token_k3", 0.1)] == ["far", "token_k3"]
    with pytest.raises(ConfigError, match=f"rollout_rs='my_modes:far,{other}' .* 'far';"):
        parse_criteria(f"my_modes:far,{other}", 0.1)


@pytest.mark.parametrize("mode", RS_MODES)
def test_inf_only_measures(mode):
    (criterion,) = parse_criteria(mode, "inf")
    assert (criterion.lower, criterion.upper) == (-math.inf, math.inf)


def test_a_missing_threshold_is_asked_for_by_mode():
    with pytest.raises(ConfigError) as caught:
        parse_criteria("seq_mean_k1,step_z,token_k3,step_kl", None)
    asked = [part.split(" ", 2) for part in str(caught.value).split("; give ")[1].split("; ")]
    assert [(mode, "band" in text, "0.999_1.001" in text, "inf" in text) for _, mode, text in asked] == [
        ("seq_mean_k1", True, True, True),
        ("step_z", False, False, False),
        ("token_k3", False, False, True),
        ("step_kl", False, False, True),
    ]


@pytest.mark.parametrize("mode", RS_MODES)
def test_auto_is_a_threshold_of_every_mode(mode):
    (criterion,) = parse_criteria(mode, "auto")
    assert criterion.needs_batch


@pytest.mark.parametrize("threshold", [1.0, 2.0, 0.0, -1.0, math.nan, "0.1_0.2", True])
def test_a_veto_is_a_ratio_below_one(threshold):
    with pytest.raises(ConfigError, match=f"rollout_token_veto_threshold={threshold!r} "):
        parse_veto(threshold)
    assert parse_veto("1e-4") == 1e-4
    assert parse_veto(None) is None


def test_bands_beyond_the_noise_floor_are_idle():
    criteria = parse_criteria("seq_mean_k1,token_k3", "0.5_2.0,0.01")
    quiet = {
        "actor/rollout_corr/rollout_rs_seq_mean_k1_max": 1e-4,
        "actor/rollout_corr/rollout_rs_seq_mean_k1_min": -1e-4,
        "actor/rollout_corr/rollout_rs_token_k3_max": 5e-3,
        "actor/rollout_corr/rollout_rs_token_k3_min": 0.0,
    }
    assert idle_modes(criteria, quiet) == ["seq_mean_k1"]
    assert idle_modes(criteria, {}) == []
    assert idle_modes(parse_criteria("seq_mean_k1", "auto"), quiet) == []
