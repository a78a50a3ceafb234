"""The text of a continuation is what it adds to the text of its prompt, with the tokenizers that checkpoints bring."""
import random

import pytest

from playground.engine.tokens import Reader, Tokens
from support.tokenizer_kinds import BYTES, KINDS

TEXTS = [
    "The red fox", " the answer", " Sure, here:\n\n    x = 1\n", "naïve café 日本語 😀", "  two  spaces",
    "don't, I'm ok.", "\tif a:\n\t\tb", " ", "<think>so</think>",
]
CHANGING = {"t5", "bert", "words"}  # kinds that do not keep every text as it is


@pytest.fixture(scope="module", params=KINDS)
def tokens(request):
    tokenizer = KINDS[request.param]()
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
    tokens = Tokens(KINDS[kind](), 700)
    prompt = tokens.encode("The red fox")
    for text in TEXTS:
        ids = tokens.encode_continuation(text)
        assert tokens.decode(ids, after=prompt) == text == b"".join(map(tokens.bytes, ids)).decode()


def test_decoding_a_continuation_as_a_text_of_its_own_loses_its_first_space():
    """The wrong variant: this is why the prompt is needed."""
    tokens = Tokens(KINDS["llama2"](), 700)
    prompt, ids = tokens.encode("The red"), tokens.encode_continuation(" the")
    assert decoded(tokens, prompt + ids) == "The red the" != "The red" + tokens.decode(ids)


def test_after_special_tokens_alone_a_text_begins():
    tokens = Tokens(KINDS["llama2"](), 700)
    ids = tokens.encode_continuation(" the")
    assert tokens.decode(ids, after=tokens.encode("")) == "the"
    assert tokens.decode(ids, after=tokens.encode("a")) == " the"


@pytest.mark.parametrize("stray", ([0xE6, 0x97], [0xFF], [0xF0, 0x9F, 0x98]))
@pytest.mark.parametrize("kind", ("llama2", "qwen"))
def test_stray_bytes_are_replaced_as_often_as_the_library_does(kind, stray):
    tokens = Tokens(KINDS[kind](), 700)
    spelled = {tokens.bytes(id): id for id in reversed(range(700))}
    ids = [spelled[b" the"], *(spelled[bytes([byte])] for byte in stray), spelled[b" the"]]
    assert tokens.decode(ids) == decoded(tokens, ids)
