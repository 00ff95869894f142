"""Draws docs/fly.svg: one generation of the embedded pair, each token coloured by why it is there.

python docs/picture.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from fly_jax import generate, load_pair
from fly_jax.evaluation.problems import built_in_problems
from fly_jax.verification.rules import Fly, Why

COLOURS = {
    Why.MATCHED: ("#1a7f37", "matched: draft and target agree"),
    Why.RESCUED: ("#bc4c00", "rescued: a mismatch that FLy keeps"),
    Why.CORRECTED: ("#cf222e", "corrected: the target's token instead"),
    Why.BONUS: ("#0969da", "bonus: after a block kept whole"),
}
PROMPT_COLOUR = "#57606a"
COLUMNS = 96
CHARACTER, LINE, MARGIN = 8.4, 24, 16


def _lines(pieces: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Pieces of (text, colour) broken into lines of at most COLUMNS characters."""
    lines: list[list[tuple[str, str]]] = [[]]
    for text, colour in pieces:
        for number, part in enumerate(text.split("\n")):
            width = sum(len(piece) for piece, _ in lines[-1])
            if number or width + len(part) > COLUMNS:
                lines.append([])
                part = part.lstrip()
            lines[-1].append((part, colour))
    return lines


def _svg(lines: Sequence[Sequence[tuple[str, str]]]) -> str:
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    rows = []
    for number, line in enumerate(lines, 1):
        spans = "".join(f'<tspan fill="{colour}">{escape(text)}</tspan>' for text, colour in line)
        at = f'x="{MARGIN}" y="{MARGIN + number * LINE - 8}"'
        rows.append(f'<text {at} xml:space="preserve">{spans}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">'
        f'<rect width="100%" height="100%" rx="8" fill="#f6f8fa"/>{"".join(rows)}</svg>\n'
    )


def main() -> None:
    """Decodes, and writes the picture of the text with the most rescues."""
    pair = load_pair()
    prompts = [problem.prompt for problem in built_in_problems()]
    # The one of the first few with the most rescues shows best what FLy does.
    found = generate(pair, prompts, rule=Fly(), protect=(), max_new_tokens=160)
    account, prompt = max(
        zip(found, prompts, strict=True), key=lambda both: both[0].num_rescued_tokens
    )
    texts = pair.tokenizer.piece_texts(account.token_ids)
    pieces = [(word, PROMPT_COLOUR) for word in re.findall(r"\s*\S+", prompt)]
    pieces += [
        (text, COLOURS[why][0])
        for text, why, token in zip(texts, account.why, account.token_ids, strict=True)
        if token not in pair.tokenizer.control_token_ids
    ]
    legend = [[(f"■ {meaning}", colour)] for colour, meaning in COLOURS.values()]
    summary = (
        f"{len(account.token_ids)} tokens in {account.num_rounds} target passes, "
        f"{account.num_rescued_tokens} mismatches rescued"
    )
    lines = [*_lines(pieces), [], *legend, [(summary, PROMPT_COLOUR)]]
    path = Path(__file__).parents[1] / "docs" / "fly.svg"
    path.write_text(_svg(lines), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
