"""Where the time of a rollout and of an update goes, on the work of `beside_peers.py`.

    python tests/benchmarks/step_profile.py [key=value ...]

One rollout and one update each at long and at short prompts, after one that warms up, under torch's profiler: shares of
the time in operations by kind, and the operations that take most. Time outside operations is Python's and torch's own;
the profiler makes it longer than it is. Then the arithmetic of products and attention by the CPU time without the
profiler, beside that of one large product on the same number of threads. And how much of an update is the transformer's
forward and backward pass, which every trainer has to compute.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "examples/tiny_ocr")]

from tests.benchmarks.beside_peers import SETTINGS, write_work  # noqa: E402
from tests.benchmarks.peer_loops import Setting, overrides_of  # noqa: E402

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "mkldnn_linear", "convolution", "conv"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "copies": ("copy_", "cat", "clone", "fill_", "zero_", "index", "contiguous"),
}
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(
        *shapes[:3]
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: (
        sdpa_backward_flop_count(*shapes[:4])
    ),
}
"""What torch's counter lacks."""


def kind_of(operation: str) -> str:
    """By the operation's name; what is none of `KINDS` is element-wise work or a reduction."""
    name = operation.removeprefix("aten::")
    for kind in ("attention", "matrix products", "copies"):
        if any(name == word or (len(word) > 4 and word in name) for word in KINDS[kind]):
            return kind
    return "element-wise and reductions"


def shares(run, name: str) -> None:
    """Print the shares of one call."""
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    total = time.perf_counter() - begin
    spent: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            spent[kind_of(event.key)] += event.self_cpu_time_total / 1e6
            most[event.key.removeprefix("aten::")] += event.self_cpu_time_total / 1e6
    inside = sum(spent.values())
    for label, counted in ((f"{name}, {inside:.1f} of {total:.1f} s in operations", spent), ("  most", most)):
        cells = (f"{kind} {seconds / inside:.0%}" for kind, seconds in counted.most_common(14))
        print(f"{label}: {', '.join(cells)}", flush=True)


def peak_product(size: int = 2048) -> float:
    """Floating point operations in a CPU second of a large float32 product."""
    matrix = torch.randn(size, size)
    return 2 * size**3 / min(cpu_seconds(lambda: matrix @ matrix) for _ in range(5))


def share_of_peak(run, peak: float) -> None:
    """Print the arithmetic of one call, and its speed beside `peak`."""
    seconds = min(cpu_seconds(run) for _ in range(3))
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        run()
    speed = counter.get_total_flops() / seconds
    print(
        f"  {seconds:.2f} s at {speed / 1e9:.0f} GFLOP/s, {speed / peak:.0%} of a large product's speed",
        flush=True,
    )


def share_of_transformer(transformer, update, repeats: int = 5) -> None:
    """Print how much of the CPU time of an update its passes take where the transformer runs them alone."""
    passes: list[dict] = []
    hook = transformer.register_forward_pre_hook(
        lambda _module, _args, inputs: passes.append(inputs), with_kwargs=True
    )
    update()
    hook.remove()

    def alone() -> None:
        for inputs in passes:
            transformer(**inputs)[0].sum().backward()
        transformer.zero_grad()

    whole, bare = (min(cpu_seconds(run) for _ in range(repeats)) for run in (update, alone))
    print(
        f"{len(passes)} passes of an update take {whole:.2f} s, in the transformer alone {bare:.2f} s",
        flush=True,
    )


def cpu_seconds(run) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def profile_setting(setting: Setting, overrides: Sequence[str]) -> None:
    from flowcorr import config
    from flowcorr.advantages import group_advantages
    from flowcorr.algorithm import apply_bypass_mode_to_diffusion_batch
    from flowcorr.records import ActorBatch
    from flowcorr.trainer.setup import build_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_work(setting, folder)
        run, _ = build_run(config.load("tiny_jpeg_lora", [*overrides_of(setting, folder), *overrides]))
    run.engine.sync(run.actor.weights.snapshot())
    drawn = run.prompts.next(run.config.rollout.prompts_per_step)
    conditioning = run.cache(drawn)

    def sample():
        return run.engine.sample(conditioning, range(len(drawn)), training_step=1, with_means=False)

    rollout = sample()
    rewards = torch.randn(rollout.num_samples, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(rewards, rollout.group_ids)
    batch = apply_bypass_mode_to_diffusion_batch(ActorBatch(rollout=rollout, advantages=advantages))

    def update():
        run.actor.update(batch, run.mode.correction, training_step=1).metrics.compute()

    update()
    print(f"{setting.tokens} tokens, {setting.window} trained steps")
    peak = peak_product()
    for name, phase in (("rollout", sample), ("update", update)):
        shares(phase, name)
        share_of_peak(phase, peak)
    share_of_transformer(run.actor.weights.transformer, update)


if __name__ == "__main__":
    for place in (0, 6):
        profile_setting(SETTINGS[place], sys.argv[1:])
