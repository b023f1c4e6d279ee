"""What the instruments say of stored runs, as data: numbers, causes and exit codes, whatever their form."""

import json
from dataclasses import replace

import torch
from instruments.foreign_dumps import D
from instruments.run_folders import write_run

from flowcorr.cli import main
from flowcorr.instruments.audit.dumped import replays_of
from flowcorr.instruments.report import report
from flowcorr.instruments.steps import read_dumped
from flowcorr.instruments.watch import Watch
from flowcorr.rollout import InProcessEngine

SMALL = [
    "rollout.emulate=int4",
    "rollout.prompts_per_step=2",
    "rollout.n=4",
    "sampling.num_inference_steps=4",
    "actor.mini_batches=1",
]


SYNC = InProcessEngine.sync
KINDS = {"healthy": "none", "warning": "leave", "serious": "repair"}  # by the level of the advice
FAULTS = {"non_finite", "summed", "one_step", "shared_shift", "few_samples", "stale"}


def audited(arguments, out, capsys):
    """The numbers and causes of an audit."""
    code = main(["audit", *map(str, arguments), "--out", str(out), "--json"])
    report = json.loads(capsys.readouterr().out)
    numbers = ("joint_nats", "outside_clip", "outliers", "outlier_band", "num_samples", "num_elements")
    advice = [found for found in report["findings"] if found["cause"] == "gap"]
    tables = report["tables"]
    return {
        "exit": code,
        "mode": report["facts"].get("mode"),
        "kind": KINDS[advice[0]["level"]] if advice else None,
        **{name: report["facts"].get(name) for name in numbers},
        "causes": [found["cause"] for found in report["findings"] if found["cause"] in FAULTS],
        "steps": [[step["step_index"], step["exact_kl"], step["clip_needed"]] for step in tables["steps"]],
        "scales": [[row["scale"], row["level"], row["expected_ess"]] for row in tables.get("scales", [])],
        "presets": {
            row["preset"].removesuffix(" (this run)"): [row["rejected_terms"], row["weight"]]
            for row in tables["presets"]
        },
    }


def examined(arguments, capsys):
    """The exit code of an examination, and the level and cause of each of its checks."""
    code = main(["doctor", *map(str, arguments), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    checks = {
        found["numbers"].get("check", found["cause"]): f"{found['level']} {found['cause']}"
        for found in findings
    }
    return {"exit": code, "checks": checks}


def half_bound(engine, weights):
    """Sync an engine whose adapter acts at half of its strength."""
    halved = {name: value / 2 if "lora_B" in name else value for name, value in weights.tensors.items()}
    SYNC(engine, replace(weights, tensors=halved))


def compared(folder):
    """What presets would have made of a dump: cosine, length, rejected and changed terms."""
    return {
        replay.name: None
        if (outcome := replay.outcome) is None
        else [outcome.cosine, outcome.relative_norm, outcome.rejected_terms, outcome.changed_terms]
        for replay in replays_of(read_dumped(folder))
    }


def reported(folder):
    """Findings, charts and learning of a report."""
    made = report([folder])
    others = ("learning", "files", "rules", "steps", "ending")
    (learned,) = [found for found in made.findings if found.cause == "learning"]
    return {
        "findings": sorted(
            [found.level, found.cause] for found in made.findings if found.cause not in others
        ),
        "charts": [name for section in made.charts for name in section.pictures],
        "learned": learned.numbers["change"],
    }


def watched():
    """Which rule speaks at which step, of a run in which one fault after another begins."""
    draw = torch.Generator().manual_seed(5)
    watch, told = Watch(), {}
    for step in range(20):
        rollout = torch.randn(32, 2, generator=draw, dtype=torch.float64) / 100
        old = rollout - 2e-4 + 0.02 / D**0.5 * torch.randn(32, 2, generator=draw, dtype=torch.float64)
        rewards = torch.zeros(32) if 4 <= step < 9 else torch.arange(32.0)
        if step >= 8:  # a part of the engine broke
            old = old + 0.1 * torch.randn(32, 2, generator=draw, dtype=torch.float64)
        if step >= 12:  # and now its log-probs are of another step
            old = old + torch.tensor([0.0, 3.0])
        if step >= 16:
            rollout[0, 0] = float("nan")
        _, findings = watch(
            step,
            rollout_log_probs=rollout,
            old_log_probs=old,
            advantages=torch.randn(32, generator=draw),
            rewards=rewards,
            group_ids=torch.arange(32) // 4,
            step_indices=[1, 3],
            policy_versions=[step - (step >= 18)] * 32,
            version=step,
            num_elements=D,
            clip_ratio=1e-3,
        )
        if findings:
            told[str(step)] = sorted(finding.cause for finding in findings)
    return told


def own_run(folder):
    """A run of flowcorr with a rejected tenth and a gap that its precision does not explain."""
    return write_run(folder, "rollout.emulate=none")
