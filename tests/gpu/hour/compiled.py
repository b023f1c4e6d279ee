"""`actor.compile`: how long compilation takes, what it gains, and whether log-probs stay what they are."""

from __future__ import annotations

from dataclasses import replace

from flowcorr.actor.scoring import Scorer
from tests.gpu.hour import meter
from tests.gpu.hour.families import build_actor, correct, planned_config, sampled_batch, update
from tests.gpu.hour.parts import Hour, SkippedError
from tests.gpu.hour.step import SAME_POLICY
from tests.tiny_pipelines import engine_beside

BLOCKS = 4
"""Of a kind; the blocks of a kind share a compilation."""


def measure(hour: Hour, family: str) -> None:
    if hour.tiny and family != "flux":
        raise SkippedError("in tiny sizes only FLUX is compiled")
    config, architecture, planned = planned_config(hour, family)
    few = architecture.cut(lambda depth: min(depth, 2 if hour.tiny else BLOCKS))
    actor, conditioning = build_actor(hour, config, few)
    batch = sampled_batch(engine_beside(actor), conditioning, config)
    rollout = batch.rollout
    eager = actor.log_probs(rollout)
    batch = correct(actor, replace(batch, old_log_probs=eager.log_probs, old_means=rollout.window.means))
    seconds = {"recompute": meter.seconds(hour.device, lambda: actor.log_probs(rollout))}
    seconds["update"] = meter.seconds(hour.device, lambda: update(actor, batch), repeats=2)
    eager = actor.log_probs(rollout)

    Scorer(
        actor.family,
        actor.weights,
        replace(config, actor=replace(config.actor, compile=True)),
    )
    first = meter.seconds_once(hour.device, lambda: actor.log_probs(rollout))
    hour.row("compilation, forwards", first, unit="s", note=f"{few.depth} blocks")
    gap = (actor.log_probs(rollout).log_probs - eager.log_probs).abs().max().item()
    hour.row("log-probs beside eager", gap, unit="nats", at_most=SAME_POLICY)
    fewer = rollout.select(slice(0, rollout.num_samples - 1))
    again = meter.seconds_once(hour.device, lambda: actor.log_probs(fewer))
    hour.row("another batch size", again, unit="s", at_most=max(first / 2, 5.0))
    first = meter.seconds_once(hour.device, lambda: update(actor, batch))
    hour.row("compilation, backwards", first, unit="s")
    faster = {"recompute": meter.seconds(hour.device, lambda: actor.log_probs(rollout))}
    faster["update"] = meter.seconds(hour.device, lambda: update(actor, batch), repeats=2)
    for name, eagerly in seconds.items():
        hour.row(f"{name}, compiled", faster[name], unit="s", expected=eagerly)
