"""What a run is saved as: drawings, and tables."""
from __future__ import annotations

import csv
import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from live_page import address, browser, choose, drawn, feed, page, seek, visitor  # noqa: F401
from playwright.sync_api import expect

from playground.events import Candidate, Commit, Done, Figure, Forward, Header, Rollback, Stamped, Step
from playground.trace import Trace
from playground.trace.csv_export import COLUMNS, to_csv
from support.live_runs import RUN
from support.live_sequences import BEAMS, filling, lane, run_of
from support.saved_runs import kept, save_as, saved, show

SVG = "{http://www.w3.org/2000/svg}"
BUNDLED = Path(__file__).parents[1] / "assets" / "traces" / "first_view.jsonl"


def picture(page, tmp_path, panel: str, kind: str) -> Path:
    page.wait_for_selector(f".panel-{panel} .panel-body svg, .panel-{panel} .panel-body canvas:visible")
    return saved(page, tmp_path, f".panel-{panel} .as-{kind}")


# --- drawings ---

CANVAS = run_of(lane(0, filling(), canvas=4))
MEASURED = run_of(
    lane(
        0,
        [(x / 10, Figure("scalar", "error", {"x": x, "series": {"held": x / 4}, "axis": "sample"})) for x in (1, 2, 3)],
    )
)


@pytest.mark.parametrize(
    "trace, lane, panel",
    [
        (RUN, 1, "entropy"),
        (RUN, 1, "tree"),
        (RUN, 1, "rounds"),
        (RUN, 1, "cache"),
        (RUN, 1, "cost"),
        (RUN, 0, "mask"),
        (BEAMS, 0, "branches"),
        (CANVAS, 0, "canvas"),
        (MEASURED, 0, "figures"),
    ],
)
def test_a_drawing_is_saved_as_svg_that_needs_nothing_of_the_page(page, feed, tmp_path, trace, lane, panel):
    run = show(page, feed, trace)
    if len(trace.headers) > 1:
        choose(page, lane)
    path = picture(page, tmp_path, panel, "svg")
    text = path.read_text()
    assert path.name.endswith(f"-{panel}.svg") and run not in path.name
    assert not re.search(r"var\(|color-mix|rgb\(| class=| style=| data-|href", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    drawing = ElementTree.fromstring(text)
    assert drawing.find(f"{SVG}title").text.endswith(f", lane {lane + 1}")
    header = trace.headers[lane]
    assert header.title in drawing.find(f"{SVG}desc").text and header.prompt in drawing.find(f"{SVG}desc").text
    assert all(
        re.fullmatch(r"none|#[0-9a-f]{6}|url\(#hatch-\d-\d\)", shape.get(name, "none"))
        for shape in drawing.iter()
        for name in ("fill", "stroke")
    )


def test_a_saved_drawing_has_the_colours_and_the_words_of_the_page(page, feed, tmp_path):
    show(page, feed)
    choose(page, 1)
    seek(page, 0.5)
    expect(page.locator(".panel-tree .which")).to_have_text("round 1 of 2")
    drawing = ElementTree.parse(picture(page, tmp_path, "tree", "svg")).getroot()
    fill = page.locator(".panel-tree .node.kept rect").first.evaluate("rect => getComputedStyle(rect).fill")
    kept = "#" + "".join(f"{int(level):02x}" for level in re.findall(r"\d+", fill)[:3])
    assert [box.get("fill") for box in drawing.iterfind(f".//{SVG}g[{SVG}title]/{SVG}rect")].count(kept) == 2
    words = ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]
    assert {" a", " x", " b", " y", " c", "accepted", "rejected"} <= set(words)


def test_a_drawing_is_saved_as_png_at_twice_its_size(page, feed, tmp_path):
    show(page, feed)
    choose(page, 1)
    drawing = ElementTree.parse(picture(page, tmp_path, "rounds", "svg")).getroot()
    head = picture(page, tmp_path, "rounds", "png").read_bytes()[:24]
    assert head[1:4] == b"PNG"
    assert struct.unpack(">II", head[16:]) == (2 * int(drawing.get("width")), 2 * int(drawing.get("height")))


def words_of(drawing) -> list[str]:
    return ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]


def test_a_painted_view_is_saved_as_shapes_and_text_not_as_pixels(page, feed, tmp_path):
    show(page, feed)
    choose(page, 1)
    for panel, word in (("cache", "position"), ("cost", "target")):
        drawing = ElementTree.parse(picture(page, tmp_path, panel, "svg")).getroot()
        assert not list(drawing.iter(f"{SVG}image"))
        assert word in words_of(drawing) and len(list(drawing.iter(f"{SVG}rect"))) > 10
        assert picture(page, tmp_path, panel, "png").read_bytes()[1:4] == b"PNG"


def test_saving_a_painted_view_leaves_the_page_as_it_was(page, feed, tmp_path):
    """Its pen is replaced while it is saved; the page's canvas is painted anew afterwards."""
    show(page, feed)
    choose(page, 1)
    picture(page, tmp_path, "cache", "png")
    canvas = page.locator(".panel-cache canvas:visible").first
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    assert canvas.evaluate("canvas => { canvas.width = canvas.width; return canvas.toDataURL(); }") != before
    picture(page, tmp_path, "cache", "png")
    page.wait_for_function(
        "([canvas, before]) => canvas.toDataURL() === before", arg=[canvas.element_handle(), before], timeout=5000
    )


def test_a_view_of_text_is_saved_as_the_page_writes_it(page, feed, tmp_path):
    show(page, feed)
    choose(page, 1)
    drawing = ElementTree.parse(saved(page, tmp_path, ".panel-difference .as-svg")).getroot()
    title, lanes = words_of(drawing)[:2]
    assert title == "Difference" and f"2 {RUN.headers[1].title}" in lanes
    shown = "".join(page.locator(".panel-difference .word-diff").inner_text().split())
    assert shown and shown in "".join("".join(words_of(drawing)).split())
    width, height = (float(drawing.get(side)) for side in ("width", "height"))
    lines = [text for text in drawing.iter(f"{SVG}text") if text.get("font-family")]
    assert all(0 <= float(text.get("x")) < width and float(text.get("y")) < height for text in lines)
    assert saved(page, tmp_path, ".panel-difference .as-png").read_bytes()[1:4] == b"PNG"


def test_a_view_that_has_nothing_yet_offers_no_picture(page, feed):
    show(page, feed)
    choose(page, 1)
    seek(page, 0)
    expect(page.locator(".panel-tree .as-svg")).to_be_hidden()


def test_a_saved_figure_names_the_view_the_lanes_the_prompt_and_its_axes(page, feed, tmp_path):
    show(page, feed)
    words = words_of(ElementTree.parse(picture(page, tmp_path, "entropy", "svg")).getroot())
    names = [f"{i + 1} {header.title}" for i, header in enumerate(RUN.headers[:2])]  # the third has no entropy
    assert words[0] == "Entropy per token"
    assert words[1] == " · ".join(names)
    assert RUN.headers[0].prompt in words[2]
    assert {"token", "nats"} <= set(words)
    assert not any(word.startswith("lane ") for word in words)


def test_every_view_of_a_run_is_saved_as_svg_and_png_under_its_title_with_all_its_lanes(page, feed, tmp_path):
    long = "A strategy whose name is much longer than there is room beside others"
    show(page, feed, replace(RUN, headers=[replace(header, title=f"{header.title}: {long}") for header in RUN.headers]))
    views = page.locator(".live .panel:has(.as-svg:visible)").evaluate_all(
        "all => all.map((one) => [one.className.match(/panel-(\\w+)/)[1], one.querySelector('h3').textContent])"
    )
    assert {"tree", "entropy", "rounds", "cache", "cost", "difference"} <= {name for name, _ in views}
    for name, title in views:
        page.locator(f".panel-{name}").scroll_into_view_if_needed()
        drawn(page)  # out of sight it was not
        words = words_of(ElementTree.parse(saved(page, tmp_path, f".panel-{name} .as-svg")).getroot())
        assert words[0] == title and long in " ".join(words[1:8]), name
        assert saved(page, tmp_path, f".panel-{name} .as-png").read_bytes()[1:4] == b"PNG", name


def test_the_key_of_a_saved_figure_has_the_samples_of_the_page(page, feed, tmp_path):
    """The dashes of "after processors" are the lane's colour, and the band between the curves is grey, not black."""
    show(page, feed)
    drawing = ElementTree.parse(picture(page, tmp_path, "entropy", "svg")).getroot()

    def sample(word: str) -> list[dict[str, str]]:
        entry = next(g for g in drawing.iter(f"{SVG}g") if [text.text for text in g.findall(f"{SVG}text")] == [word])
        return [rect.attrib for rect in entry.iter(f"{SVG}rect") if rect.get("fill") != "none"]
    colour = "key => getComputedStyle(key, '::before').backgroundColor"
    lane = page.locator(".panel-entropy .key-lane").first.evaluate(colour)
    dashes = sample("after processors")
    assert len(dashes) == 3
    assert {dash["fill"] for dash in dashes} == {"#" + "".join(f"{int(c):02x}" for c in re.findall(r"\d+", lane)[:3])}
    (band,) = sample("between the lowest and the highest lane")
    assert 0.1 < float(band["fill-opacity"]) < 0.15


def test_a_curve_hidden_by_an_equal_one_is_announced(page, feed):
    pairs = [(Step(i, 1.0 + i, 1.0 + i), Commit(i, [i], ["x"], "x")) for i in range(3)]
    steps = [(0.1 * (i + 1), event) for i, pair in enumerate(pairs) for event in pair]
    other = [(at, replace(event, entropy=0.5) if isinstance(event, Step) else event) for at, event in steps]
    trace = Trace(
        [Header(lane=i, strategy=name, title=name, prompt="p") for i, name in enumerate(("one", "two", "three"))],
        [
            Stamped(i, 10 * i + n, at, event)
            for i, lane in enumerate((steps, other, steps))
            for n, (at, event) in enumerate([*lane, (0.4, Done("end"))])
        ],
    )
    show(page, feed, trace)
    choose(page, 0)
    keys = page.locator(".panel-entropy .key-lane")
    expect(keys).to_have_text(["1 one, model", "2 two", "3 three, same curve as 1"])


def test_names_of_files_say_lanes_and_prompt_and_nothing_a_shell_reads(page, feed, tmp_path):
    titles = ("Greedy", "EAGLE/2; `x`")
    prompt = "Où est <Mia>? $(rm) ../x"
    headers = [Header(lane=i, strategy="a", title=title, prompt=prompt) for i, title in enumerate(titles)]
    trace = Trace(headers, [Stamped(lane, lane, 0.1, Done("end")) for lane in (0, 1)])
    show(page, feed, trace)
    assert save_as(page, tmp_path, "csv").name == "greedy-vs-eagle-2-x-où-est-mia-rm-x.csv"


# --- tables ---

def awkward() -> Trace:
    """Pieces that a spreadsheet would misread, a rolled back token, one without a row and one that is no candidate."""
    pieces = ["=1+1", "-5", '"quoted", twice\r\n', "@a", "é<0xE2>", "＝1", "\n=1", "\n", "+x"]
    events = [Forward(phase="prefill", tokens=1)]
    for i, piece in enumerate(pieces):
        top = [Candidate(90, "other", 0.5, 0.0, "top_k"), *([Candidate(i, piece, 2.0 ** -9, 1.0)] if i != 4 else [])]
        events += [
            Forward(tokens=1),
            Step(i, 2.0**-7, 0.0, i, top),
            Commit(i, [i], [piece], piece, [-math.pi * i], ["sampled"]),
        ]
    events += [Rollback(1, ""), Commit(8, [9, 10], ["\t", ""], "", [None, None], ["forced", "forced"]), Done("end")]
    return Trace([Header(strategy="greedy")], [Stamped(0, i, i / 7, event) for i, event in enumerate(events)])


@pytest.mark.parametrize(
    "trace",
    [pytest.param(RUN, marks=pytest.mark.journey), BEAMS, awkward(), Trace.load(BUNDLED)],
    ids=["three lanes", "beams", "awkward", "bundled"],
)
def test_the_page_and_the_shell_write_the_same_csv(page, feed, tmp_path, trace):
    show(page, feed, trace)
    assert (
        save_as(page, tmp_path, "csv").read_bytes()
        == to_csv(Trace.from_json(json.loads(json.dumps(trace.to_json())))).encode()
    )


def table(trace: Trace) -> list[dict[str, str]]:
    return list(csv.DictReader(to_csv(trace).splitlines(keepends=True)))


def test_a_row_of_the_csv_has_what_the_trace_has_of_a_token():
    rows = [row for row in table(RUN) if row["lane"] == "2"]
    assert [row["text"] for row in rows] == [" s", " a", " b", " c", " r"]
    assert [row["step"] for row in rows] == ["0", "1", "1", "1", "2"]
    assert [row["forwards"] for row in rows] == ["0", "1", "1", "1", "2"]
    assert [row["entropy"] for row in rows] == ["2.000000", "0.500000", "0.250000", "1.250000", "0.750000"]
    assert rows[1] == dict(
        zip(
            COLUMNS,
            [
                "2",
                "",
                "0",
                "1",
                "1",
                "7",
                " a",
                "draft",
                "0.500000",
                "0.250000",
                "-0.693147",
                "0.500000",
                "0.750000",
                "1",
                "0.200000",
                "1",
            ],
        )
    )


def test_no_cell_of_the_csv_is_a_formula_and_numbers_stay_numbers():
    texts = [row["text"] for row in table(awkward())]
    assert texts == ["'=1+1", "-5", '"quoted", twice\r\n', "'@a", "é<0xE2>", "'＝1", "'\n=1", "\n", "'\t", ""]
    assert [row["logprob"] for row in table(awkward())][-3:] == ["-21.991149", "", ""]
