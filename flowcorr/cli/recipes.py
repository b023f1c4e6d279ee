"""The commands that print recipes, translations, presets and explanations; without torch, except for a user's code."""

from __future__ import annotations

import argparse
import json
import warnings

from flowcorr.cli.command import OVERRIDES, RECIPES, Argument, Command, find_own_code
from flowcorr.errors import ConfigError


def config(arguments: argparse.Namespace) -> int:
    """Print the whole configuration of a recipe.

    Print the whole configuration of a recipe as YAML, with defaults and overrides, and check it. --schema prints the
    JSON schema of recipes instead, by which an editor completes keys, explains them and marks mistakes: a recipe that
    begins with `# yaml-language-server: $schema=recipe.json` is read by it.

    Examples:
      flowcorr config tiny_ocr_lora
      flowcorr config tiny_ocr_lora actor.lr=1e-4 > my_recipe.yaml
      flowcorr config --schema > recipe.json
    """
    if arguments.schema == (arguments.recipe is not None):
        raise ConfigError("`flowcorr config` takes a recipe, or `--schema` and no recipe")
    if arguments.schema:
        from flowcorr.instruments.reference.schema import recipe_schema

        print(json.dumps(recipe_schema(), indent=1))
        return 0
    from flowcorr.config import load, to_yaml
    from flowcorr.instruments.plan.preflight import check_prompts, check_settings

    find_own_code()
    config = load(arguments.recipe, arguments.overrides)
    check_settings(config)
    try:
        check_prompts(config)
    except ConfigError as error:
        warnings.warn(f"flowcorr train would stop here: {error}", UserWarning, stacklevel=2)
    print(to_yaml(config), end="")
    return 0


def translate(arguments: argparse.Namespace) -> int:
    """Translate a configuration of verl-omni, flow_grpo or Flow-Factory into a recipe.

    Translate the configuration of another trainer into a recipe and print it. The other tool resolves its
    configuration; this one reads what it wrote, executes nothing, and reads no variable of your environment. Comments
    name the source of each line, the keys that are not carried over and may change learning, sampling or rewards, and
    differences in the maths. An error says why flowcorr cannot run a configuration. Overrides are in the other
    trainer's keys; one from which no line of the recipe follows is a warning.

      verl-omni      what Hydra prints: bash run.sh --cfg job --resolve > resolved.yaml, also with other output around
                     it; or the config.yaml that Hydra saves with a run, under .hydra
      flow_grpo      its configuration as JSON, which one line writes: flowcorr translate config/grpo.py:NAME shows it
      Flow-Factory   its YAML file
      W&B            the config.yaml of a run of one of them, under wandb/

    Examples:
      flowcorr translate resolved.yaml > my_recipe.yaml && flowcorr config my_recipe.yaml
      flowcorr translate outputs/.hydra/config.yaml actor_rollout_ref.rollout.n=8 --all
      flowcorr translate general_ocr_sd3.json --gpus 8
    """
    from flowcorr.config.load import load_text
    from flowcorr.instruments.plan.preflight import check_settings
    from flowcorr.translate import translate as translated

    text = translated(arguments.source, arguments.overrides, gpus=arguments.gpus, all_keys=arguments.all)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `flowcorr train` says them
        check_settings(load_text(text))
    print(text, end="")
    return 0


def presets(_: argparse.Namespace) -> int:
    r"""List the presets of rollout correction.

    List the presets of rollout correction.

    One key chooses a preset. On the command line it replaces the recipe's whole section rollout_correction. Thresholds
    given with it override the preset's own:
      flowcorr train tiny_ocr_lora algorithm.rollout_correction.preset=decoupled_seq_is
      flowcorr train tiny_ocr_lora algorithm.rollout_correction.preset=decoupled_seq_is \
          algorithm.rollout_correction.rollout_is_threshold=3.0

    Rejection modes (rollout_rs) and their rollout_rs_threshold, in the unit of log_ratio_scale:
      token_k1 seq_sum_k1 seq_mean_k1   a band of ratios exp(delta) of steps or samples, such as 0.999_1.001
      token_ seq_sum_ seq_mean_ seq_max_, each with k2 or k3
                                        an upper bound of delta^2 / 2 or exp(delta) - 1 - delta, of steps or samples
      step_kl seq_kl                    an upper bound of the exact KL, of steps or samples
      step_z                            robust standard deviations from the median of a step index, such as 6
    In decoupled mode, the threshold auto is measured on each batch.
    """
    from flowcorr.instruments.reference.presets import show_presets

    show_presets()
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Explain a metric, a key, a preset, a finding or a word of the tools.

    Explain what the tools print: a metric, a configuration key, a preset, a check or cause of the doctor, a leg of a
    replay, a finding, a rejection mode, or a word such as ESS, joint nats, clip range or bypass. Each with its unit,
    when to worry, and what to do then. A name with spaces needs quotes. A class or function that code of your own fills
    in, such as Loss or Engine, is listed with its fields. A metric, mode or other code of your own is named after its
    module, which is imported; a metric also by the name that tools print.

    Examples:
      flowcorr explain k3_kl clip_noise_fraction
      flowcorr explain ESS "joint nats" delta
      flowcorr explain lora wrong_prompt      a check of flowcorr doctor, and a cause that it names
      flowcorr explain actor.clip_ratio
      flowcorr explain decoupled_seq_is
      flowcorr explain gap clipped            as flowcorr train prints them after each step
      flowcorr explain my_rows:GAP_OF_FACES   a metric of your own, or my_rows:NAME as a tool prints it
      flowcorr explain --all > all.md         every name, as Markdown tables to search in
    """
    from flowcorr.instruments.reference.explain import explanation
    from flowcorr.instruments.reference.tables import everything

    if arguments.all == bool(arguments.names):
        raise ConfigError("`flowcorr explain` takes names, or `--all` and no names")
    if arguments.all:
        print(everything())
        return 0
    find_own_code()
    unknown: list[str] = []
    for place, name in enumerate(arguments.names):
        try:
            text = explanation(name)
        except ConfigError as error:
            unknown.append(str(error))
            continue
        print(f"\n{text}" if place > len(unknown) else text)
    if unknown:
        raise ConfigError("; ".join(unknown))
    return 0


COMMANDS = (
    Command(
        name="config",
        run=config,
        arguments=(
            Argument(
                "recipe", nargs="?", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe"
            ),
            OVERRIDES,
            Argument("--schema", action="store_true", help="print the JSON schema of recipes"),
        ),
        epilog=RECIPES,
    ),
    Command(
        name="translate",
        run=translate,
        arguments=(
            Argument("source", metavar="SOURCE", help="a resolved configuration, as YAML or JSON"),
            Argument("--gpus", type=int, metavar="N", help="number of GPUs of a flow_grpo run"),
            Argument(
                "--all",
                action="store_true",
                help="list all keys that are not carried over, also those that change nothing",
            ),
            Argument(
                "overrides",
                nargs="*",
                default=[],
                metavar="its.key=value",
                help="changes to the other trainer's configuration",
            ),
        ),
    ),
    Command(name="presets", run=presets),
    Command(
        name="explain",
        run=explain,
        arguments=(
            Argument("names", nargs="*", metavar="NAME", help="a name or word that a tool prints"),
            Argument("--all", action="store_true", help="print every name, as Markdown tables"),
        ),
    ),
)
