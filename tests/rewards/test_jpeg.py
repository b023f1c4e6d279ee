import numpy as np
from PIL import Image

from flowcorr.records import Prompt
from flowcorr.rewards import JpegCompressibility, JpegIncompressibility

RNG = np.random.default_rng(0)
IMAGES = np.stack(
    [np.full((32, 64, 3), 200, dtype=np.uint8), RNG.integers(0, 256, (32, 64, 3), dtype=np.uint8)]
)
PROMPTS = [Prompt(text="flat"), Prompt(text="noise")]


def test_incompressibility_is_the_size_in_kilobytes(tmp_path):
    scores = JpegIncompressibility()(IMAGES, PROMPTS).scores
    for index, image in enumerate(IMAGES):
        path = tmp_path / f"{index}.jpg"
        Image.fromarray(image).save(path, quality=95)
        assert scores[index] == path.stat().st_size / 1000
    assert scores[1] > 2 * scores[0]


def test_compressibility_is_its_negative():
    np.testing.assert_array_equal(
        JpegCompressibility()(IMAGES, PROMPTS).scores, -JpegIncompressibility()(IMAGES, PROMPTS).scores
    )
