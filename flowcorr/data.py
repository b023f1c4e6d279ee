"""Prompts: from a file or the embedded word list, split by hash, and dealt out in a repeatable order."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowcorr.config.task import DataConfig
from flowcorr.errors import ConfigError, shortened, unknown_choice
from flowcorr.records import Prompt, distinct
from flowcorr.records.spellings import meant, warn_of_unread
from flowcorr.references import Reference
from flowcorr.texts import folded, quoted
from flowcorr.words import heldout_words, train_words

TINY_WORDS = "tiny_words"
_MAX_PATH = 4096  # characters of a file's path
_Parsed = tuple[Prompt, list[str], list[str]]  # the paths of its reference images, and the fields of its line


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptSet:
    """Prompts to train on, and others to evaluate on; no prompt is in both, in any spelling."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]


def load_prompts(data: DataConfig) -> PromptSet:
    """Read prompts and split them.

    A `.txt` file holds one prompt a line; the words in its one pair of double quotes are its target. A `.jsonl` file
    holds one object a line: `{"prompt": ..., "target": ..., "tag": ..., ...}`, where a missing target is taken from the
    double quotes. Where the quotes can be read in more than one way there is no target, see `texts.quoted`.
    `"image": "cat.png"` or `"images": [...]` names reference images by their paths from the file; each is decoded once
    here. `"negative_prompt": "blurry"` takes the place of `sampling.negative_prompt` for this prompt. All fields but
    these, prompt and target go into `Prompt.metadata`. `tiny_words` is the embedded list of words, which the embedded
    model was trained to draw: the prompt is the word itself.

    Without a second file, one is split by the SHA-256 of each prompt's `content`, which is its folded text and the
    content of its images. So a prompt keeps its side whatever else the file holds and however it is spelt, and one text
    with several negative prompts, which are several prompts, is on one side. The embedded words have a split of their
    own, which the embedded model's pretraining respects.

    Args:
        data: the files, or `tiny_words`, and how they are read. Of held-out prompts, each one counts once, and those
            with the smallest hashes are kept.

    Raises:
        ConfigError: a file is missing, empty or malformed (the message names file and line), prompts have unequal
            numbers of reference images, or a side of the split is empty.
    """
    if data.path == TINY_WORDS:
        return _tiny_words(data.num_train, data.num_heldout)
    prompts = _read(data, "path", data.path)
    if data.heldout_path is None:
        split = f"data.heldout_fraction={data.heldout_fraction}"
        heldout = [prompt for prompt in prompts if _hash(prompt) < data.heldout_fraction]
    else:
        split = f"data.heldout_path={data.heldout_path!r}"
        heldout = _read(data, "heldout_path", data.heldout_path)
    _check_counts([*prompts, *heldout])
    held_back = {prompt.content for prompt in heldout}
    train = [prompt for prompt in prompts if prompt.content not in held_back]
    if not heldout:
        raise ConfigError(_nothing_held_out(data, prompts))
    if not train:
        raise ConfigError(
            f"data.path={data.path!r}: {split} leaves no training prompt of {len(prompts)}; {_remedy(data, prompts)}"
        )
    ordered = sorted({prompt.key: prompt for prompt in heldout}.values(), key=_hash)
    return PromptSet(train=tuple(train), heldout=tuple(ordered[: data.num_heldout]))


def _nothing_held_out(data: DataConfig, prompts: list[Prompt]) -> str:
    """The message for a split by hash that keeps back no prompt; `data.num_heldout` only bounds their number."""
    default = ", the default," if data.heldout_fraction == DataConfig().heldout_fraction else ""
    return (
        f"data.path={data.path!r} has {len(prompts)} prompts, of which data.heldout_fraction={data.heldout_fraction}"
        f"{default} holds none out, and data.num_heldout={data.num_heldout} asks for some; {_remedy(data, prompts)}"
    )


def _remedy(data: DataConfig, prompts: list[Prompt]) -> str:
    """How to get prompts on both sides of the split: a fraction that holds out `data.num_heldout`, or half of them."""
    places = sorted({_hash(prompt) for prompt in prompts})
    number = min(data.num_heldout, len(places) // 2)
    if data.heldout_path is not None:
        return "take some of them out of that file, or add others to data.path"
    if number == 0:
        return "add prompts, or name a file of others in data.heldout_path"
    digits = 2
    while (fraction := (math.floor(places[number - 1] * 10**digits) + 1) / 10**digits) > places[number]:
        digits += 1
    return (
        f"set data.heldout_fraction={fraction:.{digits}f}, which holds out {number} of them, add prompts, or name a "
        "file of others in data.heldout_path"
    )


def _read(data: DataConfig, key: str, path: str) -> list[Prompt]:
    return read_prompts(
        Path(path), key=f"data.{key}", target_field=data.target_field, tag_field=data.tag_field
    )


def read_prompts(
    path: Path, *, key: str = "data.path", target_field: str = "target", tag_field: str = "tag"
) -> list[Prompt]:
    """All prompts of a `.txt` or `.jsonl` file, in its order; blank lines are skipped.

    Args:
        path: the file; `~` is the home folder.
        key: what names it in the configuration, for messages.
        target_field, tag_field: fields of a `.jsonl` line.

    Raises:
        ConfigError: the file is missing, empty or malformed, or a reference image cannot be used; the message names
            file and line.

    Warns:
        UserWarning: a field has a name that other tools give to what flowcorr reads under another one.
    """
    parsers: dict[str, Callable[[str, str], _Parsed]] = {
        ".txt": _parse_text,
        ".jsonl": partial(_parse_json, target_field=target_field, tag_field=tag_field),
    }
    if path.suffix not in parsers:
        raise ConfigError(unknown_choice(f"{key}={str(path)!r}: file type", path.suffix, parsers))
    parse = parsers[path.suffix]
    file = Path(os.path.expanduser(path))
    parsed = [parse(line, f"{path}:{number}") for number, line in _lines(file, key)]
    if not parsed:
        raise ConfigError(f"{key}={str(path)!r} holds no prompt; write one prompt per line")
    _check_target_field(target_field, parsed, path)
    prompts = _with_references(parsed, file.parent)
    has_targets = any(target_field in fields for _, _, fields in parsed)
    warn_of_unread(prompts, path, has_targets=has_targets)
    return prompts


def _check_target_field(name: str, parsed: list[_Parsed], path: Path) -> None:
    """Refuse a field of one's own that no line has: all targets would be taken from the double quotes."""
    fields = dict.fromkeys(field for _, _, given in parsed for field in given)
    if name != DataConfig().target_field and fields and name not in fields:
        raise ConfigError(
            f"{path}: {unknown_choice('data.target_field', name, fields)}, as its lines have them"
        )


def _with_references(parsed: list[_Parsed], folder: Path) -> list[Prompt]:
    """The prompts with their images, each file of which is decoded once."""
    places = {image: prompt.place for prompt, images, _ in reversed(parsed) for image in images}

    def read(image: str) -> Reference:
        try:
            return Reference.of(folder / os.path.expanduser(image))
        except ConfigError as error:
            raise ConfigError(f"{places[image]}: {error}") from error

    # Decoders release Python's interpreter lock. Pillow's warnings would name neither file nor line.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        loaded = dict(zip(places, pool.map(read, places), strict=True))
    return [replace(prompt, images=tuple(loaded[image] for image in images)) for prompt, images, _ in parsed]


def _check_counts(prompts: list[Prompt]) -> None:
    """Refuse prompts with unequal numbers of reference images, which no batch could hold."""
    first = prompts[0]
    for prompt in prompts:
        if len(prompt.images) != len(first.images):
            raise ConfigError(
                f"{prompt.place} has {len(prompt.images)} reference images, and {first.place} has {len(first.images)}; "
                "give every prompt equally many, or train on each kind in a run of its own"
            )


def prompts_digest(prompts: PromptSet) -> str:
    """SHA-256, in hex, of all fields of the training prompts and of the held-out ones.

    It is the same on every machine, and for every spelling of texts and targets.
    """
    parts = [
        [
            [
                prompt.key,
                None if prompt.target is None else folded(prompt.target),
                prompt.tag,
                dict(prompt.metadata),
            ]
            for prompt in part
        ]
        for part in (prompts.train, prompts.heldout)
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class PromptStream:
    """Deals out prompts for ever: each epoch is a new shuffle of all of them, fixed by seed and epoch.

    Attributes:
        position: prompts dealt so far; a stream built with it goes on where the other stopped.
    """

    def __init__(self, prompts: tuple[Prompt, ...], *, seed: int, position: int = 0) -> None:
        if not prompts:
            raise ConfigError("prompts=() is empty; a prompt stream needs at least one")
        self.position = position
        self._prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; they may reach into the next epoch."""
        dealt = self.peek(n)
        self.position += n
        return dealt

    def peek(self, n: int, *, skip: int = 0) -> list[Prompt]:
        """Look at the `n` prompts after the next `skip`; they are still dealt later."""
        return [self._at(self.position + skip + offset) for offset in range(n)]

    def peek_distinct(self, n: int) -> list[Prompt]:
        """Look at the next `n` different prompts, or at fewer if there are fewer; they are still dealt later."""
        epoch = (self._at(self.position + offset) for offset in range(2 * len(self._prompts)))
        return distinct(epoch)[:n]

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
        return self._prompts[self._order[place]]


def _tiny_words(num_train: int, num_heldout: int) -> PromptSet:
    return PromptSet(
        train=_word_prompts("data.num_train", train_words, num_train),
        heldout=_word_prompts("data.num_heldout", heldout_words, num_heldout),
    )


def _word_prompts(key: str, draw: Callable[[int], list[str]], number: int) -> tuple[Prompt, ...]:
    try:
        words = draw(number)
    except ValueError as error:
        raise ConfigError(f"{key}={number!r} cannot be drawn from data.path={TINY_WORDS}: {error}") from error
    return tuple(Prompt(text=word, target=word) for word in words)


def _lines(path: Path, key: str) -> Iterator[tuple[int, str]]:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
            raise ConfigError(
                f"{key}={str(path)!r} is a folder, a pipe or a device; give a .txt or .jsonl file"
            )
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key}={str(path)!r} does not exist (the current folder is {Path.cwd()}); "
            f"give a .txt or .jsonl file, or {TINY_WORDS}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={str(path)!r} cannot be read as UTF-8 text: {error}") from error
    if "\0" in text:
        raise ConfigError(
            f"{key}={str(path)!r} holds zero bytes: it is UTF-16 without its mark, or no text; save it as UTF-8"
        )
    # Not splitlines(): it also splits at characters that JSON allows within a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if folded(line):
            yield number, line.strip()


def _parse_text(line: str, place: str) -> _Parsed:
    if _is_object(line):
        raise ConfigError(f"{place} is a JSON object, but a .txt file holds plain prompts; name it .jsonl")
    return Prompt(text=line, target=_quoted(line), place=place), [], []


def _is_object(line: str) -> bool:
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse_json(line: str, place: str, *, target_field: str, tag_field: str) -> _Parsed:
    example = {"prompt": "a sign that says hello", target_field: "hello"}
    expected = f"each line must be an object such as {json.dumps(example)}"
    try:
        entry = json.loads(
            line, object_pairs_hook=_distinct_keys, parse_float=_finite, parse_constant=_finite
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON ({error.msg} at column {error.colno}); {expected}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, or deep nesting
        reason = shortened(str(error))
        raise ConfigError(f"{place} is JSON that cannot be read ({reason}); {expected}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} is a JSON {type(entry).__name__}; {expected}")
    text = _string(entry, "prompt", place, expected)
    if text is None:
        named = next((key for key in entry if meant(key) == "prompt"), None)
        hint = "" if named is None else f' (rename "{shortened(named)}" to "prompt")'
        raise ConfigError(f'{place} has no "prompt"{hint}; {expected}')
    target = _string(entry, target_field, place, expected)
    prompt = Prompt(
        text=text,
        target=_quoted(text) if target is None else target,
        negative_prompt=_string(entry, "negative_prompt", place, expected, may_be_empty=True),
        tag=_string(entry, tag_field, place, expected),
        metadata={
            key: value
            for key, value in entry.items()
            if key not in ("prompt", "negative_prompt", "image", "images", target_field)
        },
        place=place,
    )
    return prompt, _images(entry, place), list(entry)


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; of a key that is given twice, Python would drop the first value."""
    entry = dict(pairs)
    if len(entry) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in entry if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return entry


def _finite(text: str) -> float:
    """A number of JSON, in which `NaN`, `Infinity` and a number too large for a float have no place."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is not finite; leave its field out, or write null")
    return value


def _shown(value: object) -> str:
    return shortened(json.dumps(value))


def _images(entry: Mapping[str, Any], place: str) -> list[str]:
    """The paths of a line's reference images, as it has them."""
    given = {key: entry[key] for key in ("image", "images") if entry.get(key) is not None}
    if not given:
        return []
    (key, value), *further = given.items()
    paths = [value] if key == "image" else value
    usable = (
        isinstance(paths, list) and paths and all(isinstance(path, str) and path.strip() for path in paths)
    )
    if further or not usable:
        raise ConfigError(
            f'{place} has {_shown(given)}; name reference images as "image": "cat.png" or "images": ["cat.png", '
            '"dog.png"], relative to the file'
        )
    if inline := [path for path in paths if path.startswith("data:") or len(path) > _MAX_PATH]:
        raise ConfigError(
            f'{place} has "{key}": {_shown(inline[0])}, the content of an image; write it to a file, and give its path'
        )
    if remote := [path for path in paths if "://" in path]:
        raise ConfigError(
            f"{place} has the reference image {shortened(remote[0])}; download it, and give the file's path"
        )
    return paths


def _string(
    entry: Mapping[str, Any], key: str, place: str, expected: str, *, may_be_empty: bool = False
) -> str | None:
    value = entry.get(key)
    if value is not None and not (isinstance(value, str) and (may_be_empty or folded(value))):
        raise ConfigError(f'{place} has "{key}": {_shown(value)}, which is not text; {expected}')
    if value is not None and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f'{place} has "{key}": {_shown(value)}, half of a character; {expected}')
    if value is not None and "\0" in value:
        raise ConfigError(f'{place} has "{key}": {_shown(value)}, a zero character; {expected}')
    return value


def _quoted(text: str) -> str | None:
    try:
        return quoted(text)
    except ConfigError:  # told where a reward needs the target: other prompts may hold any marks
        return None


def _hash(prompt: Prompt) -> float:
    """A number in [0, 1) that depends on the prompt's text and images alone."""
    return int.from_bytes(hashlib.sha256(prompt.content.encode()).digest()[:6], "big") / 2**48
