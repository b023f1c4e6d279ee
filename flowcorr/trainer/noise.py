"""The noise that the rollout engine added to its SDE steps, as the actor sees it: `(x' - mean) / s`.

The means are the actor's own, of the first forward pass that it makes of a batch anyway: that of the old log-probs, or
in bypass mode the one before the first optimizer step. So no engine has to return its means. Both means differ by
rounding and staleness, which the health rules allow for: rounding moves a mean by a share of what the velocity does.

The seeds give the noise that was to be added, so both are compared, too. What the means differ by does not depend on
the noise: its correlation with the seeded noise is that of two independent directions, whatever the precision.

Without its noise, a step leaves the difference of both means, of which `WindowResiduals` are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.config.schema import Config
from flowcorr.metrics import Metrics, Stat, maximum, mean
from flowcorr.records import Rollout, Scores
from flowcorr.rollout.witnesses import seeded_noise, without_velocity
from flowcorr.sde.transition import over_elements
from flowcorr.trainer.residual_terms import in_common, terms

_ROUNDED = (torch.bfloat16, torch.float16)  # to which an engine may round its noise

_SAME = 1e-4  # factor between two noises that float32 on two devices, and their stds, explain


class NoiseMeter:
    """Adds up the noise of a training step's batch, part by part.

    Args:
        rollout: the batch, with its members.
        config: the run's configuration.
        training_step: seeded its noise.
    """

    def __init__(self, rollout: Rollout, config: Config, training_step: int) -> None:
        self._sampling, self._fresh = config.sampling, scored_by_sampler(config)
        self._seeds = {"seed": config.trainer.seed, "training_step": training_step}
        self._beside = torch.zeros(3, dtype=torch.float64)
        self._parts: list[Metrics] = []
        self._num_terms = 0
        self._together = rollout.window.latents.new_zeros(rollout.num_elements, dtype=torch.float64)

    def add(self, rollout: Rollout, scores: Scores) -> None:
        """Add the terms of a part of the batch whose scores are finite.

        Args:
            rollout: the part.
            scores: of the actor, with its step means.
        """
        assert scores.means is not None, "the noise is measured from the actor's means"
        window, finite = rollout.window, scores.log_probs.detach().isfinite()
        means, stds = scores.means.detach()[finite], scores.stds.detach()[finite]
        noise = ((window.next_latents[finite] - means) / over_elements(stds, means)).flatten(1)
        self._num_terms += len(noise)
        self._together += noise.sum(0, dtype=torch.float64)
        squared = noise.square()
        stats = {
            "rollout/noise_std": self._std(rollout.log_probs[finite], stds, noise.shape[1]),
            "rollout/noise_mean": mean(noise.sum(dtype=torch.float64), noise.numel()),
            # The fourth Hermite polynomial: to first order a noise that is too large or too small does not change it.
            "rollout/noise_tails": mean(
                (squared * (squared - 6) + 3).sum(dtype=torch.float64), noise.numel()
            ),
        }
        if self._fresh:
            ways = (scores.means.detach() - without_velocity(window, self._sampling).mean)[finite]
            ways = ways / over_elements(stds, ways)
            stats["rollout/velocity_distance"] = _root_mean_square(
                ways.square().sum(dtype=torch.float64), ways.numel()
            )
        self._compare(noise, seeded_noise(rollout, **self._seeds).to(noise.device)[finite].flatten(1))
        self._parts.append(Metrics.from_stats(stats))

    def _compare(self, noise: Tensor, seeded: Tensor) -> None:
        """Compare each term's noise `[N, D]` with that of its seeds."""
        rest = (noise - seeded).double()
        sums = torch.stack([(rest * seeded).sum(1), seeded.double().square().sum(1), rest.square().sum(1)])
        self._beside += sums.sum(1).cpu()
        if len(noise):
            self._parts.append(Metrics.from_stats({"rollout/noise_z_max": maximum(_scores(sums).max())}))

    def metrics(self) -> Metrics:
        """`rollout/noise_*` of all terms that were added. All ranks have to call it together."""
        every = torch.cat([self._together, self._beside.to(self._together.device)])
        together, beside = distributed.add_up(every, "the noise of the SDE steps").split(
            [len(self._together), 3]
        )
        # Each rank has the sum of all, and the metrics of all ranks are added.
        shared = mean(together.square().mean() / distributed.world_size(), self._num_terms)
        stats = {
            "rollout/noise_shared_by": shared,
            "rollout/noise_z_max": maximum(_scores(beside[:, None])[0]),
        }
        return Metrics.merged([*self._parts, Metrics.from_stats(stats)])

    def _std(self, log_probs: Tensor, stds: Tensor, num_elements: int) -> Stat:
        """The std around 0 that the rollout's own log-probs imply; a difference of the means does not change it."""
        known = log_probs.isfinite()
        variance = sde.noise_variance(log_probs[known], stds[known], cps_unscaled=self._sampling.cps_unscaled)
        variance = variance.clamp(min=0)  # below, the log-probs are higher than those of any latents
        squares = variance.sum(dtype=torch.float64) * num_elements
        return _root_mean_square(squares, variance.numel() * num_elements)


def _root_mean_square(squares: Tensor, count: int) -> Stat:
    return Stat("std", (count, 0.0, squares))


def _scores(sums: Tensor) -> Tensor:
    """Distance of a noise from that of its seeds, projected on the latter, in standard errors `[N]`.

    Args:
        sums: over the elements: the rest times the seeded noise, the square of the seeded noise, and that of the rest.
    """
    along, whole, rest = sums
    return (along.abs() - _SAME * whole).clamp(min=0) / rest.sqrt().clamp(min=1e-30)


def scored_by_sampler(config: Config) -> bool:
    """Whether the first forward pass of a batch is made with the weights that sampled it."""
    recomputed = config.algorithm.rollout_correction.mode in ("decoupled", "off")
    return config.rollout.max_weight_age == 0 or (recomputed and config.actor.old_policy == "behaviour")


class WindowResiduals:
    """Adds up the residuals of the window's steps, see `flowcorr.trainer.residual_terms`.

    Args:
        rollout: a training step's batch, with `members`.
        config: the run's.
        training_step: its number.
        noise: whether to measure the noise.
        velocity: whether to measure the velocity: the scores have to be those of the weights that sampled.
    """

    def __init__(
        self, rollout: Rollout, config: Config, training_step: int, *, noise: bool, velocity: bool
    ) -> None:
        self._config, self._training_step = config, training_step
        self._noise, self._velocity = noise, velocity
        self._groups = rollout.group_ids.unique()
        self._common = rollout.window.latents.new_zeros(len(self._groups), rollout.num_elements)
        # By residual `[G, C, 2]`: sums of residual x direction, and of direction^2. All ranks need those of velocities.
        self._sums = {"velocity_length": self._common.new_zeros(len(self._groups), 1, 2, dtype=torch.float64)}
        self._num_terms = torch.zeros_like(self._groups)

    def add(self, rollout: Rollout, scores: Scores) -> None:
        """Add a part of the batch; steps whose scores are not finite are left out.

        Args:
            rollout: the part.
            scores: of the actor, with its step means.
        """
        assert scores.means is not None, "the residuals are measured from the actor's means"
        window = rollout.window
        means, stds = scores.means.detach(), over_elements(scores.stds.detach(), scores.means)
        finite = over_elements(scores.log_probs.detach().isfinite(), means)
        places = torch.searchsorted(self._groups, rollout.group_ids)
        drawn = seeded_noise(rollout, seed=self._config.trainer.seed, training_step=self._training_step)
        noise = torch.where(finite, drawn.to(means), 0)
        residuals = torch.where(finite, window.next_latents - means - stds * noise, 0)
        if self._noise:
            self._fit("step_noise", places, residuals / stds, [noise])
            errors = [noise.to(dtype).float() - noise for dtype in _ROUNDED]
            self._fit("step_noise_rounding", places, residuals / stds, errors)
        if self._velocity:
            still = without_velocity(window, self._config.sampling)
            ways = torch.where(finite, means - still.mean, 0)
            self._fit("velocity_length", places, residuals, [ways])
            self._common.index_add_(0, places, residuals.sum(1).flatten(1))
            self._num_terms.index_add_(0, places, finite.flatten(1).sum(1))

    def metrics(self) -> Metrics:
        """Metrics of everything that was added. All ranks have to call it together."""
        found = [terms(name, sums[..., 0] / sums[..., 1]) for name, sums in self._sums.items()]
        if self._velocity:
            squares = self._sums["velocity_length"][:, 0, 1]
            # The mean residual over the root mean square of the way.
            common = self._common / (self._num_terms * squares).sqrt().unsqueeze(1).to(self._common)
            groups = distributed.gather_rows(self._groups, "the groups of a step")
            common = distributed.gather_rows(common, "the velocity's error by group")[groups.argsort()]
            # A group without a finite score has none; it would be part of the mean of all groups after it.
            common = common[common.isfinite().all(1)]
            if distributed.is_main():
                found.append(terms("velocity_common", in_common(common)))
        return Metrics.merged(found)

    def _fit(self, name: str, places: Tensor, residuals: Tensor, directions: list[Tensor]) -> None:
        """Add to the least-squares fit of residuals `[b, ...]` to each of some directions."""
        sums = [(residuals * direction, direction.square()) for direction in directions]
        added = torch.stack(
            [
                torch.stack([part.flatten(1).sum(1, dtype=torch.float64) for part in pair], dim=1)
                for pair in sums
            ],
            dim=1,
        )
        zeros = added.new_zeros(len(self._groups), *added.shape[1:])
        self._sums.setdefault(name, zeros).index_add_(0, places, added)


class FirstScores:
    """The observer of the first scores that a step's batch gets: measures the noise and the residuals of its window.

    Args:
        rollout: the batch, with its members.
        config: the run's configuration.
        training_step: seeded its noise.
    """

    def __init__(self, rollout: Rollout, config: Config, training_step: int) -> None:
        self._noise = NoiseMeter(rollout, config, training_step)
        self._residuals = WindowResiduals(
            rollout, config, training_step, noise=True, velocity=scored_by_sampler(config)
        )

    def __call__(self, part: Rollout, scores: Scores) -> None:
        """Add a part of the batch."""
        self._noise.add(part, scores)
        self._residuals.add(part, scores)

    def metrics(self) -> Metrics:
        """All that was measured. All ranks have to call it together."""
        return Metrics.merged([self._noise.metrics(), self._residuals.metrics()])
