"""Bounds from the noise of earlier training steps, against numbers by hand."""

import math

import pytest
import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask as correct
from flowcorr.correction.robust import Noise
from flowcorr.errors import BatchError

SIZE = 100


def noise(*, centre=0.0, spread=0.01, steps=3):
    """Known at all steps but the last."""
    columns = [torch.full((steps,), value, dtype=torch.float64) for value in (centre, spread)]
    for column in columns:
        column[-1] = math.nan
    return Noise(centre=columns[0], spread=columns[1])


def kept(delta, mode, known, *, slack=0.0, step=0, threshold="auto", kl=None, **options):
    """Which samples are kept; `delta` `[B]` holds at both steps of a window."""
    delta = torch.tensor(delta, dtype=torch.float64)[:, None].expand(-1, 2)
    correction = correct(
        delta,
        torch.zeros_like(delta),
        rollout_rs=mode,
        rollout_rs_threshold=threshold,
        step_indices=torch.full(delta.shape, step),
        num_steps=3,
        num_elements=SIZE,
        step_kl=torch.zeros_like(delta) if kl is None else torch.tensor(kl).double()[:, None].expand(-1, 2),
        noise={mode: known},
        slack=torch.full_like(delta, slack),
        **options,
    )
    assert torch.equal(*correction.keep.T)
    return correction.keep[:, 0].tolist()


# Half-widths 6 * .01 on the scale of the mode, to which the slack of .002 adds. A k1 is minus the log-ratio.
@pytest.mark.parametrize(
    ("mode", "edge", "edge_with_slack"),
    [
        ("token_k1", 0.06, 0.062),
        ("seq_mean_k1", 0.06, 0.062),
        ("seq_sum_k1", 0.03, 0.032),  # two steps
        ("token_k2", math.sqrt(2 * 0.06**3), math.sqrt(2 * 0.06**3) + 0.002),
        ("seq_max_k2", math.sqrt(2 * 0.06**3), math.sqrt(2 * 0.06**3) + 0.002),
        ("seq_sum_k2", math.sqrt(0.06**3), math.sqrt(0.06**3) + 0.002),
        ("step_z", 0.06, 0.062),
    ],
)
def test_bounds_are_the_noise_and_the_slack(mode, edge, edge_with_slack):
    threshold = 6.0 if mode == "step_z" else "auto"
    for slack, end in ((0.0, edge), (0.002, edge_with_slack)):
        values = [0.999 * end, 1.001 * end, -0.999 * end, -1.001 * end]
        assert kept(values, mode, noise(), slack=slack, threshold=threshold) == [True, False] * 2


def test_bounds_of_k3_are_those_of_its_own_scale():
    # log(1 + k3) up to .06^3; with a slack of .002 its root grows by that of log(1 + k3(.002)).
    def k3(d):
        return math.expm1(d) - d

    edge = math.expm1(0.06**3)
    wide = math.expm1((math.sqrt(0.06**3) + math.sqrt(math.log1p(k3(0.002)))) ** 2)
    for slack, end in ((0.0, edge), (0.002, wide)):
        values = [d for d in torch.linspace(-0.05, 0.05, 400).tolist() if abs(k3(d) - end) > 1e-5 * end]
        expected = [k3(d) <= end for d in values]
        assert 50 < sum(expected) < 350
        assert kept(values, "token_k3", noise(), slack=slack) == expected


def test_a_slack_of_a_kl_is_that_of_the_log_ratio_it_moves():
    # A KL of r^2 / 2 moves a log-ratio by r / sqrt(D), so a slack of .002 lets r grow by .02.
    edge = 0.06**3
    wide = (math.sqrt(edge) + math.sqrt(0.02**2 / 2)) ** 2
    for slack, end in ((0.0, edge), (0.002, wide)):
        assert kept([0, 0], "step_kl", noise(), slack=slack, kl=[0.999 * end, 1.001 * end]) == [True, False]


def test_a_scale_multiplies_the_slack_too():
    end = 0.06 + 10 * 0.002
    values = [0.0999 * end, 0.1001 * end]
    assert kept(values, "token_k1", noise(), slack=0.002, log_ratio_scale="sqrt") == [True, False]


@pytest.mark.parametrize("mode", ["token_k1", "token_k3", "seq_mean_k1", "step_kl", "step_z"])
def test_where_noise_is_not_known_nothing_is_rejected(mode):
    threshold = 6.0 if mode == "step_z" else "auto"
    far = {"threshold": threshold, "kl": [9.0]}
    assert kept([3.0], mode, noise(), **far) == [False]
    assert kept([3.0], mode, noise(), step=2, **far) == [True]
    assert kept([3.0], "token_k1", noise(), threshold="1e6") == [
        True
    ]  # a number is a bound, whatever was measured


def test_the_centre_is_a_shift_that_all_terms_have():
    values = [-0.1, -0.04 + 1e-6, 0.08 - 1e-6, 0.09]
    assert kept(values, "token_k1", noise(centre=-0.02)) == [False, True, True, False]
    assert kept(values, "step_z", noise(centre=0.02), threshold=6.0) == [False, True, True, False]


def test_noise_without_steps_is_refused():
    delta = torch.zeros(1, 2)
    with pytest.raises(BatchError, match="^noise .*step_indices"):
        correct(delta, delta, rollout_rs="token_k1", rollout_rs_threshold="auto", noise={})
