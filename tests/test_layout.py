"""The tests mirror the package: `flowcorr/x/y.py` has its tests in `tests/x/test_y.py`."""

from pathlib import Path

import flowcorr
from tests.conftest import SCOPES

PACKAGE, TESTS = Path(flowcorr.__file__).parent, Path(__file__).parent
WITHOUT_A_FILE = {
    "__main__.py": "one line, which every test that starts `python -m flowcorr` runs",
    **{
        f"health/of_{rows}.py": "rows of metrics, which `test_metric.py` and `test_table.py` read"
        for rows in ("gap", "correction", "run")
    },
}
"""Modules whose behaviour is tested elsewhere, with the reason."""
LONGEST_FILE = 500


def test_every_module_has_a_file_of_tests():
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    missing = {
        str(module) for module in modules if not (TESTS / module.parent / f"test_{module.name}").is_file()
    }
    assert missing == WITHOUT_A_FILE.keys()


def test_no_file_of_tests_is_too_long_to_read():
    lines = {
        str(path.relative_to(TESTS)): len(path.read_text(encoding="utf-8").splitlines())
        for path in TESTS.rglob("test_*.py")
    }
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE} == {}


def test_files_whose_tests_call_two_ranks_share_them():
    calls = "two_ranks" + ".call("
    calling = [path for path in TESTS.rglob("test_*.py") if calls in path.read_text(encoding="utf-8")]
    names = [path.relative_to(TESTS.parent).as_posix() for path in calling]
    assert names
    assert [name for name in names if SCOPES.get(name) != "processes"] == []
