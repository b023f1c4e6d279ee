"""How far rounding moves a velocity: one table, by which replays, health rules and the doctor tell it from a fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flowcorr.config.engines import ENGINES, trains_coarser
from flowcorr.config.schema import Config

NO_GAP = (
    1e-5  # of the velocity: nothing to explain; two stacks in float32 agree to 6e-7, under guidance to 3e-6
)
LARGEST_GAP = 0.6  # no precision explains more; matrices moved at random by half of their size give 0.64
MARGIN = 3.0  # between the largest clean gap and the gap that is too large
_MEASURED_SCALE = 4.0
# Of step means, in stds, that a precision explains: int4 gives .06 in early steps, and .26 to .36 in the last ones.
LARGEST_DISTANCE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The largest clean gap of two stacks: root mean square difference of their velocities, as a share of them.

    Attributes:
        plain: without guidance.
        guided: with a guidance scale of 4. The gap grows linearly between, and more slowly beyond (at scale 8 to 0.8 to
            0.9 of the line).
    """

    plain: float
    guided: float

    def at(self, scale: float) -> float:
        """The gap at a guidance scale; one of 1 or less is off."""
        return self.plain + (self.guided - self.plain) * max(0.0, scale - 1) / (_MEASURED_SCALE - 1)


# The largest `rollout_corr/replay/window` of clean runs of the embedded model, whose adapter had been moved at random:
# 32 x 64 pixels, 8 steps, 4 prompts with 2 images each, seeds 1001 to 1003 with sde, 1001 also with dance_sde and cps.
# Tests use other seeds, prompts and sizes. float16 rounds 8 times finer than bfloat16. int8, fp8 and int4 are emulated
# in the engine; nf4 is `model.quantization` beside an unquantized engine, where int8 stays below its number here.
ROUNDINGS: Mapping[str, Rounding] = {
    "float32": Rounding(plain=6.0e-7, guided=2.1e-6),
    "float16": Rounding(plain=1.4e-3, guided=4.8e-3),
    "bfloat16": Rounding(plain=0.0114, guided=0.038),
    "int8": Rounding(plain=0.0101, guided=0.0186),
    "fp8": Rounding(plain=0.0454, guided=0.0793),
    "nf4": Rounding(plain=0.120, guided=0.240),
    "int4": Rounding(plain=0.158, guided=0.301),
}
# An engine outside this process may have other kernels and settings: TF32 in its convolutions gives up to 1e-3, so a
# third of that passes.
OTHER_PROCESS = Rounding(plain=1.7e-4, guided=1.7e-4)
# The largest error of an image beside the same decoder in float32, mean absolute difference in grey levels of 255: of a
# decoder of FLUX.1's size with random weights, whose pixels spread by 60 levels (seed 0); the embedded model's has .6
# of it and more. That of float32 is TF32, in which an engine outside this process may compute convolutions.
IMAGE_ROUNDINGS: Mapping[str, float] = {"float32": 0.05, "float16": 0.09, "bfloat16": 0.66}
SAME_IMAGE = 0.1  # grey levels: kernels of one precision move few pixels across a whole level
_IMAGE_MARGIN = 1.5  # two decoders that round independently differ by 1.4 times the error of one


def coarse_weights(config: Config) -> set[str]:
    """The formats of fewer bits, names of `ROUNDINGS`, to which weights of one side alone are rounded."""
    rollout = config.rollout
    asked = rollout.engine.get("quantization") or rollout.engine.get("quantization_config")
    formats = {"fp8"} if asked and rollout.emulate == "none" else {rollout.emulate}
    return (formats | {trainer_quantization(config)}) - {"none"}


def trainer_quantization(config: Config) -> str:
    """`model.quantization` if the engine samples with the unquantized base, else `none`."""
    # Nothing of the run's own is imported here: reports read other people's runs.
    apart = trains_coarser(config, ENGINES.get(config.rollout.name))
    return config.model.quantization if apart else "none"


def rounds_apart(config: Config) -> bool:
    """Whether one side alone rounds its weights, to half precision or to fewer bits.

    Averaging does not reduce such an error: it is the same at every step and prompt.
    """
    return config.rollout.dtype != config.model.dtype or bool(coarse_weights(config))


def usual_gap(config: Config, scale: float | None = None) -> float:
    """The largest velocity gap that the precision of both sides accounts for.

    Args:
        config: the run's.
        scale: that of `ModelFamily.amplification`; None where the model is not at hand, whose guidance may then be of
            either key.
    """
    rollout = config.rollout
    names = {rollout.dtype, config.model.dtype, "bfloat16" if config.actor.autocast else "float32"}
    engine = ENGINES.get(rollout.name)
    if scale is None:
        scale = max(config.sampling.guidance_scale, config.sampling.true_cfg_scale)
    apart = engine is None or not engine.shares_weights
    return accounted_gap(names | coarse_weights(config), scale, apart=apart)


def accounted_gap(names: Collection[str], scale: float, *, apart: bool) -> float:
    """The largest velocity gap that roundings account for.

    Args:
        names: of `ROUNDINGS`, of both sides.
        scale: of guidance; 1 is off, or distilled.
        apart: whether the engine is outside the trainer's process.
    """
    return min(max(MARGIN * clean_gap(names, scale, apart=apart), NO_GAP), LARGEST_GAP)


def clean_gap(names: Collection[str], scale: float, *, apart: bool) -> float:
    """The largest velocity gap of clean runs, with the arguments of `accounted_gap`."""
    roundings = [ROUNDINGS[name] for name in names] + [OTHER_PROCESS] * apart
    return max(rounding.at(scale) for rounding in roundings)


def image_limit(*dtypes: str, rounding: float = 0.0) -> float:
    """The largest mean difference of an image from another decoder's image of the same latents, by rounding alone.

    Args:
        dtypes: of both decoders.
        rounding: the largest error of this model's decoder, where it was measured instead.

    Returns:
        Grey levels of 255.
    """
    return SAME_IMAGE + _IMAGE_MARGIN * max(rounding, *(IMAGE_ROUNDINGS[name] for name in dtypes))


def image_limit_of(config: Config) -> float:
    """`image_limit` of a run."""
    return image_limit(
        config.model.dtype, config.rollout.dtype if _decodes_itself(config) else config.model.dtype
    )


def decoder_dtype(config: Config) -> str:
    """Key and value of the dtype that the rollout engine's VAE decodes in, such as `model.dtype=bfloat16`."""
    if _decodes_itself(config):
        return f"rollout.dtype={config.rollout.dtype}"
    return f"model.dtype={config.model.dtype}"


def _decodes_itself(config: Config) -> bool:
    """Whether the engine has a VAE of its own; an engine in this process decodes with the trainer's."""
    engine = ENGINES.get(config.rollout.name)
    return engine is None or engine.own_processes
