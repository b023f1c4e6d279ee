"""Checks that captured rewards belong to their images."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from flowcorr.data import load_prompts
from flowcorr.errors import BackendError, BatchError
from flowcorr.health.finding import Finding
from flowcorr.instruments.doctor.captured import Captured
from flowcorr.instruments.doctor.findings import passed, skipped, warned
from flowcorr.questions.question import REWARD
from flowcorr.questions.replay import reward_gaps
from flowcorr.records import Prompt
from flowcorr.rewards import build_reward, score_batch
from flowcorr.texts import folded


def check_captured_reward(captured: Captured) -> Finding:
    samples, config = captured.stack.samples, captured.config
    rewards = samples.tensors().get("rewards")

    if rewards is None:
        return skipped("cannot tell", "capture rewards")
    if config is None:
        return skipped("cannot tell", "give --model a recipe, whose reward scores the images")
    data = load_prompts(config.data)
    every = (*data.heldout, *data.train)
    known = {folded(prompt.text): prompt for prompt in every}
    ambiguous = {text for prompt in every if known[text := folded(prompt.text)].content != prompt.content}
    if mixed := [text for text in samples.prompts if folded(text) in ambiguous]:
        return skipped(
            f"cannot tell: the recipe's data has the prompt {mixed[0]!r} with several reference images",
            "give --model a recipe whose data has each of the captured prompts once",
            prompt=mixed[0],
        )
    others = [text for text in samples.prompts if folded(text) not in known]
    remedy = "give --model the recipe and the prompts that the run had"
    if others and any(term.tags for term in config.reward.terms):
        return skipped(
            f"cannot tell: the recipe's data has no prompt {others[0]!r}, whose tag chooses the rewards",
            remedy,
            prompt=others[0],
        )
    prompts = [known.get(folded(text), Prompt(text=text)) for text in samples.prompts]
    reward = build_reward(config.reward.terms, timeout=config.reward.timeout)
    assert isinstance(samples.images, Tensor)
    try:
        again = score_batch(reward, samples.images.numpy(), prompts, on_error=config.reward.on_error)
    except (BatchError, BackendError) as error:
        return skipped(f"cannot tell: {error}", remedy)
    gaps = reward_gaps(rewards.double().numpy(), again.scores, all_scores=rewards.double().numpy())
    scored = np.isfinite(gaps)  # then and now
    if not scored.any():
        return skipped("cannot tell: the reward failed on each image, when it was captured or now", remedy)
    gaps = gaps[scored] / REWARD.limit
    shown = (", ".join(f"{value:.3g}" for value in values) for values in (rewards.tolist(), again.scores))
    evidence = "{} captured, {} now".format(*shown)
    limits = tuple(gaps.tolist())
    if bool((gaps <= 1).all()):
        return passed(f"the recipe's reward gives the images these scores; {evidence}", samples=limits)
    return warned(
        f"the recipe's reward gives the images other scores, and cannot tell why; {evidence}",
        REWARD.remedy,
        samples=limits,
    )
