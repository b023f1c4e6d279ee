"""What the instruments say of stored runs, as data: numbers, causes and exit codes, whatever their form."""

import json
from dataclasses import replace

import torch
from instruments.foreign_dumps import D
from instruments.run_folders import write_run

from flowcorr.cli import main
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


def audited(arguments, out, capsys):
    """The exit code of an audit with its facts, tables, findings and the names of its charts, without sentences."""
    code = main(["audit", *map(str, arguments), "--out", str(out), "--json"])
    report = json.loads(capsys.readouterr().out)
    return {
        "exit": code,
        "facts": {name: value for name, value in report["facts"].items() if name != "basis"},
        "tables": {name: [list(row.values()) for row in rows] for name, rows in report["tables"].items()},
        "findings": [
            [found["level"], found["cause"], *found["numbers"].values()] for found in report["findings"]
        ],
        "charts": list(report["charts"]),
    }


def audited_recipe(arguments, out, capsys):
    """The numbers of an audit that do not depend on the time it took."""
    found = audited(arguments, out, capsys)
    for name in ("recompute_share", "images_per_second"):
        del found["facts"][name]
    found["tables"]["presets"] = sorted(row[:2] + row[3:5] for row in found["tables"]["presets"])
    return found


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


def reported(folder, out):
    """Exit code, findings and charts of a report."""
    code = main(["report", str(folder), "--out", f"{out}/"])
    made = json.loads((out / "report.json").read_text(encoding="utf-8"))
    others = ("learning", "files", "rules", "steps", "ending")
    (learned,) = [found for found in made["findings"] if found["cause"] == "learning"]
    return {
        "exit": code,
        "findings": sorted(
            [found["level"], found["cause"]] for found in made["findings"] if found["cause"] not in others
        ),
        "charts": list(made["charts"]),
        "learned": learned["numbers"]["change"],
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
