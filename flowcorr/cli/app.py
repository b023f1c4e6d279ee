"""Arguments, help and exit codes of `flowcorr`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO

import flowcorr
from flowcorr.cli import commands
from flowcorr.cli import plan as planning
from flowcorr.errors import ConfigError, FlowcorrError, printable, unknown_choice

EXIT_FAILED, EXIT_USAGE, EXIT_SIGNAL = 1, 2, 128

_FIRST_DAY = """\
flowcorr train tiny_ocr_lora             train an embedded model on this machine
flowcorr report runs/tiny_ocr_lora       see what it learned, and what to mend
flowcorr audit tiny_ocr_lora             measure the rollout gap, and get the lines that correct it

flowcorr --help lists all commands."""
_TRAIN = """\
Train a model with FlowGRPO. RECIPE is a YAML file, or the name of a recipe that ships with flowcorr.
dotted.key=value overrides a key of the recipe; the value is YAML. `flowcorr config RECIPE` prints all keys.

examples:
  flowcorr train tiny_ocr_lora
  flowcorr train tiny_ocr_lora trainer.seed=1 trainer.total_steps=50 --out runs/seed1
  flowcorr train tiny_ocr_lora algorithm.rollout_correction.preset=bypass_ppo_clip --out runs/bypass
  flowcorr train tiny_ocr_lora algorithm.rollout_correction=null --out runs/uncorrected
  flowcorr train runs/seed1/config.yaml --resume
  torchrun --nproc_per_node 2 -m flowcorr train tiny_ocr_lora        on two ranks

The run's folder gets config.yaml, metrics.jsonl, checkpoints/ and images/. Ctrl-C finishes the step, saves and
prints the command that resumes; another Ctrl-C, 2 seconds later or more, stops at once. A closed terminal and a
scheduler's SIGTERM or SIGUSR1 end a run like the first Ctrl-C.

exit codes: 0 finished, 1 failed, 2 bad configuration, 128 + signal interrupted and saved, trainer.requeue after SIGUSR1
"""
_RECIPES = """\
recipes for the embedded model:
  tiny_ocr_lora  tiny_ocr_lora_bypass  tiny_ocr_lora_grpo_guard  tiny_jpeg_lora
for real models on GPUs; the header of each names its source, its engine and the memory it needs:
  sd35_medium_ocr_lora  sd35_medium_ocr_lora_bypass  sd35_medium_ocr_lora_12gb
  qwen_image_ocr_lora_rollout_corr  qwen_image_ocr_lora_decoupled
  qwen_image_ocr_grpo_guard_lora  qwen_image_ocr_lora_24gb  qwen_image_ocr_lora_2x32gb
  flux_dev_pickscore_lora  flux2_klein_pickscore_lora  z_image_pickscore_lora  ovis_image_ocr_lora
"""
_EVAL = """\
Score a run's checkpoint on its held-out prompts. This runs the rewards and the model family of the run's own, if it has
any; the log names their files before that.

examples:
  flowcorr eval runs/tiny_ocr_lora
  flowcorr eval runs/tiny_ocr_lora --checkpoint last data.num_heldout=512
"""
_DOCTOR = """\
Check whether the rollout engine and the training stack of a recipe agree, and if not, which part is wrong:
weights, LoRA, schedule, timesteps, latents, guidance, prompts, windows, noise, log-probs, images. A few prompts
are sampled and scored under weights that are changed by known amounts; nothing is trained or written.
The report ends with the noise floor: how far the log-probs differ at each step before any update.
flowcorr train runs these checks first, and stops if one fails, where the engine has processes or a model of its
own (trainer.doctor: auto); with trainer.doctor=true for every engine.

examples:
  flowcorr doctor tiny_ocr_lora
  flowcorr doctor tiny_ocr_lora rollout.emulate=fp8 --prompts 8
  flowcorr doctor tiny_ocr_lora --json | jq '.findings[] | select(.level != "healthy")'
  flowcorr doctor my_dump --model stabilityai/stable-diffusion-3.5-medium

RECIPE may also be a folder that another trainer wrote with flowcorr.dump, with captured samples. They are replayed with
the training stack, which tells the part that differs and why, or that it cannot tell and what to capture too.

exit codes: 0 all checks passed; 1 a check warned, the cause cannot be told, or the engine could not be examined; 2 a
check failed, a cause is named, or bad configuration
"""
_AUDIT = """\
Measure the gap between the log-probs of a recipe's rollout engine and training stack, and recommend a correction:
bypass or decoupled mode, clip range, weights and rejection, or none at all, with lines to paste.
A few rollout batches are sampled and their log-probs recomputed. No reward is computed. One training step on random
advantages is timed; with rollout.staleness=N, N such steps first make the engine's weights stale.

How to read it, where delta is the log-prob of the training stack minus that of the engine, per latent element:
  |delta| 99%    bypass needs a clip range of about 4 times this, or PPO clips noise
  joint nats     D times the exact KL of a trajectory's window; at x joint nats the effective sample size of exact
                 weights is at most exp(-2 x) of the batch
  ESS            effective sample size, as a share of the batch, of weights at scale mean, sqrt or sum. At scale mean
                 it is near 1 whatever the gap, because these weights stay near 1
  rejected       the share of terms that each preset rejects; 0 may mean that its band is too wide to act
  cosine         between a preset's coefficients d loss / d log_prob and those without weights and rejection, mean and
                 lowest over training steps. At 1 it only changes the length of the gradient, which Adam ignores
  norm           that length, as a multiple of the uncorrected one
  changed        terms whose coefficient changes its sign, becomes 0, or is no longer 0

examples:
  flowcorr audit tiny_ocr_lora
  flowcorr audit tiny_ocr_lora rollout.emulate=int4 --out runs/audit_int4
  flowcorr audit tiny_ocr_lora rollout.staleness=4 --batches 4
  flowcorr audit tiny_ocr_lora --json | jq -r '.findings[0].keys'
  flowcorr audit runs/int4 --scales sqrt,sum                # trained with trainer.dump_log_probs=true

RECIPE may also be the folder of a run, or of steps that any trainer wrote with flowcorr.dump. Then no model is loaded,
nothing is timed, and presets are replayed on these steps: the table shows their effect there, not how a run with them
would have gone on. A run in bypass mode has no old log-probs for decoupled presets. Of a recipe, advantages are random.
DIR gets audit.json, audit.html (a self-contained page) and its charts as PNG.
If engine and training stack disagree by more than rounding, flowcorr doctor says which part is wrong.

exit codes: 0 audited, whatever the advice; 1 failed; 2 bad configuration
"""
_REPORT = """\
Write one HTML page about runs, without scripts: findings with the number, its limit and a remedy; curves with healthy
ranges; drift by timestep; time; images; and the settings in which the runs differ. Runs that differ only by seed are
one curve, with a band from the smallest to the largest value. The same health rules warn during training, once each.
With trainer.dump_log_probs=true, histograms show the ratios in their clip range and the rollout mismatch by step.
A run may also be a folder that another trainer wrote with flowcorr.dump; notes say which further fields would help.

examples:
  flowcorr report runs/tiny_ocr_lora
  flowcorr report runs/tiny_ocr_lora --out shared/    # report.html, and report_charts/*.png
  flowcorr report runs/seed0 runs/seed1 runs/seed2 --out seeds.html
  flowcorr report runs/bypass runs/decoupled --out compare.html
"""
_CONFIG = """\
Print the whole configuration of a recipe as YAML, with defaults and overrides, and check it.

examples:
  flowcorr config tiny_ocr_lora
  flowcorr config tiny_ocr_lora actor.lr=1e-4 > my_recipe.yaml
"""
_TRANSLATE = """\
Translate the configuration of another trainer into a recipe and print it. The other tool resolves its configuration;
this one reads what it wrote, executes nothing, and reads no variable of your environment. Comments name the source of
each line, the keys that are not carried over and may change learning, sampling or rewards, and differences in the
maths. An error says why flowcorr cannot run a configuration. Overrides are in the other trainer's keys; one from which
no line of the recipe follows is a warning.

  verl-omni      what Hydra prints: bash run.sh --cfg job --resolve > resolved.yaml, also with other output around it;
                 or the config.yaml that Hydra saves with a run, under .hydra
  flow_grpo      its configuration as JSON, which one line writes: flowcorr translate config/grpo.py:NAME shows it
  Flow-Factory   its YAML file
  W&B            the config.yaml of a run of one of them, under wandb/

examples:
  flowcorr translate resolved.yaml > my_recipe.yaml && flowcorr config my_recipe.yaml
  flowcorr translate outputs/.hydra/config.yaml actor_rollout_ref.rollout.n=8 --all
  flowcorr translate general_ocr_sd3.json --gpus 8
"""
_EXPLAIN = """\
Explain what the tools print: a metric, a configuration key, a preset, a check or cause of the doctor, a leg of a
replay, a finding, a rejection mode, or a word such as ESS, joint nats, delta or bypass. Each with its unit, when to
worry, and what to do then. A name with spaces needs quotes.

examples:
  flowcorr explain k3_kl clip_noise_fraction
  flowcorr explain ESS "joint nats" delta
  flowcorr explain lora wrong_prompt      a check of flowcorr doctor, and a cause that it names
  flowcorr explain actor.clip_ratio
  flowcorr explain decoupled_seq_is
  flowcorr explain gap clipped            labels that flowcorr train prints after each step
"""
_PRESETS = """\
List the presets of rollout correction.

One key chooses a preset. On the command line it replaces the recipe's whole section rollout_correction. Thresholds
given with it override the preset's own:
  flowcorr train tiny_ocr_lora algorithm.rollout_correction.preset=decoupled_seq_is
  flowcorr train tiny_ocr_lora algorithm.rollout_correction.preset=decoupled_seq_is \\
      algorithm.rollout_correction.rollout_is_threshold=3.0

Rejection modes (rollout_rs) and their rollout_rs_threshold, in the unit of log_ratio_scale:
  token_k1 seq_sum_k1 seq_mean_k1   a band of ratios exp(delta) of steps or samples, such as 0.999_1.001
  token_ seq_sum_ seq_mean_ seq_max_, each with k2 or k3
                                    an upper bound of delta^2 / 2 or exp(delta) - 1 - delta, of steps or samples
  step_kl seq_kl                    an upper bound of the exact KL, of steps or samples
  step_z                            robust standard deviations from the median of a step index, such as 6 (decoupled)
In decoupled mode, the threshold auto is measured on each batch.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(_FIRST_DAY)
        return EXIT_USAGE
    parser = build_parser()
    if not words[0].startswith("-") and words[0] not in parser.commands:
        parser.error(unknown_choice("COMMAND", words[0], parser.commands))
    arguments, rest = parser.parse_known_args(words)
    _take_late_overrides(parser, arguments, rest)
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")  # hides their advice about optional packages
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # the same
    rank = int(os.environ.get("RANK", "0"))  # only rank 0 logs warnings
    level = logging.ERROR if rank else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    for name in ("flowcorr.rollout", "flowcorr.workers"):  # a large engine loads for minutes
        logging.getLogger(name).setLevel(logging.ERROR if rank else logging.INFO)
    with warnings.catch_warnings():
        warnings.showwarning = _show_no_warning if rank else _show_warning
        try:
            return arguments.command(arguments)
        except FlowcorrError as error:
            print(f"flowcorr: error{f' on rank {rank}' if rank else ''}: {_shown(error)}", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
        except BrokenPipeError:
            # The reader of the pipe, such as `head`, has exited: print nothing more, not even at interpreter exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_SIGNAL + 2


class Parser(argparse.ArgumentParser):
    """A parser that tells the names of its commands."""

    commands: Collection[str] = ()


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="flowcorr",
        description="FlowGRPO training for flow-matching models, with rollout correction.\n\n"
        "start here:\n  flowcorr train tiny_ocr_lora",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flowcorr {flowcorr.__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = _add(subparsers, "train", "train by a recipe", f"{_TRAIN}\n{_RECIPES}", commands.train)
    _add_recipe(train)
    train.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/RECIPE)")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue from the folder's newest intact checkpoint, or start if it holds no run; RECIPE may be the "
        "config.yaml of a run, whose folder is then the default of --out",
    )

    evaluate = _add(subparsers, "eval", "score a checkpoint on held-out prompts", _EVAL, commands.evaluate)
    evaluate.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    evaluate.add_argument("--checkpoint", default="best", metavar="best|last|PATH", help="default: best")
    _add_overrides(evaluate)

    doctor = _add(
        subparsers,
        "doctor",
        "check whether engine and trainer agree, and name the part that is wrong",
        _DOCTOR,
        commands.doctor,
    )
    _add_recipe(doctor, "a YAML file, the name of a shipped recipe, or a folder of dumped steps")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    doctor.add_argument(
        "--model",
        metavar="PATH|RECIPE",
        help="of a dump: the pipeline that replays its samples, or a recipe with it",
    )
    doctor.add_argument("--prompts", type=int, metavar="N", help="prompts to sample (default: 3)")
    doctor.add_argument(
        "--float32",
        action=argparse.BooleanOptionalAction,
        help="examine both stacks in float32 first, so that rounding hides no fault (default: if memory allows)",
    )

    audit = _add(
        subparsers, "audit", "measure the rollout gap and advise on its correction", _AUDIT, commands.audit
    )
    _add_recipe(audit, "a YAML file, the name of a shipped recipe, or a folder of dumped steps")
    audit.add_argument("--batches", type=int, metavar="N", help="rollout batches of a recipe (default: 2)")
    audit.add_argument(
        "--out",
        metavar="DIR",
        help="the folder to write (default: runs/RECIPE_audit, or the folder of dumped steps)",
    )
    audit.add_argument(
        "--scales",
        metavar="SCALE,SCALE",
        help="more scales to replay besides each preset's own: mean, sqrt, sum or a number",
    )
    audit.add_argument("--json", action="store_true", help="print audit.json, and nothing else")
    _add_imports(audit)

    plan = _add(
        subparsers, "plan", "predict memory and time of a run, without a GPU", planning.HELP, planning.plan
    )
    _add_recipe(plan)
    planning.add_arguments(plan)

    report = _add(subparsers, "report", "write one page about runs, with findings", _REPORT, commands.report)
    report.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the folder of a run")
    report.add_argument(
        "--out",
        metavar="FILE|DIR",
        help="the .html file to write (default: report.html in the first RUN_DIR), or a folder for it and its charts",
    )
    report.add_argument("--png", action="store_true", help="write the charts as PNG files beside the page")
    _add_imports(report)

    _add_recipe(
        _add(
            subparsers,
            "config",
            "print the whole configuration of a recipe",
            f"{_CONFIG}\n{_RECIPES}",
            commands.config,
        )
    )
    translating = _add(
        subparsers,
        "translate",
        "translate a configuration of verl-omni, flow_grpo or Flow-Factory into a recipe",
        _TRANSLATE,
        commands.translate,
    )
    translating.add_argument("source", metavar="SOURCE", help="a resolved configuration, as YAML or JSON")
    translating.add_argument("--gpus", type=int, metavar="N", help="number of GPUs of a flow_grpo run")
    translating.add_argument(
        "--all",
        action="store_true",
        help="list all keys that are not carried over, also those that change nothing",
    )
    _add_overrides(translating)
    _add(subparsers, "presets", "list the presets of rollout correction", _PRESETS, commands.presets)
    explaining = _add(
        subparsers,
        "explain",
        "explain a metric, a key, a preset, a finding or a word of the tools",
        _EXPLAIN,
        commands.explain,
    )
    explaining.add_argument("names", nargs="+", metavar="NAME", help="a name or word that a tool prints")
    parser.commands = list(subparsers.choices)
    return parser


def _add(
    subparsers: argparse._SubParsersAction, name: str, summary: str, text: str, command: commands.Command
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=command)
    return parser


def _add_recipe(
    parser: argparse.ArgumentParser, text: str = "a YAML file, or the name of a shipped recipe"
) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=text)
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes to the configuration"
    )


def _add_imports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-import",
        action="append",
        default=[],
        metavar="NAME",
        help="import this package.module:name, a loss, rejection mode or engine of the run's own; without it, reading "
        "a run runs no code of it",
    )


def _take_late_overrides(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str]
) -> None:
    """Accept `key=value` after an option too, where argparse no longer expects positionals."""
    unknown = [text for text in rest if text.startswith("-") or "=" not in text]
    if unknown or (rest and not hasattr(arguments, "overrides")):
        hint = _override_of(rest) if hasattr(arguments, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]


def _override_of(words: Sequence[str]) -> str:
    """The override that the first words may mean, `--trainer.seed=1` or `--steps 3`; empty where it is none."""
    from flowcorr.config import load_mapping, to_mapping

    name, _, value = (words[0] if "=" in words[0] else "=".join(words[:2])).lstrip("-").partition("=")
    is_number = value[:1].isdecimal()
    found = []
    for key, default in _keys(to_mapping(load_mapping({"algorithm": {"rollout_correction": {}}}))):
        last = key.rpartition(".")[2]
        if name and (name == key or name in last):
            other_kind = isinstance(default, int | float) is not is_number
            found.append((name not in (key, last), other_kind, len(last), key))
    return f" (did you mean {min(found)[-1]}={value or 'true'}?)" if found else ""


def _keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of all values, and these."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"flowcorr: warning: {_shown(message)}", file=sys.stderr)


def _shown(message: object) -> str:
    return "\n".join(map(printable, str(message).split("\n")))


def _show_no_warning(*_: object, **__: object) -> None:
    """Print nothing: the main rank prints the warning."""
