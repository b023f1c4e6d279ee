import math

import torch

from flowcorr.metrics import Metrics
from flowcorr.questions.noise import moments
from flowcorr.questions.normal import largest_kl, ranges


def test_moments_of_normal_noise_stay_in_their_ranges():
    noise = torch.randn(2000, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = [Metrics(moments(row)).compute() for row in noise]
    for name, (low, high) in ranges(256).items():
        values = [one[name] for one in found]
        middle = 1.0 if name == "std" else 0.0
        assert low < min(values) < middle - (middle - low) / 4
        assert middle + (high - middle) / 4 < max(values) < high
    assert max(values) > -low  # beyond the range of a normal variable


def test_fourth_moments_are_skewed_less_the_more_elements_there_are():
    skews = [high / -low for low, high in (ranges(count)["tails"] for count in (256, 65536))]
    assert skews[0] == 2
    assert 1 < skews[1] < 1.1


def test_a_gap_of_the_means_is_in_the_noise():
    assert ranges(512, 0.5)["mean"][1] == 0.5 + ranges(512)["mean"][1]
    assert ranges(None)["std"] == (-math.inf, math.inf)


def test_log_probs_of_two_policies_stay_within_their_largest_kl():
    draw = torch.Generator().manual_seed(0)
    for distance in (0.0, 0.01, 0.3):
        noise = torch.randn(4000, 256, generator=draw, dtype=torch.float64)
        # Of `x' = mu + z` under both means, which `distance` in one direction keeps apart.
        delta = ((noise.square() - (noise + distance).square()) / 2).mean(1)
        limit = largest_kl(distance, 256, 1e-12)
        assert float((-delta).max()) <= limit
        assert limit <= distance**2 / 2 + 2 * float((delta + distance**2 / 2).abs().max()) + 1e-12
