"""Configuration keys, read from the schema."""

from dataclasses import fields

from flowcorr.config import Config, to_mapping
from flowcorr.diagnostics.reference.keys import find_key, keys


def _dotted(mapping, prefix=""):
    for name, value in mapping.items():
        nested = isinstance(value, dict) and value and f"{prefix}{name}" != "rollout.engine"
        yield from _dotted(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]


def test_every_key_is_explained():
    known = {key.name: key for key in keys()}
    assert all(key.meaning for key in known.values())
    sections = {"algorithm.rollout_correction"}  # null by default
    assert set(_dotted(to_mapping(Config()))) - sections <= set(known)
    assert all(field.name in {name.split(".")[0] for name in known} for field in fields(Config))
    assert find_key("clip_ratio").default == "0.001"
    assert find_key("dtype") is None  # of several sections
