"""The noise that the rollout engine added to its SDE steps, as the actor sees it: `(x' - mean) / s`.

The means come from the actor's first forward pass on a batch: the old log-probs', or in bypass mode the last one before
the first optimizer step. So no engine has to return its means. The actor's means differ from the engine's by rounding
and staleness, and the health rules allow for that.

The seeds give the noise that should have been added, so the two are compared. The step less its seeded noise is the
difference of the two means, from which `WindowResiduals` are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowcorr import distributed, sde
from flowcorr.actor import DiffusionActor
from flowcorr.config.schema import Config
from flowcorr.metrics import Metrics, Stat, Stats, maximum, mean
from flowcorr.questions.compared import Compared, beside_seeds, standard_errors
from flowcorr.questions.residual_terms import in_common, terms
from flowcorr.records import Rollout, Scores
from flowcorr.sde.transition import over_elements

_ROUNDED = (torch.bfloat16, torch.float16)  # to which an engine may round its noise


class FirstScores:
    """The observer of the first scores that a step's batch gets: measures the noise and the residuals of its window.

    Args:
        rollout: the batch, with its members.
        actor: scores it.
        training_step: seeded its noise.
    """

    def __init__(self, rollout: Rollout, actor: DiffusionActor, training_step: int) -> None:
        self._actor, self._training_step = actor, training_step
        self._fresh = scored_by_sampler(actor.config)
        self._residuals = WindowResiduals(rollout, noise=True, velocity=self._fresh)
        self._beside = torch.zeros(3, dtype=torch.float64)
        self._parts: list[Metrics] = []
        self._num_terms = 0
        self._together = rollout.window.latents.new_zeros(rollout.num_elements, dtype=torch.float64)

    def __call__(self, rollout: Rollout, scores: Scores) -> None:
        """Add a part of the batch; terms with scores that are not finite are left out."""
        part = Compared(
            rollout=rollout, actor=self._actor, training_step=self._training_step, given_scores=scores
        )
        self._residuals.add(part)
        window, finite = rollout.window, part.log_probs.isfinite()
        means, stds = part.means[finite], scores.stds.detach()[finite]
        noise = ((window.next_latents[finite] - means) / over_elements(stds, means)).flatten(1)
        self._num_terms += len(noise)
        self._together += noise.sum(0, dtype=torch.float64)
        stats = {f"rollout/noise_{name}": stat for name, stat in moments(noise).items()}
        stats["rollout/noise_std"] = self._std(rollout.log_probs[finite], stds, noise.shape[1])
        if self._fresh:
            ways = (part.means - part.still)[finite]
            ways = ways / over_elements(stds, ways)
            stats["rollout/velocity_distance"] = _root_mean_square(
                ways.square().sum(dtype=torch.float64), ways.numel()
            )
        sums = beside_seeds(noise, part.noise[finite].flatten(1))
        self._beside += sums.sum(1).cpu()
        if len(noise):
            stats["rollout/noise_z_max"] = maximum(standard_errors(sums).max())
        self._parts.append(Metrics(stats))

    def metrics(self) -> Metrics:
        """`rollout/noise_*` and terms of residuals, of all that was added. All ranks have to call it together."""
        every = torch.cat([self._together, self._beside.to(self._together.device)])
        together, beside = distributed.add_up(every, "the noise of the SDE steps").split(
            [len(self._together), 3]
        )
        # Each rank has the sum of all, and the metrics of all ranks are added.
        shared = mean(together.square().mean() / distributed.world_size(), self._num_terms)
        stats = {
            "rollout/noise_shared_by": shared,
            "rollout/noise_z_max": maximum(standard_errors(beside[:, None])[0]),
        }
        return Metrics(*self._parts, stats, self._residuals.metrics())

    def _std(self, log_probs: Tensor, stds: Tensor, num_elements: int) -> Stat:
        """The std around 0 that the rollout's own log-probs imply; a difference of the means does not change it."""
        known, unscaled = log_probs.isfinite(), self._actor.config.sampling.cps_unscaled
        variance = sde.noise_variance(log_probs[known], stds[known], cps_unscaled=unscaled)
        variance = variance.clamp(min=0)  # below, the log-probs are higher than those of any latents
        squares = variance.sum(dtype=torch.float64) * num_elements
        return _root_mean_square(squares, variance.numel() * num_elements)


def moments(noise: Tensor) -> dict[str, Stat]:
    """The mean, the std around 0 and the fourth moment of noise, see `flowcorr.questions.normal`."""
    square = noise.square()
    return {
        "mean": mean(noise.sum(dtype=torch.float64), noise.numel()),
        "std": _root_mean_square(square.sum(dtype=torch.float64), noise.numel()),
        # To first order, a noise that is too large or too small does not change it.
        "tails": mean((square * (square - 6) + 3).sum(dtype=torch.float64), noise.numel()),
    }


def _root_mean_square(squares: Tensor, count: int) -> Stat:
    return Stat("std", (count, 0.0, squares))


def scored_by_sampler(config: Config) -> bool:
    """Whether the first forward pass of a batch is made with the weights that sampled it."""
    recomputed = config.algorithm.rollout_correction.mode in ("decoupled", "off")
    return config.rollout.max_weight_age == 0 or (recomputed and config.actor.old_policy == "behaviour")


class WindowResiduals:
    """Adds up the residuals of the window's steps, see `flowcorr.questions.residual_terms`.

    Args:
        rollout: a training step's batch.
        noise: whether to measure the noise.
        velocity: whether to measure the velocity; the scores must come from the weights that sampled.
    """

    def __init__(self, rollout: Rollout, *, noise: bool, velocity: bool) -> None:
        self._noise, self._velocity = noise, velocity
        self._groups = rollout.group_ids.unique()
        self._common = rollout.window.latents.new_zeros(len(self._groups), rollout.num_elements)
        # By residual `[G, C, 2]`: sums of residual x direction, and of direction^2. All ranks need the velocity's.
        self._sums = {"velocity_length": self._common.new_zeros(len(self._groups), 1, 2, dtype=torch.float64)}
        self._num_terms = torch.zeros_like(self._groups)

    def add(self, part: Compared) -> None:
        """Add a part of the batch; steps with scores that are not finite are left out."""
        means, stds = part.means, over_elements(part.scores.stds.detach(), part.means)
        finite = over_elements(part.log_probs.isfinite(), means)
        places = torch.searchsorted(self._groups, part.rollout.group_ids)
        noise = torch.where(finite, part.noise.to(means), 0)
        residuals = torch.where(finite, part.rollout.window.next_latents - means - stds * noise, 0)
        if self._noise:
            self._fit("step_noise", places, residuals / stds, [noise])
            errors = [noise.to(dtype).float() - noise for dtype in _ROUNDED]
            self._fit("step_noise_rounding", places, residuals / stds, errors)
        if self._velocity:
            ways = torch.where(finite, means - part.still, 0)
            self._fit("velocity_length", places, residuals, [ways])
            self._common.index_add_(0, places, residuals.sum(1).flatten(1))
            self._num_terms.index_add_(0, places, finite.flatten(1).sum(1))

    def metrics(self) -> Stats:
        """Metrics of everything that was added. All ranks have to call it together."""
        stats: Stats = {}
        for name, sums in self._sums.items():
            stats |= terms(name, sums[..., 0] / sums[..., 1])
        if self._velocity:
            squares = self._sums["velocity_length"][:, 0, 1]
            # The mean residual over the root mean square of the way.
            common = self._common / (self._num_terms * squares).sqrt().unsqueeze(1).to(self._common)
            groups = distributed.gather_rows(self._groups, "the groups of a step")
            common = distributed.gather_rows(common, "the velocity's error by group")[groups.argsort()]
            # A group without a finite score has none; it would be part of the mean of all groups after it.
            common = common[common.isfinite().all(1)]
            if distributed.is_main():
                stats |= terms("velocity_common", in_common(common))
        return stats

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
