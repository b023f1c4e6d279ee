"""Finished runs that tests share, and a reward that fails on demand."""

import json
import logging
import shutil

import pytest
import torch

from flowcorr import trainer
from tests.trainer.runs import STALE, Recorder, small_config


@pytest.fixture(autouse=True)
def no_word_on_the_scale(monkeypatch):
    """Small runs change the rank alone, and with it the adapter's scale, which `load` says."""
    monkeypatch.setattr(logging.getLogger("flowcorr.config.rules"), "disabled", True)


@pytest.fixture(scope="session")
def plain_runs(tmp_path_factory):
    """A whole run, and its folder as it was in the middle of step 4, as a killed process leaves it."""
    return _whole_and_killed(tmp_path_factory.mktemp("plain"), small_config())


@pytest.fixture(scope="session")
def stale_runs(tmp_path_factory):
    """The same with a stale, rounded rollout engine, averaged weights and a warm-up."""
    return _whole_and_killed(tmp_path_factory.mktemp("stale"), small_config(*STALE))


@pytest.fixture
def finished(plain_runs, tmp_path):
    """A copy of a finished run of four steps."""
    return shutil.copytree(plain_runs[0], tmp_path / "finished")


@pytest.fixture(autouse=True)
def _same_seed():
    """Training draws nothing from torch's global generator; a checkpoint keeps its state all the same."""
    torch.manual_seed(0)


def _whole_and_killed(folder, settings):
    torch.manual_seed(0)
    whole, killed = folder / "whole", folder / "killed"
    recorder = Recorder(4, lambda: shutil.copytree(whole, killed), phase="update")
    trainer.train(settings, whole, observer=recorder)
    return whole, killed


REWARD = """
import numpy as np
from collections.abc import Collection
from pathlib import Path
from flowcorr.errors import MissingExtraError
from flowcorr.rewards.jpeg import JpegCompressibility

class Fragile:
    def __init__(self, flag, api_key="", value=None, exits=False):
        self.flag, self.value, self.exits, self.reward = Path(flag), value, exits, JpegCompressibility()

    def __call__(self, images, prompts):
        scores = np.array(self.reward(images, prompts).scores)
        if self.flag.exists():
            if self.exits:
                raise SystemExit(0)
            if self.value is None:
                raise RuntimeError("the scorer is gone")
            scores[0] = self.value
        return scores

class Unavailable:
    def __init__(self):
        raise MissingExtraError("reward unavailable", "nosuch", "nosuch")
"""


@pytest.fixture
def fragile(tmp_path, monkeypatch):
    """The JPEG reward, which fails while a flag file is there: overrides and the flag."""
    (tmp_path / "fragile_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    flag = tmp_path / "flag"

    def overrides(**options):
        options = {"flag": str(flag), "api_key": "s3cret", **options}
        return f"reward.terms=[{{name: 'fragile_reward:Fragile', options: {json.dumps(options)}}}]"

    return overrides, flag
