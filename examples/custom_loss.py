"""A loss of your own, with an option, and a metric of your own, with the range in which it is healthy.

The loss is the clip of DAPO, wider above 1 than below (arXiv:2503.14476, eq. 8). It assumes that the engine's rounding
raises as many ratios as it lowers, which the metric measures.

    python examples/custom_loss.py --out runs/clip_higher --steps 10

From the command line the same run is

    PYTHONPATH=examples flowcorr train tiny_ocr_lora actor.loss_mode=custom_loss:CLIP_HIGHER \
        'actor.loss_options={above: 2e-3}' 'trainer.metrics=[custom_loss:RAISED]'
"""

import argparse

import torch

from flowcorr import config, trainer
from flowcorr.config.schema import ActorConfig
from flowcorr.health import Drawn, Metric, Rule
from flowcorr.losses import Limit, Loss
from flowcorr.losses.terms import exp_ratio, mask_terms, output, ratio_stats
from flowcorr.metrics import Stat, mean
from flowcorr.records import LossOutput, Terms


def clip_higher(terms: Terms, actor: ActorConfig, *, above: float) -> LossOutput:
    """Sum of `w max(-A ratio, -A clamp(ratio, 1 - clip_ratio, 1 + above))`."""
    masked = mask_terms(
        terms.log_prob,
        terms.old_log_prob,
        terms.advantage,
        adv_clip_max=actor.adv_clip_max,
        weight=terms.weight,
        keep=terms.keep,
    )
    low, high = 1 - actor.clip_ratio, 1 + above
    ratio, a = exp_ratio(masked.log_ratio), masked.advantage
    loss = masked.weight * torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    return output(loss, masked, ratio_stats(masked, masked.log_ratio, above=ratio > high, below=ratio < low))


# What the noise floor, the doctor and the audit ask: how far this loss lets a ratio be from 1, and what it reads. Each
# term is a multiple of its advantage, so the update leaves samples of advantage 0 out.
CLIP_HIGHER = Loss(
    objective=clip_higher, limit=Limit(key="clip_ratio"), scaled_by_advantage=True, reads=("clip_ratio",)
)


def raised(terms: Terms) -> Stat:
    """The share of ratios above 1 among those that differ from 1."""
    delta = terms.log_prob - terms.rollout_log_prob
    return mean((delta > 0).sum(), (delta != 0).sum())


# Shown after each step, drawn in the report, and a finding of training and report where it is outside its range.
RAISED = Metric(
    name="rollout_corr/raised_fraction",
    meaning="ratios of trainer and engine above 1, of those that differ from 1.",
    measure=raised,
    label="raised",
    chart=Drawn(section="drift", title="Raised ratios"),
    rule=Rule(
        name="raised",
        what="the share of ratios above 1",
        low=0.1,
        high=0.9,
        patience=3,
        advice="the gap has a direction, so it is no rounding; `flowcorr doctor` names the part that is wrong",
    ),
)


def main(out: str, steps: int, *overrides: str) -> trainer.RunResult:
    own = ["actor.loss_mode=custom_loss:CLIP_HIGHER", "actor.loss_options={above: 2e-3}"]
    own += ["trainer.metrics=[custom_loss:RAISED]"]
    settings = config.load("tiny_ocr_lora", [*own, f"trainer.total_steps={steps}", *overrides])
    result = trainer.train(settings, out)
    print(f"held-out exact match after {result.step} steps: {result.metrics['eval/exact_match']:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/clip_higher")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
