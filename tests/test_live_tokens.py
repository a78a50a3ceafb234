"""Single tokens in a real browser: colours, candidates, signs for unreadable characters, and the look inside."""
from __future__ import annotations

import math
import random
import re
from dataclasses import asdict
from itertools import pairwise

import pytest
from live_page import address, browser, drawn, feed, page, seek, send, token_texts, visitor, wait_for  # noqa: F401
from playwright.sync_api import expect

from playground.decoding.logit_lens import Inside, Lens
from playground.events import Candidate, Commit, Done, Figure, Forward, Header, Stamped, Step
from playground.player.frames import frame, new_name, recording

RIVALS = 10
INSIDE = Inside(
    ["The", " red", "\n"],
    [Lens(0.5, 0.0, [(5, " a", 0.81), (7, " fox", 0.01)]), Lens(1.25, 0.64, [(7, " fox", 0.64), (5, " a", 0.04)])],
    [[[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]]],
)
PLACE = {"lane": 0, "position": 1, "chosen": 7}


def event(
    position: int, piece: str, at: float, origin: str = "sampled", p: float | None = 0.5, count: int = 1
) -> tuple[float, Commit]:
    logprob = None if p is None else math.log(p)
    return at, Commit(position, [7] * count, [piece] * count, piece * count, [logprob] * count, [origin] * count)


def step(position: int, entropy: float, at: float, chosen: int = 7) -> tuple[float, Step]:
    top = [Candidate(rank, f" r{rank}", 0.08, 0.08) for rank in range(RIVALS)]
    return at, Step(position, entropy, entropy / 4, chosen, top)


def show(page, feed, happened: list, header: Header | None = None, make=frame) -> str:
    """A lane with events at these seconds, shown to its end; returns the name of the run."""
    events = [Stamped(0, seq, at, one).to_json() for seq, (at, one) in enumerate(happened)]
    headers = [
        asdict(
            header
            or Header(
                strategy="greedy", title="Greedy", prompt="one", prompt_ids=[1], prompt_pieces=["one"], vocabulary=100
            )
        )
    ]
    run = make(headers, events) if make is recording else make(new_name(), 0, events, "done", headers)
    send(page, feed, run)
    if page.locator(".live .play.playing").count():
        page.locator(".live .play").click()
    page.evaluate(
        "const s = document.querySelector('.live .scrub'); s.value = s.max; s.dispatchEvent(new Event('input', {"
        " bubbles: true }))"
    )
    expect(page.locator(".lane .tokens > .t")).to_have_count(
        sum(len(one.ids) for _, one in happened if isinstance(one, Commit))
    )
    return run["run"]


def tokens(page):
    return page.locator(".lane[data-lane='0'] .tokens > .t")


def pieces(page, feed, *written: str) -> None:
    show(page, feed, [event(i, piece, 0.1) for i, piece in enumerate(written)])


# --- colours ---

MIXED = [
    (0.0, Forward(phase="prefill")),
    step(0, 1.5, 0.1),
    (0.1, Figure("spans", "green tokens", {"spans": [[0, 1, "green", 1.0]], "shades": True})),
    event(0, " a", 0.1, p=0.25),
    event(1, " b", 0.1, "forced", None),
    (0.2, Figure("spans", "won coin flips", {"spans": [[2, 3, "0.30", 0.3], [4, 5, "0.00", 0.0]], "shades": True})),
    step(2, 6.0, 0.2),
    step(3, 0.06, 0.2),
    step(4, 0.0, 0.2),
    event(2, " c", 0.2, "draft", 0.9, 3),
    (0.2, Done()),
]


@pytest.mark.parametrize("metric, expected", [
    ("entropy", ["h5", "unknown", "h10", "h1", "h0"]),
    ("final", ["h3", "unknown", "h5", "h1", "h0"]),
    ("probability", ["h8", "unknown", "h1", "h1", "h1"]),
    ("surprisal", ["h4", "unknown", "h1", "h1", "h1"]),
    ("latency", ["h7", "h0", "h5", "h5", "h5"]),  # 100 ms; together with the previous token; 100 ms for three
    ("watermark", ["h10", "unknown", "h3", "unknown", "h0"]),
    ("overlay", ["h10", "unknown", "h3", "unknown", "h0"]),
    ("origin", ["tinted", "tinted", "tinted", "tinted", "tinted"]),
])
def test_a_colour_shows_one_number_of_a_token(page, feed, metric, expected):
    show(page, feed, MIXED)
    page.select_option(".live .metric", metric)
    drawn(page)
    expect(tokens(page).first).to_have_class(re.compile(rf"\b{expected[0]}\b"))
    classes = tokens(page).evaluate_all(
        "all => all.map((t) => [...t.classList].find((c) => /^(h\\d+|unknown|tinted)$/.test(c)))"
    )
    page.select_option(".live .metric", "entropy")
    assert classes == expected


def test_the_card_of_a_token_has_the_words_of_an_overlay(page, feed):
    show(page, feed, MIXED)
    said = page.locator(".live .card .said")
    for place, words in ((0, "green tokens\ngreen"), (2, "won coin flips\n0.30")):
        tokens(page).nth(place).click()
        expect(said).to_have_text(re.compile(words.replace("\n", r"\s*")))
    tokens(page).nth(1).click()
    expect(said).to_have_count(0)


def test_the_colour_that_was_chosen_is_remembered(page, feed):
    show(page, feed, MIXED)
    page.select_option(".live .metric", "latency")
    kept = page.evaluate("localStorage.getItem('decoding-playground.view')")
    page.select_option(".live .metric", "entropy")
    assert '"metric":"latency"' in kept


@pytest.mark.parametrize(
    "underline, expected",
    [
        ("entropy", ["3px", "none", "5px", "1px", "none"]),
        ("probability", ["4px", "none", "none", "none", "none"]),
        ("latency", ["3px", "none", "3px", "3px", "3px"]),
        ("none", ["none"] * 5),
        ("origin", ["none", "dotted", "solid", "solid", "solid"]),
    ],
)
def test_an_underline_shows_another_number_beside_the_colour(page, feed, underline, expected):
    show(page, feed, MIXED)
    page.select_option(".live .metric", "surprisal")
    page.select_option(".live .underline", underline)
    drawn(page)
    lines = tokens(page).evaluate_all(
        """(all) => all.map((t) => getComputedStyle(t)).map((style) => style.textDecorationLine === "none" ? "none"
        : style.textDecorationStyle === "solid" && style.textDecorationThickness !== "1.5px"
        ? style.textDecorationThickness : style.textDecorationStyle)"""
    )
    colours = tokens(page).evaluate_all(
        "all => all.map((t) => [...t.classList].find((c) => /^(h\\d+|unknown)$/.test(c)))"
    )
    page.select_option(".live .metric", "entropy")
    page.select_option(".live .underline", "origin")
    assert lines == expected
    assert colours == ["h4", "unknown", "h1", "h1", "h1"]


def test_each_origin_has_a_form_of_its_own_and_none_has_a_colour(page, feed):
    show(page, feed, MIXED)
    looks = page.locator(".live .origins .t").evaluate_all("""all => all.map((one) => getComputedStyle(one)).map(
        (style) => [style.textDecorationLine === "none" ? "" : style.textDecorationStyle,
            style.backgroundImage.split("(")[0], style.color, style.backgroundColor])""")
    forms, colours = {tuple(look[:2]) for look in looks}, {tuple(look[2:]) for look in looks}
    assert len(looks) == len(forms) == 5 and len(colours) == 1


# --- candidates ---

@pytest.mark.parametrize(
    "most, chosen, shown",
    [("3", 1, [0, 1, 2]), ("3", 8, [0, 1, 2, 8]), ("5", 8, [0, 1, 2, 3, 4, 8]), ("all", 8, list(range(10)))],
)
def test_a_card_shows_as_many_candidates_as_wanted_and_always_the_chosen_one(page, feed, most, chosen, shown):
    show(page, feed, [step(0, 2.0, 0.1, chosen), event(0, " a", 0.1)])
    page.select_option(".live .rivals", most)
    tokens(page).first.click()
    rows = page.locator(".live .card .candidate")
    assert rows.evaluate_all("all => all.map((row) => Number(row.dataset.id))") == shown
    rest = page.locator(".live .card .rest .num").first.inner_text()
    page.select_option(".live .rivals", "all")
    assert rest == f"{100 - 8 * len(shown)} %"


# --- what is not readable as it is ---

def chips(page, i: int) -> list[str]:
    return tokens(page).nth(i).locator(".chip").all_inner_texts()


def test_special_tokens_are_chips_and_words_that_look_a_little_like_them_are_not(page, feed):
    special, plain = ["<|im_end|>", "</s>", "[END]", "<｜end▁of▁text｜>"], ["<b>", "<|", "[1]", "a<s>b"]
    pieces(page, feed, *special, *plain)
    assert [chips(page, i) for i in range(8)] == [[piece] for piece in special] + [[]] * 4
    assert token_texts(page, 0) == special + plain


def test_blanks_and_breaks_can_be_seen_and_counted(page, feed):
    pieces(page, feed, " ", "   ", " a", "\n", "\r\n", "\t", "")
    assert [tokens(page).nth(i).locator(".blank").count() for i in range(7)] == [1, 3, 0, 0, 0, 0, 0]
    signs = tokens(page).evaluate_all(
        "all => all.map((t) => [...t.querySelectorAll('.glyph')].map((g) => g.dataset.sign).join(''))"
    )
    assert signs == ["", "", "", "↵", "↵", "⇥", "∅"]
    assert token_texts(page, 0) == [" ", "   ", " a", "\n", "\r\n", "\t", ""], "what is copied is the text"


def composed(page) -> list[list[tuple[str, str]]]:
    """Of each token the bytes that are drawn under a character, and what is above each."""
    read = "all => all.map((t) => [...t.querySelectorAll('.composed')].map((b) => [b.dataset.byte, b.textContent]))"
    return [[(byte, above) for byte, above in token] for token in tokens(page).evaluate_all(read)]


def test_a_character_of_several_tokens_is_composed_above_its_bytes_and_half_a_character_stays_bytes(page, feed):
    pieces(page, feed, "<0xE2>", "<0x82>", "<0xAC>", "a<0xFF>", "\u200b", "<0xF0><0x9F>")
    assert composed(page) == [[("E2", "€")], [("82", "")], [("AC", "")], [], [], []]
    assert [chips(page, i) for i in range(6)] == [[], [], [], ["FF"], ["U+200B"], ["F0", "9F"]]


def test_characters_that_share_a_token_are_all_composed_and_copied_once(page, feed):
    pieces(page, feed, "<0xE3><0x83>", "<0xB3><0xE3><0x83>", "<0x89>", " <0xC3>", "<0xA9>!")  # ンド é!
    assert composed(page) == [
        [("E3", "ン"), ("83", "")], [("B3", ""), ("E3", "ド"), ("83", "")], [("89", "")], [("C3", "é")], [("A9", "")]
    ]
    assert "".join(token_texts(page, 0)) == "ンド é!"


def test_a_character_whose_last_byte_is_taken_back_is_bytes_again(page, feed):
    written = ["<0xC3>", "<0xA9>", "<0xD8>", "<0xB3>"]
    show(page, feed, [event(i, piece, 0.1 * (i + 1)) for i, piece in enumerate(written)])
    assert composed(page) == [[("C3", "é")], [("A9", "")], [("D8", "س")], [("B3", "")]]
    seek(page, 0.8)
    assert composed(page) == [[("C3", "é")], [("A9", "")], []] and chips(page, 2) == ["D8"]
    seek(page, 1)
    assert composed(page)[2:] == [[("D8", "س")], [("B3", "")]]


def test_a_script_that_runs_to_the_left_is_laid_out_so_and_turns_nothing_else(page, feed):
    written = ["a", "<0xD8>", "<0xB3>", " ", "<0xD9>", "<0x84>", " ", "<0xE4>", "<0xBD>", "<0xA0>", "1"]  # س ل 你
    prompt = ["<0xD8>", "<0xB3>"]
    happened = [event(i, piece, 0.1) for i, piece in enumerate(written)]
    show(page, feed, happened, Header(strategy="greedy", title="Greedy", prompt="س", prompt_ids=[1, 2],
                                      prompt_pieces=prompt, vocabulary=100))
    left = "all => all.map((one) => one.getBoundingClientRect().left)"
    turned = page.locator(".tokens .to-left .composed").evaluate_all(left)
    others = page.locator(".tokens .to-right .composed").evaluate_all(left)
    first, last = (tokens(page).nth(i).evaluate("one => one.getBoundingClientRect().left") for i in (0, 10))
    assert turned == sorted(turned, reverse=True) and others == sorted(others) and len(turned) == 4
    assert page.locator(".prompt .composed").evaluate_all(left)[0] < first < min(turned) < min(others) < last


# --- a paragraph without end ---

PARTS = [" a", " fox", " Rapunzel", "ly", ",", " ", "  two", "'s", " (", "Donaudampf", "schifffahrt" * 4]

PLACES = """() => {
    const body = document.querySelector(".lane .body");
    const whole = body.cloneNode(true);
    const [first, ...others] = whole.querySelectorAll(".tokens");
    for (const tokens of others) {
        first.append(...tokens.childNodes);
        tokens.closest(".stretch").remove();
    }
    body.after(whole);
    const placesIn = (text) => {
        const { left, top } = text.getBoundingClientRect();
        return [...text.querySelectorAll(".tokens > .t")].map((token) =>
            [...token.getClientRects()].filter((box) => box.width)
                .map((box) => [box.left - left, box.top - top, box.width].map(Math.round)).join(" | "));
    };
    const found = [placesIn(body), placesIn(whole), body.querySelectorAll(".stretch").length];
    whole.remove();
    return found;
}"""


def unending(length: int) -> list[str]:
    return random.Random(7).choices(PARTS, [6, 6, 4, 3, 2, 1, 1, 1, 1, 1, 0.2], k=length)


def long_paragraph(page, feed, length: int = 700) -> list[str]:
    written = unending(length)
    show(page, feed, [event(i, piece, 0.01 * (i + 1)) for i, piece in enumerate(written)])
    drawn(page)
    return written


def test_a_paragraph_that_is_cut_looks_as_if_it_were_whole_wherever_the_reader_goes_and_however_wide_it_is(page, feed):
    long_paragraph(page, feed)
    for share in (1, 0.97, 0.5, 0.51, 0.49, 1):
        seek(page, share)
        cut, whole, stretches = page.evaluate(PLACES)
        assert cut == whole and stretches > 2
    for width in (700, 1100):
        page.set_viewport_size({"width": width, "height": 2400})
        drawn(page)
        cut, whole, _ = page.evaluate(PLACES)
        assert cut == whole


SIGHT = """() => {
    const text = document.querySelector(".lane .text");
    const tokens = [...text.querySelectorAll(".tokens > .t")];
    const isDrawn = (token) => token.checkVisibility({ contentVisibilityAuto: true });
    const drawn = [tokens[0], tokens[tokens.length - 1]].map(isDrawn);
    return [...drawn, Math.round(text.scrollHeight - text.clientHeight - text.scrollTop)];
}"""


def growing(lengths: list[int]) -> list[dict]:
    """Frames of a run that leave the text at these lengths."""
    run, header = new_name(), asdict(Header(strategy="greedy", title="Greedy", max_new_tokens=lengths[-1]))
    events = [
        Stamped(0, i, *event(i, piece, 0.01 * (i + 1))).to_json() for i, piece in enumerate(unending(lengths[-1]))
    ]
    return [
        frame(run, number, events[start:end], "running", None if start else [header])
        for number, (start, end) in enumerate(pairwise([0, *lengths]))
    ]


def test_of_a_long_text_only_what_is_near_is_drawn_and_its_end_stays_in_sight_while_it_grows(page, feed):
    page.set_viewport_size({"width": 390, "height": 500})
    for new in growing(lengths := list(range(200, 2001, 200))):
        send(page, feed, new)
        expect(tokens(page)).to_have_count(lengths[new["n"]])
        drawn(page)
        first, last, below = page.evaluate(SIGHT)
        assert last and below <= 1, f"after {lengths[new['n']]} tokens"
    assert not first


def test_a_paragraph_that_is_cut_is_copied_as_it_was_written(page, feed):
    written = long_paragraph(page, feed)
    copied = page.evaluate("""() => {
        const tokens = document.querySelectorAll(".lane .tokens > .t");
        getSelection().setBaseAndExtent(tokens[0], 0, tokens[tokens.length - 1], 1);
        const taken = new DataTransfer();
        tokens[5].dispatchEvent(new ClipboardEvent("copy", { bubbles: true, cancelable: true, clipboardData: taken }));
        getSelection().removeAllRanges();
        return taken.getData("text/plain");
    }""")
    assert copied == "".join(written)


# --- forks and scored texts ---

def test_a_forked_lane_says_where_it_left(page, feed):
    forked = Header(strategy="greedy", title="Greedy", forced=[4, 5, 6], forked_at=2)
    show(page, feed, [event(0, " a", 0.1, "forced")], forked)
    expect(page.locator(".lane .title").first).to_have_text("Greedy, forked at token 3")


def test_words_of_ones_own_go_at_the_token_with_its_space_in_front(page, feed):
    show(
        page,
        feed,
        [event(0, "red", 0.1), step(1, 1.0, 0.2), event(1, " fox", 0.2)],
        Header(model="toy", strategy="greedy", title="Greedy"),
    )
    words = page.locator(".live .card .own-words input")
    for position, begun in ((1, " "), (0, "")):
        tokens(page).nth(position).click()
        words.click()
        expect(words).to_have_value(begun)
    tokens(page).nth(1).click()
    words.click()
    page.keyboard.press("Enter")
    assert not feed.heard, "an empty place writes nothing"
    page.keyboard.type("hen  ran")
    page.keyboard.press("Enter")
    shown = wait_for(page, feed, "fork")
    assert (shown["words"], shown["position"], shown["lane"]) == (" hen  ran", 1, 0) and "token" not in shown


def test_a_scored_text_is_not_underlined_and_begins_no_fork(page, feed):
    header = Header(strategy="score", title="As toy reads it", forced=[7])
    show(page, feed, [step(0, 1.0, 0.1), event(0, " a", 0.1, "forced")], header)
    expect(page.locator(".lane .title").first).to_have_text("As toy reads it")
    assert tokens(page).first.evaluate("t => getComputedStyle(t).textDecorationLine") == "none"
    tokens(page).first.click()
    other = page.locator(".live .card .candidate").first
    expect(other).to_be_disabled()
    assert "scored, not generated" in other.get_attribute("title")


# --- a look inside ---

def looked(page, feed, **answer) -> None:
    run = show(
        page,
        feed,
        [event(0, " red", 0.1), step(1, 1.0, 0.2), event(1, " fox", 0.2)],
        Header(model="toy", strategy="greedy", title="Greedy"),
    )
    send(page, feed, {"run": run, **answer})


def test_the_card_offers_a_look_inside_and_says_where(page, feed):
    show(page, feed, MIXED)
    tokens(page).nth(2).click()
    page.locator(".live .card .look").click()
    asked = wait_for(page, feed, "look")
    assert asked | {"run": ""} == {"run": "", "lane": 0, "sequence": 0, "position": 2, "token": 7}


def test_a_recording_has_no_inside(page, feed):
    show(page, feed, MIXED, make=recording)
    tokens(page).nth(2).click()
    expect(page.locator(".live .card .look")).to_be_disabled()


def test_each_layer_shows_its_candidates_and_the_chosen_one_is_marked(page, feed):
    looked(page, feed, inside={**asdict(INSIDE), **PLACE})
    panel = page.locator(".panel-inside")
    expect(panel.locator("h3")).to_have_text("Look inside: lane 1, token 2")
    rows = [row.locator("th, td").all_inner_texts() for row in panel.locator(".lens tr").all()[1:]]
    assert rows == [["embedding", "0 %", "0.50", " a", " fox"], ["layer 1, the last", "64 %", "1.25", " fox", " a"]]
    shades = panel.locator(".lens .said").evaluate_all(
        "all => all.map((cell) => [...cell.classList].filter((c) => c !== 'said').join(' '))"
    )
    assert shades == ["h9", "h1 is-chosen", "h8 is-chosen", "h2"]  # ten times the square root of the probability


def test_the_text_is_shaded_by_the_heads_that_are_chosen(page, feed):
    looked(page, feed, inside={**asdict(INSIDE), **PLACE})
    panel = page.locator(".panel-inside")
    shares = panel.locator(".shaded .t")
    assert shares.evaluate_all("all => all.map((t) => t.title)") == ["13 %", "50 %", "38 %"]
    panel.locator(".heads").select_option("0/1")
    assert shares.evaluate_all("all => all.map((t) => t.title)") == ["0 %", "100 %", "0 %"]
    panel.locator("canvas").click(position={"x": 5, "y": 3})
    assert panel.locator(".heads").input_value() == "0/0"
    assert shares.evaluate_all("all => all.map((t) => t.title)") == ["25 %", "0 %", "75 %"]


def test_a_look_that_is_refused_says_why_and_one_of_another_run_is_not_shown(page, feed):
    looked(page, feed, inside=None, refused="There is nothing inside.")
    expect(page.locator(".live .message")).to_have_text("There is nothing inside.")
    expect(page.locator(".panel-inside")).to_be_hidden()
    send(page, feed, {"run": "another", "inside": {**asdict(INSIDE), **PLACE}})
    page.wait_for_timeout(200)
    expect(page.locator(".panel-inside")).to_be_hidden()


def test_a_look_is_closed_by_its_button_and_by_the_next_run(page, feed):
    looked(page, feed, inside={**asdict(INSIDE), **PLACE})
    panel = page.locator(".panel-inside")
    expect(panel).to_be_visible()
    panel.get_by_label("Close this look").click()
    expect(panel).to_be_hidden()
    looked(page, feed, inside={**asdict(INSIDE), **PLACE})
    expect(panel).to_be_visible()
    show(page, feed, MIXED)
    expect(panel).to_be_hidden()
