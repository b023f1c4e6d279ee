"""A run's weights as a folder for the hub: weights, model card, recipe and images."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from flowcorr import lora
from flowcorr.actor.weights import FILE_PATTERN
from flowcorr.config import yaml_text
from flowcorr.config.families import PIPELINES
from flowcorr.config.load import without_interpolation
from flowcorr.config.schema import Config
from flowcorr.errors import BackendError, ConfigError
from flowcorr.models import load_family, pipeline_class_of
from flowcorr.models.adapter_files import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE
from flowcorr.private import redact
from flowcorr.trackers import IMAGES_FOLDER
from flowcorr.trainer import run_folder
from flowcorr.trainer.evaluate import choose_checkpoint
from flowcorr.trainer.model_card import model_card
from flowcorr.trainer.run_config import read_config

CARD, RECIPE, TRANSFORMER = "README.md", "recipe.yaml", "transformer"
_PICTURES = ("before_after", "eval_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A written folder.

    Attributes:
        folder: where it is.
        checkpoint: the folder of the checkpoint that it was made of.
        files: what it holds, by path inside it.
    """

    folder: Path
    checkpoint: Path
    files: tuple[str, ...]


def export_run(
    run_dir: str | Path, out_dir: str | Path | None = None, *, which: str = "best", merge: bool = False
) -> Exported:
    """Write a checkpoint's weights with a model card, the recipe without secrets, and the images of evaluations.

    Without `merge` no model is loaded, and no code of the run's own is imported.

    Args:
        run_dir: the run's folder.
        out_dir: a new or empty folder; `export` in the run's folder if it is None.
        which: the run's `best` or `last` checkpoint, or one given by its folder.
        merge: also write the transformer with the adapter merged into its weights, in the precision of the more precise
            of both. This loads the model, without quantization.

    Raises:
        ConfigError: `run_dir` holds no run, `out_dir` holds files, or nothing is to be merged.
        CheckpointError: the checkpoint is missing or damaged.
        BackendError: `out_dir` cannot be written.
    """
    run_dir = Path(run_dir)
    folder = run_dir / "export" if out_dir is None else Path(out_dir)
    run = read_config(run_dir)
    config = run.config
    if merge and not config.model.lora.rank:
        raise ConfigError(f"--merge has no effect on {run_dir}, which trains all weights; leave it out")
    checkpoint, state = choose_checkpoint(run_dir / run_folder.CHECKPOINTS, which)
    family = _family_name(config)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} holds files; delete it, or choose another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        _copy_weights(checkpoint, folder, whole=not config.model.lora.rank)
        pictures = _copy_pictures(run_dir / IMAGES_FOLDER, folder)
        if merge:
            _merge(config, checkpoint, folder / TRANSFORMER)
        recipe = yaml_text.dump(without_interpolation(redact(dict(run.values))))
        (folder / RECIPE).write_text(recipe, encoding="utf-8")
        card = model_card(
            run,
            family=family,
            title=run_dir.resolve().name,
            folder=str(folder),
            step=state.step,
            records=run_folder.metrics_of(run_dir),
            picture=next((name for name in pictures if "before_after" in name), None),
            merged=merge,
        )
        (folder / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        raise BackendError(
            f"{folder} cannot be written ({error.strerror or error}); give another --out"
        ) from error
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return Exported(folder=folder, checkpoint=checkpoint, files=tuple(files))


def _family_name(config: Config) -> str:
    """The family of the model, from `model.family` or, if that is `auto`, from the pipeline's class."""
    if config.model.family != "auto":
        return config.model.family
    return PIPELINES.get(pipeline_class_of(config.model.path), "")


def _copy_weights(checkpoint: Path, folder: Path, *, whole: bool) -> None:
    if whole:
        shutil.copytree(checkpoint / TRANSFORMER, folder / TRANSFORMER, copy_function=shutil.copyfile)
        return
    for name in (DIFFUSERS_FILE, PEFT_FILE, PEFT_CONFIG):
        shutil.copyfile(checkpoint / name, folder / name)


def _copy_pictures(images: Path, folder: Path) -> list[str]:
    """Copy the images and films of evaluations, and not the many of training steps."""
    pictures = sorted(path for path in images.glob("*") if path.name.startswith(_PICTURES))
    for path in pictures:
        (folder / IMAGES_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / IMAGES_FOLDER / path.name)
    return [f"{IMAGES_FOLDER}/{path.name}" for path in pictures]


def _merge(config: Config, checkpoint: Path, folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    family = load_family(replace(config.model, quantization="none"), text_encoders=False)
    started = replace(config.model.lora, warm_start=str(checkpoint))
    lora.add_adapter(family.transformer, family, started, seed=config.trainer.seed)
    folder.mkdir()
    (folder / family.transformer.config_name).write_text(
        family.transformer.to_json_string(), encoding="utf-8"
    )
    save_torch_state_dict(
        dict(lora.merged_weights(family.transformer, {})), folder, filename_pattern=FILE_PATTERN
    )
