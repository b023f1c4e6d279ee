"""The simulation of `scaling.py` against step times computed by hand."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.errors import ConfigError
from tests.benchmarks import scaling
from tests.benchmarks.scaling import Setup, simulate

ALONE = Setup(
    engines=1,
    ranks=1,
    prompts=1,
    rollout_seconds=6.0,
    rollout_sigma=0.0,
    reward_seconds=1.0,
    reward_workers=1,
    train_seconds=3.0,
    adapter_gigabytes=1.0,
    put_bandwidth=2.0,  # .5 s
    fetch_bandwidth=0.8,  # 1.25 s
)

setups = st.builds(
    lambda ranks, each, **rest: replace(ALONE, ranks=ranks, engines=ranks * each, steps=30, **rest),
    ranks=st.integers(1, 3),
    each=st.integers(1, 3),
    prompts=st.integers(3, 7),
    shared_pool=st.booleans(),
    max_staleness=st.integers(0, 4),
    rollout_seconds=st.floats(0.1, 20),
    reward_seconds=st.floats(0, 5),
    reward_workers=st.integers(0, 2),
    train_seconds=st.floats(0.1, 20),
)


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        pytest.param(
            {}, 1.25 + 6 + 1 + 3 + 0.5, id="fetch, rollout, reward, training, put, one after the other"
        ),
        pytest.param({"reward_workers": 0}, 11.75, id="reward in the trainer"),
        pytest.param({"max_staleness": 1}, 1.25 + 6, id="rollout hides the rest"),
        pytest.param({"max_staleness": 1, "train_seconds": 9.0}, 9 + 0.5, id="training hides the rest"),
        pytest.param(
            {"max_staleness": 1, "train_seconds": 6.5, "steps": 41},
            (1.25 + 6 + 1 + 6.5 + 0.5) / 2,
            id="one ahead is not enough",
        ),
        pytest.param({"max_staleness": 2, "train_seconds": 6.5}, 1.25 + 6, id="two ahead are"),
        pytest.param(
            {"prompts": 3}, 1.25 + 18 + 1 + 9 + 0.5, id="a version is fetched once, scoring overlaps"
        ),
        pytest.param({"prompts": 3, "engines": 2}, 1.25 + 12 + 1 + 9 + 0.5, id="two engines, three shards"),
        pytest.param({"prompts": 2, "reward_seconds": 9.0}, 1.25 + 6 + 18 + 6 + 0.5, id="scoring queues"),
        pytest.param(
            {"prompts": 3, "engines": 2, "ranks": 2}
            | {"updates": 3, "all_reduce_bandwidth": 2.0, "all_reduce_latency": 0.1},
            1.25 + 12 + 1 + 6 + 3 * (0.5 + 0.2) + 0.5,
            id="the rank with two prompts, three all-reduces",
        ),
    ],
)
def test_step_times_by_hand(changed, seconds):
    assert simulate(replace(ALONE, **changed)).step_seconds == pytest.approx(seconds)


def test_a_pool_a_rank_waits_for_its_own_stragglers_only_where_there_are_some():
    own = replace(ALONE, prompts=32, ranks=8, engines=8, steps=12)
    for sigma in (0.0, 0.8):
        setup = replace(own, rollout_sigma=sigma)
        seconds = simulate(setup).step_seconds
        shared = simulate(replace(setup, shared_pool=True)).step_seconds
        assert shared < 0.9 * seconds if sigma else shared == pytest.approx(seconds)


def test_utilisation_by_hand():
    outcome = simulate(ALONE)
    assert outcome.sampling == pytest.approx(6 / 11.75)
    assert outcome.training == pytest.approx(3 / 11.75)
    assert simulate(replace(ALONE, max_staleness=1)).sampling == pytest.approx(6 / 7.25)


@settings(max_examples=40, deadline=None)
@given(setup=setups, sigma=st.floats(0, 1), seed=st.integers(0, 9))
def test_nothing_is_lost_and_nothing_is_too_old(setup, sigma, seed):
    setup = replace(setup, rollout_sigma=sigma)
    outcome = simulate(setup, seed)
    assert outcome.submitted == outcome.scored == setup.steps * setup.prompts
    assert len(outcome.finished) == setup.steps
    assert outcome.finished == sorted(outcome.finished)
    assert outcome.ages == [min(step, setup.max_staleness) for step in range(setup.steps)]
    assert 0 < outcome.sampling <= 1 + 1e-9
    assert 0 < outcome.training <= 1 + 1e-9


@settings(max_examples=40, deadline=None)
@given(setup=setups)
def test_without_stragglers_more_staleness_never_delays_a_step(setup):
    setup = replace(setup, fetch_bandwidth=math.inf)
    sooner = simulate(replace(setup, max_staleness=setup.max_staleness + 1)).finished
    assert all(a <= b + 1e-6 for a, b in zip(sooner, simulate(setup).finished, strict=True))


def test_stragglers_keep_the_mean_time_of_a_shard():
    durations = scaling.Simulation(replace(ALONE, prompts=64, steps=999, rollout_sigma=0.4), 0).durations
    assert statistics.fmean(itertools.chain(*durations)) == pytest.approx(6, rel=0.01)


def test_splits_use_all_gpus_and_alternating_takes_turns():
    for shared in (False, True):
        for split in scaling.splits(replace(ALONE, prompts=64, shared_pool=shared), 16):
            assert split.engines + split.ranks == 16
    both = simulate(scaling.alternating(replace(ALONE, prompts=4, all_reduce_latency=0.0), 4))
    assert both.step_seconds == pytest.approx(6 + 1 + 3 + 2 * 1.5 / 25)


def test_a_measured_arm_becomes_a_setup():
    phases = {"rollout": 8.0, "reward": 4.0, "old_log_prob": 1.0, "correction": 0.0, "update": 3.0}

    def arm(step):
        mean = {**phases, "sync": 0.5, "step": step}
        return {"mean": mean, "median": mean, "prompts": 4, "max_staleness": 0}

    measured = {"1 process": arm(16.5), "2 ranks": arm(8.5)}
    table = scaling.validation(measured)
    assert "| 1 process | 218 | 16.50 | 16.50 (+0.0 %) | 16.50 (+0.0 %) |" in table
    assert "| 2 ranks | 424 | 8.50 | 16.50 (+94.1 %) | 8.50 (+0.0 %) |" in table


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 2}, "ranks=2 has to be 1 to prompts=1"),
        ({"prompts": 4, "ranks": 2, "engines": 3}, "engines=3 cannot be shared out evenly over ranks=2"),
        ({"max_staleness": 30}, "steps=40 is too few"),
    ],
)
def test_setups_that_cannot_be(changed, message):
    with pytest.raises(ConfigError, match=message):
        replace(ALONE, **changed)


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("engines: 8\nranks: 4\n", encoding="utf-8")
    setup = scaling.load_setup(file, ["ranks=2", "shared_pool=true"])
    assert (setup.engines, setup.ranks, setup.shared_pool) == (8, 2, True)
    with pytest.raises(ConfigError, match="engine is no key of the simulation; choose from engines"):
        scaling.load_setup(None, ["engine=2"])


@pytest.mark.slow
def test_the_sweep_is_told_and_drawn(tmp_path, monkeypatch):
    for name, value in {"SIZES": (8,), "MIDDLE": 8, "SIGMAS": (0.0, 0.5), "RATIOS": (1.0,)}.items():
        monkeypatch.setattr(scaling, name, value)
    monkeypatch.setattr(scaling, "TABLE_SIZES", (8,))
    setup = Setup(prompts=8)
    found = scaling.sweep(setup)
    rows = scaling.table(found).splitlines()
    assert len(rows) == 4 + 1 + 2 * len(scaling.STALENESS)
    assert " · 8:8 · " in rows[4]
    assert all(sum(map(int, row.split(" · ")[1].split(":"))) == 8 for row in rows[5:])
    scaling.draw(setup, found, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 20_000
