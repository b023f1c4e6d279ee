"""Pretrain the embedded model from random weights, on one CPU core in about a quarter of an hour.

    python examples/tiny_ocr/pretrain.py --out /tmp/tiny_ocr
    flowcorr train tiny_ocr_lora model.path=/tmp/tiny_ocr

The VAE is trained first, then the transformer on clean words, then the transformer on words of which many are struck
through. This last phase is deliberate. Reinforcement learning removes a failure mode within minutes, and improves
sloppy glyphs slowly. So the demonstration needs a model that writes well and often strikes its words through.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from build_pipeline import MAX_TOKENS, build_pipeline
from fold_padding import Padding, fold_padding
from render_words import HEIGHT, WIDTH, render
from torch.nn import functional

from flowcorr.errors import MissingExtraError
from flowcorr.rewards.ocr import OcrReward, compare
from flowcorr.words import heldout_words, train_words

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline

Progress = Callable[[str, int, int, float], None]
Scorer = Callable[[np.ndarray, Sequence[str]], Sequence[float]]

_VAE_BATCH, _TRANSFORMER_BATCH, _SAMPLE_BATCH = 32, 64, 64
_VAE_LR, _CLEAN_LR, _DEFECT_LR = 2e-3, 1.5e-3, 1e-3
_KL_WEIGHT = 1e-3
_STRUCK_SHARE = 0.5
_NULL_SHARE = 0.05
_EMA_DECAY = 0.99
_CORPUS_WORDS = 16_384
_STATISTICS_WORDS = 512
_MAX_PADDING = 256  # the pipeline's default `max_sequence_length`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PretrainReport:
    """The result of `pretrain`. Scores are means over held-out words, None where no scorer was given.

    Attributes:
        out_dir: the pipeline folder.
        num_bytes: its size.
        seconds: wall time.
        vae_loss, clean_loss, defect_loss: means over the last tenth of each phase.
        clean_score: before the transformer learned the defect; reinforcement learning can hardly exceed it.
        score: of the saved folder, where reinforcement learning starts.
    """

    out_dir: Path
    num_bytes: int
    seconds: float
    vae_loss: float
    clean_loss: float
    defect_loss: float
    clean_score: float | None
    score: float | None


def pretrain(
    out_dir: str | Path,
    *,
    seed: int = 0,
    vae_steps: int = 700,
    transformer_steps: int = 1500,
    defect_steps: int = 500,
    scorer: Scorer | None = None,
    eval_words: int = 256,
    progress: Progress | None = None,
) -> PretrainReport:
    """Build the embedded model and save it as a pipeline folder that `from_pretrained` loads.

    Runs on one thread of the CPU. The same arguments give the same bytes on the same machine, with and without a
    scorer.

    Args:
        out_dir: the folder to write.
        seed: of the initial weights, the words and all noise.
        vae_steps: steps of 32 images, half of them struck through; about 0.4 s each.
        transformer_steps: steps of 64 clean images; about 0.2 s each.
        defect_steps: steps of 64 images, half of them struck through.
        scorer: scores images `[B, 32, 64, 3]` (uint8) against their words, `[B]`, for example exact match by OCR.
        eval_words: held-out words to score on.
        progress: called after each step with phase (`vae`, `clean`, `defect`), step, steps, loss.
    """
    out_dir = Path(out_dir)
    progress = progress or _no_progress
    start = time.monotonic()
    with _one_thread():
        pipeline = build_pipeline(seed)
        pipeline.set_progress_bar_config(disable=True)
        vae_loss = _train_vae(pipeline.vae, vae_steps, seed, progress)
        _standardise_latents(pipeline.vae, seed)
        clean_loss = _train_transformer(
            pipeline, "clean", transformer_steps, seed + 1, progress, lr=_CLEAN_LR, struck_share=0.0
        )
        clean_score = None if scorer is None else evaluate(pipeline, scorer, num_words=eval_words)
        defect_loss = _train_transformer(
            pipeline, "defect", defect_steps, seed + 2, progress, lr=_DEFECT_LR, struck_share=_STRUCK_SHARE
        )
        save(pipeline, out_dir)
        score = None if scorer is None else evaluate(load(out_dir), scorer, num_words=eval_words)
    return PretrainReport(
        out_dir=out_dir,
        num_bytes=sum(file.stat().st_size for file in out_dir.rglob("*") if file.is_file()),
        seconds=time.monotonic() - start,
        vae_loss=vae_loss,
        clean_loss=clean_loss,
        defect_loss=defect_loss,
        clean_score=clean_score,
        score=score,
    )


def load(folder: str | Path) -> StableDiffusion3Pipeline:
    """The pipeline in `folder`, in float32 on the CPU."""
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save(pipeline: StableDiffusion3Pipeline, folder: Path) -> None:
    """Write `pipeline` with its VAE and transformer in float16, to which both are converted in place.

    diffusers loads float16 files as float32 by default. transformers keeps the dtype of the file, so the small text
    encoders stay in float32.
    """
    pipeline.vae.half()
    pipeline.transformer.half()
    pipeline.save_pretrained(folder, safe_serialization=True)


def sample(
    pipeline: StableDiffusion3Pipeline, words: Sequence[str], *, seed: int = 0, num_steps: int = 10
) -> np.ndarray:
    """Draw one image a word with the deterministic (ODE) sampler: `[B, 32, 64, 3]`, uint8."""
    generator = torch.Generator().manual_seed(seed)
    images = pipeline(
        list(words),
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=num_steps,
        guidance_scale=1.0,
        max_sequence_length=MAX_TOKENS,
        generator=generator,
        output_type="np",
    ).images
    return np.rint(images * 255).astype(np.uint8)


def evaluate(
    pipeline: StableDiffusion3Pipeline, scorer: Scorer, *, num_words: int = 256, seed: int = 0
) -> float:
    """Mean score of one image for each of `num_words` held-out words, noise and words drawn from `seed`."""
    words = heldout_words(num_words, seed)
    total = 0.0
    for start in range(0, num_words, _SAMPLE_BATCH):
        batch = words[start : start + _SAMPLE_BATCH]
        total += float(np.sum(scorer(sample(pipeline, batch, seed=seed + start), batch)))
    return total / num_words


def _train_vae(vae: AutoencoderKL, steps: int, seed: int, progress: Progress) -> float:
    rng, generator = np.random.default_rng([seed, 0]), torch.Generator().manual_seed(seed)
    words = train_words(steps * _VAE_BATCH, seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_VAE_LR, weight_decay=0.0)
    losses = _Losses("vae", steps, progress)
    for step in range(steps):
        _set_lr(optimizer, _VAE_LR, step, steps)
        images = _images(words[step * _VAE_BATCH : (step + 1) * _VAE_BATCH], rng, struck_share=_STRUCK_SHARE)
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample(generator=generator)).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = functional.mse_loss(decoded, images) + _KL_WEIGHT * kl
        _update(optimizer, loss)
        losses.add(loss)
    return losses.last_tenth()


@torch.no_grad()
def _standardise_latents(vae: AutoencoderKL, seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    images = _images(train_words(_STATISTICS_WORDS, seed), rng, struck_share=_STRUCK_SHARE)
    latents = vae.encode(images).latent_dist.mode()
    vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4), scaling_factor=round(1 / float(latents.std()), 4)
    )


def _train_transformer(
    pipeline: StableDiffusion3Pipeline,
    phase: str,
    steps: int,
    seed: int,
    progress: Progress,
    *,
    lr: float,
    struck_share: float,
) -> float:
    """Rectified flow: the velocity `noise - latents` at `(1 - sigma) latents + sigma noise`.

    sigma is logit-normal (arXiv:2403.03206, section 3.1). The transformer ends with averaged weights.
    """
    if not steps:
        return math.nan
    transformer, generator = pipeline.transformer, torch.Generator().manual_seed(seed)
    num_words = min(_CORPUS_WORDS, steps * _TRANSFORMER_BATCH)
    corpus = _corpus(pipeline, num_words, seed, struck_share=struck_share)
    null = _encode(pipeline, [""])
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    average = torch.optim.swa_utils.AveragedModel(
        transformer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(_EMA_DECAY)
    )
    losses = _Losses(phase, steps, progress)
    with fold_padding(transformer) as padding:
        for step in range(steps):
            _set_lr(optimizer, lr, step, steps)
            loss = _velocity_loss(transformer, corpus, null, padding, generator)
            _update(optimizer, loss)
            average.update_parameters(transformer)
            losses.add(loss)
    transformer.load_state_dict(average.module.state_dict())
    return losses.last_tenth()


def _velocity_loss(
    transformer: SD3Transformer2DModel,
    corpus: _Corpus,
    null: tuple[torch.Tensor, torch.Tensor],
    padding: Padding,
    generator: torch.Generator,
) -> torch.Tensor:
    """The loss of one batch; `null` conditions some of its samples, so that guidance has a meaning."""
    chosen = torch.randint(len(corpus.latents), (_TRANSFORMER_BATCH,), generator=generator)
    is_null = torch.rand(len(chosen), 1, generator=generator) < _NULL_SHARE
    latents = corpus.latents[chosen]
    noise = torch.randn(latents.shape, generator=generator)
    sigma = torch.sigmoid(torch.randn(len(chosen), generator=generator))
    padding.tokens = _MAX_PADDING ** float(torch.rand((), generator=generator))
    velocity = transformer(
        hidden_states=torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1)),
        encoder_hidden_states=torch.where(is_null[..., None], null[0], corpus.embeds[chosen]),
        pooled_projections=torch.where(is_null, null[1], corpus.pooled[chosen]),
        timestep=1000 * sigma,
    ).sample
    return functional.mse_loss(velocity, noise - latents)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Corpus:
    """Words, encoded once: latents `[N, 4, 8, 16]`, embeds `[N, tokens, 64]`, pooled `[N, 64]`."""

    latents: torch.Tensor
    embeds: torch.Tensor
    pooled: torch.Tensor


@torch.no_grad()
def _corpus(pipeline: StableDiffusion3Pipeline, num_words: int, seed: int, *, struck_share: float) -> _Corpus:
    rng, vae = np.random.default_rng([seed, 2]), pipeline.vae
    words = train_words(num_words, seed)
    latents = []
    for start in range(0, len(words), _SAMPLE_BATCH):
        images = _images(words[start : start + _SAMPLE_BATCH], rng, struck_share=struck_share)
        latents.append(vae.encode(images).latent_dist.mode())
    embeds, pooled = _encode(pipeline, words)
    return _Corpus(
        latents=(torch.cat(latents) - vae.config.shift_factor) * vae.config.scaling_factor,
        embeds=embeds,
        pooled=pooled,
    )


@torch.no_grad()
def _encode(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditioning as the pipeline makes it, but with a single one of its equal padding tokens."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS
    )
    return embeds[:, : MAX_TOKENS + 1].contiguous(), pooled


def _images(words: Sequence[str], rng: np.random.Generator, *, struck_share: float) -> torch.Tensor:
    pixels = torch.from_numpy(render(words, rng=rng, struck_share=struck_share))
    return pixels.permute(0, 3, 1, 2).to(torch.float32).div(127.5).sub(1).contiguous()


def _set_lr(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    warmup = min(1.0, (step + 1) / 50)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = peak * warmup * (0.05 + 0.95 * cosine)


def _update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Losses:
    """The losses of one phase, reported as they come."""

    def __init__(self, phase: str, steps: int, progress: Progress) -> None:
        self._phase, self._steps, self._progress = phase, steps, progress
        self._values: list[float] = []

    def add(self, loss: torch.Tensor) -> None:
        self._values.append(float(loss.detach()))
        self._progress(self._phase, len(self._values), self._steps, self._values[-1])

    def last_tenth(self) -> float:
        tail = self._values[-math.ceil(len(self._values) / 10) :]
        return sum(tail) / len(tail) if tail else math.nan


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # The order of a sum depends on the number of threads, and so do the bits of every weight.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _no_progress(phase: str, step: int, steps: int, loss: float) -> None:
    pass


def _print_progress(phase: str, step: int, steps: int, loss: float) -> None:
    if step % 100 == 0 or step == steps:
        print(f"{phase} {step}/{steps}  loss {loss:.4f}", flush=True)


def _exact_match_scorer() -> Scorer | None:
    """Exact match by OCR; None without the extra `ocr`."""
    try:
        reward = OcrReward()
    except MissingExtraError as error:
        print(f"not scored: {error}")
        return None
    return lambda images, words: list(compare(reward.read(images), words)[0])


def main() -> None:
    """Pretrain as the command line says, and print the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, words and noise (default: 0)")
    arguments = parser.parse_args()
    report = pretrain(
        arguments.out, seed=arguments.seed, scorer=_exact_match_scorer(), progress=_print_progress
    )
    print(f"{report.out_dir}: {report.num_bytes / 1e6:.2f} MB in {report.seconds:.0f} s")
    if report.score is not None:
        print(
            f"held-out exact match {report.score:.3f}; {report.clean_score:.3f} before it learned the defect"
        )


if __name__ == "__main__":
    main()
