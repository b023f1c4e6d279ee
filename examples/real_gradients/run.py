"""What a gap between engine and trainer does to a real policy gradient, and what each correction makes of it.

    python examples/real_gradients/run.py --out runs/real_gradients

The embedded model learns to draw words for 8 training steps of `tiny_ocr_lora`. Then engines that differ from it (in
fp8, in int4, with weights 4 training steps older, with half of the adapter, with an offset on every velocity) sample
the same prompts with the same noise as the policy itself does, and the trainer's own functions make gradients of the
samples: uncorrected, with weights (token TIS at scale `sum`), with rejection (`decoupled_geo_rs`), with score
centering. Both windows (two early steps; every step but the last) and both kinds of initial noise (shared within a
group; each image its own) are measured.

`table.md` has each estimate's cosine to on-policy gradients (of the same prompts and noise, and of the other batches),
its noise and its bias, and `drift.md` what score centering takes away. A quarter of an hour on one core and 200 MB;
batches that are there are not made again, so an interrupted run goes on where it was. Needs `pip install -e '.[ocr]'`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from measure import CORRECTIONS, GAPS, SETTINGS, Setting, learned_policy
from quality import Interval, assess, on_policy_cosine
from safetensors.torch import load_file, save_file
from torch import Tensor

BATCHES = {"two": 8, "all": 4}
"""Batches of 96 images by window; the gradient of all steps costs three times as much."""


def measure(
    out: Path, settings: Sequence[str], batches: Mapping[str, int], overrides: Sequence[str] = ()
) -> None:
    """Make the gradients that `out` does not hold yet, a file a batch."""
    out.mkdir(parents=True, exist_ok=True)
    policy = learned_policy(out / "policy.safetensors", overrides)
    for name in settings:
        todo = [batch for batch in range(_count(name, batches)) if not _file(out, name, batch).exists()]
        setting = Setting(name, policy, overrides) if todo else None
        for batch in todo:
            assert setting is not None
            gradients, drifts = setting.gradients(batch)
            path = _file(out, name, batch)
            partial = path.with_suffix(".partial")
            save_file({"gradients": gradients, "drifts": torch.tensor(drifts)}, partial)
            partial.replace(path)
            print(f"{name}: batch {batch + 1} of {_count(name, batches)}", flush=True)


def _count(name: str, batches: Mapping[str, int]) -> int:
    return batches[name.partition("/")[0]]


def _file(out: Path, name: str, batch: int) -> Path:
    return out / f"{name.replace('/', '_')}_{batch:02}.safetensors"


def stored(
    out: Path, name: str, batches: Mapping[str, int]
) -> tuple[Tensor, dict[str, dict[str, Tensor]], Tensor]:
    """The gradients of a setting: on-policy `[K, P]`, by gap and correction, and drifts `[K, len(GAPS)]`."""
    files = [load_file(_file(out, name, batch)) for batch in range(_count(name, batches))]
    rows = torch.stack([file["gradients"] for file in files], 1)
    corrected = iter(rows[1:])
    by_gap = {gap: {correction: next(corrected) for correction in CORRECTIONS} for gap in GAPS}
    return rows[0], by_gap, torch.stack([file["drifts"] for file in files])


def tables(out: Path, settings: Sequence[str], batches: Mapping[str, int]) -> tuple[str, str]:
    """Both tables in Markdown."""
    lines = [
        "Cosine of a batch to the on-policy gradient with the same prompts and noise · to that of the other batches · "
        "noise variance over the on-policy one · bias in % of the on-policy gradient (95 % interval). In bold: a first "
        "cosine that surely (95 %) differs from the one without correction.",
        "",
        f"| window/noise (cosine on-policy) | gap | {' | '.join(CORRECTIONS)} |",
        "|---" * (len(CORRECTIONS) + 2) + "|",
    ]
    drift_lines = [
        "What score centering takes away, over the uncorrected gradient, in %: of the gradient of the weights "
        "(smallest and largest batch) · by `rollout_corr/score_drift`, the root of its mean.",
        "",
        f"| window/noise | {' | '.join(GAPS)} |",
        "|---" * (len(GAPS) + 1) + "|",
    ]
    for name in settings:
        on_policy, by_gap, drifts = stored(out, name, batches)
        own = f"{name} (1 · {on_policy_cosine(on_policy):.2f})"
        cells = []
        for gap, of_correction in by_gap.items():
            row = [_cell(estimate, on_policy, of_correction["none"]) for estimate in of_correction.values()]
            lines.append(f"| {own} | {gap} | {' | '.join(row)} |")
            own = ""
            taken = (of_correction["none"] - of_correction["centering"]).norm(dim=1)
            shares = 100 * taken / of_correction["none"].norm(dim=1)
            metric = 100 * float(drifts[:, GAPS.index(gap)].mean()) ** 0.5
            cells.append(f"{shares.min():.2g} to {shares.max():.2g} · {metric:.2g}")
        drift_lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n", "\n".join(drift_lines) + "\n"


def _cell(estimate: Tensor, on_policy: Tensor, uncorrected: Tensor) -> str:
    if not estimate.any():
        return "rejects all"
    found = assess(estimate, on_policy, uncorrected)
    twin = f"{found.twin:.2f}"
    if found.gain.low > 0 or found.gain.high < 0:
        twin = f"**{twin}**"
    return f"{twin} · {found.cosine:.2f} · {found.variance:.2g} · {_percent(found.bias)}"


def _percent(share: Interval) -> str:
    low, value, high = (f"{100 * end:.0f}" for end in (share.low, share.value, share.high))
    return f"{value} ({low} to {high})"


def main(
    out: Path,
    settings: Sequence[str] = SETTINGS,
    batches: Mapping[str, int] = BATCHES,
    overrides: Sequence[str] = (),
) -> None:
    """Measure, and write `table.md` and `drift.md` into `out`."""
    measure(out, settings, batches, overrides)
    table, drift = tables(out, settings, batches)
    (out / "table.md").write_text(table, encoding="utf-8")
    (out / "drift.md").write_text(drift, encoding="utf-8")
    print(f"{table}\n{drift}\nboth tables are in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/real_gradients"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="WINDOW/NOISE")
    arguments = parser.parse_args()
    main(arguments.out, arguments.settings)
