from dataclasses import replace

import pytest

from flowcorr.errors import BatchError
from flowcorr.records import Prompt
from flowcorr.trainer.collect import check_latents


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_named(make_run, bad):
    rollout = make_run().sample()
    prompts = [Prompt(text=text) for text in ("ab", "cd") for _ in range(4)]
    check_latents(rollout, prompts)
    rollout.window.latents[5, 1, 0, 0, 0] = rollout.window.next_latents[7, 1, 0, 0, 0] = bad
    rollout.final_latents[6, 0, 0, 0] = bad
    with pytest.raises(BatchError, match=r"sample 5 \(prompt 'cd'\), 3 of 8 samples"):
        check_latents(rollout, prompts)
    check_latents(replace(make_run().sample(), final_latents=None), prompts)
