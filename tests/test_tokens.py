"""Text to ids and back: what is shown piece by piece is what the whole text says."""
import random

import pytest
from toys import ASSISTANT, END, SENTENCES, USER, byte_tokenizer, sentencepiece_tokenizer

from playground.engine.text.token_bytes import Reader
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

TEXTS = SENTENCES + ["", " ", "  two  spaces  ", "a\nb\tc", "e\u0301 🙂🙂 日本語"]
MAKERS = {"byte-level": byte_tokenizer, "sentencepiece": sentencepiece_tokenizer}


@pytest.fixture(scope="module", params=MAKERS)
def tokens(request):
    tokenizer = MAKERS[request.param]()
    return Tokens(tokenizer, len(tokenizer) + 5)


@pytest.fixture(scope="module")
def byte_level():
    tokenizer = byte_tokenizer()
    return Tokens(tokenizer, len(tokenizer) + 5)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back_as_the_library_does(tokens, text):
    ids = tokens.encode(text)
    assert (
        tokens.decode(ids)
        == text
        == tokens.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_byte_level_ids_decode_as_the_library_does(byte_level, seed):
    ids = random.Random(seed).choices(range(byte_level.vocabulary), k=40)
    assert byte_level.decode(ids) == byte_level.tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("seed", range(30))
def test_pushes_of_any_size_add_up_to_the_decoded_text(tokens, seed):
    chance = random.Random(seed)
    ids = chance.choices(range(tokens.vocabulary), k=60)
    reader, text, at = Reader(tokens), "", 0
    while at < len(ids):
        step = chance.randint(0, 4)
        text += reader.push(ids[at:at + step])
        at += step
    assert text + reader.flush() == tokens.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_half_a_letter_waits_for_its_other_half(tokens, text):
    reader = Reader(tokens)
    seen = [reader.push([id]) for id in tokens.encode(text)]
    assert "".join(seen) == text
    assert not any("\ufffd" in piece for piece in seen)


def test_what_never_became_a_letter_is_flushed_as_a_replacement(byte_level):
    reader = Reader(byte_level)
    half = next(id for id in range(byte_level.vocabulary) if byte_level.bytes(id) == b"\xe2")
    assert reader.push([half]) == ""
    assert reader.flush() == "\ufffd"


def test_a_copied_reader_goes_its_own_way(tokens):
    ids, other = tokens.encode("ab日 a"), tokens.encode("c")
    for cut in range(1, len(ids)):
        reader = Reader(tokens)
        begun = reader.push(ids[:cut])
        twin = reader.copy()
        assert begun + twin.push(ids[cut:]) == "ab日 a"
        assert begun + reader.push(other) + reader.flush() == tokens.decode(ids[:cut] + other)


def test_a_rebuilt_reader_has_forgotten_what_was_taken_back(tokens):
    ids = tokens.encode("ab 🙂")
    reader = Reader(tokens)
    reader.push(ids)
    assert reader.rebuild(ids[:-1]) == "ab "
    assert reader.push(ids[-1:]) == "🙂"


def test_special_tokens_in_a_prompt_become_those_tokens_and_are_not_decoded(byte_level):
    ids = byte_level.encode(f"a{END}b")
    assert len(ids) == 3
    assert byte_level.is_special(ids[1])
    assert byte_level.decode(ids) == "ab"


def test_pieces_show_spaces_stray_bytes_special_names_and_unused_rows(byte_level):
    pieces = byte_level.pieces(range(byte_level.vocabulary))
    assert pieces[:3] == [END, USER, ASSISTANT]
    assert {" ", "a", "\n", "<0xE2>", " the"} <= set(pieces)
    assert pieces[-1] == f"<unused {byte_level.vocabulary - 1}>"


def test_a_piece_with_half_a_letter_at_its_edge_shows_both_parts():
    tokenizer = byte_tokenizer(merges=200)
    tokens = Tokens(tokenizer, len(tokenizer))
    mixed = next(id for id in range(tokens.vocabulary) if tokens.bytes(id) == b" \xe2\x80")
    assert tokens.piece(mixed) == " <0xE2><0x80>"


def test_sentencepiece_pieces_keep_their_leading_space():
    tokenizer = sentencepiece_tokenizer()
    tokens = Tokens(tokenizer, len(tokenizer))
    assert tokens.pieces(tokens.encode("ab a\n日")) == [" ab", " a", "\n", "<0xE6>", "<0x97>", "<0xA5>"]


def test_bytes_of_all_tokens_of_a_text_are_the_text(byte_level):
    text = " ".join(SENTENCES)
    assert b"".join(map(byte_level.bytes, byte_level.encode(text))) == text.encode()


def test_chat_ends_where_the_answer_begins(byte_level):
    assert "".join(byte_level.pieces(byte_level.encode_chat("red fox"))) == f"{USER} red fox{ASSISTANT}"
    assert byte_level.decode(byte_level.encode_chat("red fox", "be brief")).startswith("<|system|> be brief")


def test_chat_without_a_template_is_refused():
    tokenizer = byte_tokenizer(template=None)
    with pytest.raises(Refusal, match="no chat template"):
        Tokens(tokenizer, len(tokenizer)).encode_chat("hello")


def test_a_template_that_takes_no_system_message_is_refused_with_advice():
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{"
        " messages[0].content }}"
    )
    tokenizer = byte_tokenizer(template=template)
    tokens = Tokens(tokenizer, len(tokenizer))
    assert tokens.decode(tokens.encode_chat("hello")) == "hello"
    with pytest.raises(Refusal, match="no system role.*leave the system message empty"):
        tokens.encode_chat("hello", "be brief")
