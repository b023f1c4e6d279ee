"""Whole runs: the same steps on the device and on the CPU; and words learned, where OCR is installed."""

from __future__ import annotations

import importlib.util
import shutil

import torch

from flowcorr import config as configs
from flowcorr.trainer import train
from tests.gpu.hour.parts import Hour
from tests.gpu.hour.paths import metrics_of

COMPARED = ("reward/mean", "actor/grad_norm", "rollout_corr/logprob_abs_diff_mean", "timing/step")
STEPS = 10
LEARNED = 0.88
"""Held-out exact match after the recipe's 30 steps on a CPU, the mean of three seeds; its standard error is .03."""


def measure(hour: Hour) -> None:
    steps = 2 if hour.tiny else STEPS
    keys = [f"trainer.total_steps={steps}", "trainer.eval_every=0", "trainer.num_threads=null"]
    keys += ["rollout.prompts_per_step=2", "rollout.n=4", "data.num_heldout=4"] if hour.tiny else []
    rows = {}
    for device in dict.fromkeys((torch.device("cpu"), hour.device)):
        folder = hour.folder / device.type
        shutil.rmtree(folder, ignore_errors=True)
        train(configs.load("tiny_jpeg_lora", [*keys, f"trainer.device={device}"]), folder)
        rows[device.type] = metrics_of(folder)
    here, there = rows["cpu"], rows[hour.device.type]
    for key in COMPARED:
        hour.row(f"{key} of each step, device", [row[key] for row in there])
        hour.row(f"{key} of each step, CPU", [row[key] for row in here])
    first = abs(there[0]["actor/grad_norm"] / here[0]["actor/grad_norm"] - 1)
    hour.row("norm of the first gradient beside the CPU's", first, unit="relative", at_most=0.02)
    gains = [run[-1]["reward/mean"] - run[0]["reward/mean"] for run in (there, here)]
    hour.row("reward gained beside the CPU's", gains[0], expected=gains[1], within=0.2)
    if hour.tiny or importlib.util.find_spec("rapidocr") is None:
        hour.row("words learned", "skipped", note="in tiny sizes" if hour.tiny else "OCR is not installed")
        return
    shutil.rmtree(hour.folder / "words", ignore_errors=True)
    keys = [f"trainer.device={hour.device}", "trainer.num_threads=null", "trainer.image_every=0"]
    result = train(configs.load("tiny_ocr_lora", keys), hour.folder / "words")
    hour.row(
        "words learned: held-out exact match",
        result.metrics["eval/exact_match"],
        expected=LEARNED,
        within=0.1,
    )
