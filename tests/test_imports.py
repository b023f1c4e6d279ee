"""Code of the user's own, named as `package.module:name`."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.imports import import_target, source_of


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes a module of the user's."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    return write


def test_the_object_is_found(module):
    module("users_losses", "def loss():\n    return 7\n")
    assert import_target("actor.loss_mode", "users_losses:loss", "a loss")() == 7


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("nowhere:loss", "no module 'nowhere'"),
        ("users_own.nowhere:loss", r"no module 'users_own\.nowhere'"),
        (":loss", "no module ''"),
        ("./users_own:loss", r"no module '\./users_own'"),
        ("users_own:los", "users_own has no 'los'; .*a loss "),
        ("users_own", "users_own has no ''; .*a loss "),
    ],
)
def test_paths_that_lead_nowhere_are_named(module, path, named):
    module("users_own", "loss = None\n")
    with pytest.raises(ConfigError, match=rf"^actor\.loss_mode='{path}': .*{named}"):
        import_target("actor.loss_mode", path, "a loss")


@pytest.mark.parametrize("file", ["users_file.py", "./users_file.py", "folder/users_file.py"])
def test_a_file_is_answered_with_its_module(module, file):
    module("users_file", "loss = None\n")
    with pytest.raises(ConfigError, match=rf"^actor\.loss_mode='{file}:loss' .* users_file:loss \("):
        import_target("actor.loss_mode", f"{file}:loss", "a loss")


@pytest.mark.parametrize(
    ("text", "kind", "where", "message"),
    [
        (
            "\nimport a_missing_package\n",
            ModuleNotFoundError,
            r"\S+users_broken_{}\.py failed at line 2",
            "No module named 'a_missing_package'",
        ),
        (
            "from json import nothing\n",
            ImportError,
            r"\S+users_broken_{}\.py failed at line 1",
            "cannot import name",
        ),
        (
            "def loss():\n    return int('x')\nTWO = loss()\n",
            ValueError,
            r"\S+users_broken_{}\.py failed at line 2",
            "invalid literal",
        ),
        ("raise SystemExit(3)\n", SystemExit, r"\S+users_broken_{}\.py failed at line 1", "3$"),
        ("\nif:\n", SyntaxError, "users_broken_{} failed", r"invalid syntax \(users_broken_{}\.py, line 2\)"),
    ],
    ids=["package", "name", "value", "exit", "syntax"],
)
def test_an_error_inside_the_module_says_where_it_was_raised(module, text, kind, where, message):
    name = f"users_broken_{kind.__name__}"
    module(name, text)
    where, message = where.format(kind.__name__), message.format(kind.__name__)
    expected = rf"^actor\.loss_mode='{name}:loss': importing {where}: {kind.__name__}: {message}"
    with pytest.raises(ConfigError, match=expected) as raised:
        import_target("actor.loss_mode", f"{name}:loss", "a loss")
    assert type(raised.value.__cause__) is kind


def test_the_source_is_found_without_importing_it(module, tmp_path):
    module("users_broken_code", "raise RuntimeError('imported')\n")
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "losses.py").write_text("raise RuntimeError('imported')\n")
    assert source_of("users_broken_code:loss") == str(tmp_path / "users_broken_code.py")
    assert source_of("users_package.losses:loss") == str(package / "losses.py")
    for path in ("nowhere:loss", "users_package.nowhere:loss", "users_broken_code.inner:loss", ":loss", ""):
        assert source_of(path) == ""
