"""What the card of a token shows of its stages, and what the model is asked about a token, in a real browser."""

import json
import re
from dataclasses import asdict

from live_page import address, browser, feed, page, send, visitor, wait_for  # noqa: F401
from playwright.sync_api import expect

from playground.contract import discover
from playground.decoding.attribution import Attribution, WordEffect
from playground.events import Candidate, Commit, Header, Mask, Part, Stamped, Step
from playground.page_scripts import SCRIPTS
from playground.player.frames import frame, new_name

TOP = [
    Candidate(7, " fox", 0.5, 0.8), Candidate(8, " hen", 0.2, 0.2), Candidate(9, " cat", 0.15, 0.0, "mask"),
    Candidate(10, " dog", 0.1, 0.0, "top_k"), Candidate(11, " cow", 0.05, 0.0, "top_k")]
PARTS = [
    Part("greedy", "decoder", {}), Part("cad", "sampler", {"alpha": 0.5}),
    Part("temperature", "sampler", {"temperature": 0.7}), Part("top_k", "sampler", {"k": 2}),
    Part("choice", "constraint", {})]
EVENTS = [Step(0, 1.5, 0.6, 7, TOP), Mask(0, 12, 100, 0.15), Commit(0, [7], [" fox"], " fox", [-0.69], ["sampled"])]


def shown(page, feed) -> str:
    header = Header(model="toy", strategy="greedy", title="Greedy", prompt="one two", prompt_ids=[1], parts=PARTS)
    events = [Stamped(0, seq, 0.1, event).to_json() for seq, event in enumerate(EVENTS)]
    run = frame(new_name(), 0, events, "done", [asdict(header)])
    send(page, feed, run)
    page.locator(".lane .tokens > .t").first.click()
    return run["run"]


def test_the_card_knows_which_samplers_act_before_the_mask():
    mixing = {cls.name for cls in discover().values() if cls.kind == "sampler" and cls.stage == "mix"}
    said = re.search(r"MIXING = new Set\((.*?)\)", (SCRIPTS / "lane" / "stages.js").read_text(encoding="utf-8"))[1]
    assert set(json.loads(said)) == mixing


def test_the_card_lists_the_stages_in_the_order_in_which_they_act(page, feed):
    shown(page, feed)
    rows = page.locator(".live .card .stage-row")
    expect(rows).to_have_count(6)
    assert rows.locator(".stage-name").all_text_contents() == [
        "Model's distribution", "CAD", "Token mask", "Temperature", "Top k", "After all stages"]
    assert rows.locator(".stage-effect").all_text_contents() == [
        "1.50 nats", "", "removed 15 %", "", "removed 2 of 5 shown, 15 %", "0.60 nats"]
    settings = rows.locator(".stage-settings").all_text_contents()
    assert settings[1:5] == ["alpha 0.5", "12 allowed", "temperature 0.7", "2"]


def test_a_token_is_attributed_to_words_with_the_name_of_the_method(page, feed):
    run = shown(page, feed)
    page.locator(".live .card .attribute").click()
    asked = {"run": run, "lane": 0, "sequence": 0, "position": 0, "token": 7}
    assert wait_for(page, feed, "attribute") == asked
    found = Attribution(-0.69, [WordEffect("one", 0, -0.5), WordEffect(" two", 1, 2.0)], 3)
    send(page, feed, {"run": run, "attributed": {**asdict(found), "lane": 0, "position": 0, "piece": " fox"}})
    panel = page.locator(".panel-attribution")
    expect(panel.locator("h3")).to_contain_text("token 1")
    expect(panel.locator(".readout")).to_contain_text("Leave-one-out: 3 forwards")
    assert panel.locator(".word").all_text_contents() == ["one", "two"]
    assert panel.locator(".effects li .num").all_text_contents() == ["+2.00", "−0.50"]
    expect(panel.locator(".word.against")).to_have_text("one")
    panel.get_by_label("Close this attribution").click()
    expect(panel).to_be_hidden()
