import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowcorr.config import load, to_yaml
from flowcorr.diagnostics import report_terms
from flowcorr.diagnostics.report_charts import chart_sections
from flowcorr.diagnostics.report_page import MAX_GRIDS, write_report
from flowcorr.diagnostics.run_data import differences, group_by_seed, read_run
from flowcorr.errors import ConfigError
from flowcorr.trainer import log_probs
from flowcorr.trainer.log_probs import LoggedTerms

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


def write_run(folder: Path, *overrides, steps=4, scale=1.0, images=0, events=()) -> Path:
    """A run's folder, as the trainer leaves it."""
    (folder / "images").mkdir(parents=True)
    config = load("tiny_ocr_lora", list(overrides))
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    records = [{"step": 0, "eval/reward": 0.25}]
    for step in range(1, steps + 1):
        records.append(
            {
                "step": step,
                "rollout/num_elements": 320.0,
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
    if events:
        lines = "".join(f"{json.dumps(event)}\n" for event in events)
        (folder / "events.jsonl").write_text(lines, encoding="utf-8")
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


def test_runs_of_one_name_are_told_apart_where_their_groups_are(tmp_path):
    folders = [
        write_run(tmp_path / "x" / "seed_0"),
        write_run(tmp_path / "x" / "seed_1", "trainer.seed=1"),
        write_run(tmp_path / "y" / "seed_0", "actor.lr=1e-4", scale=0.0),
    ]
    groups = group_by_seed([read_run(folder) for folder in folders])
    assert [group.label for group in groups] == ["x/seed_0, x/seed_1", "y/seed_0"]
    text = "".join(Page(write_report(folders, tmp_path / "report.html")).text)
    assert "serious · x/seed_0Share of samples" in text
    assert "healthy · y/seed_0" in text


def test_a_run_named_twice_is_one(tmp_path):
    folder = write_run(tmp_path / "a")
    text = "".join(Page(write_report([folder, folder / ".." / "a"], tmp_path / "report.html")).text)
    assert "1 run, 1 configuration" in text
    assert "means over seeds" not in text


START = {"step": 0, "kind": "start", "total_steps": 4}
FAILURE = {"step": 2, "kind": "failure", "error": "BackendError: no <space>"}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (
            [START, FAILURE],
            "The run failed after step 2: BackendError: no <space> (last logged step 2 of 30)",
        ),
        ([START], "The run has not ended: it still runs, or it was killed (last logged step 2 of 30)"),
        (
            [START, {"step": 2, "kind": "end", "status": "interrupted"}],
            "The run was interrupted after step 2",
        ),
        (
            [START, FAILURE, {"step": 1, "kind": "resume"}, {"step": 4, "kind": "end", "status": "finished"}],
            "",
        ),
    ],
)
def test_how_a_run_ended_is_told(events, says, tmp_path):
    folder = write_run(tmp_path / "a", steps=2, scale=0.0, events=events)
    text = text_of(folder)
    assert says in text
    assert (f"flowcorr train {folder}/config.yaml --resume --out {folder}" in text) == bool(says)
    assert ("healthy · a" in text) == (FAILURE not in events[-1:])


def test_a_run_that_measured_no_gap_is_not_simply_healthy(tmp_path):
    folders = [
        write_run(tmp_path / "a", f"{CORRECTION}=null", scale=0.0),
        write_run(tmp_path / "b", scale=0.0),
    ]
    text = text_of(*folders)
    assert "healthy · aNo rule was broken; without rollout_correction, the gap was not measured." in text
    assert "healthy · bNo rule was broken." in text


def test_a_run_without_a_training_step_is_not_healthy(tmp_path):
    text = text_of(write_run(tmp_path / "a", steps=0))
    assert "note · aNo training step was logged, so there is nothing to judge." in text
    assert "healthy" not in text


def test_seeds_of_unequal_length_are_pointed_out(tmp_path):
    seeds = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "trainer.seed=1", steps=2)]
    text = text_of(*seeds)
    assert "2–4" in text
    assert "Last values are of the seeds that got furthest." in text
    assert "got furthest" not in text_of(seeds[0])


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
    folder = write_run(tmp_path / "a", f"{CORRECTION}={{preset: decoupled_seq_is, log_ratio_scale: sum}}")
    text = "".join(Page(write_report([folder], tmp_path / "report.html")).text)
    assert "|KL| of old and rollout policy is 1.28, above 0.1 at log_ratio_scale sum" in text
    assert f"healthy from {-0.1 / 320:.3g} to {0.1 / 320:.3g}" in text


def charts_of(*folders):
    sections = chart_sections(group_by_seed([read_run(folder) for folder in folders]))
    return {chart.name: chart for section in sections for chart in section.charts}


@pytest.mark.parametrize("value", [0.0, 1e-4])
def test_limits_of_shares_are_drawn_however_far_they_are(value, tmp_path):
    folder = write_run(tmp_path / "a", scale=0.0)
    metrics = {"rollout_corr/rollout_is_eff_sample_size": 1 - value, "rollout_corr/rejected_ratio": value}
    records = [{"step": step, **{name: part * step for name, part in metrics.items()}} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    charts = charts_of(folder)
    for name in ("rollout_corr_rollout_is_eff_sample_size", "rollout_corr_rejected_ratio"):
        assert "stroke-dasharray" in charts[name].svg
        assert "far from all values" not in charts[name].caption
    assert "healthy up to 0.05, serious above 0.1" in charts["rollout_corr_rejected_ratio"].caption


def test_a_limit_is_far_where_it_is_not_drawn_and_only_there(runs):
    for chart in charts_of(*runs).values():
        if "healthy" in chart.caption:
            assert ("far from all values" in chart.caption) != ("stroke-dasharray" in chart.svg)


def test_serious_shares_are_shaded_darker(tmp_path):
    chart = charts_of(write_run(tmp_path / "a"))["rollout_corr_rejected_ratio"]  # .2
    assert [chart.svg.count(colour) for colour in ("#f7d9d4", "#eeb4aa")] == [1, 1]


def test_weights_of_the_update_are_drawn(tmp_path):
    folder = write_run(tmp_path / "a", f"{CORRECTION}.preset=bypass_pg_is")
    name = "actor/rollout_corr/rollout_is_eff_sample_size"
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, name: 0.2}), encoding="utf-8")
    assert "healthy from 0.3" in charts_of(folder)[name.replace("/", "_")].caption


def test_long_runs_are_drawn_by_means_with_their_extremes(tmp_path):
    folder = write_run(tmp_path / "a", steps=1001)
    chart = charts_of(folder)["rollout_corr_kl"]
    (line,) = re.findall(r'<polyline points="([^"]*)"', chart.svg)
    (band,) = re.findall(r'<polygon points="([^"]*)"', chart.svg)
    assert len(line.split()) == 167  # of six steps each, the last of five
    assert len(band.split()) == 2 * 167
    assert "means over 6 steps" in chart.caption
    assert "step 1001: 0.999" in chart.svg  # of 0.997 to 1.001
    heat = charts_of(folder)["drift_by_timestep_0"]
    assert heat.svg.count("<rect") == 2 * 167
    assert "step 0, step 6: 0.00035</title>" in heat.svg
    assert "means over" not in "".join(
        chart.caption for chart in charts_of(write_run(tmp_path / "b")).values()
    )


def test_labels_stay_inside_the_picture(tmp_path):
    charts = charts_of(write_run(tmp_path / "a", steps=3000))
    for chart in charts.values():
        for x, text in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle">([^<]*)', chart.svg):
            assert float(x) + 3.5 * len(text) <= 400


def test_a_run_that_was_just_begun_has_a_page(tmp_path):
    folder = write_run(tmp_path / "a", f"{CORRECTION}=null", steps=1)
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n{"ste', encoding="utf-8")
    assert Page(write_report([folder], tmp_path / "report.html")).open == []


def dump(folder: Path, *, bypass=False, clip_centers=None, scale=1e-3, steps=2) -> None:
    """Terms of 64 samples, two steps each; their ratios are 1 for the first half."""
    draw = torch.Generator().manual_seed(0)
    settings = load(folder / "config.yaml")
    for step in range(1, steps + 1):
        rollout = torch.randn(64, 2, generator=draw)
        old = (
            rollout
            if bypass
            else rollout + scale * torch.tensor([1.0, 3.0]) * torch.randn(64, 2, generator=draw)
        )
        update = scale * torch.randn(64, 2, generator=draw)
        update[:32] = 0
        flat = torch.ones(64, 2)
        terms = LoggedTerms(
            rollout_log_probs=rollout,
            old_log_probs=old,
            current_log_probs=old + update,
            advantages=flat[:, 0],
            rewards=flat[:, 0],
            timesteps=flat,
            sigmas=flat,
            sigmas_next=flat,
            stds=0.5 * flat,
            step_indices=torch.tensor([0, 1]).repeat(64, 1),
            group_ids=torch.arange(64),
            policy_versions=torch.arange(64),
            num_elements=512,
            bypass=bypass,
            current_old_kl=torch.full((64, 2), 2e-3),
            clip_centers=clip_centers,
        )
        log_probs.save(folder / log_probs.FOLDER, step, terms, settings)


def text_of(*folders, charts=None):
    out = folders[0].parent / "report.html"
    return "".join(Page(write_report(list(folders), out, charts=charts)).text)


def test_without_dumped_terms_one_sentence_tells_how(tmp_path):
    text = text_of(write_run(tmp_path / "a"))
    assert "Train with trainer.dump_log_probs=true to see here" in text
    assert "clip range dashed" not in text


def test_dumped_terms_are_drawn(tmp_path):
    folder = write_run(tmp_path / "a", "actor.clip_ratio=1e-3")
    dump(folder)
    text = text_of(folder)
    assert "dump_log_probs" not in text
    terms = [log_probs.load(path) for path in log_probs.files(folder).values()]
    ratio = torch.cat([part.current_log_probs - part.old_log_probs for part in terms]).exp()
    above, below = ((ratio > 1.001).double().mean(), (ratio < 0.999).double().mean())
    assert f"clip range dashed: {above:.1%} above, {below:.1%} below" in text
    assert "256 terms of 2 training steps" in text
    assert "50% are 0, scored before the first optimizer step" in text
    gap = torch.cat([part.old_log_probs - part.rollout_log_probs for part in terms])
    stds = [f"{step}: {gap[:, step].mean():.1e} ± {gap[:, step].std(correction=0):.1e}" for step in (0, 1)]
    assert f"mean ± std of step {', '.join(stds)}" in text


def test_bars_outside_the_clip_range_stand_out(tmp_path):
    folder = write_run(tmp_path / "a", "actor.clip_ratio=1e-3")
    dump(folder)
    (chart,) = [
        chart
        for section in chart_sections(group_by_seed([read_run(folder)]))
        for chart in section.charts
        if chart.name == "ratios_0"
    ]
    bars = re.findall(r'fill="(#\w+)"><title>, (\S+) to (\S+): ([\d.]+)%', chart.svg)
    assert sum(float(share) for *_, share in bars) == pytest.approx(100, abs=1)
    for colour, left, right, _ in bars:
        outside = abs(float(left) + float(right)) / 2 > 1e-3
        assert colour == ("#dc7310" if outside else "#2563eb")
    assert {colour for colour, *_ in bars} == {"#dc7310", "#2563eb"}


@pytest.mark.parametrize(
    ("overrides", "dumped", "expected"),
    [
        ([f"{CORRECTION}.preset=bypass_ppo_clip"], {"bypass": True}, "clips it: current less rollout,"),
        ([], {"scale": 1e-5}, "clip range far from all values here: 0.0% above, 0.0% below"),
        ([], {"scale": 0.0}, "0 everywhere: both stacks score alike, to the last bit"),
        (["actor.clip_ratio=[1e-3, 1e-9, 1e-3, 1e-3]"], {}, "in clip ranges of its step: current"),
        (["actor.loss_mode=flow_dppo"], {}, "this loss has no clip range"),
        ([f"{CORRECTION}.preset=bypass_pg_is"], {"bypass": True}, "this loss has no clip range"),
        # exp((0 + 2e-3) / 2) leaves a range of 9e-4 wherever nothing was learned yet
        (["actor.loss_mode=grpo_guard", "actor.clip_ratio=9e-4"], {"scale": 0.0}, "100.0% above, 0.0% below"),
        (
            [f"{CORRECTION}.preset=bypass_ppo_clip", "actor.clip_center=drift"],
            {"bypass": True, "clip_centers": torch.full((64, 2), -1.0), "scale": 0.0},
            "100.0% above, 0.0% below",
        ),
    ],
)
def test_ratios_are_those_that_the_loss_clips(overrides, dumped, expected, tmp_path):
    folder = write_run(tmp_path / "a", *overrides)
    dump(folder, **dumped)
    assert expected in text_of(folder)


def test_of_many_steps_some_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(report_terms, "MAX_STEPS", 3)
    folder = write_run(tmp_path / "a")
    dump(folder, steps=7)
    assert "384 terms of 3 training steps" in text_of(folder)


def test_charts_are_pictures_too(runs, tmp_path):
    dump(runs[0])
    write_report(runs, tmp_path / "report.html", charts=tmp_path / "charts")
    pictures = {path.stem: path for path in (tmp_path / "charts").iterdir()}
    names = [
        chart.name
        for section in chart_sections(group_by_seed([read_run(folder) for folder in runs]))
        for chart in section.charts
    ]
    assert sorted(pictures) == sorted(names)
    assert {"reward_mean", "ratios_0", "mismatch_by_step_0", "drift_by_timestep_1"} <= pictures.keys()
    for path in pictures.values():
        with Image.open(path) as picture:
            assert picture.width == 800
            colours = picture.convert("RGB").getcolors(maxcolors=10**6)
        assert len(colours) > 5  # text is anti-aliased, so it was drawn


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
    dump(runs[0])
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
