"""Questions about an engine's samples: a number, the largest healthy one, and the remedy of a larger one.

A training step asks them of its batch, a replay of single images, and the doctor of an engine at hand or of captured
samples. The table is read without torch. A `Compared` computes most numbers; `noise`, `outside`, `images` and `replay`
compute numbers that come part by part or take passes of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowcorr.errors import ConfigError
from flowcorr.imports import import_target

if TYPE_CHECKING:
    from torch import Tensor

    from flowcorr.config.schema import Config
    from flowcorr.questions.compared import Compared
    from flowcorr.questions.legs import LegName

_OWN = "trainer.checks"  # names questions of one's own
ERRORS = 6.0  # standard errors; chance exceeds this twice in 1e9 times


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about an engine's samples, asked alike by a training step and the doctor.

    Attributes:
        name: of the health rule; of a question of one's own, of the doctor's check as well.
        what: the number in words.
        limit: the largest healthy number.
        remedy: advice for a larger number.
        meaning: the explanation of its metric; empty for `what`.
        unit: of the number; empty for a plain one.
        causes: what a larger number tells of the engine, which the health rule says before the remedy.
        metric: the name under which training logs it; by default `rollout/` with the name.
        number: computes it of a rollout, `[B, ...]`: of booleans (samples at fault) the share is logged, of numbers the
            largest. It returns None if the rollout lacks its inputs. Without a function, the number is computed part by
            part or in replays.
        fault: the multiple of `limit` from which on only a fault explains the number, so that a training run stops; by
            default it goes on.
    """

    name: str
    what: str
    limit: float
    remedy: str
    meaning: str = ""
    unit: str = ""
    causes: str = ""
    metric: str = ""
    number: Callable[[Compared], Tensor | None] | None = None
    fault: float = math.inf

    @property
    def logged_as(self) -> str:
        """The name of the metric."""
        return self.metric or f"rollout/{self.name}"

    @property
    def advice(self) -> str:
        """The causes of a larger number and the remedy."""
        return f"{self.causes}: {self.remedy}" if self.causes else self.remedy


def own_questions(config: Config) -> tuple[Question, ...]:
    """The questions that `trainer.checks` names.

    Raises:
        ConfigError: one is something else, or cannot be asked.
    """
    return tuple(_own_question(path) for path in config.trainer.checks)


def _own_question(path: str) -> Question:
    question = import_target(_OWN, path, "a question")
    if not isinstance(question, Question):
        raise ConfigError(
            f"{_OWN}={path!r} is of type {type(question).__name__}; name a flowcorr.questions.question.Question"
        )
    empty = [name for name in ("name", "what", "remedy", "number") if not getattr(question, name)]
    if empty:
        raise ConfigError(
            f"{_OWN}={path!r} has no {', '.join(empty)}; a question of your own needs each of them"
        )
    return question


NATS = "nats per latent element"
EQUALITY = 1.0  # no precision or chance breaks the limit
BEYOND = 2.0  # of a limit that was set by clean runs of several precisions
_SEEDS = "(seed, training step, group, member)"

SIGMAS = Question(
    name="sigmas",
    what="difference of a noise level from that of the schedule",
    number=lambda compared: compared.sigma_errors,
    limit=1e-5,  # float32 tables agree within 6e-8; bfloat16 sigmas differ by 1e-3
    remedy="give both stacks one scheduler config (shift, dynamic shift) and one sampling.num_inference_steps, and "
    "take sigmas from the table by step index, in float32",
)
WINDOWS = Question(
    name="windows",
    what="share of samples with other SDE steps or noise levels than their seeds and the schedule give",
    metric="rollout/other_windows",
    number=lambda compared: compared.other_windows | (compared.sigma_errors.cpu() > SIGMAS.limit).any(1),
    limit=0.0,  # samples
    fault=EQUALITY,
    remedy="pass sampling.sde_window_size, sde_window_range (half-open), sde_window_layout and window_per with every "
    "request and read them per request, or take the steps that flowcorr.sde.draw_windows gives",
    meaning="Share of samples whose SDE steps are not those that their seeds give, or whose noise levels are not those "
    "of the schedule; such an engine ignores `sde_window_layout`, `sde_window_range` or `window_per`, seeds by "
    "other numbers, or has another scheduler.",
    unit="share",
    causes="the engine draws windows of its own, and fewer of the schedule's steps may be trained than the recipe asks "
    f"for; or its noise levels are others, and then {SIGMAS.remedy}",
)
LATENTS = Question(
    name="coarse_latents",
    what="share of samples whose latents were rounded to half precision, or clamped,",
    number=lambda compared: compared.coarse_latents,
    limit=0.0,  # samples
    fault=EQUALITY,
    remedy="draw, keep and return latents in float32, the initial noise included, and leave them as they are between "
    "the steps",
    meaning="Share of samples with latents that were rounded to half precision, or clamped to a bound.",
    unit="share",
)
TRAJECTORIES = Question(
    name="trajectories",
    what="share of samples whose latents do not fit together, or do not begin at their seeds' noise,",
    metric="rollout/broken_trajectories",
    number=lambda compared: compared.broken_trajectories,
    limit=0.0,  # samples
    fault=EQUALITY,
    remedy=f"draw the initial noise by flowcorr.sde.initial_noise of {_SEEDS}, and return the latents before and after "
    "each step of the window as they were",
    meaning="Share of samples whose latents do not fit together where they have no choice: the first step begins at "
    "the seeds' initial noise, a step of the window ends where the next of the schedule begins, and the last one ends "
    "at the final latents.",
    unit="share",
    causes="the initial noise is not that of its seeds, in size or place, or latents of another sample or step were "
    "returned",
)
STDS = Question(
    name="std_error",
    what="relative difference of a step's std from that of the configuration",
    number=lambda compared: compared.std_errors,
    limit=1e-4,  # relative; float32 agrees within 1e-7, a noise level of .8 instead of .7 gives .14
    fault=EQUALITY,
    remedy="sample with sampling.sde_type and sampling.noise_level, and return the full std of a step",
    meaning="Largest relative difference of a step's std from the one that the configuration gives.",
    unit="share",
)
LOG_PROBS = Question(
    name="log_prob_error",
    what="difference of a log-prob from that of the noise of its seeds",
    number=lambda compared: compared.log_prob_errors,
    limit=1e-5,  # nats; float32 gives 1e-6, rounding to bfloat16 2e-3, and noise rounded to bfloat16 1e-4
    fault=EQUALITY,
    remedy="score with flowcorr.sde.log_prob: the mean over the elements, with its normaliser, in float32; return the "
    "latents, means and stds that were scored",
    meaning="Largest difference of a log-prob from that of the noise that the seeds give to its step; an equality in "
    "every precision.",
    unit=NATS,
    causes=f"the engine draws other noise than {_SEEDS} and step index give, in its size or its place, or returns "
    "log-probs of other samples, or such that are not mean-pooled, normalised and float32; `flowcorr doctor` tells "
    "them apart",
)
STEP_NOISE = Question(
    name="seeded_noise",
    what="standard errors between the step noise and that of its seeds",
    metric="rollout/noise_z_max",
    number=lambda compared: compared.noise_errors,
    limit=ERRORS,
    fault=EQUALITY,
    remedy=f"add s times flowcorr.sde.step_noise of {_SEEDS} and step index to the mean, in float32, and leave the "
    "latents as they are",
    meaning="How many standard errors the step noise `(x' - mean) / s` is from the noise that the seeds give, along "
    "it: of the worst step, or of all together. The gap of both policies does not depend on that noise, so that "
    "neither rounding nor staleness is in it.",
    unit="standard deviations",
    causes="the noise of a step has another size or other seeds, belongs to another sample, or latents moved after the "
    "step",
)
# Means over images, in errors of the window: clean runs (bf16, fp8, int8, int4, guidance) give at most 1.9 from four
# images on. Single images reach 4.1, where their window lies late and its velocities differ little.
_OUTSIDE = 4.0
_NO_LOG_PROB = "no log-prob sees these steps: compare"
BEFORE = Question(
    name="replay_before",
    what="error of the steps before the SDE window, in errors of the window itself,",
    metric="rollout_corr/replay/before",
    limit=_OUTSIDE,
    fault=BEYOND,
    remedy=f"{_NO_LOG_PROB} initial noise, prompt embeddings, guidance, timesteps and schedule before the window in "
    "both stacks",
    meaning="Replay: error of the steps from the initial noise to the SDE window, as a multiple of "
    "`replay/window`.",
    unit="`replay/window`",
)
BETWEEN = Question(
    name="replay_between",
    what="error of the steps between those of the SDE window, in errors of the window itself,",
    metric="rollout_corr/replay/between",
    limit=_OUTSIDE,
    fault=BEYOND,
    remedy=f"{_NO_LOG_PROB} embeddings, guidance and schedule of the steps between those of the window in both stacks, "
    "and return the latents before and after each SDE step",
    meaning="Replay: error of the steps between those of the SDE window, as a multiple of `replay/window`; absent "
    "where no step lies there, as in a consecutive window.",
    unit="`replay/window`",
)
AFTER = Question(
    name="replay_after",
    what="error of the steps after the SDE window, in errors of the window itself,",
    metric="rollout_corr/replay/after",
    limit=_OUTSIDE,
    fault=BEYOND,
    remedy=f"{_NO_LOG_PROB} prompt embeddings, guidance, timesteps and schedule after the window in both stacks, and "
    "leave latents as they are between the steps",
    meaning="Replay: error of the steps from the SDE window to the final latents, as a multiple of "
    "`replay/window`.",
    unit="`replay/window`",
)
OUTSIDE: Mapping[LegName, Question] = {"before": BEFORE, "between": BETWEEN, "after": AFTER}
"""By leg."""
# Its limit follows from both decoders, see `precision.image_limit`.
IMAGES_REMEDY = (
    "compare the VAEs, their scaling, shift and tiling, the order of channels, that of the images in a batch, and what "
    "encodes or resizes images on their way; rewards score the engine's images"
)
REWARD = Question(
    name="replay_reward",
    what="difference of a score from the reward of its image, in standard deviations of the scores,",
    metric="rollout_corr/replay/reward",
    limit=0.1,  # standard deviations of the scores
    remedy="compare the order of images, their channels and size, and the unit of the reward; the scores of a judge "
    "that samples its answers are not repeatable",
    meaning="Replay: largest difference between a score and a second score of the same image.",
    unit="std of the scores",
)
OF_ROLLOUTS = (WINDOWS, LATENTS, TRAJECTORIES, LOG_PROBS, STDS)
"""Asked of each batch at no cost."""
