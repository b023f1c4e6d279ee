"""Run Flow-Factory's own `flow_factory.train` on a CPU, on a copy of its source with a fault and the example's lines.

    WORK=... FLOW_FACTORY=... python run_flow_factory.py FOLDER EPOCHS FAULT SEED     # FAULT: a key of FAULTS, or clean

WORK holds `model` and `prompts`; the dump is written to FOLDER, the copy to FOLDER-source.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[2] / "examples"
sys.path.insert(0, str(HERE.parents[1]))

from integrations.real_loops.change import changed  # noqa: E402
from integrations.real_loops.planted_flow_factory import DUMP, FAULTS, FILES, FLOAT32  # noqa: E402

CONFIG = """\
launcher: accelerate
num_processes: 1
mixed_precision: "no"
data: {{dataset_dir: {work}/prompts, preprocessing_batch_size: 2, dataloader_num_workers: 0, force_reprocess: true,
  cache_dir: {folder}-cache, max_dataset_size: 4,
  sampler_type: distributed_k_repeat}}
model: {{finetune_type: lora, lora_rank: 4, lora_alpha: 8, target_modules: default, model_name_or_path: {work}/model,
  model_type: sd3-5, master_weight_dtype: float32}}
log: {{project: tiny, logging_backend: none, save_dir: {folder}-saves, save_freq: 0}}
train: {{trainer_type: grpo, latent_storage_dtype: fp32, max_epochs: {epochs}, clip_range: 1.0e-4, adv_clip_range: 5.0,
  kl_beta: 0, ref_param_device: cpu, resolution: 64, num_inference_steps: 5, guidance_scale: 4.5,
  per_device_batch_size: 4, group_size: 4, global_std: true, unique_sample_num_per_epoch: 2, gradient_step_per_epoch: 2,
  learning_rate: 3.0e-4, ema_decay: 0, ema_device: cpu, seed: {seed}}}
scheduler: {{dynamics_type: Flow-SDE, noise_level: 0.8, num_sde_steps: 2, sde_steps: [1, 2], seed: {seed}}}
eval: {{resolution: 64, per_device_batch_size: 2, guidance_scale: 4.5, num_inference_steps: 2, eval_freq: 0, seed: 42}}
rewards: [{{name: jpeg, reward_model: integrations.real_loops.jpeg_reward.Jpeg, batch_size: 4, device: cpu,
  dtype: float32}}]
"""


def main(folder, epochs, fault, seed):
    """Copy, change and train."""
    source = Path(f"{folder}-source")
    shutil.copytree(Path(os.environ["FLOW_FACTORY"]) / "src", source)
    for name, *change in (*([FAULTS[fault][1]] if fault in FAULTS else ()), FLOAT32, *DUMP):
        path = source / "flow_factory" / FILES[name]
        path.write_text(changed(path.read_text(encoding="utf-8"), *change), encoding="utf-8")
    config = Path(f"{folder}.yaml")
    config.write_text(
        CONFIG.format(work=os.environ["WORK"], folder=folder, epochs=epochs, seed=seed), encoding="utf-8"
    )
    os.environ["DUMP"] = folder
    sys.path[:0] = [str(source), str(EXAMPLES)]
    sys.argv = ["flow_factory.train", str(config)]
    runpy.run_module("flow_factory.train", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
