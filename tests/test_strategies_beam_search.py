"""Beam search against a search by hand, and wrong variants against the same check."""
from __future__ import annotations

from itertools import product

import pytest
import torch
from pairs import TOKENIZER, network, pair
from registry import Collapse
from runs import run as run_lane
from tables import TableModel, Text, product_law
from transformers import PreTrainedModel

from playground.algorithms.search.beams import Beams
from playground.contract import Decoder
from playground.contract.lane_config import LaneConfig
from playground.engine.model import Model
from playground.events import Branches
from playground.grammar.matcher import GrammarEngine
from strategies.search import beam_search as beam_search_module
from support.option_searches import OPTIONS, START, answer, chance, lopsided
from support.search_oracles import PROMPT, BeamSearch, lane_of
from support.search_runs import logp, of, run
from support.speculation import GREEDY
from support.wrong_variants import refused


def beams_by_the_book(model: TableModel, width: int, exponent: float, length: int) -> Text:
    """Every text in a tuple, every context read again. Finished texts are ranked by sum / length ** exponent."""

    def rank(text: Text) -> float:
        return logp(model, PROMPT, text) / len(text) ** exponent

    live, finished = [()], []
    for _ in range(length):
        offers = [(*text, token) for text in live for token in range(model.vocabulary)]
        offers.sort(key=lambda text: -logp(model, PROMPT, text))
        finished += [text for text in offers[:width] if text[-1] in model.end_ids]
        finished = sorted(finished, key=rank, reverse=True)[:width]
        live = [text for text in offers if text[-1] not in model.end_ids][:width]
        if len(finished) == width and max(map(rank, live)) <= rank(finished[-1]):
            live = []
            break
    return max([*finished, *live], key=rank)


def check_beam_search(cls: type[Decoder]) -> None:
    for seed, (width, exponent) in product(range(5), ((2, 0.0), (3, 1.0), (3, 0.5))):
        model = TableModel("abcd.", ".", seed, spread=0.8)
        lane, _ = run_lane(lane_of(cls(beams=width, length_exponent=exponent)), {"target": model}, PROMPT, 6)
        assert tuple(lane.main.written) == beams_by_the_book(model, width, exponent, 6)


class RanksTheOtherWay(BeamSearch):
    """Multiplies by the length where it should divide."""

    def __post_init__(self):
        self.length_exponent = -self.length_exponent


class OneBeamFewer(BeamSearch):
    def __post_init__(self):
        self.beams -= 1


class ForgetsTheSum(Beams):
    """Scores by the last token's log-probability alone."""

    def choose(self, gains, ends):
        for beam in self.live:
            beam.score = 0.0
        return super().choose(gains, ends)


class EndsCountForNothing(Beams):
    """Collects every text that ends, however improbable it is."""

    def choose(self, gains, ends):
        offers = super().choose(gains, ends)
        return sorted({*offers, *(offer for offer in self.considered if ends(offer.token))}, key=self.considered.index)


@pytest.mark.oracle("beam_search")
def test_beam_search_finds_what_a_search_over_tuples_finds():
    check_beam_search(BeamSearch)


@pytest.mark.refuses("beam_search")
@pytest.mark.parametrize("wrong", [RanksTheOtherWay, OneBeamFewer])
def test_a_wrong_beam_search_is_refused(wrong):
    refused(check_beam_search, wrong)


@pytest.mark.refuses("beam_search")
@pytest.mark.parametrize("wrong", [ForgetsTheSum, EndsCountForNothing])
def test_beams_that_are_chosen_wrongly_are_refused(wrong, monkeypatch):
    monkeypatch.setattr(beam_search_module, "Beams", wrong)
    refused(check_beam_search, BeamSearch)


PATTERN = "(the|then) (fox|bird) (sing|listen)s"
TEXTS = [f"{a} {b} {c}s" for a in ("the", "then") for b in ("fox", "bird") for c in ("sing", "listen")]


def allowed_by(pattern: str, prompt: int):
    """The same grammar in the form of the library: which tokens may follow."""
    grammar = GrammarEngine(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id]).compile("regex", pattern)

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        matcher = grammar.matcher()
        if not all(matcher.advance(token) for token in ids[prompt:].tolist()) or matcher.stopped:
            return [TOKENIZER.eos_token_id]  # a finished beam is padded
        return matcher.mask().nonzero()[:, 0].tolist()

    return allowed


def by_the_library(model: PreTrainedModel, prompt: list[int], beams: int) -> list[int]:
    ids = torch.tensor([prompt])
    end = TOKENIZER.eos_token_id
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beams,
        length_penalty=1.0,
        early_stopping="never",
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=end,
        pad_token_id=end,
        prefix_allowed_tokens_fn=allowed_by(PATTERN, len(prompt)),
    )
    return written[0, len(prompt):].tolist()


@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beam_search_under_a_grammar_equals_the_librarys(width):
    prompt = TOKENIZER.encode("The green bird")
    expected = by_the_library(network("llama"), prompt, width)
    found = answer("beam_search", ("regex", {"pattern": PATTERN}), pair().target, prompt, beams=width)
    assert found.written == expected and found.text in TEXTS


@pytest.mark.refuses("beam_search")
def test_renormalising_over_the_allowed_tokens_finds_other_texts(monkeypatch):
    monkeypatch.setattr(
        "strategies.search.beam_search.log_probabilities",
        lambda rows: torch.cat([row.scores for row in rows]).log_softmax(-1),
    )
    assert any(
        answer("beam_search", ("choice", {"options": "|".join(OPTIONS)}), model, [START], beams=8).text
        != max(OPTIONS, key=lambda option: chance(model, option) / (len(option) + 1))
        for model in map(lopsided, range(4))
    )


COLLAPSES = {
    "beam_search": [
        Collapse(of("beam_search", beams=1), GREEDY),
        Collapse(of("beam_search", beams=1, length_exponent=0.0, early_stop=True), GREEDY),
    ],
}


def all_texts(model: TableModel, prompt: list[int], length: int) -> list[Text]:
    """Every text that ends, or is as long as it may be."""
    return list(product_law(model, prompt, length))


# --- beam search ---

@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("letters, ends, length", [("abcd", "", 3), ("ab", "", 5), ("ab.", ".", 4)])
def test_a_beam_for_every_prefix_finds_the_most_probable_text(letters, ends, length):
    greedy_too = 0
    for seed in range(8):
        model, prompt = TableModel(letters, ends, seed, spread=0.5), [0, 1]
        truth = max(all_texts(model, prompt, length), key=lambda text: logp(model, prompt, text))
        assert run(of("beam_search", beams=16, length_exponent=0.0), model, prompt, length).texts()[0] == truth
        greedy_too += run(GREEDY, model, prompt, length).texts()[0] == truth
    assert greedy_too < 8, "a search is only tested where greedy misses"


# --- other diversity functions, token by token, as the paper words them ---

@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("exponent, early", [(0.0, False), (1.0, False), (1.0, True)])
def test_beam_search_equals_the_librarys(architecture, exponent, early):
    prompt = [54, 71, 71, 54, 9]
    library, ours = network(architecture), network(architecture)
    end = run(GREEDY, pair(architecture).target, prompt, 4).texts()[0][-1]  # a token that occurs early
    ours.generation_config.eos_token_id = end
    expected = library.generate(
        torch.tensor([prompt]),
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        max_new_tokens=12,
        length_penalty=exponent,
        early_stopping=early,
        eos_token_id=end,
        pad_token_id=319,
    )
    texts = [[token for token in row[len(prompt):] if token != 319] for row in expected.tolist()]
    recorded = run(
        of("beam_search", beams=4, length_exponent=exponent, early_stop=early),
        Model(ours, TOKENIZER, architecture),
        prompt,
        12,
    )
    assert [list(text) for text, _ in recorded.finished()] == texts
    assert any(text[-1] == end for text in texts) and list(recorded.texts()[0]) == texts[0]


PROCESSED = {
    "n-grams": ({"no_repeat_ngram_size": 2}, ("no_repeat_ngram", {"n": 2})),
    "length": ({"min_new_tokens": 9}, ("min_new_tokens", {"count": 9})),
}


@pytest.mark.oracle("beam_search")
@pytest.mark.parametrize("theirs, ours", PROCESSED.values(), ids=PROCESSED)
def test_beams_with_processors_equal_the_librarys(theirs, ours):
    prompt, model = [54, 71, 71, 54, 9], network("llama")
    end = run(GREEDY, pair("llama").target, prompt, 4).texts()[0][-1]
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 12, "length_penalty": 1.0, "pad_token_id": 319}
    expected = model.generate(
        torch.tensor([prompt]), **options, eos_token_id=end, renormalize_logits=True, **theirs
    )[0, len(prompt):].tolist()
    model.generation_config.eos_token_id = end
    target = Model(model, TOKENIZER, "llama")
    lane = LaneConfig("beam_search", {"beams": 4}, [ours])
    plain = run(LaneConfig("beam_search", {"beams": 4}), target, prompt, 12).texts()[0]
    assert list(run(lane, target, prompt, 12).texts()[0]) == [token for token in expected if token != 319]
    assert list(plain) != expected, "the processor changes nothing"


def test_enough_beams_continue_if_several_tokens_end_a_text():
    model = TableModel(
        "abxyz", "xyz", rule=lambda context: torch.tensor([0.0, -0.1, 5.0, 5.1, 5.2], dtype=torch.float64)
    )
    recorded = run(of("beam_search", beams=2, length_exponent=0.0), model, [0], 3)
    assert [text for text, _ in recorded.finished()] == [(4,), (3,)]
    assert [len(event.scores) for event in recorded.of(Branches) if event.scores] == [2]
