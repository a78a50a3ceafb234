"""A game for classes: a text grows, teams guess its next token, and then the model's own odds are shown.

The text is a run like any other, or one that was given and is read. The browser gets what the events of that run say of
each token and plays it in rounds (assets/game.rules.js, game.js); teams, choices and points stay there. Only a word
that is typed comes back, to be cut into tokens and given its odds.
"""
from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from html import escape
from os.path import commonprefix
from time import monotonic
from typing import Any

import gradio as gr

from playground.algorithms.fairy_tales import TALES
from playground.bench.questions import STORIES, gallery
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.events import Failed, Step
from playground.request_limits import MAX_TOKEN_ID, check_text
from playground.trace import Trace
from playground.trace.transcript import Token, sequences
from playground.ui.admission_queue import GAME
from playground.ui.frames import Facts, trace_of
from playground.ui.handlers import MODEL_CONTROLS, Changes, Visit, status, waits
from playground.ui.live_view import to_json
from playground.ui.readers import ends_unread
from playground.ui.settings import Settings
from playground.ui.site import Site
from playground.ui.theme import PRIVATE, notice, read

SCORE = "score"  # stands in a link of this page where the text is given
# what is drawn follows the odds that are shown
KNOBS = {"greedy": {}, "sample": {"temperature": 1.0, "top_p": 1.0}, SCORE: {}}
WAYS = [("Model's likeliest", "greedy"), ("Model's draws", "sample"), ("A given text", SCORE)]
PLAYED = (STORIES, "arithmetic", "records", "programs", "edit")  # tasks whose answers are long enough to guess at
TOLD = 3  # tales that are offered to be read
LENGTH = 64  # tokens of an offered text
OPENING = 480  # letters of a tale that are read, up to the end of a sentence
PAUSE = 0.8  # seconds between two looks at a run that still grows
MOST_WORDS = 8  # looked up or waiting for it: each takes a thread of the server
LONGEST = 40  # letters of a word that is typed
MOST_IDS = 200_000  # tokens before a word that is typed; the model's context is checked where it is known
FIRST = 60  # letters of a prompt by which a menu names it
SCRIPTS = ("live/dom.js", "game.rules.js", "game.js")  # in this order: they share one scope
STAGE = "<section class='game' aria-label='Guessing game'></section>"


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the page: what text is played, and under it the game."""
    Game(site).bind(blocks)


class Game:
    """The components with their acts."""

    def __init__(self, site: Site):
        self.site, self.visit = site, gr.State(None)
        gr.HTML(INTRODUCTION, elem_classes="game-lead", apply_default_css=False)
        with gr.Row(elem_classes="ask game-ask", equal_height=False):
            self._text()
            self._numbers()
        with gr.Row(elem_classes="actions"):
            self.go = gr.Button("Start the game", variant="primary", elem_id="run", min_width=150, scale=0)
            self.status = gr.HTML(
                "",
                html_template=read("status.html"),
                elem_classes="status",
                elem_id="game-status",
                apply_default_css=False,
            )
            self.share = gr.Button("Copy link", size="sm", variant="secondary", elem_id="share", min_width=90, scale=0)
            self.link = gr.Textbox(visible="hidden", elem_id="link")
        self.board = board([odds_over(site)])

    def _text(self) -> None:
        start = offers()[0][1]
        with gr.Column(scale=5, min_width=280, elem_classes="question"):
            self.way = gr.Radio(WAYS, value=way_of(start), label="The text", elem_id="way", elem_classes="segmented")
            self.prompt = gr.Textbox(
                start.prompt,
                label="Prompt, or the text to be read",
                lines=3,
                max_lines=10,
                elem_id="prompt",
                placeholder="Write what the model continues, or a text that it reads…",
            )
            self.notice = notice("prompt-notice")

    def _numbers(self) -> None:
        start = offers()[0][1]
        with gr.Column(scale=2, min_width=280, elem_classes="numbers"):
            names = [(name, number) for number, (name, _) in enumerate(offers())]
            self.example = gr.Dropdown(names, value=None, label="Take an example", elem_id="example")
            self.mode = gr.Radio(
                [("Raw text", "raw"), ("Chat", "chat")],
                value=start.mode,
                label="The prompt is",
                elem_id="mode",
                elem_classes="segmented",
            )
            with gr.Row(elem_classes="pair"):
                self.length = gr.Number(start.length, label="Tokens", precision=0, min_width=90, elem_id="length")
                self.seed = gr.Number(start.seed, label="Seed", precision=0, min_width=90, elem_id="seed")
            self.numbers_notice = notice("numbers-notice")

    def controls(self) -> list[gr.components.Component]:
        return [self.way, self.prompt, self.mode, self.length, self.seed]

    def bind(self, blocks: gr.Blocks) -> None:
        told = [self.visit, self.board, self.status, self.notice, self.numbers_notice]
        blocks.load(self.open, None, self.controls(), **PRIVATE)
        self.go.click(self.start, [self.visit, *self.controls()], told, concurrency_limit=None, **PRIVATE)
        self.example.input(self.pick, self.example, self.controls(), queue=False, **PRIVATE)
        self.share.click(self.copy, self.controls(), self.link, **PRIVATE)
        self.link.change(None, self.link, None, js="(code) => window.shareLink(code)", **PRIVATE)
        self.way.change(None, self.way, [self.mode, self.length], js=_hides_what_is_not_asked(), **PRIVATE)

    # --- what a person does ---

    def open(self, request: gr.Request) -> Changes:
        """Put the controls as the link has them."""
        settings = Settings.from_code(request.query_params.get("s", ""))
        return self._shown(settings) if settings and settings.prompt else gr.skip()

    def pick(self, example: int) -> Changes:
        offered = offers()
        return self._shown(offered[example][1]) if type(example) is int and 0 <= example < len(offered) else gr.skip()

    def copy(self, *values: Any) -> Iterator[Changes]:
        """The code of a link to this game; the browser makes it an address, each time anew."""
        yield {self.link: ""}
        yield {self.link: settings_of(*values).to_code()}

    @ends_unread
    def start(self, before: Visit | None, *values: Any) -> Iterator[Changes]:
        """Let the models write or read the text and hand it to the board as it grows; leaving the page stops it."""
        settings = settings_of(*values)
        reads = way_of(settings) == SCORE
        visit = before.follow(settings, reads) if before else Visit(settings, reads=reads)
        try:
            settings.check(self.site.rules)
            yield {self.visit: visit, self.notice: "", self.numbers_notice: ""}
            yield from self._run(visit)
        except Refusal as refusal:
            yield {self.status: "", self._place(refusal): escape(str(refusal))}
        finally:
            visit.leave()

    # --- how it is done ---

    def _shown(self, settings: Settings) -> Changes:
        reads = way_of(settings) == SCORE
        return {
            self.way: way_of(settings),
            self.prompt: settings.prompt,
            self.mode: gr.update(value=settings.mode, visible=not reads),
            self.length: gr.update(value=settings.length, visible=not reads),
            self.seed: settings.seed,
        }

    def _run(self, visit: Visit) -> Iterator[Changes]:
        arrival = self.site.arrival(visit.settings)
        for now in arrival.watch():
            yield {self.status: status(now)}
        if visit.stopped:
            return
        visit.ticket = self.site.join(GAME)
        for place in visit.ticket.wait():
            yield {self.status: waits(place)}
            if visit.stopped:
                return
        yield {self.status: status(arrival)}
        begin = self.site.read if visit.reads else self._begin
        visit.run = begin(arrival, visit.settings)
        yield from self._grow(visit)

    def _begin(self, arrival, settings: Settings):
        return self.site.start(arrival, settings, Memory())  # a game learns nothing from the one before

    def _grow(self, visit: Visit) -> Iterator[Changes]:
        """The whole game so far, again and again: what gets lost on the way comes with the next."""
        due = 0.0
        for news in visit.run.frames():
            if visit.left:
                return
            over = news is not None and news["state"] == "done"
            if over or monotonic() > due:
                due = monotonic() + PAUSE
                yield self._board(visit, over)
            else:
                yield gr.skip()
        wrong = visit.run.error or failure(visit.run.headers, visit.run.events)
        yield {self.notice: escape(wrong)} if wrong else gr.skip()

    def _board(self, visit: Visit, over: bool) -> Changes:
        """The game as it stands; the one before stays until this one has a token."""
        run, settings = visit.run, visit.settings
        if not run.events:
            return gr.skip()
        facts = told(run.trace, visit.reads)
        value = {"game": run.name, "seed": settings.seed, "over": over, "lanes": lanes_link(settings), **facts}
        return {self.board: packed(value)} if facts["tokens"] else gr.skip()

    def _place(self, refusal: Refusal) -> gr.HTML:
        return self.numbers_notice if refusal.about in (*MODEL_CONTROLS, "length", "seed") else self.notice


def board(functions: list[Callable[..., Any]]) -> gr.HTML:
    """The game itself. Its value is a JSON text, what `told` says and with it "game", "seed", "over" and "lanes"; see
    assets/game.js.
    """
    return gr.HTML("", html_template=STAGE, js_on_load=script(), server_functions=functions,
                   elem_id="game", apply_default_css=False)


def packed(value: dict[str, Any]) -> str:
    """JSON without a tag in it: prompts and tokens are written by strangers."""
    return to_json(value).replace("<", "\\u003c")


# --- words that are typed ---

def odds_over(site: Site) -> Callable[..., dict[str, Any]]:
    """What the board asks of the server, one word at a time."""
    turn, waiting = threading.Lock(), threading.BoundedSemaphore(MOST_WORDS)

    def odds(asked: dict[str, Any]) -> dict[str, Any]:
        """Of {"ids", "word", "spaced"}: the token that a word begins with after the tokens `ids`, and its probability
        there, {"id", "piece", "p"}; or {"refused"}. `spaced` says that what is there ends with a blank or a line
        already.
        """
        try:
            ids, word = _checked(asked)
            if not waiting.acquire(blocking=False):
                raise Refusal(f"{MOST_WORDS} words are being looked up already: try again in a moment.", "word")
            try:
                with turn:
                    return _odds(site, ids, word, bool(asked.get("spaced")))
            finally:
                waiting.release()
        except Refusal as refusal:
            return {"refused": str(refusal)}
    return odds


def _checked(asked: Any) -> tuple[list[int], str]:
    ids, word = (asked.get("ids"), asked.get("word")) if isinstance(asked, dict) else (None, None)
    if not isinstance(word, str) or len(word) > 2 * LONGEST or not 0 < len(word.strip()) <= LONGEST:
        raise Refusal(f"Type one word of at most {LONGEST} letters.", "word")
    if (
        not isinstance(ids, list)
        or len(ids) > MOST_IDS
        or not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids)
    ):
        raise Refusal("These are no tokens: start the game again.", "word")
    check_text(word, "word", LONGEST, "word")
    return ids, word.strip()


def _odds(site: Site, ids: list[int], word: str, spaced: bool) -> dict[str, Any]:
    settings = Settings()
    target = site.arrival(settings).result().target
    token = first_token(target.tokens, word, spaced)
    layers = site.look(settings, target.name, ids, token)["layers"]
    return {"id": token, "piece": target.tokens.piece(token), "p": layers[-1]["chosen"]}


def first_token(tokens: Any, word: str, spaced: bool) -> int:
    """Id of the token a word begins with where it follows other text: after a blank, unless it is a sign or one is
    there already.
    """
    before = "a\n" if spaced else "a " if word[0].isalnum() else "a"
    opening, whole = tokens.encode(before), tokens.encode(before + word)
    return whole[min(len(commonprefix([opening, whole])), len(whole) - 1)]


def script() -> str:
    """All scripts of the game as the body of one function."""
    return "\n".join(['"use strict";', *map(read, SCRIPTS)])


# --- what is told of a run ---

def told(trace: Trace, reads: bool) -> dict[str, Any]:
    """What was there before the first token, and every token whose odds are known, as plain data. A text that is read
    begins with its first token.
    """
    header = trace.headers[0]
    written = sequences(trace.lane(header.lane).events)[0]
    known = [
        _token(token, written.steps[place]) for place, token in enumerate(written.tokens) if place in written.steps
    ]
    opening = header.prompt_pieces if reads else [header.prompt]
    return {"opening": opening, "asked": header.chat and not reads, "ids": header.prompt_ids, "tokens": known}


def _token(token: Token, step: Step) -> dict[str, Any]:
    """Odds before masks and samplers; entropy in bits, over the whole vocabulary."""
    top = [{"id": candidate.id, "piece": candidate.piece, "p": candidate.raw} for candidate in step.top]
    return {
        "id": token.id,
        "piece": token.piece,
        "p": math.exp(token.logprob),
        "entropy": step.entropy / math.log(2),
        "top": top,
    }


def failure(headers: Facts, events: Facts) -> str:
    """Why the text ended before its time; empty where it did not."""
    lane = trace_of(headers, list(events)).lane(headers[0]["lane"]) if headers else None
    return (
        next((stamped.event.message for stamped in lane.events if isinstance(stamped.event, Failed)), "")
        if lane
        else ""
    )


# --- settings of a game ---

def settings_of(way: str, prompt: str, mode: str, length: int, seed: int) -> Settings:
    """A game's text as the settings of a run. What is read is plain text."""
    lane = {"strategy": way if way in KNOBS else SCORE, "knobs": KNOBS.get(way, {})}
    return Settings(prompt=prompt, mode="raw" if way == SCORE else mode, length=length, seed=seed, lanes=[lane])


def way_of(settings: Settings) -> str:
    """Where the text comes from: greedy, sample or score."""
    name = settings.lanes[0]["strategy"] if settings.lanes else "greedy"
    return name if name in KNOBS else "greedy"


def lanes_link(settings: Settings) -> str:
    """The playground with the same run in its lane; a text that is read stands there as the prompt."""
    lanes = settings.lanes if way_of(settings) != SCORE else Settings().lanes
    shown = Settings(settings.prompt, settings.mode, seed=settings.seed, length=settings.length, lanes=lanes)
    return f"./?s={shown.to_code()}"


def offers() -> list[tuple[str, Settings]]:
    """Texts to begin with: stories and answers the model writes, and tales it reads; each by its name in the menu."""
    return [*_questions(), *_tales()]


def _questions() -> list[tuple[str, Settings]]:
    """Every story, and the first question of the other tasks that needs nothing but its prompt."""
    plain = [
        question for question in gallery() if question.task in PLAYED and not question.before and not question.context
    ]
    first = {question.task: question for question in reversed(plain) if question.task != STORIES}
    asked = [
        *(question for question in plain if question.task == STORIES),
        *(first[task] for task in PLAYED if task in first),
    ]
    ways = {STORIES: "sample"}
    return [
        (_short(question.prompt), settings_of(ways.get(question.task, "greedy"), question.prompt, "chat", LENGTH, 0))
        for question in asked
    ]


def _tales() -> list[tuple[str, Settings]]:
    lines = TALES.read_text(encoding="utf-8").splitlines()[:TOLD]
    return [
        (f"To read: {tale['title']}", settings_of(SCORE, _opening(tale["text"]), "raw", LENGTH, 0))
        for tale in map(json.loads, lines)
    ]


def _opening(text: str) -> str:
    """The first sentences."""
    return text[:OPENING].rpartition(". ")[0] + "." if ". " in text[:OPENING] else text[:OPENING]


def _short(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= FIRST else f"{line[:FIRST]}…"


# --- parts of the page ---

INTRODUCTION = (
    "<h2>What comes next?</h2><p>A text grows token by token. Guess the next one before it is shown; then the model's own odds are laid open. "
    "A guess costs its surprise in bits, and whoever pays least leads.</p>"
)


def _hides_what_is_not_asked() -> str:
    """A script: a text that is read is neither a chat nor has it a length of its own."""
    return f"(way) => Array.from({{ length: 2 }}, () => ({{ __type__: 'update', visible: way !== '{SCORE}' }}))"
