"""The text of a continuation is what it adds to the text of its prompt, with the tokenizers that checkpoints bring."""
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from playground.engine.text.token_bytes import Reader
from playground.engine.text.tokens import Tokens
from support.tokenizer_kinds import BYTES, KINDS

TEXTS = [
    "The red fox", " the answer", " Sure, here:\n\n    x = 1\n", "naïve café 日本語 😀", "  two  spaces",
    "don't, I'm ok.", "\tif a:\n\t\tb", " ", "<think>so</think>",
]
CHANGING = {"t5", "bert", "words"}  # kinds that do not keep every text as it is


@pytest.fixture(scope="module", params=KINDS)
def tokens(request):
    return tokens_of(request.param)


def tokens_of(kind: str) -> Tokens:
    """A tokenizer for a network with three embeddings more than tokens."""
    tokenizer = KINDS[kind]()
    return Tokens(tokenizer, len(tokenizer) + 3)


def prompts(tokens: Tokens) -> list[list[int]]:
    """Nothing, special tokens only, and texts."""
    begin = tokens.tokenizer.bos_token_id
    return [[], [] if begin is None else [begin], *map(tokens.encode, TEXTS)]


def continuations(tokens: Tokens) -> list[list[int]]:
    """Texts, and random tokens without byte tokens, since the library loses whole characters beside stray bytes."""
    chance, names = random.Random(0), tokens.names()
    ids = [id for id in range(tokens.vocabulary) if names.get(id) not in BYTES]
    return [*map(tokens.encode_continuation, TEXTS), *(chance.choices(ids, k=12) for _ in range(20))]


def decoded(tokens: Tokens, ids: list[int]) -> str:
    return tokens.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_continuation_adds_what_the_library_decodes_after_the_prompt(tokens):
    for prompt in prompts(tokens):
        before = decoded(tokens, prompt)
        for ids in continuations(tokens):
            whole = decoded(tokens, prompt + ids)
            assert whole == before + tokens.decode(ids, after=prompt)


def test_pushes_after_a_prompt_add_up_also_when_copied_and_rebuilt(tokens):
    chance = random.Random(1)
    for prompt in prompts(tokens):
        ids = chance.choices(continuations(tokens), k=1)[0]
        cut = chance.randint(0, len(ids))
        reader, text = Reader(tokens, prompt), tokens.decode(ids, after=prompt)
        begun = reader.push(ids[:cut])
        twin = reader.copy()
        assert begun + "".join(twin.push([id]) for id in ids[cut:]) + twin.flush() == text
        assert reader.rebuild(ids) + reader.flush() == text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CHANGING])
def test_a_continuation_is_encoded_as_exactly_its_text(kind):
    """Also where a text by itself would begin with another space."""
    tokens = tokens_of(kind)
    prompt = tokens.encode("The red fox")
    for text in TEXTS:
        ids = tokens.encode_continuation(text)
        assert tokens.decode(ids, after=prompt) == text == b"".join(map(tokens.bytes, ids)).decode()


def test_decoding_a_continuation_as_a_text_of_its_own_loses_its_first_space():
    """The wrong variant: this is why the prompt is needed."""
    tokens = tokens_of("llama2")
    prompt, ids = tokens.encode("The red"), tokens.encode_continuation(" the")
    assert decoded(tokens, prompt + ids) == "The red the" != "The red" + tokens.decode(ids)


def test_after_special_tokens_alone_a_text_begins():
    tokens = tokens_of("llama2")
    ids = tokens.encode_continuation(" the")
    assert tokens.decode(ids, after=tokens.encode("")) == "the"
    assert tokens.decode(ids, after=tokens.encode("a")) == " the"


@pytest.mark.parametrize("stray", ([0xE6, 0x97], [0xFF], [0xF0, 0x9F, 0x98]))
@pytest.mark.parametrize("kind", ("llama2", "qwen"))
def test_stray_bytes_are_replaced_as_often_as_the_library_does(kind, stray):
    tokens = tokens_of(kind)
    spelled = {tokens.bytes(id): id for id in reversed(range(tokens.vocabulary))}
    ids = [spelled[b" the"], *(spelled[bytes([byte])] for byte in stray), spelled[b" the"]]
    assert tokens.decode(ids) == decoded(tokens, ids)


REAL = json.loads((Path(__file__).parent / "real_texts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_decode_answers_as_they_were_recorded(name):
    """Recorded from the library with whole vocabularies, by `record_real_texts.py`."""
    recorded = REAL[name]
    backend = Tokenizer(models.WordLevel({token: id for id, token in enumerate(recorded["tokens"])}, "?"))
    backend = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"decoder": recorded["decoder"]}))
    backend.add_special_tokens([recorded["tokens"][id] for id in recorded["special"]])
    tokens = Tokens(PreTrainedTokenizerFast(tokenizer_object=backend), len(recorded["tokens"]))
    for case in recorded["cases"]:
        assert tokens.decode(case["answer"], after=case["prompt"]) == case["text"]
        reader = Reader(tokens, case["prompt"])
        assert "".join(reader.push([id]) for id in case["answer"]) + reader.flush() == case["text"]
