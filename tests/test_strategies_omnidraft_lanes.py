"""OmniDraft: which lanes can use a draft with other tokens, and its text in these."""
from __future__ import annotations

import pytest
import torch
from pairs import network, pair
from registry import registered, title
from tables import TableModel, distance
from toys import byte_tokenizer, sentencepiece_tokenizer

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.cross_tokenizer import Lexicon
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.scoring import score
from playground.decoding.session import prepare
from playground.engine.model import Model
from playground.events import Done, Draft, Event, Failed, Forward
from playground.trace import check
from playground.ui.components.model_menu import drafts
from support.laws import AT_ONE, EXACT
from support.online_drafting import speculative_lane
from support.speculation import GREEDY
from support.two_tokenizers import between, crossed, law_between, speaking, strangers

# --- the text in the draft's own tokens ---

def test_the_draft_always_reads_the_same_text_in_its_own_tokens():
    cut = 0
    for seed in range(6):
        models, before = strangers(seed), []
        ours, theirs = (models[name].letters for name in ("target", "draft"))
        for lane, _ in between(speculative_lane("omnidraft", AT_ONE, depth=3), models, [0, 1, 0], Limits(seed, 14)):
            if "draft" not in lane._streams:
                continue
            stream = lane.stream("draft")
            read = (
                list(map(int, stream.store.keys[0].rows[0, : stream.store.length, 0].tolist()))
                if stream.store.length
                else []
            )
            whole = "".join(ours[token] for token in lane.tokens)
            assert whole.startswith("".join(theirs[token] for token in read))
            assert "".join(theirs[token] for token in [*read, *stream.unread()]) == whole
            cut += read[:len(before)] != before
            before = read
    assert cut > 3, "no text was ever spelled in another way than it was read"


def test_the_draft_takes_no_forward_within_a_character():
    ours, theirs = byte_tokenizer(60), byte_tokenizer(10)
    script = [*ours("é!")["input_ids"], ours.eos_token_id]
    assert len(script) > 3, "the letter is to have several tokens"

    def rule(context):
        return (
            torch.nn.functional.one_hot(torch.tensor(script[min(len(context), len(script)) - 1]), len(ours)).double()
            * 9
        )

    models, places = (
        {"target": TableModel(tokenizer=ours, rule=rule), "draft": TableModel(tokenizer=theirs, seed=1)},
        [],
    )
    for lane, recorded in between(speculative_lane("omnidraft"), models, ours("a")["input_ids"], Limits(0, 9)):
        places += [lane.generated for event in recorded if isinstance(event, Draft)]
    assert lane.text == "é!" and lane.reason == "end"
    whole = [place for place in range(len(script)) if "\ufffd" not in ours.decode(script[:place])]
    assert set(places) <= set(whole) and 0 in places and len(whole) < len(script)


class GoesBack(Decoder):
    """Writes four tokens, lets the draft read them, rolls some back and runs the draft again, each time for the row
    after the text.
    """

    needs, translates = ("draft",), True

    def __init__(self, count: int):
        self.count, self.rows = count, []

    def __deepcopy__(self, memo):
        return self

    def decode(self, lm):
        rows = yield lm.prefill()
        for _ in range(4):
            yield lm.keep(lm.pick(rows))
            rows = yield lm.extend()
        for count in (0, self.count):
            yield lm.roll_back(count)
            rows = yield lm.stream("draft").extend()
            self.rows.append((list(lm.tokens), rows.raw[0]))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_after_a_rollback_the_drafts_row_is_that_of_the_shorter_text(count):
    for seed in range(4):
        models, decoder = strangers(seed), GoesBack(count)
        ours, theirs = models["target"].tokens, models["draft"].tokens
        list(between(Assembly(decoder), models, [0, 1], Limits(0, 9)))
        for tokens, row in decoder.rows:
            read = theirs.encode("".join(ours.letters[token] for token in tokens[:2])) + theirs.encode(
                "".join(ours.letters[token] for token in tokens[2:])
            )
            scores = models["draft"].scores(tuple(read))
            expected = [
                float(scores[theirs.letters.index(letter)]) if letter in theirs.letters else float("-inf")
                for letter in ours.letters
            ]
            assert row.tolist() == expected


def test_of_tokens_with_equal_text_the_canonical_one_is_mapped():
    with_bytes, without = sentencepiece_tokenizer(), byte_tokenizer(20)
    name = with_bytes.convert_tokens_to_ids
    assert name("<0x61>") < name("a")
    lexicon = Lexicon(TableModel(tokenizer=without), TableModel(tokenizer=with_bytes))
    assert lexicon.theirs[without.convert_tokens_to_ids("a")] == name("a")
    assert lexicon.theirs[without.convert_tokens_to_ids("x")] == name("<0x78>")
    back = Lexicon(TableModel(tokenizer=with_bytes), TableModel(tokenizer=without))
    assert back.ours[without.convert_tokens_to_ids("a")] == name("a")


@pytest.mark.parametrize(
    "ours, theirs", [(byte_tokenizer(20), sentencepiece_tokenizer()), (sentencepiece_tokenizer(), byte_tokenizer(20))]
)
def test_tokenizers_with_different_space_handling_read_the_same_text(ours, theirs):
    names = {"a", "b", "c", "ab", "\u2581", "\u2581a", "\u0120"}
    wanted = [token for token in range(len(ours)) if ours.convert_ids_to_tokens(token) in names]

    def rule(context):
        chances = TableModel(tokenizer=None, letters=wanted, seed=1).scores(context)
        return torch.full((len(ours),), -1e9, dtype=torch.float64).index_copy(0, torch.tensor(wanted), chances)

    models = {"target": TableModel(tokenizer=ours, rule=rule), "draft": TableModel(tokenizer=theirs, seed=1)}
    *_, (lane, _) = between(speculative_lane("omnidraft", AT_ONE), models, ours("ab ba")["input_ids"], Limits(3, 14))
    stream, said = lane.stream("draft"), lane.tokens[lane.prompt_length:]
    read = (stream.store.keys[0].rows[0, :stream.store.length, 0].int().tolist() + stream.unread())[len(stream.prompt):]
    assert b"".join(map(models["draft"].tokens.bytes, read)) == b"".join(map(models["target"].tokens.bytes, said))
    assert b" " in b"".join(map(models["target"].tokens.bytes, said)) and len(stream.spellings(0)) > len(said) / 2


def test_the_drafts_end_token_maps_to_the_targets():
    def ending(place):
        return lambda context: torch.nn.functional.one_hot(torch.tensor(place), 3).double() * 9

    models = {
        "target": speaking(["a", "b", "."], ".", rule=ending(2)),
        "draft": speaking(["!", "b", "a"], "!", rule=ending(0)),
    }
    lane, recorded = crossed(speculative_lane("omnidraft"), models, [0], 5)
    assert lane.tokens == [0, 2] and lane.reason == "end"
    assert [event.tokens for event in recorded if isinstance(event, Draft)] == [[2]]


def test_a_draft_with_a_full_context_drafts_nothing():
    models = strangers()
    models["draft"].context = 6
    lane, recorded = crossed(speculative_lane("omnidraft", AT_ONE), models, [0, 1, 0], 20)
    assert lane.generated == 20 and lane.stream("draft").store.length <= 6
    assert [event for event in recorded if isinstance(event, Draft)]


def test_under_a_grammar_the_distribution_is_the_targets_among_allowed_tokens():
    ours, theirs = byte_tokenizer(60), byte_tokenizer(10)
    models = {"target": TableModel(tokenizer=ours, seed=3), "draft": TableModel(tokenizer=theirs, seed=4)}
    q, x, z = (ours.convert_tokens_to_ids(letter) for letter in "qxz")
    assert theirs.convert_tokens_to_ids("q") == q and len(theirs) < len(ours)
    first, second = (models["target"].scores(context).softmax(-1) for context in ((q, q), (q, q, q)))
    chance_of_q, chance_of_x = float(first[q] / (first[q] + first[z])), float(second[x] / (second[x] + second[z]))
    by_hand = {(q, x): chance_of_q * chance_of_x, (q, z): chance_of_q * (1 - chance_of_x), (z,): 1 - chance_of_q}
    config = speculative_lane("omnidraft", ("choice", {"options": "qz|qx|z"}), AT_ONE)
    assert distance(law_between(config, models, [q, q], 6), by_hand) < EXACT


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_networks_with_different_tokenizers_write_what_the_target_writes_alone(architecture):
    target = pair(architecture).target
    models = Models(target, Model(network(architecture), byte_tokenizer(20), "another"))
    session = prepare(
        models,
        [GREEDY, speculative_lane("omnidraft"), speculative_lane("omnidraft", ("regex", {"pattern": "[a-z ]{3,9}"}))],
        Prompt("The green bird"),
        Limits(0, 16),
    )
    recorded = [stamped for stamped in session]
    plain, crossed_ = (
        [token for s in recorded if s.lane == lane and s.event.kind == "commit" for token in s.event.ids]
        for lane in (0, 1)
    )
    assert plain == crossed_ and len(set(plain)) > 3
    assert isinstance(recorded[-1].event, Done) and check(session.trace) == []
    assert any(isinstance(s.event, Forward) and s.event.stream == "draft" for s in recorded)


# --- which lanes can use such a draft ---

def ends_of(models: Models, *configs: LaneConfig) -> list[Event]:
    session = prepare(models, list(configs), Prompt("ab"), Limits(0, 4))
    last = {stamped.lane: stamped.event for stamped in session}
    return [last[lane] for lane in range(len(configs))]


def test_a_draft_with_other_tokens_is_refused_only_to_lanes_that_cannot_translate_it():
    drafters = [speculative_lane(cls.name) for cls in registered("drafter") if "draft" in cls.needs]
    others = [LaneConfig("greedy"), speculative_lane("prompt_lookup"), LaneConfig("ead")]
    for config, end in zip([*drafters, *others], ends_of(Models(*strangers().values()), *drafters, *others)):
        parts = [find(name) for name in (config.strategy, *(name for name, _ in config.extras))]
        bound = [cls.title for cls in parts if "draft" in cls.needs and not cls.translates]
        assert isinstance(end, Failed) == bool(bound), title(config)
        if bound:
            assert (
                f"which {bound[0]} cannot translate" in end.message
                and find("omnidraft").title in end.message
                and end.message.endswith(".")
            )


def test_a_draft_with_the_same_tokens_is_refused_to_no_lane():
    models = Models(TableModel("abc"), TableModel("abc", seed=1))
    assert models.differences == "" and all(
        isinstance(end, Done) for end in ends_of(models, speculative_lane("draft_model"), speculative_lane("omnidraft"))
    )


def test_models_without_a_token_in_common_are_refused():
    models = Models(speaking(["a", "b"]), speaking(["c", "d"]))
    models.draft.tokens.encode = lambda text: [0] * len(text)  # reads letters it has no token of as another one
    end, = ends_of(models, speculative_lane("omnidraft"))
    assert isinstance(end, Failed) and "no token in common" in end.message


def test_the_menu_of_drafts_says_who_can_use_the_one_with_other_tokens():
    titles = {name: text for text, name in drafts()}
    assert "OmniDraft" in titles["pocket-other-draft"] and "OmniDraft" not in titles["pocket-draft"]


def test_a_text_is_scored_by_the_target_alone_where_the_draft_has_other_tokens():
    assert [header.model for header in score(Models(*strangers().values()), Prompt("abab")).headers] == ["table"]
    assert len(score(Models(TableModel("ab"), TableModel("ab", seed=1)), Prompt("abab")).headers) == 2
