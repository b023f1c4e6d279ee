"""Python configurations, read from their syntax."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.python_config import read_config, read_functions

BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 42
    config.train = train = ml_collections.ConfigDict()
    train.lr = 3e-4
    train.betas = (0.9, -0.5)
    return config
"""
FILE = """
import os
import imp

base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))

def common():
    config = base.get_config()
    config.dataset = os.path.join(os.getcwd(), "dataset/ocr")
    config.reward = {"ocr": 1.0}
    return config

def run():
    gpus = 4
    config = common()
    config.train.batches = int(48 / (gpus * 3 / 2))
    assert config.train.batches % 2 == 0, "even"
    config.train.half = config.train.batches // 2
    config.name = f'logs'
    return config

def calls():
    config = common()
    config.lr = secret()
    return config

def loops():
    for i in range(3):
        pass
    return {}

def get_config(name):
    return globals()[name]()
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "base.py").write_text(BASE)
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_what_a_function_returns(file):
    config, names = read_config(file, "run")
    assert config == {
        "seed": 42,
        "train": {"lr": 3e-4, "betas": (0.9, -0.5), "batches": 8, "half": 4},
        "dataset": "dataset/ocr",
        "reward": {"ocr": 1.0},
        "name": "logs",
    }
    assert names == {"gpus": 4}


def test_functions_without_arguments_are_configurations(file):
    assert read_functions(file) == ["common", "run", "calls", "loops"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "calls",
            r"mine.py line 24: `secret\(\)` is not a literal, and the file is not executed; write its value",
        ),
        ("loops", r"mine.py line 28: `for i in .* is not an assignment"),
        ("rum", "did you mean run"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(file, function, message):
    with pytest.raises(ConfigError, match="(?s)" + message):
        read_config(file, function)


def test_a_file_that_is_no_python(tmp_path):
    (tmp_path / "a.py").write_text("def (")
    with pytest.raises(ConfigError, match="cannot be read as Python"):
        read_functions(tmp_path / "a.py")
