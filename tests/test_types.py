"""What a type checker knows of the package, on a file of a user's."""

import pytest
from mypy import api

USER = """
import flowcorr

flowcorr.dump("folder", 1, nonsense=3)
flowcorr.group_advantages("rewards", "groups")
flowcorr.nothing
flowcorr.load("recipe.yaml").actor.lrr
steps: str = flowcorr.load("recipe.yaml").trainer.total_steps
"""


@pytest.mark.system
def test_misuse_of_public_names_is_an_error(tmp_path):
    path = tmp_path / "user.py"
    path.write_text(USER, encoding="utf-8")
    found, _, _ = api.run(["--config-file", "pyproject.toml", str(path)])
    lines = {int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line}
    assert lines == {4, 5, 6, 7, 8}
