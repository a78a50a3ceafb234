"""Lanes of a Llama-2-style tokenizer: the first space of an answer is part of it, wherever its text is read."""
import copy

import pytest

import playground
from playground.engine.text.tokens import Tokens
from playground.grammar.matcher import GrammarEngine
from support.scripted_networks import chain, save, scripted
from support.tokenizer_kinds import KINDS

PROMPT, ANSWER = "The red", " fox reads the answer"


@pytest.fixture(scope="module")
def tokenizer():
    return KINDS["llama2"]()


@pytest.fixture(scope="module")
def models(tokenizer, tmp_path_factory):
    whole = tokenizer(PROMPT + ANSWER)["input_ids"]
    network = scripted(len(tokenizer), chain([*whole, tokenizer.eos_token_id]))
    folder = save(tmp_path_factory.mktemp("llama2"), network, tokenizer)
    return playground.load(folder, draft="none", device="cpu", dtype="float32")


def test_a_text_follows_its_prompt_as_in_the_library(models, tokenizer):
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=20)
    whole = tokenizer.decode([*tokenizer(PROMPT)["input_ids"], *result.token_ids], skip_special_tokens=True)
    assert PROMPT + result.text == whole == PROMPT + ANSWER
    assert result.reason == "end"


def test_pieces_and_texts_of_the_events_add_up_to_the_answer(models):
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=20)
    commits = [stamped.event for stamped in result.trace.lane(0).events if stamped.event.kind == "commit"]
    assert "".join(commit.text for commit in commits) == result.text
    assert "".join(piece for commit in commits for piece in commit.pieces) == result.text + "</s>"


def test_a_stop_string_ends_a_text_at_its_first_word(models):
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=20, stop=" fox")
    assert (len(result.token_ids), result.text, result.reason) == (1, "", "stop_string")


@pytest.mark.parametrize("constraint, knobs", [
    ("choice", {"options": " fox| bird"}), ("choice", {"options": "fox|bird"}), ("regex", {"pattern": " [a-z]{3}"}),
    ("lark", {"source": 'start: " " /[a-z]{3}/'}), ("template", {"source": " {{word:[a-z]{3}}}"}),
])
def test_a_constrained_text_is_of_its_language(models, constraint, knobs):
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=6, extras=[(constraint, knobs)])
    assert result.text.removeprefix(" ").isalpha() and len(result.text.strip()) >= 3
    assert result.text[:1].isspace() == next(iter(knobs.values())).startswith((" ", "start"))
    if constraint == "choice":
        assert result.text in knobs["options"].split("|")


@pytest.mark.parametrize("strategy", ["beam_search", "best_of_n", "speculative"])
def test_branches_and_drafts_read_the_same_text(models, strategy):
    extras = ["prompt_lookup"] if strategy == "speculative" else []
    result = playground.run(strategy, PROMPT, models=models, max_new_tokens=20, extras=extras)
    assert result.text == ANSWER


def test_a_prompt_without_text_begins_a_text(models, tokenizer):
    result = playground.run("greedy", "<s>", models=models, max_new_tokens=3)
    whole = tokenizer.decode([*tokenizer("<s>")["input_ids"], *result.token_ids], skip_special_tokens=True)
    assert result.text == whole and not result.text.startswith(" ")


def test_a_constraint_after_special_tokens_alone_is_refused_where_the_first_word_changes(models):
    """Constraints would read " fox" where people read "fox"."""
    with pytest.raises(playground.Refusal, match="special tokens only.*write some words in the prompt"):
        playground.run("greedy", "<s>", models=models, max_new_tokens=3, extras=[("choice", {"options": " fox"})])
    bytes_level = KINDS["gpt2"]()
    Tokens(bytes_level, len(bytes_level)).check_constrainable(bytes_level("<|endoftext|>")["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_constraints_read_the_bytes_that_texts_have(kind):
    """llguidance has its own view of a vocabulary, which must be ours; it marks its own tokens by the byte 0xFF."""
    tokenizer = KINDS[kind]()
    tokens = Tokens(tokenizer, len(tokenizer))
    if kind in ("t5", "bert", "words"):
        with pytest.raises(playground.Refusal, match="do not work with this model's tokenizer"):
            GrammarEngine(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        return
    engine = GrammarEngine(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    for id in range(len(tokenizer)):
        if not tokens.is_special(id) and tokens.bytes(id) != b"\xff":
            assert engine.llguidance.decode_bytes([id]) == tokens.bytes(id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_has_the_tokens_of_the_library(kind):
    tokenizer = copy.deepcopy(KINDS[kind]())
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }} a:"
    turns = [{"role": "user", "content": "The red fox"}]
    library = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert Tokens(tokenizer, len(tokenizer)).encode_chat("The red fox") == library


@pytest.mark.parametrize("target, draft", [("llama2", "gpt2"), ("gpt2", "llama2"), ("mistral", "llama3")])
def test_a_draft_with_other_tokens_reads_the_same_continuation(tmp_path, target, draft):
    """Its guesses are right only if it reads the text as its own tokenizer writes it after a prompt."""
    folders = {}
    for kind in (target, draft):
        tokenizer = KINDS[kind]()
        ids = [*tokenizer(PROMPT)["input_ids"], *Tokens(tokenizer, len(tokenizer)).encode_continuation(ANSWER)]
        network = scripted(len(tokenizer), chain([*ids, tokenizer.eos_token_id]))
        folders[kind] = save(tmp_path / kind, network, tokenizer)
    models = playground.load(folders[target], folders[draft], device="cpu", dtype="float32")
    result = playground.run("speculative", PROMPT, models=models, max_new_tokens=20, extras=["omnidraft"])
    assert result.text == ANSWER
    assert result.metrics["origins"]["draft"] >= 4
