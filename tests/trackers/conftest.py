import io

import pytest
from PIL import Image


@pytest.fixture
def video():
    """An animated GIF of three frames."""
    first, *rest = [Image.new("RGB", (8, 6), (shade, 0, 0)) for shade in (0, 100, 200)]
    film = io.BytesIO()
    first.save(film, "GIF", save_all=True, append_images=rest, duration=60)
    return film.getvalue()
