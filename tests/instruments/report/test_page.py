"""The page of some runs."""

import base64
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from instruments.html_pages import Page
from instruments.run_folders import dump, write_run
from PIL import Image

from flowcorr import dumps
from flowcorr.errors import BackendError, ConfigError
from flowcorr.instruments.audit import audit_folder
from flowcorr.instruments.page import save, save_page
from flowcorr.instruments.report import report
from flowcorr.instruments.report.charts import chart_sections
from flowcorr.instruments.report.pictures import MAX_GRIDS, MAX_IMAGE_BYTES
from flowcorr.instruments.report.runs import group_by_seed, read_run

CORRECTION = "algorithm.rollout_correction"
START = {"step": 0, "kind": "start", "total_steps": 4}
FAILURE = {"step": 2, "kind": "failure", "error": "BackendError: no <space>"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def page_of(folders, out):
    """The page of some runs."""
    save_page(report(folders), out)
    return Page(out)


def text_of(*folders):
    return page_of(folders, folders[0].parent / "report.html").text


def found_in(*folders):
    """What a report on runs found: level and cause, by run."""
    found = {}
    for finding in report(folders).findings:
        found.setdefault(finding.numbers["run"], set()).add((finding.level, finding.cause))
    return found


def test_the_page_is_whole_and_loads_nothing(runs, tmp_path):
    page = page_of(runs, tmp_path / "new" / "report.html")
    page.check_alone()
    assert "svg" in page.tags
    assert page.references
    assert len(page.source) < 1_000_000


def test_images_are_embedded_and_few(runs, tmp_path):
    page = page_of(runs, tmp_path / "report.html")
    assert page.tags.count("img") == MAX_GRIDS + 1
    assert re.findall(r"rollouts at step (\d+)", page.text) == ["0", "2", "4", "6"]


def test_large_images_are_shown_smaller(tmp_path):
    folder = write_run(tmp_path / "a", images=3)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8))
    for path in (folder / "images").iterdir():
        noise.save(path, compress_level=0)
    page = page_of([folder], tmp_path / "report.html")
    pictures = [reference for reference in page.references if reference.startswith("data:image/webp")]
    assert len(pictures) == 4
    for picture in pictures:
        data = base64.b64decode(picture.partition("base64,")[2])
        assert len(data) <= MAX_IMAGE_BYTES
        with Image.open(io.BytesIO(data)) as image:
            assert image.width == image.height >= 200


def test_text_of_the_user_is_escaped(tmp_path, evil):
    folders = [
        write_run(tmp_path / "a <script>", events=[{**FAILURE, "error": evil}]),
        write_run(
            tmp_path / "b$x$ <i>",
            "sampling.guidance_scale=2.0",
            f"sampling.negative_prompt={json.dumps(evil)}",
        ),
    ]
    page = page_of(folders, tmp_path / "report.html")
    page.check_alone()
    assert f"step 2: {evil}" in page.text
    assert page.text.count(evil) == 3  # the verdict, the finding, and the prompt that differs
    texts = [text.strip() for text in page.texts]
    assert "a <script>" in texts  # the heading of images, and every legend
    assert "b$x$ <i>" in texts
    assert "<i>" not in page.source


def test_the_page_begins_with_its_verdict_and_its_contents(tmp_path):
    start = {**START, "time": "2026-11-23T05:00:00.000+00:00"}
    events = [start, {"step": 4, "kind": "end", "status": "finished"}]
    page = page_of([write_run(tmp_path / "a", events=events)], tmp_path / "report.html")
    assert "tiny_ocr" in page.text
    assert "2026-11-23" in page.text
    made = report([tmp_path / "a"])
    worst = next(finding for finding in made.findings if finding.level == made.level == "serious")
    assert made.verdict.endswith(f": {worst.sentence}")
    assert page.text.index(made.verdict[1:]) < page.text.index("Learning")
    linked = re.findall(r'<a href="#([\w-]+)"', page.source)
    assert linked
    assert linked == re.findall(r'<section id="([\w-]+)"', page.source)


def test_every_chart_has_a_title_that_can_be_read_aloud(runs, tmp_path):
    source = page_of(runs, tmp_path / "report.html").source
    assert source.count("<svg") == len(re.findall(r"<svg [^>]*><title>[^<]+</title>", source)) > 3


def test_sections_tell_learning_first_then_drift_then_images(tmp_path):
    folder = write_run(tmp_path / "a", images=2)
    headings = re.findall(r"<h2>(.*?)</h2>", page_of([folder], tmp_path / "r.html").source)
    order = [heading for heading in headings if heading in ("Learning", "Drift by timestep", "Pictures, a")]
    assert order == ["Learning", "Drift by timestep", "Pictures, a"]


def test_a_run_named_twice_is_one(tmp_path):
    folder = write_run(tmp_path / "a")
    text = page_of([folder, folder / ".." / "a"], tmp_path / "report.html").text
    assert "1 run in" in text


@pytest.mark.parametrize(
    ("events", "level", "named"),
    [
        ([START, FAILURE], "serious", ["step 2", "BackendError: no <space>"]),
        ([START], "note", []),
        ([START, {"step": 2, "kind": "end", "status": "interrupted"}], "note", ["step 2", "interrupted"]),
        (
            [START, FAILURE, {"step": 1, "kind": "resume"}, {"step": 4, "kind": "end", "status": "finished"}],
            None,
            [],
        ),
    ],
)
def test_how_a_run_ended_is_told(events, level, named, tmp_path):
    folder = write_run(tmp_path / "a", steps=2, scale=0.0, events=events)
    made = report([folder])
    ended = [finding for finding in made.findings if finding.cause == "ending"]
    assert [finding.level for finding in ended] == ([level] if level else [])
    for finding in ended:
        assert [part for part in named if part not in finding.sentence] == []
        assert (finding.numbers["last logged step"], finding.numbers["of"]) == (2, 30)
        assert f"flowcorr train {folder}/config.yaml --resume --out {folder}" in finding.remedy


def test_a_run_that_measured_no_gap_is_not_simply_healthy(tmp_path):
    folders = [
        write_run(tmp_path / "a", f"{CORRECTION}=null", scale=0.0),
        write_run(tmp_path / "b", scale=0.0),
    ]
    told = [one.numbers for one in report(folders).findings if one.cause == "rules"]
    assert told == [{"run": "a", "correction": "off"}, {"run": "b", "correction": "decoupled"}]


def test_a_run_without_a_training_step_is_not_healthy(tmp_path):
    found = found_in(write_run(tmp_path / "a", steps=0))
    assert found == {"a": {("note", "learning"), ("note", "steps")}}


def test_seeds_of_unequal_length_are_pointed_out(tmp_path):
    seeds = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "trainer.seed=1", steps=2)]
    summary = report(seeds).tables[0]
    assert "got furthest" in summary.note
    assert summary.rows[0][2] == "2–4"
    assert "got furthest" not in report(seeds[:1]).tables[0].note


def test_findings_have_their_numbers(runs):
    made = report(runs)
    found = {finding.numbers["run"]: finding for finding in made.findings if finding.cause == "rejected"}
    assert found.keys() == {"a", "b"}
    numbers = found["b"].numbers
    assert (numbers["value"], numbers["limit"]) == (pytest.approx(0.3), 0.1)
    assert (numbers["step"], numbers["steps_broken"]) == (1, 4)
    assert made.level == "serious"


def test_faults_of_the_log_probs_of_a_run_are_told(tmp_path):
    """As audit tells them of the same steps."""
    folder = write_run(tmp_path / "a", scale=0.0)
    dump(folder)
    assert ("healthy", "rules") in found_in(folder)["a"]
    for path in dumps.files(folder).values():
        terms = dumps.load(path)
        terms.old_log_probs[:, 1] += 0.5
        dumps.save(path.parent, int(path.stem[5:]), terms, dumps.load_loss(path))
    told = {cause for _, cause in found_in(folder)["a"]}
    assert told & {"one_step", "shared_shift"}
    assert told & {"one_step", "shared_shift"} == {audit_folder(folder).findings[0].cause}


def test_limits_follow_the_precision(tmp_path):
    found = found_in(
        write_run(tmp_path / "same", "rollout.emulate=none"),
        write_run(tmp_path / "fp8", "rollout.emulate=fp8"),
    )
    assert ("warning", "kl") in found["same"]
    assert ("warning", "kl") not in found["fp8"]


def test_a_run_that_was_just_begun_has_a_page(tmp_path):
    folder = write_run(tmp_path / "a", f"{CORRECTION}=null", steps=1)
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n{"ste', encoding="utf-8")
    page_of([folder], tmp_path / "report.html").check_alone()


@pytest.mark.system
def test_charts_are_pictures_too(runs, tmp_path):
    dump(runs[0])
    save(report(runs), tmp_path / "report", "report")
    pictures = {path.stem: path for path in (tmp_path / "report").glob("*.png")}
    sections = chart_sections(group_by_seed([read_run(folder) for folder in runs]))
    names = [name for section in sections for name in section.pictures]
    assert sorted(pictures) == sorted(names)
    assert {"reward_mean", "ratios_0", "mismatch_by_step_0", "drift_by_timestep_1"} <= pictures.keys()
    for path in pictures.values():
        with Image.open(path) as picture:
            assert picture.width == 760
            colours = picture.convert("RGB").getcolors(maxcolors=10**6)
        assert len(colours) > 5  # text is anti-aliased, so it was drawn


def test_the_json_has_every_number_that_the_page_draws(tmp_path):
    folders = [
        write_run(tmp_path / name, f"trainer.seed={seed}", f"actor.lr={lr}", scale=scale, images=1)
        for name, seed, lr, scale in (("a", 0, 1e-4, 1.0), ("b", 1, 1e-4, 2.0), ("c", 0, 2e-4, 4.0))
    ]
    dump(folders[2])
    made = report(folders)
    files = save(made, tmp_path / "out", "report")
    charts = json.loads((tmp_path / "out" / "report.json").read_text())["charts"]
    assert sorted(charts) == sorted(file.stem for file in files if file.suffix == ".png")

    kl = charts["rollout_corr_kl"]
    seeds, alone = kl["curves"]
    assert seeds["steps"] == alone["steps"] == [1, 2, 3, 4]
    assert seeds["least"] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    assert seeds["means"] == pytest.approx([1.5e-3, 3e-3, 4.5e-3, 6e-3])
    assert seeds["most"] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3])
    assert alone["means"] == alone["least"] == pytest.approx([4e-3, 8e-3, 12e-3, 16e-3])
    assert [seeds["name"], alone["name"]] == ["a, b", "c"]
    assert kl["section"].startswith("Drift")
    assert all("colour" not in part for part in (kl, seeds))

    cells = {(row, step): value for row, step, value in charts["drift_by_timestep_1"]["cells"]}
    assert cells["step 0", 4] == pytest.approx(4 * 4e-4)
    ratios = charts["ratios_1"]
    assert len(ratios["edges"]) == len(ratios["rows"][""]) + 1
    assert sum(ratios["rows"][""]) == pytest.approx(1, abs=0.03)
    assert len(charts["mismatch_by_step_1"]["rows"]) == 2
    assert ["rollout", 2.0] in [bar[:2] for bar in charts["time_0"]["bars"]]


def test_what_is_no_run_is_refused(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"a/metrics\.jsonl holds no"):
        report([folder])
    with pytest.raises(BackendError, match=f"^{tmp_path} .*--out$"):
        save_page(report([write_run(tmp_path / "b")]), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_complaint(runs, width, tmp_path):
    dump(runs[0])
    out = tmp_path / "report.html"
    save_page(report(runs), out)
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


def test_the_verdict_counts_runs(tmp_path):
    folders = [write_run(tmp_path / f"seed{seed}", f"trainer.seed={seed}") for seed in (0, 1)]
    constant = [{"step": step, "reward/mean": 1.0, "reward/std": 0.0} for step in (1, 2)]
    (folders[0] / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in constant))
    assert re.findall(r"in (\w+ runs?)\b", report(folders).verdict) == ["1 run", "1 run"]
