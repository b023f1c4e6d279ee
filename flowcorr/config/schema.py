"""The configuration tree: one frozen dataclass a section, one default a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowcorr.config.checks import (
    MOST_PIXELS,
    MOST_STEPS,
    above,
    at_least,
    at_most,
    not_blank,
    within,
)
from flowcorr.config.rollout import Dtype, RolloutConfig
from flowcorr.config.run import TrainerConfig
from flowcorr.config.task import DataConfig, RewardConfig
from flowcorr.correction.config import MEASURED, RolloutCorrectionConfig
from flowcorr.errors import ConfigError

# As `MOST_STEPS`: a slip of the exponent is named as such.
_MOST_NOISE, _MOST_GUIDANCE, _MOST_FRAMES = 10, 1000, 10_000
_MOST_RANK, _MOST_TOKENS = 8192, 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """`model.lora`: the adapter that is trained.

    Attributes:
        rank: rank of the adapter; 0 trains all weights of the transformer.
        alpha: the adapter's output is scaled by `alpha / rank`. Saved adapters are scaled already: their alpha is the
            rank.
        targets: names of the layers that get an adapter; null takes the model family's own.
        dtype: dtype of the adapter's weights.
        init: `gaussian` draws A with std 1/rank, `kaiming` is peft's default; B starts at 0 in both.
        warm_start: a LoRA folder or file to start from, as diffusers, peft, ai-toolkit, DiffSynth or kohya name its
            tensors; it keeps its strength under any `alpha`.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    dtype: Dtype = "float32"
    init: Literal["gaussian", "kaiming"] = "gaussian"
    warm_start: str | None = None

    def __post_init__(self) -> None:
        within("model.lora.rank", self.rank, 0, _MOST_RANK)
        above("model.lora.alpha", self.alpha, 0)
        if self.targets is not None and not self.targets:
            raise ConfigError(
                "model.lora.targets=[] adapts nothing; name layers, or use null for the family's own"
            )
        if self.warm_start is not None:
            not_blank("model.lora.warm_start", self.warm_start)
            if not self.rank:
                raise ConfigError(
                    f"model.lora.warm_start={self.warm_start!r} is an adapter, and model.lora.rank=0 trains all "
                    "weights without one; set rank to the adapter's, or merge it into the model of model.path"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`model`: the pipeline that is trained.

    Attributes:
        path: a diffusers pipeline folder or hub name; `tiny_ocr` is the model that ships with flowcorr.
        family: the model family; `auto` reads it from the pipeline's `model_index.json`.
        dtype: dtype of the frozen weights that the actor computes with; float16 scales the loss.
        quantization: `nf4` keeps 4 bits of each frozen weight in the transformer's blocks, `int8` 8 bits; activations
            are not rounded. It needs an adapter, and `nf4` needs bitsandbytes. `in_process` samples with the same
            weights; an engine that holds the model unquantized causes a gap, which is that of bfloat16 for `int8` and
            larger than that of fp8 for `nf4`.
        attention: diffusers' backend for the transformer's attention, such as `flash_varlen` or `_native_cudnn`; null
            leaves diffusers' own choice. It needs a model that supports backends.
        offload_text_encoders: keep the text encoders in main memory and put each of their layers on the GPU only while
            it computes, by diffusers' group offloading. Encoding takes longer, and the embeddings are the same.
        lora: the adapter.
        max_sequence_length: tokens of the long text encoder (T5, Qwen); null takes the family's default.
    """

    path: str = "tiny_ocr"
    family: str = "auto"
    dtype: Dtype = "float32"
    quantization: Literal["none", "nf4", "int8"] = "none"
    attention: str | None = None
    offload_text_encoders: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    max_sequence_length: int | None = None

    def __post_init__(self) -> None:
        not_blank("model.path", self.path)
        if self.max_sequence_length is not None:
            within("model.max_sequence_length", self.max_sequence_length, 1, _MOST_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """`sampling`: how trajectories are drawn, alike for rollout and training.

    Attributes:
        sde_type: the transition of the steps in the window and in `sde_noise_range`.
        noise_level: `eta`; for `cps` in (0, 1].
        num_inference_steps: denoising steps in all.
        sde_window_size: steps a trajectory that are trained on: SDE steps with a log-prob. The others are Euler steps.
        sde_window_range: half-open range of steps that the window lies in.
        sde_window_layout: `consecutive` draws the first step of the window, and the others follow it; `scattered`
            draws any `sde_window_size` steps of the range, with Euler steps between them.
        sde_noise_range: half-open range of steps that are SDE steps even outside the window, where they have no
            log-prob and are not trained on; null for none. DanceGRPO and flow_grpo sample so.
        post_window_stride: steps of the schedule that one Euler step of a rollout covers after both ranges; 1 is off.
            If it does not divide them, the last Euler step covers fewer. The window keeps its latents and log-probs,
            and images change. Evaluations take all steps. MixGRPO-Flash (arXiv:2507.21802) compresses the same steps.
        window_per: `group` draws one window for all images of a prompt, `sample` one for each image.
        guidance_scale: classifier-free guidance (SD3, FLUX.2 klein, Ovis-Image, Wan; Z-Image, one more than its
            pipeline counts) or distilled guidance (FLUX.1); 1 is off.
        true_cfg_scale: classifier-free guidance of Qwen-Image and Qwen-Image-Edit; 1 is off.
        negative_prompt: the text that guidance moves away from; a line of the data may have its own.
        height, width: image size in pixels; null takes the model's native size.
        num_frames: frames of a video; null takes the model's native number, which is 1 of a model that makes images.
        cps_unscaled: drop `1 / (2 s^2)` from cps log-probs, as other code bases do. The result is not a density, and
            `rollout_corr/bookkeeping_z_max` then has another unit.
    """

    sde_type: Literal["sde", "cps", "dance_sde"] = "sde"
    noise_level: float = 0.7
    num_inference_steps: int = 10
    sde_window_size: int = 2
    sde_window_range: tuple[int, int] = (0, 4)
    sde_window_layout: Literal["consecutive", "scattered"] = "consecutive"
    sde_noise_range: tuple[int, int] | None = None
    post_window_stride: int = 1
    window_per: Literal["group", "sample"] = "group"
    guidance_scale: float = 1.0
    true_cfg_scale: float = 1.0
    negative_prompt: str = ""
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    cps_unscaled: bool = False

    def __post_init__(self) -> None:
        above("sampling.noise_level", self.noise_level, 0)
        at_most("sampling.noise_level", self.noise_level, _MOST_NOISE)
        if self.sde_type == "cps" and self.noise_level > 1:
            raise ConfigError(
                f"sampling.noise_level={self.noise_level} is out of range for sde_type=cps: "
                "its std is sigma_next * sin(noise_level * pi / 2), so use 0 < noise_level <= 1"
            )
        within("sampling.num_inference_steps", self.num_inference_steps, 1, MOST_STEPS)
        at_least("sampling.sde_window_size", self.sde_window_size, 1)
        self._check_range("sde_window_range", self.sde_window_range)
        if self.sde_noise_range is not None:
            self._check_range("sde_noise_range", self.sde_noise_range)
        low, high = self.sde_window_range
        if self.sde_window_size > high - low:
            raise ConfigError(
                f"sampling.sde_window_size={self.sde_window_size} does not fit sampling.sde_window_range="
                f"[{low}, {high}], which holds {high - low} steps; shorten the window or widen the range"
            )
        self._check_stride()
        for key, least, most in (
            *((key, 0, _MOST_GUIDANCE) for key in ("guidance_scale", "true_cfg_scale")),
            *((key, 1, MOST_PIXELS) for key in ("height", "width")),
            ("num_frames", 1, _MOST_FRAMES),
        ):
            if getattr(self, key) is not None:
                within(f"sampling.{key}", getattr(self, key), least, most)

    @property
    def noisy_steps(self) -> range:
        """The steps of `sde_noise_range`, which are stochastic inside and outside the window."""
        return range(*(self.sde_noise_range or (0, 0)))

    @property
    def rollout_steps(self) -> tuple[int, ...]:
        """The steps of the schedule at which a rollout calls the transformer, see `post_window_stride`."""
        end = self._stochastic_end
        return (*range(end), *range(end, self.num_inference_steps, self.post_window_stride))

    @property
    def _stochastic_end(self) -> int:
        """The step after the last one that can be stochastic."""
        return max(self.sde_window_range[1], self.noisy_steps.stop)

    def _check_stride(self) -> None:
        stride, end = self.post_window_stride, self._stochastic_end
        at_least("sampling.post_window_stride", stride, 1)
        left = self.num_inference_steps - end
        if stride > max(left, 1):
            key = "sde_window_range" if end == self.sde_window_range[1] else "sde_noise_range"
            fix = f"use at most {left}" if left > 1 else f"use 1, or end sampling.{key} earlier"
            raise ConfigError(
                f"sampling.post_window_stride={stride} covers more than the {left} steps after step {end}, where "
                f"sampling.{key} ends (sampling.num_inference_steps={self.num_inference_steps}); {fix}"
            )

    def _check_range(self, key: str, steps: tuple[int, int]) -> None:
        low, high = steps
        if not 0 <= low < high <= self.num_inference_steps:
            raise ConfigError(
                f"sampling.{key}=[{low}, {high}] lies outside the schedule; it is half-open and must "
                f"satisfy 0 <= start < end <= sampling.num_inference_steps={self.num_inference_steps}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """`actor`: the loss and the optimizer.

    Attributes:
        loss_mode: a name in `flowcorr.losses.LOSSES`, or `package.module:name` of a loss of your own.
        loss_options: keyword arguments of a loss of your own.
        clip_ratio: PPO clip range on mean-pooled ratios; or a list, one for each step of the schedule from the
            first on, up to the last step that a window can hold.
        old_policy: the weights for recomputed old log-probs in decoupled mode: `current`, or `behaviour`, the weights
            that sampled. With `behaviour` the clipped ratio contains the staleness, and the correction only covers the
            engine's part of the gap.
        ratio_level: the level of the ratio: one step, or the window's mean or sum.
        adv_clip_max: advantages are clamped to +- this.
        kl_threshold: `flow_dppo` drops terms above this exact KL, nats per latent element.
        importance_cap: cap of the ratio in `importance_cap`, 1 or more.
        kl_coef: weight of the exact KL to the reference (the weights without the adapter).
        kl_weighting: unit of `kl_coef`: `exact` is the KL of the step; `flow_grpo` is the unit of published recipes
            with `sde_type: sde`. Published recipes of other types use the exact KL.
        optimizer: `adamw` of torch, or `adamw_8bit` of bitsandbytes with moments of 2 bytes a weight instead of 8 for
            float32 weights. It pays for `model.lora.rank: 0`.
        lr: learning rate of AdamW.
        betas: decay of AdamW's averages of the gradient and of its square.
        eps: AdamW's floor of a gradient's size; gradients far below it hardly move the weights.
        weight_decay: AdamW's decay of the weights.
        warmup_steps: optimizer updates over which the learning rate rises linearly.
        lr_schedule: shape of its fall afterwards, until the last update of `trainer.total_steps`.
        lr_min_ratio: share of `lr` that it falls to.
        grad_clip: largest gradient norm.
        epochs: passes over a step's samples.
        mini_batches: optimizer updates a pass; groups are never split.
        micro_batch_size: samples a forward pass, in updates and when log-probs are recomputed; null takes a mini-batch.
            `auto` takes the fewest passes within a bound on memory: the first training step measures the bytes of one
            row (an image at one step), and allows 96 MiB on a CPU, and .8 of a GPU's free memory. The choice is
            logged, and a checkpoint keeps its bound.
        fold_steps: score all window steps of a micro-batch in one forward pass; `auto` does so if that is within the
            bound and takes no more passes.
        autocast: bfloat16 autocast around the transformer. Trained weights that `fsdp` shards are gathered in bfloat16,
            also for an engine in this process that shares them, with `rollout.dtype: bfloat16`.
        gradient_checkpointing: trade compute for memory in the transformer.
        compile: `torch.compile` the blocks of the trained transformer, for scoring, learning, evaluations, and rollouts
            that share them. It differs from other copies by rounding. The first step takes a minute or two more, or a
            sixth of that after an earlier run has filled `TORCHINDUCTOR_CACHE_DIR`.
        fsdp: with several ranks, spread the transformer's weights over them, and its gradients and optimizer state if
            it is trained. An adapter stays whole on each rank.
        ema: decay of an exponential moving average of the trained weights, used for evaluation; null is off.
    """

    loss_mode: str = "flow_grpo"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    clip_ratio: float | tuple[float, ...] = 1e-3
    old_policy: Literal["current", "behaviour"] = "current"
    ratio_level: Literal["step", "trajectory_mean", "trajectory_sum"] = "step"
    adv_clip_max: float = 5.0
    kl_threshold: float = 1e-6
    importance_cap: float = 1.001
    kl_coef: float = 0.0
    kl_weighting: Literal["exact", "flow_grpo"] = "exact"
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_min_ratio: float = 0.0
    grad_clip: float = 1.0
    epochs: int = 1
    mini_batches: int = 2
    micro_batch_size: int | Literal["auto"] | None = "auto"
    fold_steps: bool | Literal["auto"] = "auto"
    autocast: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    fsdp: bool = False
    ema: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.clip_ratio, list):
            object.__setattr__(self, "clip_ratio", tuple(self.clip_ratio))
        for key in ("adv_clip_max", "kl_threshold", "lr", "eps", "grad_clip"):
            above(f"actor.{key}", getattr(self, key), 0)
        # Ratios begin at 1, so a smaller cap would hold all of them, and none would have a gradient.
        at_least("actor.importance_cap", self.importance_cap, 1)
        for clip in self.clip_ratio if isinstance(self.clip_ratio, tuple) else (self.clip_ratio,):
            above("actor.clip_ratio", clip, 0)
        for key in ("kl_coef", "weight_decay", "warmup_steps"):
            at_least(f"actor.{key}", getattr(self, key), 0)
        for key in ("epochs", "mini_batches"):
            at_least(f"actor.{key}", getattr(self, key), 1)
        if isinstance(self.micro_batch_size, int):
            at_least("actor.micro_batch_size", self.micro_batch_size, 1)
        if not 0 <= self.lr_min_ratio <= 1:
            raise ConfigError(
                f"actor.lr_min_ratio={self.lr_min_ratio} is out of range; use a share in [0, 1]"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"actor.betas={list(self.betas)} is out of range; each must be in [0, 1)")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"actor.ema={self.ema} is out of range; use a decay in (0, 1), or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """`algorithm`: advantages and rollout correction.

    Attributes:
        advantage_std: divide by the group's std, by the whole step's, or not at all.
        rollout_correction: measures the gap and corrects it; left out, it only measures, and null computes nothing and
            logs nothing.
    """

    advantage_std: Literal["group", "global", "none"] = "group"
    rollout_correction: RolloutCorrectionConfig = MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def mini_batch_size(self) -> int:
        """Samples of the largest mini-batch, of all ranks together."""
        groups = -(-self.rollout.prompts_per_step // self.actor.mini_batches)
        return groups * self.rollout.learned_per_prompt
