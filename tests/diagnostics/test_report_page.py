import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from flowcorr.config import load, to_yaml
from flowcorr.diagnostics.report_page import MAX_GRIDS, write_report
from flowcorr.diagnostics.run_data import differences, group_by_seed, read_run
from flowcorr.errors import ConfigError

EVIL = "<script>alert(1)</script>\"'&"
CORRECTION = "algorithm.rollout_correction"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Tags, references and text of a page; void elements are not closed."""

    VOID = frozenset(("meta", "link", "img", "br"))

    def __init__(self, path):
        super().__init__()
        self.tags, self.references, self.open, self.text = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def write_run(folder: Path, *overrides, steps=4, scale=1.0, images=0) -> Path:
    """A run's folder, as the trainer leaves it."""
    (folder / "images").mkdir(parents=True)
    config = load("tiny_ocr_lora", list(overrides))
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    records = [{"step": 0, "eval/reward": 0.25}]
    for step in range(1, steps + 1):
        records.append(
            {
                "step": step,
                "reward/mean": scale * step / 8,
                "rollout_corr/kl": scale * 1e-3 * step,
                "rollout_corr/rollout_is_mean": None,
                "rollout_corr/rejected_ratio": 0.2 * scale,
                "rollout_corr/step_0/logprob_abs_diff": scale * 1e-4 * step,
                "rollout_corr/step_1/logprob_abs_diff": 0.0,
                "timing/rollout": 2.0,
                "timing/update": 1.0,
                "timing/step": 4.0,
            }
        )
    records.append({"step": steps, "eval/reward": 0.75})
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8"
    )
    for index in range(images):
        Image.new("RGB", (8, 8)).save(folder / "images" / f"rollout_{index:06d}_00.png")
    if images:
        Image.new("RGB", (8, 8)).save(folder / "images" / "before_after.png")
    return folder


@pytest.fixture
def runs(tmp_path):
    """Two seeds of one configuration, and another configuration with hostile text."""
    return [
        write_run(tmp_path / "a", images=7),
        write_run(tmp_path / "b", "trainer.seed=1", scale=1.5),
        write_run(
            tmp_path / "c <i>",
            f"sampling.negative_prompt={json.dumps(EVIL)}",
            "sampling.guidance_scale=2.0",
            scale=0.0,
        ),
    ]


def test_the_page_is_whole_and_loads_nothing(runs, tmp_path):
    out = write_report(runs, tmp_path / "new" / "report.html")
    page = Page(out)
    assert page.open == []
    assert "script" not in page.tags
    assert "svg" in page.tags
    assert page.references
    assert all(reference.startswith("data:") for reference in page.references)
    source = out.read_text(encoding="utf-8")
    assert not any(text in source for text in ("http://", "https://", "@import", "url("))


def test_images_are_embedded_and_few(runs, tmp_path):
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert page.tags.count("img") == MAX_GRIDS + 1
    assert "rollouts at step 0" in page.text
    assert "rollouts at step 6" in page.text


def test_text_of_the_user_is_escaped(runs, tmp_path):
    out = write_report(runs, tmp_path / "report.html")
    assert EVIL in Page(out).text
    assert "<script" not in out.read_text(encoding="utf-8")
    assert "<i>" not in out.read_text(encoding="utf-8")


def test_seeds_become_a_band(runs):
    groups = group_by_seed([read_run(folder) for folder in runs])
    assert [group.label for group in groups] == ["a, b", "c <i>"]
    assert groups[0].band("reward/mean")[0] == pytest.approx((1, 0.15625, 0.125, 0.1875))
    assert groups[0].band("rollout_corr/rollout_is_mean") == []


def test_groups_of_one_name_are_told_apart_by_their_parents(tmp_path):
    folders = [write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", "actor.lr=1e-4")]
    groups = group_by_seed([read_run(folder) for folder in folders])
    assert [group.label for group in groups] == ["x/run", "y/run"]


def test_differences_name_the_keys_that_differ(runs):
    groups = group_by_seed([read_run(folder) for folder in runs])
    assert differences(groups) == {
        "sampling.guidance_scale": ["1.0", "2.0"],
        "sampling.negative_prompt": ["", EVIL],
    }


def test_findings_are_in_words(runs, tmp_path):
    text = "".join(Page(write_report(runs, tmp_path / "report.html")).text)
    assert "Share of samples with a rejected step is 0.3, above 0.1." in text
    assert "worst at step 1; on 4 of 4 steps" in text
    assert "No rule was broken." in text
    assert "0 everywhere: both stacks score alike" in text


def test_limits_follow_the_scale(tmp_path):
    folder = write_run(tmp_path / "a", f"{CORRECTION}.log_ratio_scale=sum")
    text = "".join(Page(write_report([folder], tmp_path / "report.html")).text)
    assert "|KL| of old and rollout policy is 2.05, above 0.1 at log_ratio_scale sum" in text
    assert f"healthy from {-0.1 / 512:.3g} to {0.1 / 512:.3g}" in text


def test_a_run_that_was_just_begun_has_a_page(tmp_path):
    folder = write_run(tmp_path / "a", f"{CORRECTION}=null", steps=1)
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n{"ste', encoding="utf-8")
    assert Page(write_report([folder], tmp_path / "report.html")).open == []


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        write_report([tmp_path], tmp_path / "report.html")
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="holds no metrics yet"):
        write_report([folder], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="--out"):
        write_report([write_run(tmp_path / "b")], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_complaint(runs, width, tmp_path):
    out = write_report(runs, tmp_path / "report.html")
    # Windows have a least width of about 500 pixels, frames have none; the framed page tells how wide it got.
    tell = "<script>parent.postMessage(document.documentElement.scrollWidth, '*')</script></body>"
    out.write_text(out.read_text(encoding="utf-8").replace("</body>", tell), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<script>onmessage = (event) => { document.body.dataset.width = event.data }</script>"
        f'<body><iframe src="{out.name}" style="border: 0; width: {width}px; height: 20000px"></iframe></body>',
        encoding="utf-8",
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command = [CHROMIUM, *options, "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert f'data-width="{width}"' in done.stdout  # nothing sticks out sideways
