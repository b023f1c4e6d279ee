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
        with pytest.raises(ConfigError, match=r"sampling\.sde_window_size"):
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
    with pytest.raises(ConfigError, match=r"sampling\.sde_window_range.*sampling\.num_inference_steps=10"):
        check_window(2, window_range, 10)


@pytest.mark.parametrize("size", [0, -1, 5])
def test_a_window_that_does_not_fit(size):
    with pytest.raises(ConfigError, match=rf"sampling\.sde_window_size={size}.*choose 1 to 4"):
        check_window(size, (2, 6), 10)


def test_draw_windows_refuses_other_choices():
    with pytest.raises(ConfigError, match=r"sampling\.window_per='groups'.*did you mean group"):
        draw([0], [0], per="groups")
    with pytest.raises(ConfigError, match=r"sampling\.sde_window_layout='scatter'.*did you mean scattered"):
        draw([0], [0], layout="scatter")
    with pytest.raises(BatchError, match="2 groups and 1 members"):
        draw([0, 0], [0])


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_schedules_that_can_be_sampled(kind):
    check_schedule(kind, SCHEDULE, (0, 4), 0.7)


def test_the_only_step_has_no_shorter_range():
    with pytest.raises(ConfigError, match="adds no noise; choose sde or dance_sde"):
        check_schedule("cps", [0.9, 0.0], (0, 1), 0.7)


def test_cps_must_end_before_the_last_step():
    check_schedule("cps", SCHEDULE, (0, 3), 0.7)
    with pytest.raises(
        ConfigError, match=r"sampling\.sde_window_range=\[0, 4\] holds step 3.*end the range at 3"
    ):
        check_schedule("cps", SCHEDULE, (0, 4), 0.7)
    with pytest.raises(ConfigError, match=r"sampling\.sde_noise_range=\[1, 4\] holds step 3"):
        check_schedule("cps", SCHEDULE, (0, 3), 0.7, noise_range=(1, 4))


@pytest.mark.parametrize(
    ("kind", "window_range", "noise_level", "message"),
    [
        ("sdee", (0, 2), 0.7, r"sampling\.sde_type='sdee'.*did you mean sde"),
        ("cps", (0, 2), 1.1, r"sampling\.noise_level=1\.1.*0 < noise_level <= 1"),
        ("sde", (0, 2), float("inf"), r"sampling\.noise_level=inf"),
        ("sde", (0, 5), 0.7, r"sampling\.sde_window_range=\[0, 5\].*num_inference_steps=4"),
    ],
)
def test_schedules_with_bad_settings(kind, window_range, noise_level, message):
    with pytest.raises(ConfigError, match=message):
        check_schedule(kind, SCHEDULE, window_range, noise_level)


def test_a_first_level_is_one_but_for_rounding():
    check_schedule("sde", [1.0005, 0.7, 0.4, 0.0], (0, 3), 0.7)


@pytest.mark.parametrize("kind", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize(
    ("sigmas", "steps"), [([1.0005, 1.0, 0.4, 0.0], (0, 2)), ([1.0, 0.5, 1e-6, 0.0], (1, 3))]
)
def test_stochastic_steps_above_one_or_below_all_noise(kind, sigmas, steps):
    with pytest.raises(ConfigError, match=r"sampling\.sde_window_range"):
        check_schedule(kind, sigmas, steps, 0.7)


def test_steps_outside_the_window_descend_too():
    for tail in ([0.4, 0.4, 0.0], [0.4, 0.5, 0.0], [0.4, float("nan"), 0.0]):
        with pytest.raises(BatchError, match="must lie within"):
            check_schedule("sde", [1.0, 0.7, *tail], (0, 2), 0.7)


@pytest.mark.parametrize(
    "sigmas", [[1.0, 0.5, 0.5, 0.0], [0.5, 0.9, 0.1, 0.0], [1.5, 0.9, 0.1, 0.0], [1.0, float("nan"), 0.1, 0]]
)
def test_schedules_that_do_not_descend(sigmas):
    with pytest.raises(BatchError, match="must lie within"):
        check_schedule("sde", sigmas, (0, 3), 0.7)
