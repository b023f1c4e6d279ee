"""The model card of exported weights: base, scores, how to load them, how they were trained."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import flowcorr
from flowcorr.config.families import FAMILIES
from flowcorr.config.schema import Config
from flowcorr.models import EMBEDDED, ModelFamily, resolve_family
from flowcorr.trainer.run_config import RunConfig

_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_NO_SCORES = ("/reward_std", "/scored_images", "/failed_samples")


def model_card(
    run: RunConfig,
    *,
    family: str,
    title: str,
    folder: str,
    step: int,
    records: Sequence[Mapping[str, Any]],
    picture: str | None,
    merged: bool,
) -> str:
    """The card as Markdown, with the front matter that the hub reads.

    Args:
        run: the run's configuration.
        family: the name of its model's family; that of a family of one's own is its path.
        title: its heading.
        folder: the folder of the exported weights, as the code on the card names it.
        step: training steps that made the weights.
        records: of `metrics.jsonl`.
        picture: an image in the folder, if there is one.
        merged: whether the folder also holds merged weights.
    """
    config, base = run.config, run.config.model.path
    kind = resolve_family(family) if family in FAMILIES else None
    rank = config.model.lora.rank
    base_code = f'str(EMBEDDED["{base}"])' if base in EMBEDDED else _quoted(base)
    return (
        _environment()
        .get_template("model_card.md.j2")
        .render(
            config=config,
            loss_mode=run.loss_mode,
            version=flowcorr.__version__,
            title=title,
            step=step,
            base=base,
            base_code=base_code,
            on_hub=_ON_HUB.fullmatch(base) is not None and not os.path.exists(base),
            task=_task(kind),
            what=f"A LoRA of rank {rank}" if rank else "All weights of the transformer",
            reward=" + ".join(
                f"{'' if term.weight == 1 else f'{term.weight:g} '}{term.name}"
                for term in config.reward.terms
            ),
            scores=_scores(records, step),
            folder=_quoted(folder),
            makes_edits=kind is not None and kind.num_references[0] > 0,
            has_loader=_has_loader(kind),
            call=None if kind is None else _call(config, kind),
            picture=picture,
            merged=merged,
        )
    )


def _task(family: type[ModelFamily] | None) -> str:
    """The hub's name of the task."""
    if family is None or not (family.makes_videos or family.num_references[0]):
        return "text-to-image"
    return "text-to-video" if family.makes_videos else "image-to-image"


def _scores(records: Sequence[Mapping[str, Any]], step: int) -> list[tuple[str, float | None, float]]:
    """Name, mean before training and mean at `step` of each held-out score."""
    of_step = {record["step"]: record for record in records if record.get("eval/reward") is not None}
    before, after = of_step.get(0, {}), of_step.get(step, {})
    return [
        (name.removeprefix("eval/"), before.get(name), value)
        for name, value in after.items()
        if name.startswith("eval/")
        and value is not None
        and "/image/" not in name
        and not name.endswith(_NO_SCORES)
    ]


def _has_loader(family: type[ModelFamily] | None) -> bool:
    """Whether the pipeline of diffusers loads adapters itself."""
    import diffusers

    pipeline = None if family is None else getattr(diffusers, family.pipeline_class)
    return hasattr(pipeline, "load_lora_weights")


def _call(config: Config, family: type[ModelFamily]) -> str:
    """The call of the pipeline that draws a sample."""
    sampling, trainer = config.sampling, config.trainer
    steps = trainer.eval_num_inference_steps or sampling.num_inference_steps
    values: dict[str, Any] = {
        "height": trainer.eval_height or sampling.height,
        "width": trainer.eval_width or sampling.width,
        "num_frames": sampling.num_frames if family.makes_videos else None,
        "num_inference_steps": steps,
        family.guidance_key: getattr(sampling, family.guidance_key),
    }
    options = [f"{name}={value!r}" for name, value in values.items() if value is not None]
    options = ['image=load_image("reference.png")'] * (family.num_references[0] > 0) + options
    result = "frames" if family.makes_videos else "images"
    return f'pipe(prompt="a prompt", {", ".join(options)}).{result}[0]'


def _quoted(text: str) -> str:
    """A text as a literal of Python; JSON's escapes of two halves of a character are another text there."""
    return json.dumps(text, ensure_ascii=False)


def _environment() -> Environment:
    # The card is Markdown, whose code must not be escaped.
    return Environment(
        loader=PackageLoader("flowcorr.trainer"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
