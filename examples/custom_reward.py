"""A reward of your own: any function of images and prompts, named by its import path.

    python examples/custom_reward.py --out runs/ink --steps 10

From the command line the same run is

    PYTHONPATH=examples flowcorr train tiny_ocr_lora 'reward.terms=[{name: custom_reward:ink}]' \
        trainer.best_metric=eval/reward
"""

import argparse

import numpy as np

from flowcorr import config, trainer
from flowcorr.records import Prompt


def ink(images: np.ndarray, prompts: list[Prompt]) -> np.ndarray:
    """Share of dark pixels, in per cent: images `[B, H, W, 3]` uint8 -> scores `[B]`."""
    return 100 * (images.mean(-1) < 128).mean((1, 2))


def main(out: str, steps: int, *overrides: str) -> trainer.RunResult:
    settings = config.load(
        "tiny_ocr_lora",
        [
            "reward.terms=[{name: custom_reward:ink}]",
            "trainer.best_metric=eval/reward",
            f"trainer.total_steps={steps}",
            *overrides,
        ],
    )
    result = trainer.train(settings, out)
    print(f"held-out ink after {result.step} steps: {result.metrics['eval/reward']:.2f} %")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/ink")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    main(arguments.out, arguments.steps)
