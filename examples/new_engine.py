"""A rollout engine of your own: a copy of the transformer that computes under autocast, as many servers do.

    python examples/new_engine.py --out runs/autocast --steps 10

From the command line the same run is

    PYTHONPATH=examples flowcorr train tiny_ocr_lora rollout.name=new_engine:AUTOCAST rollout.emulate=none \
        rollout.dtype=bfloat16

An engine takes weights, samples groups of images and returns their trajectories. Here all of that happens in one
process. An engine elsewhere sends the merged weights away in `sync`, and gets window, log-probs and images back. The
gap of an engine is judged by `rollout.dtype`: in float32 the one of autocast would be a fault, and end the run.
"""

import argparse
import copy
from dataclasses import replace

import torch

from flowcorr import config, sde, trainer
from flowcorr.config import Engine
from flowcorr.errors import ConfigError
from flowcorr.models import DTYPES, SamplingPlan
from flowcorr.records import Rollout
from flowcorr.rollout import decode, ignore_images, sample_sde_window

# The facts that config, plan and trainer ask for before the engine is built.
AUTOCAST = Engine(build="new_engine:AutocastEngine")


class AutocastEngine:
    """See `flowcorr.rollout.RolloutEngine`; it computes in `rollout.dtype`, and `rollout.engine` has no options."""

    def __init__(self, config, family, *, merge, base, probe):
        rollout = config.rollout
        if rollout.staleness or rollout.emulate != "none":
            raise ConfigError(
                f"rollout.staleness={rollout.staleness} with rollout.emulate={rollout.emulate!r} cannot be used with "
                f"rollout.name={rollout.name}, which samples with the weights it was given; set staleness: 0 and "
                "emulate: none"
            )
        if rollout.engine:
            raise ConfigError(
                f"rollout.engine={dict(rollout.engine)} has no meaning for {rollout.name}; leave it out"
            )
        self.dtype = DTYPES[rollout.dtype]
        self.config, self.family, self.merge = config, family, merge
        self.plan = SamplingPlan.of(family, config.sampling)
        self.device = next(family.transformer.parameters()).device
        self.transformer = copy.deepcopy(base).to(self.device)
        self.weights = None

    @property
    def history(self):
        return [] if self.weights is None else [self.weights]

    def restore(self, history):
        self.sync(history[-1])

    def sync(self, weights):
        self.weights = weights
        self.transformer.load_state_dict(dict(self.merge(weights.tensors)))

    def sample(self, conditioning, groups, *, training_step, with_means, on_images=ignore_images):
        count, plan = self.config.rollout.n, self.plan
        prompts = torch.arange(len(groups), device=self.device).repeat_interleave(count)  # of each image
        owners = [group for group in groups for _ in range(count)]
        members = [member for _ in groups for member in range(count)]
        seeds = {"seed": self.config.trainer.seed, "training_step": training_step}

        def velocity(latents, timesteps, rows):
            chosen = {name: values[prompts[rows]].to(self.device) for name, values in conditioning.items()}
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                return self.family.velocity(self.transformer, latents, timesteps, chosen, plan.guidance)

        def noise(step, rows):
            names = [owners[row] for row in rows], [members[row] for row in rows]
            return sde.step_noise(plan.latent_shape, *names, **seeds, step_index=step).to(self.device)

        start = sde.initial_noise(
            plan.latent_shape, owners, members, **seeds, same_in_group=self.config.rollout.same_initial_noise
        )
        window, log_probs, final = sample_sde_window(
            velocity,
            start.to(self.device),
            self.family.in_dtype(plan.schedule, self.dtype),
            plan.sampling,
            plan.windows(owners, members, **seeds).to(self.device),
            noise,
            with_means=with_means,
        )
        images, finite_images = decode(self.family, final, on_images)
        rollout = Rollout(
            window=window,
            log_probs=log_probs,
            images=images,
            finite_images=finite_images,
            final_latents=final,
            group_ids=torch.tensor(owners, device=self.device),
            policy_versions=torch.full((len(owners),), self.weights.version, device=self.device),
        )
        return replace(rollout, conditioning=dict(conditioning), conditioning_rows=prompts).validate()

    def close(self):
        self.transformer = None


def main(out: str, steps: int, *overrides: str) -> trainer.RunResult:
    engine = ["rollout.name=new_engine:AUTOCAST", "rollout.emulate=none", "rollout.dtype=bfloat16"]
    settings = config.load("tiny_ocr_lora", [*engine, f"trainer.total_steps={steps}", *overrides])
    result = trainer.train(settings, out)
    print(f"held-out exact match after {result.step} steps: {result.metrics['eval/exact_match']:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/autocast")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
