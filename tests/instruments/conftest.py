import pytest


@pytest.fixture
def evil():
    """Text that a page must escape, and that no chart may read as mathematics."""
    return "<script>alert(1)</script>\"'&$x$"
