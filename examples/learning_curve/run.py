"""Train the default recipe on three seeds and draw the curve and the image grid of the README.

    python examples/learning_curve/run.py --out runs/learning_curve

Finished seeds are not trained again. Needs `pip install -e '.[ocr]'`.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowcorr import config, trainer
from flowcorr.trackers import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent


def curve(run_dir: Path) -> tuple[list[int], list[float], list[float], float]:
    """Steps and held-out exact match of the evaluations, training reward, and seconds of training."""
    records = read_metrics(run_dir / "metrics.jsonl")
    evaluated = [record for record in records if "eval/exact_match" in record]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    seconds = sum(record.get("timing/step", 0.0) for record in records)
    return [r["step"] for r in evaluated], [r["eval/exact_match"] for r in evaluated], rewards, seconds


def draw(curves: list[tuple[list[int], list[float], list[float], float]], recipe: str, path: Path) -> None:
    """Held-out exact match and training reward: the mean over seeds, and a band from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), dpi=150)
    exact, rewards = ([run[column] for run in curves] for column in (1, 2))
    _band(left, curves[0][0], exact, marker="o")
    _band(right, range(1, len(rewards[0]) + 1), rewards)
    left.set(xlabel="training step", ylabel="exact match (OCR)", ylim=(0, 1), title="128 held-out words")
    right.set(xlabel="training step", ylabel="mean reward", ylim=(0, 1), title="training words, SDE samples")
    figure.suptitle(
        f"flowcorr train {recipe}: mean of {len(curves)} seeds, least to most; 2 CPU cores", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path)


def _band(axes: "Axes", steps: Sequence[int], runs: Sequence[Sequence[float]], marker: str = "") -> None:
    mean, low, high = (
        [choose(at) for at in zip(*runs, strict=True)] for choose in (statistics.mean, min, max)
    )
    axes.plot(steps, mean, marker=marker, markersize=3)
    axes.fill_between(steps, low, high, alpha=0.2)
    for place, right in ((0, 4), (-1, -12)):
        end = (steps[place], mean[place])
        axes.annotate(f"{mean[place]:.2f}", end, textcoords="offset points", xytext=(right, -14))
    axes.grid(alpha=0.3)


def main(out: Path, recipe: str, seeds: int, *overrides: str) -> None:
    """Train, then write `curve.png`, `before_after.png` and `summary.json` into `out`."""
    curves = []
    for seed in range(seeds):
        run_dir = out / f"seed_{seed}"
        settings = config.load(recipe, [f"trainer.seed={seed}", *overrides])
        result = trainer.train(settings, run_dir, resume=True)
        curves.append(curve(run_dir))
        steps, exact, _, seconds = curves[-1]
        print(
            f"seed {seed}: {exact[0]:.3f} -> {exact[-1]:.3f} in {result.step} steps, {seconds:.0f} s of training"
        )
    gains = [exact[-1] - exact[0] for _, exact, _, _ in curves]
    summary = {
        "recipe": recipe,
        "exact_match": [dict(zip(steps, exact, strict=True)) for steps, exact, _, _ in curves],
        "gain": gains,
        "training_seconds": [round(seconds, 1) for *_, seconds in curves],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    draw(curves, recipe, out / "curve.png")
    shutil.copy(out / "seed_0" / "images" / "before_after.png", out / "before_after.png")
    print(f"gain: {statistics.mean(gains):+.3f} (least {min(gains):+.3f}); pictures in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/learning_curve"))
    parser.add_argument("--recipe", default="tiny_ocr_lora")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="configuration keys, such as trainer.total_steps=10")
    arguments = parser.parse_args()
    main(arguments.out, arguments.recipe, arguments.seeds, *arguments.overrides)
