"""A config of flow_grpo for a tiny Stable Diffusion 3: two prompts of four images, four steps, on a CPU."""

import importlib.util
import os
from pathlib import Path


def get_config():
    """flow_grpo's own base config with another model, size and schedule."""
    work = Path(os.environ["WORK"])
    path = Path(os.environ["FLOW_GRPO"]) / "config/base.py"
    source = importlib.util.spec_from_file_location("base", path)
    base = importlib.util.module_from_spec(source)
    source.loader.exec_module(base)
    config = base.get_config()
    config.pretrained.model = str(work / "model")
    config.dataset = str(work / "prompts")
    config.logdir = config.save_dir = str(work / "logs")
    config.prompt_fn, config.reward_fn = "general_ocr", {"jpeg_compressibility": 1}
    config.mixed_precision, config.resolution = "no", 64
    config.sample.num_steps, config.sample.eval_num_steps = 4, 2
    config.sample.train_batch_size, config.sample.num_image_per_prompt = 8, 4
    config.sample.num_batches_per_epoch, config.sample.test_batch_size = 2, 2
    config.train.batch_size, config.train.gradient_accumulation_steps = 8, 1
    config.train.timestep_fraction, config.train.beta, config.train.ema = 0.99, 0.04, True
    return config
