"""Code of the user's own, named as `package.module:name`."""

import pytest

from flowcorr.errors import ConfigError
from flowcorr.imports import import_target


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
    ("path", "message"),
    [
        (
            "nowhere:loss",
            r"^actor\.loss_mode='nowhere:loss': there is no module 'nowhere' on the Python path",
        ),
        ("users_own.nowhere:loss", "there is no module 'users_own"),
        (":loss", "there is no module ''"),
        ("users_own:los", r"the module users_own has no 'los'; name a loss in it$"),
        ("users_own", r"the module users_own has no ''; name a loss in it$"),
    ],
)
def test_paths_that_lead_nowhere_are_named(module, path, message):
    module("users_own", "loss = None\n")
    with pytest.raises(ConfigError, match=message):
        import_target("actor.loss_mode", path, "a loss")


def test_an_error_inside_the_module_is_passed_on(module):
    module("users_broken", "import a_package_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        import_target("actor.loss_mode", "users_broken:loss", "a loss")
