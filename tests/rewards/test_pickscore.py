import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor

from flowcorr.config import RewardTerm
from flowcorr.errors import ConfigError
from flowcorr.records import Prompt
from flowcorr.rewards import PickScore, build_reward

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 24, 40, 3), dtype=np.uint8)
PROMPTS = [
    Prompt(text=text) for text in ("a cat", "dog", "a cat", "a very long prompt that must be cut", "x")
]


@pytest.fixture(scope="module")
def options(clip_folder):
    return {"path": clip_folder, "processor": clip_folder, "device": "cpu"}


@pytest.fixture(scope="module")
def logits(clip_folder):
    """Temperature times cosine, from the model's own forward pass over images and texts, one pair at a time."""
    model, processor = (
        AutoModel.from_pretrained(clip_folder),
        AutoProcessor.from_pretrained(clip_folder, backend="pil"),
    )
    values = []
    for image, prompt in zip(IMAGES, PROMPTS, strict=True):
        inputs = processor(
            text=[prompt.text],
            images=[Image.fromarray(image)],
            truncation=True,
            max_length=16,
            return_tensors="pt",
        )
        with torch.no_grad():
            values.append(model(**inputs).logits_per_image.item())
    return np.array(values)


def test_logits_are_those_of_the_model(options, logits):
    output = PickScore(**options)(IMAGES, PROMPTS)
    assert tuple(output.extra) == PickScore.extras
    np.testing.assert_allclose(output.extra["logit"], logits, rtol=1e-4, atol=1e-4)
    assert np.ptp(logits) > 0.1
    assert np.abs(logits).max() <= 14.2858  # the temperature that CLIP starts with is exp(2.6592)


def test_divisor_is_that_of_flow_grpo_unless_given(options, logits):
    np.testing.assert_allclose(
        PickScore(**options)(IMAGES, PROMPTS).scores, logits / 26, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        PickScore(**options, divisor=1)(IMAGES, PROMPTS).scores, logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_scores_do_not_depend_on_the_batch(options, batch_size):
    scores = PickScore(**options, batch_size=batch_size)(IMAGES, PROMPTS).scores
    np.testing.assert_allclose(scores, PickScore(**options)(IMAGES, PROMPTS).scores, rtol=1e-4, atol=1e-5)


def test_scores_depend_on_the_prompt_and_the_image(options):
    same_image = PickScore(**options)(IMAGES[[0, 0]], PROMPTS[:2]).scores
    same_prompt = PickScore(**options)(IMAGES[:2], [PROMPTS[0]] * 2).scores
    assert same_image[0] != same_image[1]
    assert same_prompt[0] != same_prompt[1]


def test_bfloat16_stays_close(options, logits):
    output = PickScore(**options, dtype="bfloat16")(IMAGES, PROMPTS)
    np.testing.assert_allclose(output.extra["logit"], logits, atol=0.6)
    assert not np.array_equal(output.extra["logit"], logits)


def test_reward_can_be_pickled_and_holds_no_model(options):
    reward = PickScore(**options)
    stored = pickle.dumps(reward)
    assert len(stored) < 1000
    np.testing.assert_array_equal(
        pickle.loads(stored)(IMAGES, PROMPTS).scores, reward(IMAGES, PROMPTS).scores
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dtype": "float8"}, "dtype='float8' .*float32"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"divisor": 0}, "divisor=0"),
        ({"device": None}, "device=<NoneType>"),
        ({"path": ["a", "b"]}, "path=<list>"),
        ({"processor": None}, "processor=<NoneType>"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"path": "/no/such/folder"}, "path='/no/such/folder' .*processor="),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, changed, named):
    with pytest.raises(ConfigError, match=f"^reward pickscore: {named}"):
        PickScore(**{**options, **changed})


def test_other_models_are_refused(options, tmp_path):
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=8, **shape)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"path='{tmp_path}' .*BertModel; .*CLIPModel"):
        PickScore(**{**options, "path": str(tmp_path)})


def test_prompts_that_are_longer_than_the_model_reads_are_told(options):
    """The model reads 16 tokens, one of which is a letter here, and two of which are its own."""
    reward = PickScore(**options)
    assert reward.describe_cuts([Prompt(text="a b c d e f g h i j k l m n"), Prompt(text="")]) is None
    long = [Prompt(text=f"a b c d e f g h i j k l m n {end}", place=f"p.txt:{end}") for end in "xyz"]
    told = reward.describe_cuts([Prompt(text="a cat"), *long])
    assert "(p.txt:x is the first) by reward pickscore: 3 of 4 beyond 16 tokens" in told
    scores = reward(IMAGES[[0, 0, 0]], long).scores
    assert len(set(scores.round(6))) == 1  # as the sentence says


def test_a_sum_tells_of_the_prompts_that_each_term_scores(options):
    term = RewardTerm(name="pickscore", options=options, tags=("long",))
    prompts = [Prompt(text="a b c " * 20, tag=tag) for tag in ("long", "short", "long")]
    (told,) = build_reward([term, RewardTerm(name="jpeg_compressibility")]).describe_cuts(prompts)
    assert "reward pickscore: 1 of 1 beyond 16 tokens" in told
    assert build_reward([term]).describe_cuts(prompts[1:2]) == []
