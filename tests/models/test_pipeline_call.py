"""A pipeline's own call, whose transformer computes in a few steps only."""

from flowcorr.models.pipeline_call import call_pipeline


def test_only_the_steps_that_are_asked_for_are_computed_and_the_pipeline_is_left_as_it_was(adapter_of):
    pipeline, passes = adapter_of("sd3").pipeline, []
    hook = pipeline.transformer.pos_embed.register_forward_hook(lambda *_: passes.append(1))
    asked = {"prompt": "cat", "height": 32, "width": 32, "num_inference_steps": 5, "max_sequence_length": 8}
    asked |= {"guidance_scale": 3.0, "negative_prompt": "bad", "no_such_argument": 1}
    call = call_pipeline(pipeline, asked, [0, 2], decodes=True)
    hook.remove()
    assert len(passes) == 2
    assert list(call.steps) == [0, 2]
    assert [len(step.rows) for step in call.steps.values()] == [2, 2]
    assert len(call.sigmas) == 6
    assert call.pixels.shape == (1, 32, 32, 3)
    assert call.final.isfinite().all()
    owners = (pipeline.transformer, pipeline.scheduler, pipeline.vae)
    assert not any({"forward", "step", "decode"} & vars(owner).keys() for owner in owners)
    assert call_pipeline(pipeline, asked, [0], decodes=False).pixels is None
