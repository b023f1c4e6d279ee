"""Run verl-omni's own loop, as `real_loops/run_verl_omni.py` does, with a fix taken back or not.

    WORK=... VERL_OMNI=SOURCE python verl_omni.py FOLDER NAME [taken_back]

SOURCE is the tree of a commit. `taken_back` undoes the fix of NAME in the copy of the source.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]

from integrations.real_loops import planted_verl_omni, run_verl_omni  # noqa: E402

planted_verl_omni.FILES["agents"] = "agent_loop/diffusion_agent_loop.py"
_OPTIONS = "**_config_to_sampling_dict(config.pipeline)"
_WITHOUT = '**{k: v for k, v in _config_to_sampling_dict(config.pipeline).items() if k != "guidance_scale"}'
TAKEN_BACK = {
    "vo_guidance_dropped": [("agents", (_OPTIONS, 0), "instead", _WITHOUT)],
    "vo_colliding_seeds": [
        ("agents", ('batch.non_tensor_batch.get("_rollout_seed_global_idx")', 0), "instead", "None")
    ],
    "vo_cut_embeddings": [
        ("agents", ("if current_length > target_length:", None), "instead", "if False:"),
        ("agents", ("self.rollout_config.max_prompt_embed_length", 0), "instead", "None"),
    ],
    "vo_half_latents": [
        ("sde", ("if not return_dict:", 0), "before", "prev_sample = prev_sample.to(torch.bfloat16).float()")
    ],
}
"""By bug: the changes that undo its fix."""


class TwoWorkers(run_verl_omni.Loop):
    """Its agent loop, called once for either half of a batch, as two workers would be."""

    def sample(self, prompts, seed):
        """A batch of the step, with the rows numbered as the trainer numbers them."""
        import numpy as np
        from verl import DataProto

        agents, generate = self._agents, self._agents.generate_sequences

        async def halves(batch):
            # A prompt's images stand side by side, as the trainer repeats them.
            order = sorted(range(len(batch)), key=lambda row: row % len(prompts))
            batch = batch.select_idxs(np.array(order))
            batch.non_tensor_batch["_rollout_seed_global_idx"] = np.arange(len(batch), dtype=np.int64)
            return DataProto.concat([await generate(half) for half in batch.chunk(2)])

        agents.generate_sequences = halves
        try:
            return super().sample(prompts, seed)
        finally:
            del agents.generate_sequences


def main(folder, name, how=""):
    """Train two steps."""
    if how == "taken_back":
        run_verl_omni.DUMP = (*TAKEN_BACK[name], *run_verl_omni.DUMP)
    if name == "vo_colliding_seeds":
        run_verl_omni.Loop = TwoWorkers
    run_verl_omni.main(folder, "2", "clean", "42")


if __name__ == "__main__":
    main(*sys.argv[1:])
