"""Draw signs, and ask for other words on them: edits that OCR and a similarity to the reference can score.

    python examples/sign_edits.py my_edits          # writes my_edits.jsonl, and its images in my_edits/

The wheel's own `sign_edits.jsonl`, which editing recipes train on, was written so, of the words of `ocr_prompts.jsonl`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from flowcorr.config import find_recipe
from flowcorr.texts import quoted

SIZE, NUM_SIGNS = 512, 24
SHAPES = ("rectangle", "rounded_rectangle", "ellipse")
WALLS = ("#b8c7d9", "#d9c7a8", "#8fae8b", "#c98f7a")
BOARDS = (("#fdf6e3", "#2b2b2b"), ("#1f4e79", "#ffffff"), ("#7a1f1f", "#ffe9b0"))


def words() -> list[str]:
    """The quoted words of the prompts that ship with flowcorr."""
    prompts = find_recipe("sd35_medium_ocr_lora").with_name("ocr_prompts.jsonl").read_text(encoding="utf-8")
    texts = [quoted(json.loads(line)["prompt"]) for line in prompts.splitlines()]
    return [text for text in texts if text is not None]


def draw_sign(text: str, number: int) -> Image.Image:
    """A board on a wall with `text` in its middle, in the shape and the colours of its number."""
    board, ink = BOARDS[number % len(BOARDS)]
    image = Image.new("RGB", (SIZE, SIZE), WALLS[number % len(WALLS)])
    pen = ImageDraw.Draw(image)
    shape = SHAPES[number // len(WALLS) % len(SHAPES)]
    frame = (16, SIZE // 4, SIZE - 16, 3 * SIZE // 4)
    if shape == "ellipse":
        pen.ellipse(frame, fill=board, outline=ink, width=6)
    else:
        pen.rounded_rectangle(frame, 40 * (shape == "rounded_rectangle"), fill=board, outline=ink, width=6)
    pen.text((SIZE // 2, SIZE // 2), text, ink, ImageFont.load_default(min(90, 700 // len(text))), "mm")
    return image


def write(folder: Path) -> None:
    """Write `<folder>.jsonl`, one edit for each text, and the signs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = words()
    for number in range(NUM_SIGNS):
        small = draw_sign(texts[-1 - number], number).quantize(32)
        small.save(folder / f"{number:02}.png", optimize=True)
    lines = [
        {
            "prompt": f'Change the text on the sign to "{text}"',
            "image": f"{folder.name}/{place % NUM_SIGNS:02}.png",
        }
        for place, text in enumerate(texts)
    ]
    folder.with_suffix(".jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
