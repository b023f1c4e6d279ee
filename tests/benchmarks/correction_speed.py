"""Time the correction beside verl's helper: sequence weights, seq_mean_k1 rejection, all diagnostics.

    pip install --no-deps verl            # optional; without it only flowcorr is timed
    python tests/benchmarks/correction_speed.py [--threads 1] [--repeats 7]

Only verl's `trainer/ppo/rollout_corr_helper.py` and the masked sums it uses are loaded, with its config classes
and batch container replaced by empty ones, so that neither ray nor tensordict is needed; a container that does
nothing can only make it faster. `flowcorr` reads the host once, in `metrics.compute()`, which is included.
Both take turns, and the fastest repeat counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch

from flowcorr.correction import compute_rollout_correction_and_rejection_mask

SHAPES = ((512, 2), (4096, 10), (65536, 10))
THRESHOLDS = {
    "rollout_is": "sequence",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.999_1.001",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    verl = load_verl_helper()
    print("| shape | flowcorr | verl | verl / flowcorr |\n|---|---|---|---|")
    for samples, steps in SHAPES:
        generator = torch.Generator().manual_seed(0)
        rollout = torch.randn(samples, steps, generator=generator)
        target = rollout + 3e-4 * torch.randn(samples, steps, generator=generator)
        mask = torch.ones(samples, steps)
        contenders = {"flowcorr": lambda t=target, r=rollout: ours(t, r)}
        if verl is not None:
            contenders["verl"] = lambda t=target, r=rollout, m=mask: verl(t, r, m, **THRESHOLDS)
        best = fastest(contenders, arguments.repeats, calls=max(1, 20480 // samples))
        row = [f"{best['flowcorr'] * 1e3:.3f} ms", "not installed", ""]
        if verl is not None:
            row[1:3] = [f"{best['verl'] * 1e3:.3f} ms", f"{best['verl'] / best['flowcorr']:.1f}x"]
        print(f"| ({samples}, {steps}) | " + " | ".join(row) + " |", flush=True)


def ours(target: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    return compute_rollout_correction_and_rejection_mask(target, rollout, **THRESHOLDS).metrics.compute()


def fastest(contenders: dict[str, Callable[[], object]], repeats: int, calls: int) -> dict[str, float]:
    """Seconds a call of each contender in its fastest repeat; the contenders alternate."""
    for call in contenders.values():
        call()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
    return best


def load_verl_helper() -> Callable[..., object] | None:
    """verl's function of the same name, or None where verl is not installed."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    for name in (
        "verl",
        "verl.utils",
        "verl.trainer",
        "verl.trainer.config",
        "verl.workers",
        "verl.workers.config",
    ):
        sys.modules[name] = types.ModuleType(name)
    _stub(
        "verl.protocol", DataProto=type("DataProto", (), {"from_dict": staticmethod(lambda tensors: tensors)})
    )
    _stub("verl.trainer.config.algorithm", RolloutCorrectionConfig=dict)
    _stub("verl.workers.config.actor", PolicyLossConfig=dict)
    sums = re.search(
        r"def masked_sum.*?(?=\ndef masked_var)",
        (root / "utils" / "torch_functional.py").read_text(),
        re.DOTALL,
    )
    assert sums is not None, "verl's masked sums have moved; this benchmark knows verl 0.9"
    functional = _stub("verl.utils.torch_functional", torch=torch)
    exec(sums.group(), functional.__dict__)
    sys.modules["verl.utils"].torch_functional = functional
    helper = importlib.util.spec_from_file_location(
        "helper", root / "trainer" / "ppo" / "rollout_corr_helper.py"
    )
    assert helper is not None
    assert helper.loader is not None
    module = importlib.util.module_from_spec(helper)
    helper.loader.exec_module(module)
    return module.compute_rollout_correction_and_rejection_mask


def _stub(name: str, **values: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
    return module


if __name__ == "__main__":
    main()
