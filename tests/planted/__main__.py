"""Plant known faults in an engine in process of a recipe's precision, and print which check names each.

    python -m tests.planted tiny_ocr_lora                                  # a table, in some minutes
    python -m tests.planted tiny_ocr_lora sampling.guidance_scale=4 --fault adapter_scaled=0.5    # one report
    python -m tests.planted tiny_ocr_lora --fault adapter_scaled --svg verdict.svg                # and its picture

The table has the check that names a fault, or the rule that speaks at the first training step, the smallest size that
was named and the next one that was not.
"""

import argparse
from functools import partial

from rich.console import Console

from flowcorr import config
from flowcorr.errors import FlowcorrError
from flowcorr.instruments import page
from flowcorr.instruments.doctor.examination import NUM_PROMPTS
from flowcorr.instruments.terminal import printing_on, show_table
from tests.planted.fault import Fault, parse_fault
from tests.planted.stand_in import Bench, Drilled, drill
from tests.planted.table import FAULTS

COLUMNS = ("fault", "size", "named by", "smallest named", "not named", "stands for")


def show_fault(bench: Bench, fault: Fault, size: float, console: Console) -> None:
    """The doctor's report on an engine with one fault, and the checks that name it."""
    report = bench.report(fault.plant(size))
    page.show(report, console=console)
    warned = [f"{check} warns" for check in report.causes("warning")]
    named = ", ".join([f"{check} fails" for check in report.causes()] + warned)
    console.print(f"planted: {fault.name}, {fault.stands_for}; {named or 'no check sees it'}", markup=False)


def show_drill(bench: Bench, console: Console) -> None:
    """Plant each fault in turn."""
    rows = []
    for drilled in drill(bench):
        console.print(f"{drilled.fault.name}: {drilled.named_by or 'not named'}", markup=False)
        rows.append(cells(drilled))
    show_table(console, COLUMNS, rows, words=2, prose=True)
    seen = sum(bool(named_by) for _, _, named_by, *_ in rows)
    console.print(f"{seen} of {len(rows)} planted faults are named", markup=False)


def cells(drilled: Drilled) -> tuple[str, ...]:
    fault, number = drilled.fault, lambda value: "" if value is None else f"{value:.3g}"
    sizes = number(drilled.smallest), number(drilled.unseen)
    return fault.name, number(fault.size), drilled.named_by, *sizes, fault.stands_for


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument(
        "--fault",
        metavar="NAME[=SIZE]",
        type=partial(parse_fault, FAULTS),
        help="this one, with its report (default: all)",
    )
    parser.add_argument("--svg", metavar="FILE", help="save what the terminal shows as a picture")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--float32", action=argparse.BooleanOptionalAction, help="see flowcorr doctor")
    arguments = parser.parse_intermixed_args()
    try:
        loaded = config.load(arguments.recipe, arguments.overrides)
        if arguments.fault is not None and not arguments.fault[0].applies(loaded):
            parser.error(f"{arguments.fault[0].name} has nothing to change in this run")
        bench = Bench(loaded, num_prompts=arguments.prompts, float32=arguments.float32)
        picture = None
        if arguments.svg:
            picture = Console(record=True, force_terminal=True, width=118, highlight=False)
        with printing_on(picture) as console:
            if arguments.fault is None:
                show_drill(bench, console)
            else:
                show_fault(bench, *arguments.fault, console)
        if picture is not None:
            picture.save_svg(arguments.svg, title="flowcorr doctor")
    except FlowcorrError as error:
        parser.error(str(error))
