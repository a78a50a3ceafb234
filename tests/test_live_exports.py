"""Exports of the live view: drawings, tables, standalone pages; and the runs of a visit."""
from __future__ import annotations

import csv
import gzip
import json
import math
import re
import struct
from base64 import b64decode
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from chromium import new_context
from live_page import (  # noqa: F401
    address,
    browser,
    choose,
    drawn,
    feed,
    numbers,
    page,
    seek,
    send,
    token_texts,
    visitor,
    wait_for,
)
from playwright.sync_api import expect

from playground import Result
from playground.events import Candidate, Commit, Done, Figure, Forward, Header, Rollback, Stamped, Step
from playground.player.frames import frame, new_name, recording
from playground.player.standalone import to_html
from playground.trace import Trace
from playground.trace.csv_export import COLUMNS, to_csv
from support.live_runs import EVENTS, HEADERS, HOSTILE, RUN
from support.live_sequences import BEAMS, filling, lane, run_of

SVG = "{http://www.w3.org/2000/svg}"
BUNDLED = Path(__file__).parents[1] / "assets" / "traces" / "first_view.jsonl"


def show(page, feed, trace: Trace = RUN, name: str | None = None) -> str:
    """A whole run, played to its end; returns its name."""
    run = frame(
        name or new_name(),
        0,
        [stamped.to_json() for stamped in trace.events],
        "done",
        [asdict(header) for header in trace.headers],
    )
    send(page, feed, run)
    seek(page, 1.0)
    last = max(stamped.at for stamped in trace.events)
    expect(page.locator(".live .clock")).to_have_text(f"{last:.2f} of {last:.2f} s")
    return run["run"]


def saved(page, tmp_path, *buttons: str) -> Path:
    """The file downloaded by these clicks."""
    for button in buttons[:-1]:
        page.click(button)
    with page.expect_download() as download:
        page.click(buttons[-1])
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    return path


def save_as(page, tmp_path, act: str) -> Path:
    return saved(page, tmp_path, ".live .save > button", f".live .save [data-do={act}]")


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


# --- standalone pages ---

def alone(browser, path: Path, **how):
    """A saved page in a window without a network."""
    window = new_context(browser, viewport={"width": 1440, "height": 2400}, offline=True, **how).new_page()
    window.broken, window.asked = [], []
    window.on("pageerror", lambda error: window.broken.append(error))
    window.on("request", lambda request: window.asked.append(request.url))
    window.goto(path.as_uri())
    window.wait_for_selector(".live .lane")
    return window


@pytest.mark.journey
def test_a_saved_page_plays_to_the_end_without_a_network_and_shows_the_same(page, feed, browser, tmp_path):
    show(page, feed)
    shown = [token_texts(page, lane) for lane in (0, 1)]
    window = alone(browser, save_as(page, tmp_path, "page"))
    expect(window.locator(".lane .status")).to_have_text(["ended", "reached the token limit", "failed"])
    assert [token_texts(window, lane) for lane in (0, 1)] == shown
    assert window.locator(".live img").count() == 0 and window.evaluate("window.hacked") is None
    window.locator(".lane[data-lane='1'] .tokens > .t").nth(1).click()
    assert "has no model" in window.locator(".live .card .candidate").nth(1).get_attribute("title")
    expect(window.locator(".live .card .look")).to_be_disabled()
    assert window.asked == [window.url] and not window.broken
    assert Trace.load(save_as(window, tmp_path, "export")).to_json() == RUN.to_json()
    window.context.close()


@pytest.mark.parametrize("lane, status", [(0, "ended"), (1, "reached the token limit")])
def test_a_notebook_plays_a_result_in_a_frame_and_stays_untouched(browser, tmp_path, lane, status):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset='utf-8'>{Result(RUN.lane(lane))._repr_html_()}")
    window = new_context(browser, viewport={"width": 1440, "height": 900}, offline=True).new_page()
    window.goto(notebook.as_uri())
    player = window.frame_locator("iframe")
    expect(player.locator(".lane .status")).to_have_text([status])
    assert player.locator(".lane .tokens > .t").count() == len(Result(RUN.lane(lane)).token_ids)
    assert window.evaluate("document.querySelector('iframe').contentDocument") is None
    window.context.close()


def without_data(text: str) -> str:
    """The page with its script unpacked, and without the trace."""
    unpacked = re.sub(r'(?<=id="source">)[^<]*', lambda found: gzip.decompress(b64decode(found[0])).decode(), text)
    return re.sub(r'(<script type="application/json" id="trace">).*?(</script>)', r"\1\2", unpacked)


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="trace">(.*?)</script>', text, re.S)[1])


def test_the_page_and_the_shell_write_the_same_page(page, feed, tmp_path):
    show(page, feed)
    by_page, by_shell = save_as(page, tmp_path, "page").read_text(), to_html(RUN)
    assert without_data(by_page) == without_data(by_shell) and "class Player" in without_data(by_shell)
    assert data_of(by_page) == data_of(by_shell)
    assert Trace.from_json(data_of(by_shell)).to_json() == RUN.to_json()


@pytest.mark.security
def test_hostile_words_stay_words_in_a_saved_page(browser, tmp_path):
    words = ["</script><script>window.hacked=1</script>", HOSTILE, "{{source}}", "<!--", "$&"]
    prompt = words[0] + words[2]
    events = [Commit(i, [i], [word], word, [None], ["sampled"]) for i, word in enumerate(words)]
    path = tmp_path / "hostile.html"
    path.write_text(to_html(Trace([Header(title=words[1], prompt=prompt, prompt_pieces=[prompt])],
                                  [Stamped(0, i, 0.0, event) for i, event in enumerate([*events, Done("end")])])))
    window = alone(browser, path, color_scheme="dark")
    assert token_texts(window, 0) == words
    assert window.evaluate("window.hacked") is None and window.locator(".live img").count() == 0
    assert window.evaluate("document.body.className") == "dark"
    assert not window.broken
    window.context.close()


# --- keys ---

def test_home_and_end_go_to_the_ends_of_a_run(page, feed):
    show(page, feed)
    page.keyboard.press("Home")
    expect(page.locator(".live .clock")).to_have_text("0.00 of 0.40 s")
    page.keyboard.press("End")
    expect(page.locator(".live .clock")).to_have_text("0.40 of 0.40 s")


def test_the_keys_are_listed_and_work_on_nothing_beneath_the_list(page, feed):
    show(page, feed)
    page.keyboard.press("?")
    dialog = page.locator(".live dialog.keys")
    expect(dialog).to_be_visible()
    assert {"Space", "Home", "End", "?", "Esc"} <= set(dialog.locator("kbd").all_inner_texts())
    page.keyboard.press("Home")
    expect(page.locator(".live .clock")).to_have_text("0.40 of 0.40 s")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.click(".live [data-do=keys]")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")


def test_escape_closes_the_menu_and_puts_the_focus_back(page, feed):
    show(page, feed)
    page.click(".live .save > button")
    page.keyboard.press("Escape")
    expect(page.locator(".live .save [role=dialog]")).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent") == "Save as"


# --- the runs of a visit ---

def writing(*forced: int, tokens: tuple[int, ...] = (1, 2, 3)) -> tuple[Header, list]:
    """A lane that writes ids as words; its rows have two more candidates at every position."""
    header = Header(
        title="Greedy",
        strategy="greedy",
        model="toy",
        prompt="Say",
        prompt_ids=[5],
        prompt_pieces=["Say"],
        forced=list(forced),
    )
    top = [Candidate(i, f" w{i}", 0.25, 0.25) for i in range(1, 5)]
    events = [
        event
        for i, token in enumerate(tokens)
        for event in (
            Step(i, 1.0, 1.0, token, top),
            Commit(i, [token], [f" w{token}"], f" w{token}", [-1.0], ["sampled"]),
        )
    ]
    return header, [*events, Done("end")]


def visit_run(*lanes: tuple[Header, list]) -> Trace:
    rows = [(number, event) for number, (_, events) in enumerate(lanes) for event in events]
    return Trace([replace(header, lane=number) for number, (header, _) in enumerate(lanes)],
                 [Stamped(number, seq, seq / 100, event) for seq, (number, event) in enumerate(rows)])


FIRST = visit_run(writing())
FORKED = visit_run(writing(), writing(1, 4, tokens=(1, 4, 2)))


@pytest.fixture
def fresh(page, address):
    """The page as a visitor opens it, without stored runs."""
    page.goto(address)
    page.wait_for_selector(".live .welcome")
    return page


def kept(page) -> list[str]:
    return page.locator(".live .visit-run").evaluate_all("all => all.map((one) => one.textContent)")


def test_a_fork_hangs_below_its_run_and_the_run_can_be_brought_back(fresh, feed):
    first = show(fresh, feed, FIRST)
    expect(fresh.locator(".live .visit")).to_be_hidden()
    second = show(fresh, feed, FORKED)
    assert kept(fresh) == ["Run 1Greedy, “Say”", "Run 2lane 1 forked at token 2: “ w4” instead of “ w2”, as lane 2"]
    assert fresh.locator(".visit li li .visit-run[aria-current]").text_content().startswith("Run 2")
    fresh.locator(".live .visit-run").first.click()
    fresh.wait_for_selector(f".live[data-run='{first}']")
    expect(fresh.locator(".lane")).to_have_count(1)
    assert token_texts(fresh, 0) == [" w1", " w2", " w3"]
    fresh.locator(".lane[data-lane='0'] .tokens > .t").nth(1).click()
    assert "Run again from here" in fresh.locator(".live .card .candidate[data-id='4']").get_attribute("title")
    fresh.keyboard.press("Escape")  # the card may cover the runs
    fresh.locator(".live .visit-run").nth(1).click()
    fresh.wait_for_selector(f".live[data-run='{second}']")
    assert token_texts(fresh, 1) == [" w1", " w4", " w2"]
    fresh.locator(".lane[data-lane='0'] .tokens > .t").nth(2).click()
    expect(fresh.locator(".live .card .candidate[data-id='4']")).to_be_enabled()


def test_a_run_goes_on_while_an_earlier_one_is_shown(fresh, feed):
    first = show(fresh, feed, FIRST)
    name, facts = new_name(), [stamped.to_json() for stamped in FORKED.events]
    headers = [asdict(header) for header in FORKED.headers]
    send(fresh, feed, frame(name, 0, facts[:4], "running", headers))
    fresh.locator(".live .visit-run").first.click()
    send(fresh, feed, frame(name, 1, facts[4:], "done"))
    fresh.wait_for_timeout(300)
    assert fresh.locator(".live").get_attribute("data-run") == first
    fresh.locator(".live .visit-run").nth(1).click()
    expect(fresh.locator(".lane[data-lane='1'] .tokens > .t")).to_have_count(3)
    assert not feed.heard


def test_a_run_that_was_packed_away_comes_back_as_it_was(fresh, feed):
    fresh.evaluate("""() => {
        const Press = CompressionStream;
        window.packed = 0;
        window.CompressionStream = class extends Press { constructor(form) { super(form); window.packed += 1; } };
    }""")
    first = show(fresh, feed, FORKED)
    before = [(token_texts(fresh, lane), numbers(fresh, lane)) for lane in (0, 1)]
    show(fresh, feed, FIRST)
    show(fresh, feed, FIRST)
    fresh.wait_for_function("packed >= 1")
    assert (
        f"3 runs, {len(FORKED.events) + 2 * len(FIRST.events)} events" in fresh.locator(".visit-note").text_content()
    ), "what is packed still counts"
    fresh.locator(".live .visit-run").first.click()
    fresh.wait_for_selector(f".live[data-run='{first}']")
    expect(fresh.locator(".lane[data-lane='1'] .tokens > .t")).to_have_count(3)
    assert [(token_texts(fresh, lane), numbers(fresh, lane)) for lane in (0, 1)] == before


def test_a_held_run_is_still_held_when_it_is_brought_back(fresh, feed):
    name, facts = new_name(), [stamped.to_json() for stamped in FIRST.events]
    headers = [asdict(header) for header in FIRST.headers]
    show(fresh, feed, FIRST)
    send(fresh, feed, frame(name, 0, facts[:4], "held", headers))
    fresh.locator(".live .visit-run").first.click()
    fresh.locator(".live .visit-run").nth(1).click()
    expect(fresh.locator(".lane .status")).to_have_text("held")
    expect(fresh.locator(".live .play")).to_have_attribute("aria-label", "Play")
    fresh.click(".live .play")
    assert wait_for(fresh, feed, "resume") == {}


def test_a_run_that_begins_with_no_new_token_is_no_fork(fresh, feed):
    for trace in (FORKED, FORKED):
        show(fresh, feed, trace)
    expect(fresh.locator(".live .visit > ol > li")).to_have_count(2)


def test_the_oldest_runs_go_first_and_a_replayed_recording_is_none_of_them(fresh, feed):
    send(fresh, feed, recording(HEADERS, EVENTS))
    for _ in range(21):
        show(fresh, feed, FIRST)
    assert [text.split("Greedy")[0] for text in kept(fresh)] == [f"Run {number}" for number in range(10, 22)]
    assert "12 runs" in fresh.locator(".visit-note").text_content()


# --- opening ---

def drop(page, name: str, text: str, on: str = ".live"):
    page.evaluate(
        """([name, text, on]) => {
        const carried = new DataTransfer();
        carried.items.add(new File([text], name));
        for (const act of ["dragover", "drop"]) {
            const how = { bubbles: true, cancelable: true, dataTransfer: carried };
            document.querySelector(on).dispatchEvent(new DragEvent(act, how));
        }
    }""",
        [name, text, on],
    )


def as_lines(head: dict, *events: dict) -> str:
    return "\n".join(json.dumps(line) for line in (head, *events)) + "\n"


def test_a_trace_is_opened_wherever_on_the_page_it_is_dropped(page, feed):
    show(page, feed, FIRST)
    whole = RUN.to_json()
    drop(page, "mine.jsonl", as_lines({**whole, "events": []}, *whole["events"]), on="body")
    expect(page.locator(".live .message")).to_have_text(f"Opened mine.jsonl: 3 lanes, {len(EVENTS)} events.")
    expect(page.locator(".lane")).to_have_count(3)
    expect(page.locator(".live")).not_to_have_class(re.compile("dropping"))


HEAD = {"format": "decoding-playground-trace", "version": 1, "lanes": [{"title": "x"}]}


@pytest.mark.parametrize("text, message", [
    ("", "This file is empty"),
    ("PK\x03\x04", "Line 1 of this file is not JSON"),
    (as_lines({"format": "list"}), "This is not a trace"),
    (as_lines({**HEAD, "version": 9}), "has format version 9"),
    (as_lines({**HEAD, "lanes": []}), "has no lanes"),
    (as_lines({**HEAD, "lanes": ["a"]}), "is not an object with fields"),
    (as_lines({**HEAD, "lanes": [{"forced": "none"}]}), "wrong value for forced"),
    (as_lines({**HEAD, "lanes": [{"parts": [None]}]}), "malformed"),
    (as_lines(HEAD, {"kind": "flight", "lane": 0, "seq": 0, "at": 0}), "unknown kind"),
    (as_lines(HEAD, {"kind": "done", "lane": 3, "seq": 0, "at": 0}), "refers to a lane"),
    (as_lines(HEAD, {"kind": "commit", "lane": 0, "seq": 0, "at": 0, "ids": 7}), "wrong value for ids"),
    (as_lines(HEAD)[:-1] + "\n{\"kind\": \"do", "Line 2 of this file is not JSON"),
])
def test_a_file_that_is_no_trace_is_refused_in_a_sentence_and_nothing_is_lost(page, feed, text, message):
    run = show(page, feed, FIRST)
    drop(page, "other.jsonl", text)
    expect(page.locator(".live .message.is-trouble")).to_contain_text(message)
    expect(page.locator(f".live[data-run='{run}'] .lane .tokens > .t")).to_have_count(3)
