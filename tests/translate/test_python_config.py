"""Python configurations, read from their syntax."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.translate.python_config import read_config, read_functions
from flowcorr.translate.unread import Unread

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

SIZES = (2, 3)

def run():
    import math
    gpus = 4
    config = common()
    config.train.batches = int(48 / (gpus * 3 / 2))
    assert config.train.batches % 2 == 0, "even"
    config.train.half = config.train.batches // 2
    config.name = f'logs/{config.dataset}-{gpus}'
    config.window = (0, config.train.batches // 2)
    config.sizes = [*[]] if gpus < 1 else SIZES
    config.steps = config.train.batches * 2 // 3 if gpus > 1 else 1
    config.rest = dict(a=1)
    return config

def lost():
    config = common()
    config.lr = secret()
    config.path = os.path.join(os.environ["HOME"], "a")
    config.more = config.lr * 2
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
    assert config.pop("rest").text == "dict(a=1)"
    assert config == {
        "seed": 42,
        "train": {"lr": 3e-4, "betas": (0.9, -0.5), "batches": 8, "half": 4},
        "dataset": "dataset/ocr",
        "reward": {"ocr": 1.0},
        "name": "logs/dataset/ocr-4",
        "window": (0, 4),
        "sizes": (2, 3),
        "steps": 5,
    }
    assert names == {"gpus": 4}


def test_functions_without_arguments_are_configurations(file):
    assert read_functions(file) == ["common", "run", "lost", "loops"]


def test_what_does_not_follow_from_the_file_is_unread(file):
    config, _ = read_config(file, "lost")
    call = "`secret()` is a call that cannot be read; write its value (mine.py line 31)"
    assert config["lr"] == Unread("secret()", call)
    assert config["more"].reason == call
    assert config["path"].reason == (
        "`os.environ['HOME']` does not follow from the file, which is not executed; write its value (mine.py line 32)"
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("loops", r"^`for i in range\(3\):` is not an assignment \(mine\.py line 37\)$"),
        ("rum", "did you mean run"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(file, function, message):
    with pytest.raises(ConfigError, match=message):
        read_config(file, function)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def (", r"^it is no Python: .*\(a\.py line \d\)$"),
        ("x = 1\ny = '", r"^it is no Python: unterminated string literal .*\(a\.py line 2\)$"),
        ("\n(", r"^it is no Python: .*\(a\.py line \d\)$"),
        ("x = " + "9" * 5000, r"^it is no Python: Exceeds the limit .*\(a\.py line 1\)$"),
        ("\nx = " + "1 + " * 20_000 + "1", r"^a statement of more than 2000 tokens \(a\.py line 2\)$"),
        ("x = " + "-" * 20_000 + "1", r"^a statement of more than 2000 tokens \(a\.py line 1\)$"),
        ("x = " + "1 + " * 100 + "1", r"^it is nested more than 60 levels deep \(a\.py line 1\)$"),
        ("x = " + "-" * 1900 + "1", r"^it is nested more than 60 levels deep \(a\.py line 1\)$"),
        ("x = '\0'", r"^it is no Python: source code"),
    ],
)
def test_a_file_that_is_no_python_of_a_configuration(tmp_path, text, message):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_functions(tmp_path / "a.py")


HEAD = "import ml_collections\ndef get():\n    config = ml_collections.ConfigDict()\n"


def read(tmp_path, body):
    """What `get` returns whose body has these lines, from line 4 on, and sets `config.x`."""
    (tmp_path / "a.py").write_text(HEAD + "".join(f"    {line}\n" for line in (*body, "return config")))
    return read_config(tmp_path / "a.py", "get")[0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9 ** 9 ** 9", "`9 ** 9 ** 9` cannot be computed: the exponent is too large (a.py line 4)"),
        ("10.0 ** 400", "`10.0 ** 400` cannot be computed: the exponent is too large (a.py line 4)"),
        ("(10.0 ** 60) ** 60", "`10.0 ** 60` is beyond the numbers of a configuration (a.py line 4)"),
        ("int(1e400)", "`1e309` is beyond the numbers of a configuration (a.py line 4)"),
        (
            "int('abc')",
            "`int('abc')` cannot be computed: invalid literal for int() with base 10: 'abc' (a.py line 4)",
        ),
        ("1 / 0", "`1 / 0` cannot be computed: division by zero (a.py line 4)"),
        ("(-8) ** 0.5", "`(-8) ** 0.5` is beyond the numbers of a configuration (a.py line 4)"),
        ("'a' * 9", "`'a' * 9` cannot be computed: only numbers are multiplied (a.py line 4)"),
        ("{[]: 1}", "`{[]: 1}` has a key that is not text (a.py line 4)"),
        ("{**config}", "`{**config}` has a key that is not text (a.py line 4)"),
        (
            "config.y",
            "`config.y` does not follow from the file, which is not executed; write its value (a.py line 4)",
        ),
        (
            "b'a'",
            "`b'a'` does not follow from the file, which is not executed; write its value (a.py line 4)",
        ),
        ("f'{config:>9999999999}'", "`{config:>9999999999}` does not follow"),
    ],
)
def test_a_value_that_cannot_be_computed_is_unread(tmp_path, value, reason):
    assert read(tmp_path, [f"config.x = {value}"])["x"].reason.startswith(reason)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (["config.a = config"], r"^`config\.a` would hold itself \(a\.py line 4\)$"),
        (
            ["b = ml_collections.ConfigDict()", "config.b = b", "b.a = [config]"],
            r"^`b\.a` would hold itself \(a\.py line 6\)$",
        ),
        *(
            ([line], r"^`def get\(\):` calls itself, or others more than 20 deep \(a\.py line 2\)$")
            for line in ("config.x = get()", "return get()")
        ),
        (
            ["t = (1, 1)", *["t = (t, t)"] * 40],
            r"^`\(t, t\)` is read after 100000 others.*\(a\.py line \d+\)$",
        ),
        (["t = (1,)", *["t = (t,)"] * 100], r"^`\(t,\)` holds more than 60 levels \(a\.py line \d+\)$"),
        (["assert 1 == 2, 'odd'"], r"^`assert 1 == 2, 'odd'` does not hold \(a\.py line 4\)$"),
        (
            ["config[0] = 1"],
            r"^`config\[0\]` is not a name or a field, and cannot be assigned to \(a\.py line 4\)$",
        ),
        (
            ["config.a = 1", "config.a.b = 1"],
            r"^`config\.a\.b` sets a field of a value that is not a ConfigDict",
        ),
        (["while True: pass"], r"^`while True:` is not an assignment \(a\.py line 4\)$"),
    ],
)
def test_a_body_that_no_configuration_has_is_refused_with_its_line(tmp_path, body, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, body)


def test_work_is_bounded(tmp_path):
    """Functions that call two others, texts that double, and sections that hold two others."""
    calls = "".join(f"def f{n}():\n    x = f{n + 1}()\n    return f{n + 1}()\n" for n in range(19))
    (tmp_path / "a.py").write_text(calls + "def f19():\n    return 1\ndef get():\n    return f1()\n")
    with pytest.raises(ConfigError, match="is read after 100000 others, and no configuration needs as many"):
        read_config(tmp_path / "a.py", "get")
    found = read(tmp_path, ["s = 'aa'", *["s = f'{s}{s}'"] * 40, "config.x = s"])
    assert "makes more than 10000 characters" in found["x"].reason
    sections = [f"c{n} = ml_collections.ConfigDict()\n    c{n}.a = c{n}.b = c{n - 1}" for n in range(1, 40)]
    with pytest.raises(ConfigError, match="is read after 100000 others"):
        read(tmp_path, ["c0 = ml_collections.ConfigDict()", *sections, "config.x = c39"])


def test_a_file_without_a_configuration(tmp_path):
    lines = (
        'base = load("../base")\nimport os\ndef get():\n    c = os.get()\n    c = base.get()\n    return c\n'
    )
    (tmp_path / "a.py").write_text(lines)
    (tmp_path / "b.py").write_text("class A: pass")
    with pytest.raises(ConfigError, match="^it defines no function without arguments"):
        read_functions(tmp_path / "b.py")
    with pytest.raises(ConfigError, match="^it defines no function, and"):
        read_config(tmp_path / "b.py", "get")
    with pytest.raises(ConfigError, match=r"^get returns no ConfigDict \(a\.py line 3\)$"):
        read_config(tmp_path / "a.py", "get")
