"""Draw a recorded run of two lanes as an animation for the head of the README: every token appears at the moment of its
lane's own clock at which it was committed, in slow motion.

    python tools/draw_animation.py [--trace assets/traces/first_view.jsonl] [--out docs/decoding.svg]

Needed again when the trace is recorded again. An image viewer that does not animate shows the finished texts.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from playground.events import Header  # noqa: E402
from playground.trace import Trace  # noqa: E402
from playground.trace.result import Result  # noqa: E402
from playground.trace.transcript import Token, Written, sequences  # noqa: E402

SECONDS, REST = 14.0, 4.0  # of the slower lane's text, and until the animation begins again
WIDTH, COLUMN, MARGIN, TOP, LINE = 920, 450, 24, 84, 20  # pixels
LETTERS = 48  # in a line of a lane
COLOURS = ((0.5, "#5b6472"), (1.5, "#8a5a00"), (float("inf"), "#c2410c"))  # of entropies below so many nats
STYLE = (
    "text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}.h{font:600 16px system-ui,sans-serif;"
    "fill:#1d2333}.s{font:12.5px system-ui,sans-serif;fill:#4a5268}.d{text-decoration:underline}"
)


def drawing(trace: Trace) -> str:
    """The animation as SVG. `loop` is its clock: a token is hidden for so long from every beginning of it."""
    slowness = SECONDS / max(stamped.at for stamped in trace.events)
    lanes = [lane for header in trace.headers for lane in _lane(trace, header, slowness)]
    height = TOP + LINE * max(len(_lines(_written(trace, header))) for header in trace.headers) + 40
    prompt = escape(trace.headers[0].prompt)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{len(trace.headers)} lanes decode one prompt</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fdfcf9" stroke="#ddd8cc">'
        f'<animate id="loop" attributeName="x" values="0" begin="0s;loop.end" dur="{SECONDS + REST:g}s"/></rect>',
        f'<text class="s" x="{MARGIN}" y="30">“{prompt}” A recorded run, {slowness:.0f} times slower. Warmer: higher '
        "entropy. Underlined: guessed by the draft model and accepted.</text>",
        *lanes,
        "</svg>",
    ]) + "\n"


def _lane(trace: Trace, header: Header, slowness: float) -> Iterator[str]:
    """The title of a lane, its lines, and at its end what it cost."""
    events = trace.lane(header.lane).events
    result, left = Result(trace.lane(header.lane)), MARGIN + header.lane * COLUMN
    committed = {stamped.seq: stamped.at * slowness for stamped in events}
    written = _written(trace, header)
    yield f'<text class="h" x="{left}" y="{TOP - 26}">{escape(header.title)}</text>'
    place = 0
    for number, line in enumerate(_lines(written)):
        spans = []
        for token, piece in line:
            step = written.steps.get(place)
            spans.append(_span(token, piece, step.entropy if step else 0.0, committed[token.seq]))
            place += 1
        yield f'<text x="{left}" y="{TOP + LINE * number}">{"".join(spans)}</text>'
    said = f"{len(written.tokens)} tokens, {result.metrics['target_forwards']} forwards of the target after the prompt"
    at = events[-1].at * slowness
    yield f'<text class="s" x="{left}" y="{TOP + LINE * len(_lines(written)) + 12}">{said}{_hidden(at)}</text>'


def _written(trace: Trace, header: Header) -> Written:
    return sequences(trace.lane(header.lane).events)[0]


def _lines(written: Written) -> list[list[tuple[Token, str]]]:
    """The tokens in lines, each with the text that is shown of it; a word is whole in one line. An end token is no part
    of the text.
    """
    ended = not written.text.endswith(written.tokens[-1].piece)
    lines: list[list[tuple[Token, str]]] = [[]]
    for token in written.tokens[:-1] if ended else written.tokens:
        piece = token.piece.replace("\n", " ")
        if sum(len(shown) for _, shown in lines[-1]) + len(piece) > LETTERS and piece.startswith(" "):
            lines.append([])
        lines[-1].append((token, piece if lines[-1] else piece.lstrip()))
    return lines


def _span(token: Token, piece: str, entropy: float, at: float) -> str:
    colour = next(colour for most, colour in COLOURS if entropy < most)
    drafted = ' class="d"' if token.origin == "draft" else ""
    return f'<tspan fill="{colour}"{drafted}>{escape(piece)}{_hidden(at)}</tspan>'


def _hidden(at: float) -> str:
    """Until `at` seconds after the beginning."""
    return f'<set attributeName="visibility" to="hidden" begin="loop.begin" dur="{max(at, 0.001):.3f}s"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT / "assets/traces/first_view.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/decoding.svg")
    given = parser.parse_args()
    given.out.write_text(drawing(Trace.load(given.trace)), encoding="utf-8")
    print(f"{given.out}: {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
