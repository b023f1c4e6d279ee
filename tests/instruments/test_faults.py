"""Faults planted in drawn log-probs, and what `diagnose` makes of them."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowcorr.instruments import faults as diagnosis
from flowcorr.records import Terms

B, T, D = 32, 4, 512


@dataclass(frozen=True, kw_only=True)
class Step:
    """What differs between the drawn training steps."""

    log_probs: torch.Tensor
    rollout_log_probs: torch.Tensor
    step_indices: torch.Tensor
    ages: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    num_elements: int | None = None

    def gap(self):
        flat = torch.full_like(self.log_probs, math.nan)
        return Terms(
            log_prob=self.log_probs,
            old_log_prob=self.log_probs,
            rollout_log_prob=self.rollout_log_probs,
            advantage=flat,
            std=flat,
            step=flat,
            step_index=self.step_indices,
            sigma=flat,
            keep=self.keep,
            num_elements=self.num_elements,
        )


def diagnose(steps):
    """The faults of training steps, numbered from 1 on."""
    ages = {number: one.ages for number, one in enumerate(steps, 1) if one.ages is not None}
    return diagnosis.diagnose({number: one.gap() for number, one in enumerate(steps, 1)}, ages)


def clean(r=(0.01, 0.012, 0.02, 0.04), *, steps=3, seed=0, ages=None, num_elements=None):
    """Training steps whose gap is rounding: step means off by `r` stds, each sample in its own direction."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        size = torch.tensor(r, dtype=torch.float64)
        rollout = 2 + 0.05 * torch.randn(B, T, generator=draw, dtype=torch.float64)
        noise = torch.randn(B, T, generator=draw, dtype=torch.float64)
        found.append(
            Step(
                log_probs=rollout - size**2 / 2 + size / math.sqrt(num_elements or D) * noise,
                rollout_log_probs=rollout,
                step_indices=torch.arange(T).repeat(B, 1),
                ages=ages,
                num_elements=num_elements,
            )
        )
    return found


def causes(steps):
    return [found.cause for found in diagnose(steps)]


def shuffled(log_probs):
    """Another order of steps in each sample, as of a trainer that shuffles them."""
    order = torch.rand(B, T, generator=torch.Generator().manual_seed(1)).argsort(1)
    return log_probs.gather(1, order), int((order != torch.arange(T)).sum())


@pytest.mark.parametrize(
    ("noun", "moved"),
    [
        ("samples", lambda log_probs: (log_probs.roll(4, 0), B)),
        ("samples", lambda log_probs: (torch.cat([log_probs[:16], log_probs[16:].flip(0)]), B // 2)),
        ("steps", lambda log_probs: (log_probs.flip(1), B * T)),
        ("steps", shuffled),
    ],
    ids=["gathered otherwise", "one rank", "reversed", "shuffled"],
)
def test_another_order_of_samples_or_steps_is_told(noun, moved):
    steps = clean((1e-3,) * T)
    late, number = moved(steps[2].log_probs)
    found = diagnose([*steps[:2], replace(steps[2], log_probs=late)])[0]
    assert (found.cause, found.level) == ("other_order", "serious")
    assert found.numbers["since training step"] == 3
    assert found.numbers[f"{noun} at another place"] == pytest.approx(number, rel=0.1)


@pytest.mark.parametrize("num_samples", [8, 500])
@pytest.mark.parametrize("window", [1, 10])
def test_noise_as_large_as_the_log_probs_spread_is_no_other_order(num_samples, window):
    """In a crowd each log-prob lies near another's, but several lie near one."""
    draw = torch.Generator().manual_seed(0)
    log_probs, others = torch.randn(2, num_samples, window, generator=draw, dtype=torch.float64)
    steps = [
        Step(
            log_probs=log_probs,
            rollout_log_probs=others,
            step_indices=torch.arange(window).repeat(num_samples, 1),
        )
    ]
    assert "other_order" not in causes(steps)


def of_one_step(r, num_samples, *, seed=0):
    """Training steps of one SDE step each, whose log-probs spread as those of `D` normal numbers do."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(20):
        noise, rounding = torch.randn(2, num_samples, 1, generator=draw, dtype=torch.float64)
        rollout = 2 + noise / math.sqrt(2 * D)
        found.append(
            Step(
                log_probs=rollout - r**2 / 2 + r / math.sqrt(D) * rounding,
                rollout_log_probs=rollout,
                step_indices=torch.zeros(num_samples, 1, dtype=torch.long),
            )
        )
    return found


@pytest.mark.parametrize(("r", "num_samples"), [(0.1, 3), (0.3, 16), (0.3, 32), (0.1, 96)])
@pytest.mark.parametrize("seed", range(5))
def test_single_numbers_near_those_of_others_are_no_other_order(r, num_samples, seed):
    assert "other_order" not in causes(of_one_step(r, num_samples, seed=seed))


@pytest.mark.parametrize("num_samples", [16, 96])
def test_another_order_of_windows_of_one_step_is_told(num_samples):
    steps = of_one_step(1e-3, num_samples)
    steps[3] = replace(steps[3], log_probs=steps[3].log_probs.roll(4, 0))
    found = diagnose(steps)[0]
    assert (found.cause, found.numbers["since training step"]) == ("other_order", 4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "r",
    [(0, 0, 0, 0), (1e-6,) * 4, (0.01,) * 4, (0.06, 0.07, 0.1, 0.3), (0.02, 0.02, 0.02, 0.1)],
    ids=["none", "float32", "bf16", "int4", "late"],
)
def test_rounding_is_no_fault(r, seed):
    assert diagnose(clean(r, seed=seed)) == []


def test_one_step_with_another_sigma_is_named():
    steps = clean(r=(1e-6, 1e-6, 0.3, 1e-6))
    (found,) = diagnose(steps)
    assert found.cause == "one_step"
    assert (found.numbers["step"], found.numbers["confidence"]) == (2, "certain")


def test_beside_bfloat16_one_step_is_likely_and_not_sure():
    (found,) = diagnose(clean(r=(0.02, 0.02, 0.3, 0.02)))
    assert (found.cause, found.numbers["confidence"]) == ("one_step", "likely")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-3, 0.01, 0.05])
def test_a_late_step_of_flow_cps_that_one_rounding_moves_farthest_has_no_gap_alone(scale, seed):
    """Steps 5 to 8 of 10 that end at sigma .02, as Qwen-Image has them, noise level .8."""
    sensitivities = 0.513, 0.736, 1.241, 10.728
    r = tuple(scale * each for each in sensitivities)
    assert diagnose(clean(r, seed=seed, num_elements=65536)) == []


@pytest.mark.parametrize(("side", "named"), [("log_probs", "trainer"), ("rollout_log_probs", "engine")])
def test_one_log_prob_for_all_samples_is_told_by_its_side(side, named):
    steps = clean()
    for one in steps:
        values = getattr(one, side)
        values.copy_(values.mean(0).expand_as(values))
    (found,) = diagnose(steps)
    assert (found.cause, found.numbers["steps"], named in found.sentence) == (
        "one_for_all",
        [0, 1, 2, 3],
        True,
    )


def test_log_probs_that_half_precision_makes_equal_are_no_mean_over_the_batch():
    steps = clean((0.0,) * T)
    for one in steps:
        for values in (one.log_probs, one.rollout_log_probs):
            values.copy_((2 + (values - 2) / 100).bfloat16())
    assert steps[0].log_probs.unique().numel() == 1
    assert diagnose(steps) == []


def test_non_finite_log_probs_are_counted_and_placed():
    steps = clean(steps=4)
    steps[1].log_probs[3, 2] = math.nan
    steps[3].rollout_log_probs[5:7, 2] = math.inf
    (found,) = diagnose(steps)
    assert found.numbers == {"samples": 3, "of": 128, "since training step": 2, "training steps": 2}


def test_a_step_that_nobody_trained_is_no_fault():
    steps = clean()
    for one in steps:
        one.log_probs[:, 3] = math.nan
    keep = torch.tensor([True, True, True, False]).expand(B, T)
    assert diagnose([replace(one, keep=keep) for one in steps]) == []
    assert causes(steps) == ["non_finite"]


def test_sums_in_place_of_means_hide_everything_else():
    steps = clean()
    for one in steps:
        one.log_probs.mul_(D)
        one.rollout_log_probs.mul_(D)
    assert causes(steps)[0] == "summed"


@pytest.mark.parametrize(("ages", "expected"), [(None, []), ([0] * B, []), ([0] * (B - 1) + [4], ["stale"])])
def test_older_weights_are_told_by_their_versions(ages, expected):
    assert causes(clean(ages=None if ages is None else torch.tensor(ages))) == expected


def test_the_age_is_told_in_numbers():
    (found,) = diagnose(clean(ages=torch.tensor([2] * (B // 2) + [4] * (B // 2))))
    assert (found.numbers["mean age in versions"], found.numbers["largest"]) == (3.0, 4.0)


@pytest.mark.parametrize("side", ["log_probs", "rollout_log_probs"])
def test_sums_on_one_side_are_told_by_that_side(side):
    steps = clean()
    for one in steps:
        getattr(one, side).mul_(D)
    found = diagnose(steps)[0]
    assert found.cause == "summed"
    trainer, engine = (found.numbers[name] for name in ("of the trainer", "median |log p| of the engine"))
    assert (trainer > engine) == (side == "log_probs")


@pytest.mark.parametrize("num_elements", [D, None])
def test_a_number_that_all_samples_share_is_no_gap_of_densities(num_elements):
    """As where one side leaves out the normaliser; without D, only a shift up is impossible."""
    steps = [replace(one, num_elements=num_elements) for one in clean()]
    for one in steps:
        one.log_probs.add_(torch.tensor([-0.4, 0.0, 0.3, 0.0]))
    (found,) = diagnose(steps)
    assert found.cause == "shared_shift"
    shifted = [name for name in found.numbers if name.startswith("delta log p")]
    assert shifted == [f"delta log p at step {step}" for step in ([0, 2] if num_elements else [2])]


@pytest.mark.parametrize("k", [0.3, 0.8, 1.2, 2.0])
def test_another_std_leaves_the_trace_of_a_density(k):
    """`log k - (k^2 - 1) mean(e^2) / 2` with a std that is smaller by `k`."""
    steps = [replace(one, num_elements=D) for one in clean()]
    draw = torch.Generator().manual_seed(9)
    for one in steps:
        square = 1 + math.sqrt(2 / D) * torch.randn(B, T, generator=draw, dtype=torch.float64)
        one.log_probs.copy_(one.rollout_log_probs + math.log(k) - (k**2 - 1) * square / 2)
    assert diagnose(steps) == []


@pytest.mark.parametrize(("num_judged", "expected"), [(7, []), (8, ["one_step"])])
def test_few_judged_samples_tell_of_no_step_that_it_has_a_gap_alone(num_judged, expected):
    """A sample's gap may be near 0 at the other steps by chance."""
    (one,) = clean((1e-6, 1e-6, 0.3, 1e-6), steps=1)
    keep = (torch.arange(B) < num_judged)[:, None].expand(B, T)
    assert causes([replace(one, keep=keep)]) == expected


def test_few_samples_shared_by_a_step_tell_nothing():
    steps = [replace(one, num_elements=D) for one in clean(steps=1)]
    steps[0].log_probs.add_(torch.tensor([-0.4, 0.0, 0.3, 0.0]))
    few = replace(
        steps[0],
        **{name: getattr(steps[0], name)[:7] for name in ("log_probs", "rollout_log_probs", "step_indices")},
    )
    assert diagnose([few]) == []


@pytest.mark.parametrize("r", [(0, 0, 0, 0), (0.01,) * 4])
def test_a_gap_of_a_few_samples_is_theirs_alone(r):
    steps = clean(r)
    for one in steps[1:]:
        one.log_probs[[3, 9], :2] -= 0.5
    (found,) = diagnose(steps)
    assert found.cause == "few_samples"
    assert [found.numbers[name] for name in ("samples", "of", "since training step")] == [4, 96, 2]


def judged_in_part():
    """A bypass run with 4 mini-batches: only the first is scored before an update, and so judged."""
    keep = (torch.arange(B) < B // 4)[:, None].expand(B, T)
    return [replace(one, keep=keep) for one in clean()]


def test_samples_that_are_not_judged_are_not_the_others_that_lack_a_gap():
    assert diagnose(judged_in_part()) == []


def test_the_count_of_samples_is_of_those_that_are_judged():
    steps = judged_in_part()
    steps[0].log_probs[[1, 20]] = math.nan
    (found,) = diagnose(steps)
    assert (found.numbers["samples"], found.numbers["of"]) == (1, 3 * B // 4)


def test_samples_of_older_weights_are_no_fault():
    ages = torch.zeros(B, dtype=torch.long)
    ages[[3, 9]] = 2
    steps = clean((0, 0, 0, 0), ages=ages)
    for one in steps:
        one.log_probs[[3, 9]] -= 0.5
    assert causes(steps) == ["stale"]


@pytest.mark.parametrize("seed", range(4))
def test_gaps_of_many_sizes_are_none_of_a_few_samples(seed):
    """The size of the gap varies among samples, by a factor of e in a standard deviation."""
    draw = torch.Generator().manual_seed(seed)
    steps = clean((0, 0, 0, 0), steps=4)
    for one in steps:
        size = 0.01 * torch.randn(B, 1, generator=draw, dtype=torch.float64).exp()
        noise = torch.randn(B, T, generator=draw, dtype=torch.float64)
        one.log_probs.add_(size / math.sqrt(D) * noise - size**2 / 2)
    assert diagnose(steps) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_log_probs_were_rounded_those_that_moved_by_a_unit_are_no_few_samples(dtype):
    steps = clean((1e-3,) * 4)
    rounded = [
        replace(
            one,
            log_probs=one.log_probs.to(dtype).double(),
            rollout_log_probs=one.rollout_log_probs.to(dtype).double(),
        )
        for one in steps
    ]
    assert (
        torch.cat([(one.log_probs - one.rollout_log_probs).abs().amax(1) > 0 for one in rounded])
        .double()
        .mean()
        > 0
    )
    assert diagnose(rounded) == []


@pytest.mark.parametrize("ratio", [0.93, 1.07])
def test_stds_that_differ_are_told_by_the_log_probs_that_they_follow(ratio):
    """The trainer's std is `ratio` times the engine's, and its means differ too."""
    draw, size, r = torch.Generator().manual_seed(11), 4096, 0.05
    square = 1 + math.sqrt(2 / size) * torch.randn(64, 2, generator=draw, dtype=torch.float64)
    engine = -square / 2
    shift = -(r**2) / 2 + r / math.sqrt(size) * torch.randn(64, 2, generator=draw, dtype=torch.float64)
    step = Step(
        log_probs=-square / ratio**2 / 2 - math.log(ratio) + shift,
        rollout_log_probs=engine,
        step_indices=torch.arange(2).expand(64, 2),
        num_elements=size,
    )
    found = diagnosis.diagnose({0: step.gap()})
    assert [finding.cause for finding in found] == ["other_std"]
    assert found[0].numbers["std of the trainer beside the engine's"] == pytest.approx(ratio, rel=0.02)
    assert not diagnosis.diagnose({0: replace(step, log_probs=engine + shift).gap()})
