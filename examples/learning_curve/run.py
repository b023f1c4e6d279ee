"""Train the default recipe on three seeds and draw the first picture of the README.

    python examples/learning_curve/run.py --out runs/learning_curve

Finished seeds are not trained again. Needs `pip install -e '.[ocr]'`.
"""

import argparse
import json
import statistics
from pathlib import Path

from PIL import Image

from flowcorr import config, trainer
from flowcorr.trackers import read_metrics

SHOWN = (0, 0, 524, 430)  # four columns and five rows of the grid of samples


def curve(run_dir: Path) -> tuple[list[int], list[float], float]:
    """Steps and held-out exact match of the evaluations, and seconds of training."""
    records = read_metrics(run_dir / "metrics.jsonl")
    evaluated = [record for record in records if "eval/exact_match" in record]
    seconds = sum(record.get("timing/step", 0.0) for record in records)
    return [r["step"] for r in evaluated], [r["eval/exact_match"] for r in evaluated], seconds


def draw(curves: list[tuple[list[int], list[float], float]], images: Path, path: Path) -> None:
    """Words of the first seed before and after, and held-out exact match: mean, lowest and highest of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (before, after, right) = pyplot.subplots(
        1, 3, figsize=(10, 3), dpi=120, width_ratios=(1, 1, 1.2), layout="constrained"
    )
    for axes, name in ((before, "before"), (after, "after")):
        with Image.open(images / f"eval_{name}.png") as grid:
            axes.imshow(grid.crop(SHOWN))
        axes.set_title(f"held-out words, {name}")
        axes.axis("off")
    steps, exact = curves[0][0], [scores for _, scores, _ in curves]
    mean, low, high = (
        [choose(at) for at in zip(*exact, strict=True)] for choose in (statistics.mean, min, max)
    )
    right.plot(steps, mean, marker="o", markersize=3)
    right.fill_between(steps, low, high, alpha=0.2)
    for place, offset in ((0, 6), (-1, -12)):
        end = (steps[place], mean[place])
        right.annotate(f"{mean[place]:.2f}", end, textcoords="offset points", xytext=(offset, -14))
    right.set(xlabel="training step", ylim=(0, 1), title=f"exact match (OCR), {len(curves)} seeds")
    right.grid(alpha=0.3)
    figure.savefig(path)
    with Image.open(path) as picture:  # a palette takes a third of the space
        picture.convert("RGB").quantize(64).save(path, optimize=True)


def main(out: Path, recipe: str, seeds: int, *overrides: str) -> None:
    """Train, then write `curve.png` and `summary.json` into `out`."""
    curves = []
    for seed in range(seeds):
        run_dir = out / f"seed_{seed}"
        settings = config.load(recipe, [f"trainer.seed={seed}", *overrides])
        result = trainer.train(settings, run_dir, resume=True)
        curves.append(curve(run_dir))
        steps, exact, seconds = curves[-1]
        print(
            f"seed {seed}: {exact[0]:.3f} -> {exact[-1]:.3f} in {result.step} steps, {seconds:.0f} s of training"
        )
    gains = [exact[-1] - exact[0] for _, exact, _ in curves]
    summary = {
        "recipe": recipe,
        "exact_match": [dict(zip(steps, exact, strict=True)) for steps, exact, _ in curves],
        "gain": gains,
        "training_seconds": [round(seconds, 1) for *_, seconds in curves],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    draw(curves, out / "seed_0" / "images", out / "curve.png")
    print(f"gain: {statistics.mean(gains):+.3f} (least {min(gains):+.3f}); picture in {out}")


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
