"""Loads a pipeline and wraps it in the adapter of its family."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flowcorr import hub
from flowcorr.config.families import GUIDANCE_KEYS, GUIDE, PIPELINES, find_family
from flowcorr.config.schema import ModelConfig
from flowcorr.devices import keep_float32
from flowcorr.errors import ConfigError, one_sentence, unknown_choice
from flowcorr.imports import import_target
from flowcorr.models.base import InVllmOmni, ModelFamily
from flowcorr.models.paths import EMBEDDED, resolve_path
from flowcorr.models.quantized import quantize_blocks
from flowcorr.models.step_rule import check_step_rule

CONVERT = (
    "Weights are read from safetensors only, since loading a pickle can run code. Convert it once, if you trust it: "
    "python -c \"from diffusers import DiffusionPipeline as P; P.from_pretrained('{}').save_pretrained('converted')\""
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pipeline_class_of(path: str) -> str:
    """The class of the pipeline at `model.path`.

    Raises:
        ConfigError: there is no such pipeline.
    """
    return _pipeline_parts(resolve_path(path), path)[0]


def resolve_family(name: str) -> type[ModelFamily]:
    """The family called `name`, or the class at `package.module:Class`.

    Raises:
        ConfigError: the name is unknown, or the path leads to no `ModelFamily`, or to one that is not complete.
    """
    path = name if ":" in name else find_family(name).adapter
    family = import_target("model.family", path, "a ModelFamily")
    if not (isinstance(family, type) and issubclass(family, ModelFamily)):
        raise ConfigError(f"model.family={name!r} is not a ModelFamily; {GUIDE}")
    if ":" in name:
        _check_family(family, name)
    return family


def _check_family(family: type[ModelFamily], name: str) -> None:
    """Check that a family of the user's own states and implements all that it has to.

    Raises:
        ConfigError: it does not.
    """
    stated = [fact for fact in ("name", "pipeline_class", "lora_targets") if not hasattr(family, fact)]
    methods = [f"{method}()" for method in sorted(family.__abstractmethods__)]
    if stated or methods:
        raise ConfigError(
            f"model.family={name!r}: the class lacks {', '.join((*stated, *methods))}; "
            f"`flowcorr explain ModelFamily` says what each is, and {GUIDE}"
        )
    kinds = {
        "name": (str, "text"),
        "pipeline_class": (str, "the name of a class of diffusers, as text"),
        "lora_targets": (tuple, "a tuple of ends of layers' names"),
        "num_references": (tuple, "the fewest and the most reference images"),
        "vllm_omni": (InVllmOmni | None, "a flowcorr.models.base.InVllmOmni, or None"),
    }
    for fact, (kind, meaning) in kinds.items():
        if not isinstance(value := getattr(family, fact), kind):
            raise ConfigError(f"model.family={name!r}: {fact}={value!r} has to be {meaning}")
    if family.guidance_key not in GUIDANCE_KEYS:
        message = unknown_choice("guidance_key", family.guidance_key, GUIDANCE_KEYS)
        raise ConfigError(f"model.family={name!r}: {message}")


def _pipeline_class(family: type[ModelFamily]) -> Any:
    """The class of diffusers that a family names."""
    import diffusers

    try:
        return getattr(diffusers, family.pipeline_class)
    except AttributeError:
        names = [name for name in dir(diffusers) if name.endswith("Pipeline")]
        near = difflib.get_close_matches(family.pipeline_class, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"model.family={family.place()}: pipeline_class={family.pipeline_class!r} is no class of diffusers "
            f"{diffusers.__version__}{hint}"
        ) from None


def load_family(
    model: ModelConfig,
    device: torch.device | str = "cpu",
    *,
    reference_size: tuple[int | None, int | None] = (None, None),
    text_encoders: bool = True,
    transformer_on_host: bool = False,
) -> ModelFamily:
    """Load a diffusers pipeline and wrap it in its family's adapter, frozen and in evaluation mode.

    A transformer that is to be quantized goes to the device layer by layer, each of which is quantized there.

    From then on, convolutions in float32 do not compute in TF32 in this process.

    Args:
        model: path, family, dtype, quantization, offloading and token limit of the pipeline; the adapter is not added
            here.
        device: where the pipeline is put; offloaded text encoders compute there. On a CPU nothing is offloaded.
        reference_size: height and width that reference images are fitted to, those of the images that are drawn.
        text_encoders: whether to load them; without them `encode` cannot be called.
        transformer_on_host: leave the transformer in host memory, from where it is sharded.

    Raises:
        ConfigError: the folder holds no pipeline with weights in safetensors, its family is unknown, its scheduler
            takes other steps than Euler's, or its attention cannot be computed so, or its layers not quantized.
        MissingExtraError: `model.quantization` needs bitsandbytes.
    """
    keep_float32()
    path, dtype = model.path, DTYPES[model.dtype]
    location = resolve_path(path)
    class_name, components = _pipeline_parts(location, path)
    encoders = {
        name: kind if text_encoders else None
        for name, (library, kind) in components.items()
        if name.startswith("text_encoder") and (library == "transformers" or not text_encoders)
    }
    chosen = _family_of(class_name, path) if model.family == "auto" else resolve_family(model.family)
    pipeline = _read_pipeline(location, path, chosen, dtype, encoders)
    pipeline.scheduler = chosen.with_euler_steps(pipeline.scheduler)
    check_step_rule(pipeline.scheduler, path)
    pipeline.set_progress_bar_config(disable=True)
    if model.attention is not None:
        _set_attention(pipeline.transformer, model.attention)
    if model.quantization != "none":
        quantize_blocks(pipeline.transformer, model.quantization, device)
    on_host = {"transformer"} if transformer_on_host else set()
    offloads = model.offload_text_encoders and torch.device(device).type != "cpu"
    if offloads:
        on_host |= {name for name in components if name.startswith("text_encoder")}
    for name, component in pipeline.components.items():
        if isinstance(component, torch.nn.Module):
            component.to("cpu" if name in on_host else device)
            component.requires_grad_(False).eval()
    try:
        family = chosen(
            pipeline,
            dtype=dtype,
            max_sequence_length=model.max_sequence_length,
            reference_size=reference_size,
        )
    except TypeError as error:
        raise ConfigError(
            f"model.family={chosen.place()}: {chosen.__name__}(pipeline, dtype=..., max_sequence_length=..., "
            f"reference_size=...) fails: {one_sentence(error)}; an __init__ of its own takes and passes on **options"
        ) from error
    if text_encoders:
        _check_template(family, path)
    if offloads:
        family.offload_text_encoders(device)
    return family


def _read_pipeline(
    location: str,
    path: str,
    family: type[ModelFamily],
    dtype: torch.dtype,
    encoders: Mapping[str, str | None],
) -> Any:
    """The pipeline at a location, called `path` in the configuration, on the host.

    Args:
        location: its folder or its name on the hub.
        path: what the configuration calls it.
        family: its family.
        dtype: the dtype of its weights.
        encoders: the classes in transformers of its text encoders; None for one that is left out.
    """
    from safetensors import SafetensorError

    kind = _pipeline_class(family)
    options = {"use_safetensors": True, "local_files_only": hub.only_cached(location)}
    try:
        with quiet_loaders():
            loaded = {
                name: class_name and _text_encoder(location, path, name, class_name, dtype=dtype, **options)
                for name, class_name in encoders.items()
            }
            pipeline = kind.from_pretrained(location, torch_dtype=dtype, **options, **loaded)
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, AttributeError, TypeError, SafetensorError) as error:
        if (damaged := _damaged_file(location)) is not None:
            raise ConfigError(
                f"model.path={path!r}: {damaged} is cut or damaged ({one_sentence(error)}); download it again"
            ) from error
        message = f"model.path={path!r} cannot be loaded as a {family.name} pipeline: {one_sentence(error)}"
        hint = f". {CONVERT.format(path)}" if "safetensors" in message else ""
        raise ConfigError(message + hint + hub.why_not_found(location)) from error
    _check_parts(pipeline.components, path)
    return pipeline


def _text_encoder(location: str, path: str, name: str, class_name: str, **options: Any) -> Any:
    """Load a text encoder, and check that files hold all weights: transformers would draw missing ones at random."""
    import transformers

    model, loading_info = getattr(transformers, class_name).from_pretrained(
        location, subfolder=name, output_loading_info=True, **options
    )
    if (missing := hub.missing_weight(model, loading_info)) is not None:
        raise _lacking(path, name, model, missing)
    return model


def _damaged_file(location: str) -> Path | None:
    """The first file of a folder's weights that cannot be opened."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(location).glob("*/*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return None


def _check_parts(components: Mapping[str, Any], path: str) -> None:
    """Refuse a component without all of its weights, which diffusers leaves empty, or without its vocabulary."""
    from transformers import PreTrainedTokenizerBase

    for name, component in components.items():
        tokenizer = getattr(component, "tokenizer", component)  # that of a processor
        if isinstance(tokenizer, PreTrainedTokenizerBase) and not hub.knows_words(tokenizer):
            raise ConfigError(
                f"model.path={path!r}: its {name} knows no words, so that all prompts would be one to the model; its "
                "vocabulary, such as tokenizer.json, is missing: download it again"
            )
        weights = component.named_parameters() if isinstance(component, torch.nn.Module) else ()
        empty = next((weight for weight, value in weights if value.is_meta), None)
        if empty is not None:
            raise _lacking(path, name, component, empty)


def _check_template(family: ModelFamily, path: str) -> None:
    """Refuse a tokenizer without the chat template into which its family puts prompts."""
    try:
        family.tokenized_text("a")
    except ValueError as error:
        raise ConfigError(
            f"model.path={path!r}: its tokenizer cannot put a prompt into its chat template ({one_sentence(error)}); "
            "chat_template.jinja is missing or of another model: download it again"
        ) from error


def _lacking(path: str, name: str, component: torch.nn.Module, weight: str) -> ConfigError:
    return ConfigError(
        f"model.path={path!r}: the files of its {name} lack the weight {weight}; they are of another "
        f"{type(component).__name__} than {name}/config.json describes, or a shard is missing"
    )


@contextlib.contextmanager
def quiet_loaders() -> Iterator[None]:
    """Silence the loaders' progress bars, and their remarks on keywords and packages that nothing here needs."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    logs = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    imports = logging.getLogger("transformers.utils.import_utils")
    for log in logs:
        log.disable_progress_bar()
    imports.addFilter(_is_news)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks.*", category=UserWarning)
            yield
    finally:
        imports.removeFilter(_is_news)
        for log in logs:
            log.enable_progress_bar()


def check_attention(transformer: Any, backend: str | None) -> None:
    """Check that `model.attention` has an effect on a transformer.

    Raises:
        ConfigError: its attention has no backends.
    """
    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    if backend is not None and not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise ConfigError(
            f"model.attention={backend!r} would have no effect: {type(transformer).__name__} always uses torch's "
            "scaled_dot_product_attention; leave the key out"
        )


def _set_attention(transformer: Any, backend: str) -> None:
    check_attention(transformer, backend)
    try:
        transformer.set_attention_backend(backend)
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"model.attention={backend!r} cannot be used here: {error}") from error


def _is_news(record: logging.LogRecord) -> bool:
    """False for a remark on torchvision, which only image inputs would need."""
    return "requires torchvision" not in record.getMessage()


def _family_of(class_name: str, path: str) -> type[ModelFamily]:
    if class_name not in PIPELINES:
        message = unknown_choice("its pipeline class", class_name, PIPELINES)
        raise ConfigError(f"model.path={path!r}: {message}; {GUIDE}")
    return resolve_family(PIPELINES[class_name])


def _pipeline_parts(location: str, path: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """The pipeline's class, and the library and class of its components, as `model_index.json` has them."""
    from diffusers import DiffusionPipeline

    index = Path(location) / "model_index.json"
    if Path(location).is_dir() and not index.is_file():
        raise ConfigError(f"model.path={path!r} is not a diffusers pipeline: {index} is missing")
    try:
        with quiet_loaders():
            if index.is_file():
                index_values = json.loads(index.read_text())
            else:
                alone = hub.only_cached(location)
                index_values = DiffusionPipeline.load_config(location, local_files_only=alone)
        parts = {name: part for name, part in index_values.items() if isinstance(part, list) and any(part)}
        return str(index_values["_class_name"]), {
            name: (library, kind) for name, (library, kind) in parts.items()
        }
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"model.path={path!r} is neither a pipeline folder, nor a pipeline on the hub, nor one of "
            f"{', '.join(EMBEDDED)}: {one_sentence(error)}{hub.why_not_found(location)}"
        ) from error
