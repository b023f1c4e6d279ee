"""Configuration keys, read from the schema."""

import re
from dataclasses import fields

from flowcorr.config import Config, to_mapping
from flowcorr.instruments.reference.keys import find_key, keys


def _dotted(mapping, prefix=""):
    for name, value in mapping.items():
        nested = isinstance(value, dict) and value and f"{prefix}{name}" != "rollout.engine"
        yield from _dotted(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]


def test_every_key_is_explained():
    known = {key.name: key for key in keys()}
    assert all(key.meaning for key in known.values())
    assert set(_dotted(to_mapping(Config()))) <= set(known)
    assert all(field.name in {name.split(".")[0] for name in known} for field in fields(Config))
    assert find_key("clip_ratio").default == "0.001"
    assert find_key("dtype") is None  # of several sections
    assert known["algorithm.rollout_correction"].default == "{preset: disabled}"
    assert known["reward.terms"].default == "[{name: ocr}]"
    assert find_key("normalize").name == "reward.terms[].normalize"


def test_meanings_name_keys_that_exist():
    every = list(keys())
    names = {key.name for key in every}
    sections = {name.partition(".")[0] for name in names}
    unknown = [
        (key.name, found)
        for key in every
        for found in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", key.meaning)
        if found.partition(".")[0] in sections
        and not any(f"{name}.".startswith(f"{found}.") for name in names)
    ]
    assert unknown == []
