"""The phrase ban: its law by hand, what it takes back, and wrong variants against the same check."""
from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from registry import Collapse
from runs import figures, run
from tables import Law, TableModel, Text, distance, law, write

from playground.contract import Decoder, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Forward, Note, Rollback
from support.laws import AT_ONE, EXACT
from support.wrong_variants import refused

PhraseBan = find("phrase_ban")
GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "phrase_ban": [
        Collapse(LaneConfig("phrase_ban"), GREEDY),
        Collapse(LaneConfig("phrase_ban", {"phrases": "a\ne\n t", "tries": 0}), GREEDY),
    ],
}


def ban(*phrases: str, **knobs) -> LaneConfig:
    return LaneConfig("phrase_ban", {"phrases": "\n".join(phrases), **knobs})


def scripted(letters: list[str], *texts: str) -> TableModel:
    """A model that wants the first of these texts, after a change the second, and so on; texts are lists of tokens."""
    wanted = [[letters.index(piece) for piece in text.split("|")] for text in texts]

    def rule(context: Text) -> torch.Tensor:
        scores, text = torch.zeros(len(letters), dtype=torch.float64), list(context[1:])
        for rank, each in enumerate(wanted):
            if each[:len(text)] == text and len(each) > len(text):
                scores[each[len(text)]] = max(float(scores[each[len(text)]]), 9.0 - rank)
        return scores

    return TableModel(letters, rule=rule)


# --- the law: a repair by hand ---

def repaired(model: TableModel, prompt: Text, length: int, phrases: list[str], tries: int) -> Law:
    """Every course of a text that is rewritten at the token in which a phrase began; one letter is one token."""
    found: Law = defaultdict(float)

    def write(text: Text, chance: float, banned: dict[int, frozenset], tried: tuple, passed: int) -> None:
        if len(text) == length:
            found[text] += chance
            return
        p = model.scores((*prompt, *text)).softmax(-1).tolist()
        here = banned.get(len(text), frozenset())
        left = {token: share for token, share in enumerate(p) if token not in here} or dict(enumerate(p))
        for token, share in left.items():
            weight = chance * share / sum(left.values())
            longer = (*text, token)
            letters = "".join(model.letters[each] for each in longer)
            starts = [i for i in range(passed, len(letters)) for phrase in phrases if letters[i:].startswith(phrase)]
            if not starts:
                write(longer, weight, banned, tried, passed)
            elif tried.count(place := min(starts)) >= tries:
                write(longer, weight, banned, tried, place + 1)
            else:
                kept = {at: tokens for at, tokens in banned.items() if at <= place}
                kept[place] = kept.get(place, frozenset()) | {longer[place]}
                write(longer[:place], weight, kept, (*tried, place), min(passed, place))

    write((), 1.0, {}, (), 0)
    return dict(found)


def check_phrase_ban(cls: type[Decoder]) -> None:
    """Sampled texts have the law of the repair, and none contains a phrase that could be avoided."""
    for seed, (phrases, tries) in enumerate(((["ab"], 1), (["a", "bb"], 2), (["aba", "bc"], 1))):
        model, decoder = TableModel("abc", seed=seed), cls(phrases="\n".join(phrases), tries=tries)
        assembly = Assembly(decoder, [*decoder.toggles(), make("temperature", t=1.0)])
        found = law(assembly, {"target": model}, [0], 3)
        assert distance(found, repaired(model, (0,), 3, phrases, tries)) < EXACT
    model = scripted(["s", "a", "b", "c"], "s|a|b|s", "s|c|a|c")
    assert text_of(cls(phrases="ab"), model, 4) == "scac"


def text_of(decoder: Decoder, model: TableModel, length: int) -> str:
    return write(Assembly(decoder, decoder.toggles()), {"target": model}, [0], Limits(0, length), Draws(0)).text


class ForbidsTheLastToken(PhraseBan):
    """As forbidden words do: the phrase begins, and its end is replaced."""

    def _take_back(self, lm, phrase, choice):
        return super()._take_back(lm, phrase._replace(place=lm.generated), choice)


class ForbidsItEverywhere(PhraseBan):
    def _take_back(self, lm, phrase, choice):
        yield from super()._take_back(lm, phrase, choice)
        (sampler,) = (each for each in lm.chain.samplers if each.name == "phrase_ban")
        for place in range(20):
            sampler._changes.setdefault(place, sampler._changes[lm.prompt_length + phrase.place])


class ForgetsWhatWasTried(PhraseBan):
    """Remembers only the last token that failed at a place."""

    def _take_back(self, lm, phrase, choice):
        for sampler in lm.chain.samplers:
            if sampler.name == "phrase_ban":
                sampler._changes = {}
        return super()._take_back(lm, phrase, choice)


@pytest.mark.oracle("phrase_ban")
def test_the_law_is_that_of_the_repair_by_hand():
    check_phrase_ban(PhraseBan)


@pytest.mark.refuses("phrase_ban")
@pytest.mark.parametrize("wrong", [ForbidsTheLastToken, ForbidsItEverywhere, ForgetsWhatWasTried])
def test_a_wrong_phrase_ban_is_refused(wrong):
    refused(check_phrase_ban, wrong)


# --- what is taken back ---

SHIVERS = ["The", " king", " felt", " shivers", " down", " his", " spine", " cold", " fear", " and", "."]
WANTED = "The| king| felt| shivers| down| his| spine| and| .".replace(" .", ".")


def test_a_phrase_is_rewritten_where_it_began_and_the_text_before_it_is_the_plain_runs():
    model = scripted(SHIVERS, WANTED, "The| king| felt| cold| and| fear| and| fear")
    lane, events = run(ban("Shivers down his spine"), {"target": model}, [9], 8)
    assert lane.text == "The king felt cold and fear and fear"
    (taken,) = [event for event in events if isinstance(event, Rollback)]
    assert (taken.count, taken.text) == (4, "The king felt")
    assert sum(isinstance(event, Forward) for event in events) == 8 + 4  # one for each token that was taken back
    (tree,) = figures(events, "phrases taken back")
    assert tree["labels"] == ["The king felt…", " shivers", " down", " his", " spine"]
    assert tree["parents"] == [-1, 0, 1, 2, 3] and tree["values"] == [3, 3, 4, 5, 6]


@pytest.mark.parametrize("phrase, text", [
    ("own", "The king felt shivers cold fear"),  # begins inside a token, which is the one that goes
    ("s down", "The king felt cold and fear"),  # begins in the last letter of a token
    ("SHIVERS DOWN", "The king felt cold and fear"),
    ("shivers.", "The king felt shivers down his"),  # a dot is a dot
])
def test_the_token_in_which_a_phrase_begins_is_replaced(phrase, text):
    model = scripted(SHIVERS, WANTED, "The| king| felt| cold| and| fear", "The| king| felt| shivers| cold| fear")
    assert run(ban(phrase), {"target": model}, [9], 6)[0].text == text


def test_of_two_overlapping_phrases_the_one_that_began_first_goes():
    model = scripted(SHIVERS, WANTED, "The| king| felt| shivers| cold| fear", "The| king| cold| fear| and| his")
    assert run(ban("down"), {"target": model}, [9], 6)[0].text == "The king felt shivers cold fear"
    assert run(ban("down", "felt shivers down"), {"target": model}, [9], 6)[0].text == "The king cold fear and his"


def test_a_phrase_that_ends_the_text_at_its_length_is_taken_back_too():
    model = scripted(SHIVERS, WANTED, "The| king| felt| cold| and")
    lane, events = run(ban("shivers down"), {"target": model}, [9], 5)
    assert lane.text == "The king felt cold and" and lane.reason == "length"
    assert [event.count for event in events if isinstance(event, Rollback)] == [1]


def test_a_place_that_cannot_be_rewritten_lets_its_phrase_pass_and_says_so():
    model = TableModel("ab", seed=3)
    lane, events = run(ban("a", "b", tries=2), {"target": model}, [0], 4)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert lane.generated == 4 and notes and all(note.endswith("passes: its place was rewritten 2 times.")
                                                 for note in notes)


def test_a_factor_makes_a_token_less_likely_and_does_not_forbid_it():
    """Half as likely once and twice: 0.75 of the mass is enough for the second place after two halvings."""
    fixed = torch.tensor([0.6, 0.25, 0.15], dtype=torch.float64).log()
    model = TableModel("abc", rule=lambda context: fixed)
    _, events = run(ban("a", factor=0.5), {"target": model}, [0], 1)
    lane, _ = run(ban("a", factor=0.5), {"target": model}, [0], 1)
    assert lane.text == "b" and sum(isinstance(event, Rollback) for event in events) == 2  # .6, .3, then .15 < .25


def test_random_texts_contain_no_phrase_unless_a_note_says_so_and_always_end():
    passed = 0
    for seed in range(16):
        letters, phrases = ("abc", ["ab", "ba", "cc"]) if seed % 2 else ("abcdefgh", ["ab", "cde", "h"])
        config = LaneConfig("phrase_ban", {"phrases": "\n".join(phrases)}, [AT_ONE])
        lane, events = run(config, {"target": TableModel(letters, seed=seed)}, [0], 24, seed)
        notes = sum(isinstance(event, Note) for event in events)
        assert lane.generated == 24 and any(phrase in lane.text for phrase in phrases) == bool(notes)
        passed += bool(notes)
        assert lane.target.store.keys[0].rows[0, :24, 0].tolist() == lane.tokens[:24]  # the cache is the text's
    assert passed < 8


def test_given_tokens_are_not_taken_back():
    """A fork of a run begins with tokens of a phrase: only those after them are replaced."""
    decoder = make("phrase_ban", phrases="shivers down")
    model = scripted(SHIVERS, WANTED, "The| king| felt| shivers| cold| fear")
    limits = Limits(0, 6, forced=(0, 1, 2, 3))
    lane = write(Assembly(decoder, decoder.toggles()), {"target": model}, [9], limits, Draws(0))
    assert lane.text == "The king felt shivers cold fear"


@pytest.mark.parametrize("phrases, says", [
    ("\n".join(f"word {i}" for i in range(65)), "at most 64"), ("x" * 81, "80 characters"),
])
def test_too_many_or_too_long_phrases_are_refused(phrases, says):
    with pytest.raises(Refusal, match=says):
        make("phrase_ban", phrases=phrases)


@pytest.mark.parametrize("toggle", [("regex", {"pattern": "a*"}), ("sink_window", {}), ("mirostat", {})])
def test_what_cannot_be_taken_back_is_refused_before_the_run(toggle):
    with pytest.raises(Refusal, match="Phrase ban does not work with"):
        assemble(LaneConfig("phrase_ban", {}, [toggle]))
