"""The lines of `examples/dump_log_probs.py` for Flow-Factory, with a field more where a loop has it at hand."""

import os

import dump_log_probs


def capture_flow_factory(samples, trainer, dtype):
    """Of the example; `dtype` is that of its autocast."""
    return dump_log_probs.capture_flow_factory(samples, trainer, dtype)


def dump_flow_factory(folder, epoch, samples, current, fresh, trainer, replay, **more):
    """Of the example, with `old_rollout_kl` `[B, T]` where the loss reads step means."""
    plain = dump_log_probs.dump_and_watch

    def dump_and_watch(*args, **terms):
        return plain(*args, **terms, **more)

    dump_log_probs.dump_and_watch = dump_and_watch
    try:
        dump_log_probs.dump_flow_factory(folder, epoch, samples, current, fresh, trainer, replay)
    finally:
        dump_log_probs.dump_and_watch = plain
    if epoch + 1 >= int(os.environ["EPOCHS"]):  # old commits have no last epoch
        raise SystemExit
