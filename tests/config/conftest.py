import pytest


@pytest.fixture
def recipe(tmp_path):
    """A function that writes YAML text to a file and returns its path."""

    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def bare(recipe):
    return recipe("model: {}")
