import json

import pytest

from flowcorr import config
from flowcorr.errors import ConfigError
from flowcorr.trackers.jsonl import read_metrics
from flowcorr.trainer import train

WORDS = {
    "cat": "animal",
    "dog": "animal",
    "cow": "animal",
    "red": "colour",
    "blue": "colour",
    "green": "colour",
}


@pytest.fixture
def tagged(tmp_path, monkeypatch):
    """`tagged(*overrides)`: a run of one step on prompts of two tags, of which a user's reward scores one."""
    lines = [json.dumps({"prompt": word, "tag": tag}) for word, tag in WORDS.items()]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "test.jsonl").write_text(
        '{"prompt": "pig", "tag": "animal"}\n{"prompt": "grey", "tag": "colour"}'
    )
    (tmp_path / "zoo.py").write_text(
        "def zoo(images, prompts):\n"
        "    assert {prompt.tag for prompt in prompts} == {'animal'}\n"
        "    return [3.0] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def load(*overrides):
        return config.load(
            "tiny_jpeg_lora",
            [
                f"data.path={tmp_path / 'train.jsonl'}",
                f"data.heldout_path={tmp_path / 'test.jsonl'}",
                "reward.terms=[{name: jpeg_compressibility}, {name: 'zoo:zoo', tags: [animal]}]",
                "sampling.num_inference_steps=3",
                "sampling.sde_window_range=[0, 3]",
                "rollout.prompts_per_step=6",
                "rollout.n=2",
                "trainer.total_steps=1",
                *overrides,
            ],
        )

    return load


def test_the_mean_of_a_term_is_that_of_the_prompts_that_it_scores(tagged, tmp_path):
    train(tagged(), tmp_path / "run")
    for prefix in ("reward", "eval"):
        records = read_metrics(tmp_path / "run" / "metrics.jsonl")
        record = next(record for record in records if f"{prefix}/zoo" in record)
        assert record[f"{prefix}/zoo"] == 3.0
        total = record["reward/mean"] if prefix == "reward" else record["eval/reward"]
        assert total == pytest.approx(1.5 + record[f"{prefix}/jpeg_compressibility"])  # half of the prompts


def test_tags_are_checked_before_a_model_is_loaded(tagged, tmp_path):
    settings = tagged("reward.terms=[{name: 'zoo:zoo', tags: [animal]}]", "model.path=nowhere")
    with pytest.raises(ConfigError, match="no term of reward.terms scores prompts with the tag 'colour'"):
        train(settings, tmp_path / "run")
