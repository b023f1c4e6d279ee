"""A reward for Flow-Factory without a model: the negative size of the JPEG, in half megabytes."""

import io

import torch
from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput


class Jpeg(PointwiseRewardModel):
    """As `jpeg_compressibility` of flow_grpo."""

    def __call__(self, prompt, image=None, video=None, **kwargs):
        """A score an image."""
        return RewardModelOutput(
            rewards=torch.tensor([-self._size(one) / 5e5 for one in image]), extra_info={}
        )

    @staticmethod
    def _size(image):
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=95)
        return stream.tell()
