"""What every correction does to the policy gradient, against a gradient that is known exactly.

    python examples/ground_truth/run.py --out runs/ground_truth

Writes `ground_truth.csv` (every preset, scale and setting), `table.md` and `ground_truth.png`; two minutes on one core.

A linear-Gaussian flow stands in for the model (`linear_flow`): `D` latent elements, `T` SDE steps, and
a rollout policy whose step means are off by `r` stds a latent element: in a random direction (as rounding), or, the
worst, entirely in the plane that the reward sees, ahead of the target policy or behind it (as stale weights). The
direction is the same for all samples. So is its size, or, *by state*, it grows with the state before the step and is 0
in the mean, as the error of quantized weights grows with what they are multiplied by.
"""

import argparse
import csv
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import linear_flow as ground
import torch
from linear_flow import LinearFlow

SIZES = (16, 512, 16384)
ALIGNED_SIZE = 512  # under `sum`, an aligned shift acts by `sqrt(D) r` alone
SHIFTS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
WINDOWS = (2, 10)
BATCHES = (64, 512)
SAMPLES = 16384
TABLE_ROWS = (
    ("disabled", "-", "uncorrected"),
    ("decoupled_token_is", "mean", "token TIS, `mean`"),
    ("decoupled_token_is", "sqrt", "token TIS, `sqrt`"),
    ("decoupled_token_is", "sum", "token TIS, `sum`"),
    ("decoupled_token_icepop", "sum", "token IcePop, `sum`"),
    ("decoupled_seq_is", "mean", "sequence TIS, `mean`"),
    ("decoupled_seq_is", "sqrt", "sequence TIS, `sqrt`"),
    ("decoupled_seq_is", "sum", "sequence TIS, `sum`"),
    ("decoupled_seq_is_rs", "sum", "sequence TIS + RS, `sum`"),
    ("exact_seq_is", "sum", "sequence, no cap, `sum`"),
    ("decoupled_geo_rs", "mean", "geometric RS, `mean`"),
    ("decoupled_k3_rs", "sum", "K3 RS, `sum`"),
    ("bypass_ppo_clip", "-", "bypass, clip 1e-3"),
    ("centred", "-", "centred"),
    ("centred_token_is", "mean", "centred, token TIS, `mean`"),
    ("centred_token_is", "sqrt", "centred, token TIS, `sqrt`"),
    ("centred_token_is", "sum", "centred, token TIS, `sum`"),
    ("centred_bypass", "-", "centred, bypass, clip 1e-3"),
)
TABLE_COLUMNS = (
    (2, "random", 512, 1e-2),
    (2, "random", 16384, 1e-2),
    (2, "random", 16384, 1e-1),
    (10, "random", 16384, 1e-2),
    (2, "ahead", 512, 1e-2),
    (2, "behind", 512, 1e-2),
    (2, "by state, random", 16384, 1e-1),
    (2, "by state, ahead", 512, 1e-2),
)
Row = dict[str, object]


def settings(shifts: Iterable[float]) -> Iterable[tuple[str, LinearFlow]]:
    """Every setting with the name of its shift's direction; without a shift, `D` and direction do not matter."""
    directions = [("random", size, ground.random_alignment(size)) for size in SIZES]
    directions += [("ahead", ALIGNED_SIZE, 1.0), ("behind", ALIGNED_SIZE, -1.0)]
    directions += [("by state, random", SIZES[-1], ground.random_alignment(SIZES[-1]))]
    directions += [("by state, ahead", ALIGNED_SIZE, 1.0)]
    for steps in WINDOWS:
        yield "none", LinearFlow(num_elements=ALIGNED_SIZE, num_steps=steps)
        for direction, size, alignment in directions:
            for r in shifts:
                flow = LinearFlow(num_elements=size, num_steps=steps, r=r, alignment=alignment)
                yield direction, replace(flow, by_state=direction.startswith("by state"))


def measure(samples: int, shifts: Iterable[float] = SHIFTS) -> list[Row]:
    """One row for each setting, correction and batch size."""
    rows = []
    noises = {steps: ground.draw(samples, steps) for steps in WINDOWS}
    for direction, flow in settings(shifts):
        trajectories = ground.simulate(flow, noises[flow.num_steps])
        exact = {f"exact_bias_{name}": bias for name, bias in _exact_biases(flow).items()}
        for arm in ground.arms():
            estimates = ground.estimate(flow, trajectories, arm.config)
            for size in BATCHES:
                quality = ground.assess(flow, trajectories, estimates, size)
                rows.append(_row(direction, flow, arm, size, quality, exact))
    return rows


def _row(
    direction: str,
    flow: LinearFlow,
    arm: ground.Arm,
    size: int,
    quality: ground.Quality,
    exact: dict[str, float],
) -> Row:
    numbers = {name: getattr(quality, name) for name in quality.__dataclass_fields__}
    return {
        "T": flow.num_steps,
        "direction": direction,
        "D": flow.num_elements,
        "r": flow.r,
        "preset": arm.name,
        "scale": arm.scale,
        "n": size,
        "bias": quality.bias,
        "bias_se": quality.bias_se,
        **numbers,
        "exact_ess": math.nan if flow.by_state else 1 / (1 + ground.chi_squared(flow)),
        **exact,
    }


def _exact_biases(flow: LinearFlow) -> dict[str, float]:
    """Length of the bias without a correction, with uncapped ratios of steps, and centred; NaN without a closed form.

    Uncapped ratios of windows leave none. Centering leaves that of a shift that is the same for all states.
    """
    if flow.by_state:
        plain, centred = (ground.expected_gradient_by_state(flow, centred=one) for one in (False, True))
        token = torch.full_like(plain, math.nan)
    else:
        plain, token = (ground.expected_gradient(flow, level) for level in (None, "token"))
        centred = plain
    found = {"none": plain, "token": token, "centred": centred}
    return {name: float((one - flow.truth).norm() / flow.truth.norm()) for name, one in found.items()}


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def table(rows: list[Row], size: int = BATCHES[-1]) -> str:
    """Markdown: for each correction and setting, bias, variance and worth."""
    found = {
        (row["T"], row["direction"], row["D"], row["r"], row["preset"], row["scale"]): row
        for row in rows
        if row["n"] == size
    }
    columns = [column for column in TABLE_COLUMNS if (*column, *TABLE_ROWS[0][:2]) in found]
    reference = [found[(*column, *TABLE_ROWS[0][:2])] for column in columns]
    lines = [
        f"Bias in % of the true gradient (± standard error) · variance over that of on-policy samples · on-policy "
        f"samples that one sample is worth, at {size} samples an estimate. Weights without a cap have too heavy tails "
        "for their standard errors to be trusted where the ESS is small.",
        "",
        "| | " + " | ".join(f"T={t}, {way}, D={d}, r={r:g}" for t, way, d, r in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        "| ESS of exact weights, `exp(-T D r^2)` | "
        + " | ".join("-" if math.isnan(row["exact_ess"]) else f"{row['exact_ess']:.2g}" for row in reference)
        + " |",
        "| exact bias: none / token, no cap / centred | "
        + " | ".join(
            " / ".join(_exact(row[f"exact_bias_{name}"]) for name in ("none", "token", "centred")) + " %"
            for row in reference
        )
        + " |",
    ]
    for preset, scale, label in TABLE_ROWS:
        cells = [_cell(found[(*column, preset, scale)]) for column in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _exact(bias: float) -> str:
    return "-" if math.isnan(bias) else f"{100 * bias:.2g}"


def _cell(row: Row) -> str:
    bias, error = 100 * row["bias"], 100 * row["bias_se"]
    digits = 0 if error >= 1 else 1 if error >= 0.1 else 2
    if _vanishes(row):
        return "100 · 0 · vanishes"
    variance = row["variance"] / row["on_policy_variance"]
    return f"{bias:.{digits}f}±{error:.{digits}f} · {variance:.2g} · {row['worth']:.2f}"


def _vanishes(row: Row) -> bool:
    """Whether nothing is kept, or all weights are at the lower bound of their exponent, -20."""
    return row["variance"] < 1e-6 * row["on_policy_variance"]


CURVES = (
    ("disabled", "-", "uncorrected", "black", "-"),
    ("decoupled_seq_is", "mean", "sequence TIS, mean", "tab:blue", "--"),
    ("decoupled_seq_is", "sqrt", "sequence TIS, sqrt", "tab:orange", "-"),
    ("decoupled_seq_is", "sum", "sequence TIS, sum", "tab:red", "-"),
    ("decoupled_token_is", "sum", "token TIS, sum", "tab:red", ":"),
    ("decoupled_token_icepop", "sum", "token IcePop, sum", "tab:purple", ":"),
    ("decoupled_geo_rs", "mean", "geometric RS, mean", "tab:green", "-."),
    ("bypass_ppo_clip", "-", "bypass, clip 1e-3", "tab:gray", "-"),
)


def draw(rows: list[Row], path: Path, size: int = BATCHES[-1], steps: int = WINDOWS[0]) -> None:
    """Bias and worth against the shift, in random directions at every `D`, and for stale weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [*(("random", d) for d in SIZES), ("behind", ALIGNED_SIZE)]
    figure, grid = pyplot.subplots(2, len(panels), figsize=(11, 5.2), dpi=110, sharex=True, sharey="row")
    for (direction, d), (top, bottom) in zip(panels, grid.T, strict=True):
        for preset, scale, label, colour, style in CURVES:
            where = (steps, direction, d, preset, scale, size)
            line = [
                row
                for row in rows
                if (row["T"], row["direction"], row["D"], row["preset"], row["scale"], row["n"]) == where
            ]
            r = [row["r"] for row in line]
            look = {"color": colour, "linestyle": style, "linewidth": 1.4}
            top.errorbar(
                r, [100 * row["bias"] for row in line], [100 * row["bias_se"] for row in line], **look
            )
            worth = [math.nan if _vanishes(row) else row["worth"] for row in line]
            bottom.plot(r, worth, label=label, **look)
        top.set(title=f"{direction}, D={d}", xscale="log", yscale="log")
        bottom.set(xlabel="r, stds a latent element")
        top.grid(alpha=0.3)
        bottom.grid(alpha=0.3)
    grid[0, 0].set_ylim(bottom=0.03)
    grid[1, 0].set_ylim(bottom=0)
    grid[0, 0].set_ylabel("bias, % of the true gradient")
    grid[1, 0].set_ylabel("on-policy samples that\none sample is worth")
    figure.legend(*grid[1, 0].get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8)
    figure.suptitle(
        f"Gradient estimates from {size} samples, T={steps} steps, against the exact gradient", fontsize=10
    )
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def main(out: Path, samples: int = SAMPLES, shifts: Iterable[float] = SHIFTS) -> None:
    """Measure, and write `ground_truth.csv`, `table.md` and `ground_truth.png` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    rows = measure(samples, shifts)
    write_csv(rows, out / "ground_truth.csv")
    markdown = table(rows)
    (out / "table.md").write_text(markdown, encoding="utf-8")
    print(markdown)
    draw(rows, out / "ground_truth.png")
    print(f"{len(rows)} rows, table and picture in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/ground_truth"))
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of each setting")
    arguments = parser.parse_args()
    main(arguments.out, arguments.samples)
