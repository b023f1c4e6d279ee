import numpy as np
import pytest
from torch.nn.functional import cosine_similarity

from flowcorr.errors import BatchError, ConfigError
from flowcorr.rewards import ReferenceSimilarity
from flowcorr.rewards.clip import load_clip
from tests.prompts import prompts_of

SIZE = (24, 40)


@pytest.fixture
def similarity(clip_folder):
    return ReferenceSimilarity(path=clip_folder, device="cpu", batch_size=2)


def references(prompts, number=0):
    return np.stack([np.asarray(prompt.images[number].fitted(*SIZE)) for prompt in prompts])


def test_an_image_that_was_left_as_it_is_scores_one(similarity):
    prompts = prompts_of(["make it red", "add a cat", "a hat"], images=1)
    np.testing.assert_allclose(similarity(references(prompts), prompts).scores, 1, atol=1e-5)


def test_scores_are_cosines_and_the_mean_over_references(similarity, clip_folder):
    clip = load_clip("mine", clip_folder, clip_folder, "cpu", "float32")
    images = np.random.default_rng(0).integers(0, 256, (3, *SIZE, 3), dtype=np.uint8)
    prompts = prompts_of(["make it red", "add a cat", "a hat"], images=2)
    made = clip.embed_images(images, 3)
    expected = sum(
        cosine_similarity(made, clip.embed_images(references(prompts, number), 3)) for number in range(2)
    )
    scores = similarity(images, prompts).scores
    np.testing.assert_allclose(scores, expected.numpy() / 2, atol=1e-5)
    assert np.ptp(scores) > 1e-4


def test_a_prompt_without_a_reference_is_an_error(similarity):
    with pytest.raises(BatchError, match="reference_similarity: sample 0 .*'cat'"):
        similarity(np.zeros((1, *SIZE, 3), dtype=np.uint8), prompts_of(["cat"]))


@pytest.mark.parametrize("option", ["path", "device"])
def test_texts_are_told_from_other_values(clip_folder, option):
    with pytest.raises(ConfigError, match=f"^reward reference_similarity: {option}=<NoneType> "):
        ReferenceSimilarity(**{"path": clip_folder, option: None})
