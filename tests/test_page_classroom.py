"""A class in a real browser: a presenter and a follower."""
from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import saved
from app_page import PATIENCE, running, status, tokens
from chromium import chromium, new_context
from playwright.sync_api import expect

from playground.ui.components.settings import Settings
from support.launched import free_port

ROOT = Path(__file__).parents[1]
NAME = "Ada <img src=x onerror=hacked=1>"


@pytest.fixture(scope="module")
def invitation(tmp_path_factory) -> Iterator[dict[str, str]]:
    """What `python app.py --classroom` prints: the links of the presenter and of the class, and the code."""
    models = saved.save_models(tmp_path_factory.mktemp("models"))
    command = [sys.executable, "app.py", "--classroom", "--host", "127.0.0.1", "--port", str(free_port())]
    app = subprocess.Popen([*command, "--model", models.target, "--draft", models.draft], cwd=ROOT, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found: dict[str, str] = {}
    while "Code" not in found:
        line = app.stdout.readline()
        assert line, "the app ended before its class was open"
        if known := re.match(r"(Presenter|Class|Code)[^:]*: +(.*)", line):
            found[known[1]] = known[2]
    yield found
    app.terminate()
    app.wait(PATIENCE)


@pytest.mark.slow
def test_a_follower_sees_the_presenters_run_votes_and_takes_the_controls(invitation):
    """The browsers are two contexts: each has cookies of its own."""
    with chromium() as browser:
        presenter, follower = (new_context(browser, viewport={"width": 1280, "height": 900}).new_page()
                               for _ in range(2))
        wrong: list[tuple[str, str]] = []  # on the class's page, which nothing interrupts while it loads
        follower.on("pageerror", lambda error: wrong.append((follower.url, error.stack or str(error))))
        follower.goto(invitation["Class"].removesuffix("classroom"))  # who is not the presenter is sent to the class
        follower.fill("[name=code]", "1")
        follower.click("button[type=submit]")
        expect(follower.locator(".join-trouble")).to_contain_text("not the code of the class")
        expect(follower.locator("[name=code]"), "to be typed anew").to_be_focused()
        assert follower.evaluate("getSelection().toString()") == "1"
        follower.fill("[name=code]", invitation["Code"])
        follower.fill("[name=name]", NAME)
        follower.click("button[type=submit]")
        expect(follower.locator(".who")).to_contain_text(NAME)

        welcome = follower.locator(".welcome")
        expect(welcome).to_contain_text("You are in. Waiting for the presenter")  # who cannot press Run
        place = welcome.bounding_box()
        assert place["height"] > 500 and follower.locator(".who .hint").is_hidden(), "nothing else is there yet"

        presenter.goto(invitation["Presenter"])
        slide = presenter.locator(".class-slide")  # the class sees first how to join
        expect(slide.locator(".class-code")).to_have_text(invitation["Code"])
        expect(slide.locator(".class-code")).to_have_css("font-size", "96px")
        expect(slide.locator(".class-following")).to_have_text("1 is following")
        expect(slide.locator(".class-link")).to_have_text(invitation["Class"].removeprefix("http://"))
        expect(slide.locator(".class-qr")).to_be_in_viewport(ratio=1)
        assert slide.locator(".class-qr").evaluate("image => image.decode().then(() => image.naturalWidth > 0)")
        slide.get_by_role("button", name="Start").click()
        expect(slide).to_be_hidden()
        expect(presenter.locator(".class-fold summary")).to_contain_text("1 following")
        code = Settings(prompt="The green bird", length=24, lanes=[{"strategy": "greedy"}]).to_code()
        presenter.goto(f"{invitation['Class'].removesuffix('classroom')}?s={code}")
        expect(presenter.locator("#prompt textarea")).to_have_value("The green bird")
        expect(presenter.locator(".lane-card")).to_have_count(1)
        presenter.click("#run")
        expect(status(presenter, 0)).to_have_text("reached the token limit")
        shown = follower.locator(".lane[data-lane='0']")
        expect(shown.locator(".status")).to_have_text("reached the token limit")
        expect(shown.locator(".tokens > *")).to_have_count(24)
        assert shown.locator(".tokens").text_content() == running(presenter, 0).locator(".tokens").text_content()
        shown.locator(".tokens > *").nth(3).click()
        expect(follower.locator(".card")).to_be_visible()
        # a follower runs nothing
        assert follower.locator(".card :is(.candidate, .look, .attribute):enabled").count() == 0
        expect(follower.locator(".card .requests")).to_contain_text("Only the presenter of this class")
        expect(tokens(presenter, 0)).to_have_count(24)

        self_paced = follower.locator(".live .player [data-do='back']")
        self_paced.click()
        presenter.locator("#live input[type=file]").set_input_files(ROOT / "assets/traces/first_view.jsonl")
        expect(follower.locator(".lane .prompt").first).to_contain_text("Tell me a story about Mia.")
        expect(follower.locator(".lane")).to_have_count(2)
        presenter.click("#run")
        expect(follower.locator(".lane")).to_have_count(1)
        expect(status(presenter, 0)).to_have_text("reached the token limit")
        expect(shown.locator(".tokens > *")).to_have_count(24)

        presenter.click(".lessons-open")
        presenter.locator(".lesson-list button").filter(has_text="Temperature").click()
        expect(follower.locator(".vote p").first).to_contain_text("How many tokens of lane 2")
        follower.locator(".vote button").nth(1).click()
        expect(follower.locator(".vote button").nth(1)).to_have_attribute("aria-pressed", "true")
        expect(presenter.locator(".class-fold summary")).to_contain_text("1 vote")
        for votes in (presenter.locator(".lesson-panel .class-count"), follower.locator(".vote .class-count")):
            expect(votes).to_have_text(["0", "1", "0"])

        follower.set_viewport_size({"width": 390, "height": 844})
        for place in ("0", "document.body.scrollHeight"):  # a sheet at the bottom of a phone, wherever it is scrolled
            follower.evaluate(f"scrollTo(0, {place})")
            expect(follower.locator(".vote p").first).to_be_in_viewport()
            expect(follower.locator(".vote button[aria-pressed]").last).to_be_in_viewport()
        follower.set_viewport_size({"width": 1280, "height": 900})

        presenter.get_by_text("Go on without a prediction").click()
        expect(presenter.locator(".lesson-said")).to_be_visible()
        right = presenter.locator(".lesson-question label").evaluate_all(
            "all => all.findIndex((one) => one.classList.contains('is-true'))"
        )
        words = follower.locator(".vote-outcome p")
        expect(words.first).to_have_text(re.compile("^You were right" if right == 1 else "^Not this time: you said"))
        expect(words.nth(1)).to_have_text(presenter.locator(".lesson-said").text_content().replace("Your", "The"))
        expect(follower.locator(".vote button.is-true")).to_have_count(1)
        back = follower.get_by_text("Back to the run")
        expect(back).to_be_hidden()
        follower.set_viewport_size({"width": 390, "height": 844})
        back.click()  # the answer covers half of a phone, and its player
        expect(follower.locator(".vote")).to_be_hidden()
        expect(follower.locator(".live .player")).to_be_in_viewport(ratio=1)
        follower.set_viewport_size({"width": 1280, "height": 900})

        presenter.locator(".class-fold summary").click()
        expect(presenter.locator(".class-followers li")).to_contain_text(NAME)
        presenter.locator(".class-followers button").click()
        follower.locator(".controls-yours a").click()
        expect(follower.locator("#run")).to_be_visible()
        presenter.locator(".class-back").click()
        expect(follower.locator(".who")).to_contain_text(NAME)  # back on the class's page
        assert not [stack for url, stack in wrong if url.endswith("/classroom")]
        assert not any(page.evaluate("window.hacked") for page in (presenter, follower))
