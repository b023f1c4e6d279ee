import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcorr.errors import BatchError, ConfigError
from flowcorr.sde import check_schedule, check_window, draw_windows

SCHEDULE = [1.0, 0.9, 0.7, 0.4, 0.0]


def draw(groups, members, **changes):
    options = {
        "seed": 1,
        "training_step": 4,
        "size": 2,
        "window_range": (1, 7),
        "num_inference_steps": 10,
        "per": "sample",
    }
    return draw_windows(groups, members, **(options | changes))


GROUPS, MEMBERS = [i // 4 for i in range(400)], [i % 4 for i in range(400)]


@pytest.mark.parametrize("layout", ["consecutive", "scattered"])
@settings(max_examples=50)
@given(start=st.integers(0, 5), length=st.integers(1, 6), size=st.integers(1, 6), seed=st.integers(0, 9))
def test_windows_lie_within_their_range(layout, start, length, size, seed):
    options = {
        "size": size,
        "window_range": (start, start + length),
        "num_inference_steps": 11,
        "seed": seed,
        "layout": layout,
    }
    if size > length:
        with pytest.raises(ConfigError, match=rf"sampling\.sde_window_size={size} .* 1 to {length},"):
            draw(GROUPS[:20], MEMBERS[:20], **options)
        return
    steps = draw(GROUPS[:20], MEMBERS[:20], **options)
    assert steps.shape == (20, size)
    assert steps.min() >= start
    assert steps.max() < start + length
    gaps = steps.diff(dim=1)
    assert ((gaps == 1) if layout == "consecutive" else (gaps > 0)).all()


@pytest.mark.parametrize(("layout", "number"), [("consecutive", 5), ("scattered", 15)])
def test_every_window_is_drawn_about_equally_often(layout, number):
    windows, counts = draw(GROUPS, MEMBERS, layout=layout).unique(dim=0, return_counts=True)
    assert len(windows) == number
    expected = 400 / number  # of which the standard deviation is the square root at most
    assert (counts - expected).abs().max() < 4 * expected**0.5


@pytest.mark.parametrize("layout", ["consecutive", "scattered"])
@pytest.mark.parametrize("per", ["group", "sample"])
def test_windows_do_not_depend_on_batching(per, layout):
    whole = draw(GROUPS, MEMBERS, per=per, layout=layout)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = draw([GROUPS[i] for i in order], [MEMBERS[i] for i in order], per=per, layout=layout)
    assert torch.equal(whole[order], shuffled)
    assert torch.equal(whole[100:200], draw(GROUPS[100:200], MEMBERS[100:200], per=per, layout=layout))


@pytest.mark.parametrize("layout", ["consecutive", "scattered"])
def test_a_group_shares_its_window_and_samples_do_not(layout):
    of_groups = draw(GROUPS, MEMBERS, per="group", layout=layout).unflatten(0, (100, 4))
    assert torch.equal(of_groups, of_groups[:, :1].expand_as(of_groups))
    assert len(of_groups[:, 0, 0].unique()) == 5
    of_samples = draw(GROUPS, MEMBERS, per="sample", layout=layout).unflatten(0, (100, 4))
    assert not torch.equal(of_samples, of_samples[:, :1].expand_as(of_samples))


def test_windows_change_with_seed_and_training_step():
    first = draw(GROUPS, MEMBERS)
    assert torch.equal(first, draw(GROUPS, MEMBERS))
    assert not torch.equal(first, draw(GROUPS, MEMBERS, seed=2))
    assert not torch.equal(first, draw(GROUPS, MEMBERS, training_step=5))


def test_draws_stay_what_they_are():
    """Else a run would not continue as it began."""
    groups, members = GROUPS[:6], MEMBERS[:6]
    assert draw(groups, members).tolist() == [[3, 4], [4, 5], [4, 5], [4, 5], [1, 2], [5, 6]]
    assert draw(groups, members, per="group").tolist() == [[4, 5]] * 4 + [[2, 3]] * 2
    assert draw(groups, members, layout="scattered").tolist() == [
        [1, 4],
        [3, 6],
        [3, 6],
        [2, 3],
        [5, 6],
        [2, 3],
    ]


def test_no_samples_have_no_windows():
    assert draw([], []).shape == (0, 2)


@pytest.mark.parametrize("window_range", [(0, 11), (-1, 4), (5, 5), (6, 2), (10, 12)])
def test_a_range_outside_the_schedule_names_both_keys(window_range):
    with pytest.raises(
        ConfigError,
        match=rf"^{re.escape(f'sampling.sde_window_range={list(window_range)}')} .*num_inference_steps=10;",
    ):
        check_window(2, window_range, 10)


@pytest.mark.parametrize("size", [0, -1, 5])
def test_a_window_that_does_not_fit(size):
    with pytest.raises(ConfigError, match=rf"sampling\.sde_window_size={size} .* 1 to 4,"):
        check_window(size, (2, 6), 10)


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"per": "groups"}, r"sampling\.window_per='groups' .*group\?"),
        ({"layout": "scatter"}, r"sampling\.sde_window_layout='scatter' .*scattered\?"),
    ],
)
def test_draw_windows_refuses_other_choices(choice, named):
    with pytest.raises(ConfigError, match=f"^{named}"):
        draw([0], [0], **choice)


def test_each_sample_has_a_group_and_a_member():
    with pytest.raises(BatchError, match="^2 groups .* 1 members "):
        draw([0, 0], [0])


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_schedules_that_can_be_sampled(kind):
    check_schedule(kind, SCHEDULE, (0, 4), 0.7)


@pytest.mark.parametrize(
    ("sigmas", "window_range", "noise_range", "named"),
    [
        (SCHEDULE, (0, 4), None, r"sampling\.sde_window_range=\[0, 4\] .* step 3, .*sigma=0,.* 3, or "),
        (SCHEDULE, (0, 3), (1, 4), r"sampling\.sde_noise_range=\[1, 4\] .* step 3, .*sigma=0,.* 3, or "),
        ([0.9, 0.0], (0, 1), None, r"sampling\.sde_window_range=\[0, 1\] .* step 0, .*; choose sde "),
    ],
)
def test_cps_must_end_before_the_last_step(sigmas, window_range, noise_range, named):
    check_schedule("cps", SCHEDULE, (0, 3), 0.7)
    with pytest.raises(ConfigError, match=f"^{named}"):
        check_schedule("cps", sigmas, window_range, 0.7, noise_range=noise_range)


@pytest.mark.parametrize(
    ("kind", "window_range", "noise_level", "named"),
    [
        ("sdee", (0, 2), 0.7, r"sampling\.sde_type='sdee' .*sde\?"),
        ("cps", (0, 2), 1.1, r"sampling\.noise_level=1\.1.*0 < noise_level <= 1"),
        ("sde", (0, 2), float("inf"), r"sampling\.noise_level=inf"),
        ("sde", (0, 5), 0.7, r"sampling\.sde_window_range=\[0, 5\].*num_inference_steps=4"),
    ],
)
def test_schedules_with_bad_settings(kind, window_range, noise_level, named):
    with pytest.raises(ConfigError, match=f"^{named}"):
        check_schedule(kind, SCHEDULE, window_range, noise_level)


def test_a_first_level_is_one_but_for_rounding():
    check_schedule("sde", [1.0005, 0.7, 0.4, 0.0], (0, 3), 0.7)


@pytest.mark.parametrize("kind", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize(
    ("sigmas", "steps"), [([1.0005, 1.0, 0.4, 0.0], (0, 2)), ([1.0, 0.5, 1e-6, 0.0], (1, 3))]
)
def test_stochastic_steps_above_one_or_below_all_noise(kind, sigmas, steps):
    with pytest.raises(ConfigError, match=rf"sampling\.sde_window_range=\[{steps[0]}, {steps[1]}\] .* step "):
        check_schedule(kind, sigmas, steps, 0.7)


@pytest.mark.parametrize(
    ("sigmas", "named"),
    [
        ([1.0, 0.5, 0.5, 0.0], "sigma=0.5 to 0.5 at step 1"),
        ([0.5, 0.9, 0.1, 0.0], "sigma=0.5 to 0.9 at step 0"),
        ([1.5, 0.9, 0.1, 0.0], "sigma=1.5 to 0.9 at step 0"),
        ([1.0, math.nan, 0.1, 0], "sigma=1.0 to nan at step 0"),
        # Beyond the window's steps.
        ([1.0, 0.7, 0.4, 0.4, 0.0], "sigma=0.4 to 0.4 at step 2"),
        ([1.0, 0.7, 0.4, 0.5, 0.0], "sigma=0.4 to 0.5 at step 2"),
        ([1.0, 0.7, 0.4, math.nan, 0.0], "sigma=0.4 to nan at step 2"),
    ],
)
def test_schedules_that_do_not_descend(sigmas, named):
    with pytest.raises(BatchError, match=re.escape(named)):
        check_schedule("sde", sigmas, (0, 2), 0.7)
