import math

import torch

from flowcorr.metrics import Metrics
from flowcorr.questions.noise import moments
from flowcorr.questions.normal import ranges


def test_moments_of_normal_noise_stay_in_their_ranges():
    noise = torch.randn(2000, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = [Metrics.from_stats(moments(row)).compute() for row in noise]
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
