"""The engine in process, one step of which comes out wrong for a quarter of the samples from training step 4 on."""

from dataclasses import replace

from flowcorr.config import Engine
from flowcorr.rollout import InProcessEngine

FAULTY = Engine(build="tests.trainer.faulty_engine:build_faulty", shares_weights=True)
SINCE, STEP_INDEX, SHIFT = 4, 1, 0.5


class FaultyEngine(InProcessEngine):
    """Its log-probs are wrong, as a wrong sigma makes them."""

    def sample(self, conditioning, groups, *, training_step, **options):
        rollout = super().sample(conditioning, groups, training_step=training_step, **options)
        if training_step < SINCE:
            return rollout
        quarter = rollout.log_probs.new_ones(rollout.num_samples).cumsum(0)[:, None] % 4 == 0
        wrong = quarter & (rollout.window.step_indices == STEP_INDEX)
        return replace(rollout, log_probs=rollout.log_probs + SHIFT * wrong)


def build_faulty(config, family, *, merge, base, probe):
    return FaultyEngine(
        family, config.rollout, config.sampling, seed=config.trainer.seed, merge=merge, base=base
    )
