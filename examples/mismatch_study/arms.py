"""What is compared: a rollout, a window and a correction make an arm; the table of screened arms says why each."""

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

CORRUPTED_SHARE = 0.1

# Corrupted: a tenth of the samples were drawn for another prompt, see `hooks.WrongPrompts`. Quarter: one of four
# workers has a fault, see `hooks.OneOfFour`. nf4_trainer: the trainer is quantized and the engine is not, see
# `hooks.UnquantizedEngine`. 12_of_24: learns from the extremes of twice as many images. longer_2, longer_4, longer_6:
# the steps that follow the window's range are so many times as long. exchanged_4, exchanged_8: .4 or .8 of the images
# are those of other samples of their prompt, see `hooks.ExchangedImages`.
_EXACT = "rollout.emulate=none"  # the recipe's own engine is an fp8 one
ROLLOUTS = {
    "fp32": (_EXACT,),
    "bf16": (_EXACT, "rollout.dtype=bfloat16"),
    "fp8": ("rollout.emulate=fp8",),
    "int4": ("rollout.emulate=int4",),
    "stale": (_EXACT, "rollout.staleness=4"),
    "fp32+corrupted": (_EXACT,),
    "int4+corrupted": ("rollout.emulate=int4",),
    "quarter_adapter": (_EXACT,),
    "quarter_sigma": (_EXACT,),
    "nf4_trainer": (_EXACT, "model.quantization=nf4"),
    "fp32_12_of_24": (_EXACT, "rollout.n=24", "rollout.n_learned=12"),
    "fp32_24_of_24": (_EXACT, "rollout.n=24"),
    "fp8_longer_2": ("rollout.emulate=fp8", "sampling.post_window_stride=2"),
    "fp8_longer_6": ("rollout.emulate=fp8", "sampling.post_window_stride=6"),
    "fp8_exchanged_4": ("rollout.emulate=fp8",),
    "fp8_exchanged_8": ("rollout.emulate=fp8",),
    "fp32_longer_4": (_EXACT, "sampling.post_window_stride=4"),
    "fp32_longer_6": (_EXACT, "sampling.post_window_stride=6"),
}
# `all`: every step but the last, whose std is 7e-4. Smaller micro-batches halve its time and change no gradient.
# later, guided, few: other settings of sampling with a window of two.
WINDOWS = {
    "two": (),
    "all": (
        "sampling.sde_window_size=9",
        "sampling.sde_window_range=[0, 9]",
        "actor.micro_batch_size=24",
    ),
    "later": ("sampling.sde_window_range=[2, 6]",),
    "guided": ("sampling.guidance_scale=2.0",),
    "few": ("sampling.num_inference_steps=6", "sampling.sde_window_range=[0, 2]"),
}
UNCORRECTED, CONTROL = "uncorrected", "step_mean"
AUTO_BAND, STEP_KL = "bypass_auto", "step_kl"
# A control rejects as many terms as the other does, at random: see `hooks.RandomRejection`.
RANDOM = {"bypass_random": AUTO_BAND, "step_kl_random": STEP_KL}
# The section `algorithm.rollout_correction`, and keys elsewhere.
CORRECTIONS = {
    UNCORRECTED: ("preset: disabled",),
    "bypass": ("preset: bypass_ppo_clip",),
    AUTO_BAND: ("preset: bypass_ppo_clip_auto_rs",),
    "bypass_random": ("preset: bypass_ppo_clip",),
    "bypass_rs": ("preset: bypass_ppo_clip_geo_rs",),
    "auto": ("bypass_mode: auto",),
    "is_mean": ("preset: decoupled_token_is",),
    "is_sqrt": ("preset: decoupled_token_is, log_ratio_scale: sqrt",),
    "is_sum": ("preset: decoupled_token_is, log_ratio_scale: sum",),
    "seq_sum": ("preset: decoupled_seq_is, log_ratio_scale: sum",),
    "step_z": ("rollout_rs: step_z, rollout_rs_threshold: 5",),
    # Between samples of the right prompt (at most 6e-4 with fp8) and of a wrong one (at least 4e-3).
    STEP_KL: ("rollout_rs: step_kl, rollout_rs_threshold: 2.0e-3",),
    "step_kl_random": ("preset: disabled",),
    "score_centering": ("preset: disabled, score_centering: true",),
    CONTROL: ("preset: decoupled_token_is, log_ratio_scale: sum",),  # and hooks.StepMeanWeights
}
# Bypass with each step's mean drift taken off before the clip: screened, and since taken out of flowcorr.
REMOVED = ("centred",)

# Setting -> corrections, and why these. Without a gap all weights are 1, nothing is rejected, and bypass is the same
# computation as uncorrected. In `int4/two` every correction runs; elsewhere those that could act there.
SCREEN = {
    "fp32/two": ("uncorrected", "the reference; without a gap every correction is the identity"),
    "fp32/all": ("uncorrected", "the reference"),
    "bf16/two": (
        "uncorrected bypass is_sum",
        "the usual gap, a tenth of the clip range: the ends of what can be done about it",
    ),
    "fp8/two": (
        "uncorrected bypass bypass_rs is_sum step_mean",
        "a tenth of the terms starts outside the clip; weights but those of scale sum are 1 within 1 %",
    ),
    "int4/two": (
        "uncorrected bypass bypass_rs is_mean is_sqrt is_sum seq_sum step_z step_kl step_mean auto",
        "the largest gap: everything",
    ),
    "stale/two": (
        "uncorrected bypass is_sum seq_sum step_mean auto",
        "a shift along what is learned, for which the exact gradient recommends seq_sum; nothing to reject",
    ),
    "fp8/all": (
        "uncorrected bypass is_sum",
        "late steps have a hundred times the gap of early ones",
    ),
    "int4/all": (
        "uncorrected bypass is_sqrt is_sum step_mean auto",
        "where a feasibility study saw harm and a cure that its control explained; step_kl rejects all late steps",
    ),
    "stale/all": ("uncorrected bypass is_sum step_mean", "as stale/two"),
    "fp32+corrupted/two": (
        "uncorrected bypass bypass_rs is_sum step_z step_kl",
        "outliers without any other gap: whatever rejects or shrinks them",
    ),
    "int4+corrupted/two": (
        "uncorrected step_z step_kl",
        "outliers within a gap that is as large as a fixed bound on the KL",
    ),
    "fp32+corrupted/all": ("uncorrected step_z", "outliers where most of the gradient is"),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train: names in `ROLLOUTS`, `WINDOWS` and `CORRECTIONS`."""

    rollout: str
    window: str
    correction: str

    @classmethod
    def parse(cls, name: str) -> "Arm":
        """From `rollout/window/correction`."""
        arm = cls(*name.split("/"))
        corrections = (*CORRECTIONS, *REMOVED)
        for part, known in ((arm.rollout, ROLLOUTS), (arm.window, WINDOWS), (arm.correction, corrections)):
            if part not in known:
                raise ValueError(f"arm {name!r}: {part!r} is unknown; choose from {', '.join(known)}")
        return arm

    def __str__(self) -> str:
        return f"{self.setting}/{self.correction}"

    @property
    def setting(self) -> str:
        """What a correction is to repair."""
        return f"{self.rollout}/{self.window}"

    @property
    def corrupted(self) -> bool:
        return self.rollout.endswith("+corrupted")

    @property
    def exchanged(self) -> float:
        """The share of images that belong to other samples."""
        _, _, tenths = self.rollout.partition("_exchanged_")
        return float(tenths or 0) / 10

    @property
    def references(self) -> list["Arm"]:
        """What it is compared with: uncorrected training, and for weights their control; for that, no gap.

        Chosen samples are compared with as few and with as many that are all learned from, longer steps with the
        recipe's own, exchanged images with both.
        """
        plain = Arm(self.rollout, self.window, UNCORRECTED)
        if self == plain:
            others: tuple[str, ...] = ("fp32",)
            if self.rollout == "fp32":
                others = ()
            elif self.rollout == "fp32_12_of_24":
                others = ("fp32", "fp32_24_of_24")
            elif "_longer_" in self.rollout:
                others = (self.rollout.partition("_")[0],)
            elif "_exchanged_" in self.rollout:
                others = ("fp8", "fp8_longer_6")
            return [replace(self, rollout=other) for other in others]
        control = Arm(self.rollout, self.window, CONTROL)
        if self.correction == AUTO_BAND:
            return [replace(self, correction=other) for other in ("bypass", "bypass_random")]
        if self.correction == STEP_KL:
            return [plain, replace(self, correction="step_kl_random")]
        return [plain, control] if self.correction in ("is_sum", "score_centering") else [plain]

    def overrides(self) -> list[str]:
        """Configuration keys on top of the recipe."""
        section, *others = CORRECTIONS[self.correction]
        key = "algorithm.rollout_correction"  # null first: else the keys of the recipe's own would remain
        correction = [f"{key}=null", f"{key}={{{section}}}"]
        return [*ROLLOUTS[self.rollout], *WINDOWS[self.window], *correction, *others]


def screened() -> list[Arm]:
    """All arms of the table."""
    return [
        Arm(*setting.split("/"), correction)
        for setting, (corrections, _) in SCREEN.items()
        for correction in corrections.split()
    ]


def chosen(path: Path) -> list[Arm]:
    """The arms of a file `{name: reason}`, those chosen for confirmation."""
    return [Arm.parse(name) for name in yaml.safe_load(path.read_text(encoding="utf-8"))]
