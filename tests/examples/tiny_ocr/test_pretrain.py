import hashlib

import pretrain
import pytest
import torch
from build_pipeline import build_pipeline

from flowcorr.words import is_heldout

STEPS = {"vae_steps": 2, "transformer_steps": 2, "defect_steps": 2}


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_VAE_BATCH", "_TRANSFORMER_BATCH", "_STATISTICS_WORDS"):
            patch.setattr(pretrain, name, 8)
        yield


def digests(folder):
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def rebuilt(small_batches, tmp_path_factory):
    steps, scored = [], []

    def scorer(images, words):
        assert images.shape == (len(words), 32, 64, 3)
        assert images.dtype == "uint8"
        scored.extend(words)
        return [1.0] * len(words)

    report = pretrain.pretrain(
        tmp_path_factory.mktemp("first"),
        **STEPS,
        scorer=scorer,
        eval_words=5,
        progress=lambda *step: steps.append(step),
    )
    return report, steps, scored


def test_rebuilding_twice_gives_the_same_bytes(rebuilt, tmp_path):
    report, _, _ = rebuilt
    # Neither the caller's random state nor the scoring in between may matter.
    torch.manual_seed(12345)
    threads, state = torch.get_num_threads(), torch.get_rng_state()

    pretrain.pretrain(tmp_path, **STEPS)

    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    first, second = digests(report.out_dir), digests(tmp_path)
    assert first == second
    assert sum(name.endswith(".safetensors") for name in first) == 5


def test_the_folder_loads_and_draws(rebuilt):
    report, _, _ = rebuilt
    images = pretrain.sample(pretrain.load(report.out_dir), ["abc", "wxyz"], num_steps=2)

    assert images.shape == (2, 32, 64, 3)
    assert images.std() > 0


def test_progress_and_report_cover_every_phase(rebuilt):
    report, steps, scored = rebuilt

    assert [(phase, step, total) for phase, step, total, _ in steps] == [
        (phase, step, 2) for phase in ("vae", "clean", "defect") for step in (1, 2)
    ]
    assert report.clean_loss == pytest.approx(steps[3][3])  # the last tenth of two steps is the last
    assert report.score == report.clean_score == 1.0
    assert len(scored) == 10
    assert all(is_heldout(word) for word in scored)
    assert report.num_bytes == sum(f.stat().st_size for f in report.out_dir.rglob("*") if f.is_file())


def test_another_seed_gives_other_weights_and_the_callers_random_state_stays():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    first, second = (build_pipeline(seed).transformer.pos_embed.proj.weight for seed in (0, 1))

    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)
