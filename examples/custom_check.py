"""A question of your own about what the engine returns: do the images of a prompt differ?

A training step asks it of its batch and judges the answer, and the doctor asks it of the engine at hand.

    PYTHONPATH=examples flowcorr train tiny_ocr_lora 'trainer.checks=[custom_check:SAME_IMAGES]'
    PYTHONPATH=examples flowcorr doctor tiny_ocr_lora 'trainer.checks=[custom_check:SAME_IMAGES]'
"""

import torch
from torch import Tensor

from flowcorr.questions.compared import Compared
from flowcorr.questions.question import Question


def copies(compared: Compared) -> Tensor | None:
    """`[B]` bool: which images are, pixel by pixel, that of another sample of their prompt."""
    rollout = compared.rollout
    if rollout.images is None:
        return None
    pixels = rollout.images.flatten(1)
    same = (pixels[:, None] == pixels).all(2) & (rollout.group_ids[:, None] == rollout.group_ids)
    return (same & ~torch.eye(len(pixels), dtype=torch.bool, device=same.device)).any(1)


SAME_IMAGES = Question(
    name="same_images",
    what="share of images that are copies of another image of their prompt",
    number=copies,
    limit=0.0,
    remedy="seed the noise of each image of a prompt by its own number, or raise sampling.noise_level",
)
