"""A model family of your own, its vllm-omni engine included: LongCat-Image, which flowcorr does not know.

    python examples/new_model.py meituan-longcat/LongCat-Image      # is the adapter right? flowcorr doctor asks, too
    PYTHONPATH=examples flowcorr train RECIPE model.path=meituan-longcat/LongCat-Image \
        model.family=new_model:LongCatImage rollout.name=vllm_omni

An adapter says what its pipeline does between the prompt and the velocity, and nothing about training. Read the
pipeline's `__call__` from top to bottom and put each part into its method; `compare_with_pipeline` then names the part
that differs. Here latents are packed, as in FLUX; `flowcorr/models/z_image.py` is a family with spatial ones. What the
adapter does not say is the base's: here most of `predict`, and `decode` by a VAE that scales its latents by one number.

In vllm-omni, `predict`, `guide` and `decode` run without the pipeline: there `self.pipeline` has a `vae` and a
`transformer` with its `config`, and nothing else.
"""

import argparse

import torch

from flowcorr.config import ModelConfig
from flowcorr.config.layers import JOINT_ATTENTION
from flowcorr.models import AdapterCheck, compare_with_pipeline, load_family
from flowcorr.models.base import InVllmOmni
from flowcorr.models.packed import PackedFamily, positions


class LongCatImage(PackedFamily):
    """`LongCatImagePipeline` without its rewriting of prompts; guidance is on above `guidance_scale` 1."""

    name = "longcat_image"
    pipeline_class = "LongCatImagePipeline"
    lora_targets = JOINT_ATTENTION
    # The engine's half: where its transformer is, and which of its layers are called otherwise there. Without this row
    # the family samples in process.
    vllm_omni = InVllmOmni(
        transformer="vllm_omni.diffusion.models.longcat_image.longcat_image_transformer:LongCatImageTransformer2DModel",
        layer_suffix=(".to_out.0", ".to_out"),
        quantizes=False,
    )

    def call_arguments(self, prompt, guidance):
        # How the pipeline's own call draws the same image, for the comparison.
        return super().call_arguments(prompt, guidance) | {"enable_prompt_rewrite": False}

    def embed_texts(self, texts):
        # One row a text, whatever else is in the batch: these tensors are cached and put together anew. Texts of
        # different lengths are padded to one length, here by the pipeline. Negative prompts are such texts, too.
        self.pipeline.tokenizer_max_length = self.text_tokens
        embeds, _ = self.pipeline.encode_prompt(texts)
        return {"prompt_embeds": embeds}

    def inputs(self, latents, conditioning, guidance):
        # The transformer's inputs beside tokens, time and text. Under guidance it is called once, for twice the batch,
        # first with the tensors `negative_x` in place of `x`.
        embeds = conditioning["prompt_embeds"]
        _, rows, columns, _ = latents.shape
        length = embeds.shape[1]
        text = torch.arange(length, device=embeds.device)
        image = positions(1, rows, columns, device=embeds.device)
        return {
            "txt_ids": torch.stack([torch.zeros_like(text), text, text], dim=1),
            "img_ids": image + image.new_tensor([1, length, length]),
        }

    def guide(self, negative, positive, scale):
        # The pipeline's own guidance: no token gets a larger norm by it.
        mixed = super().guide(negative, positive, scale)
        norms = positive.norm(dim=-1, keepdim=True), mixed.norm(dim=-1, keepdim=True)
        return mixed * (norms[0] / (norms[1] + 1e-8)).clamp(max=1)


def check(path: str, *, height: int | None = None, width: int | None = None) -> AdapterCheck:
    """The comparison of the adapter with its pipeline's own call, with guidance and without."""
    family = load_family(ModelConfig(path=path, family=f"{__name__}:LongCatImage"))
    return compare_with_pipeline(family, height=height, width=width)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path")
    result = check(parser.parse_args().path)
    print(*(difference.sentence for difference in result.differences), sep="\n")
    print(f"largest difference of velocities from the pipeline's: {result.velocity_gap:.2g}")
