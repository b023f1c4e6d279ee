"""How to write the resolved configuration of what is not read."""

from pathlib import Path

import pytest

from flowcorr.translate.unresolved import of_python, of_script


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "python3 -m verl_omni.trainer.main_diffusion a=1",
            "bash run.sh --cfg job --resolve > resolved.yaml",
        ),
        ("ff-train examples/grpo/default.yaml", "translate its YAML, examples/grpo/default.yaml"),
        (
            "accelerate launch scripts/train_sd3.py --config config/grpo.py:pickscore_sd3",
            "run_path('config/grpo.py')['pickscore_sd3']().to_json_best_effort())\" > pickscore_sd3.json",
        ),
        (
            "torchrun fastvideo/train_grpo_flux.py",
            "it starts no trainer whose configuration flowcorr translates",
        ),
        ("# python3 -m verl_omni.trainer.main_diffusion", "it starts no trainer"),
    ],
)
def test_a_script(text, message):
    assert message in of_script(Path("run.sh"), text)


def test_a_python_file_names_its_configurations():
    text = "def one():\n    pass\n\ndef two():\n    pass\n\ndef get_config(name):\n    pass\n"
    assert of_python(Path("a.py"), "", text).endswith("> NAME.json; NAME is one of one, two")
    assert of_python(Path("a.py"), "two", text).endswith("> two.json")
    assert of_python(Path("a.py"), "three", text).endswith("> NAME.json; NAME is one of one, two")
