"""The tokenizers of the pocket models: byte-level BPE with single digits and a chat template.

Every digit is a token of its own, so numbers are copied digit by digit. Roles, the end of an answer, the end of a text,
padding and the mask are special tokens with the same ids in every tokenizer. Questions and answers start with a space,
like words within a text.
"""
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from playground.engine.checkpoint.model_files import tokenizer_folder

END_OF_TEXT, SYSTEM, USER, ASSISTANT, END, PAD, MASK = SPECIALS = [
    "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|mask|>"]
SIZE = 4096
OWN = dict(size=2560, digits=r"\d{1,3}")     # of the other draft: fewer tokens, with up to three digits
CHUNK = 20_000                    # characters passed to the trainer at once
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|> ' + m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(texts, size=SIZE, digits=r"\d"):
    """Train a tokenizer of `size` tokens, bytes and special tokens included, on an iterable of strings.

    `digits` is a regular expression; its matches are separate pre-tokens.
    """
    bpe = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Split(Regex(digits), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([digits, words]), decoders.ByteLevel()
    every_byte = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, initial_alphabet=every_byte, show_progress=False,
    )
    bpe.train_from_iterator((text[i:i + CHUNK] for text in texts for i in range(0, len(text), CHUNK)), trainer)
    return wrap(bpe)


def wrap(bpe):
    """Wrap a trained BPE as a transformers tokenizer, with role tokens and the chat template."""
    named = dict(bos_token=END_OF_TEXT, eos_token=END, pad_token=PAD, mask_token=MASK)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, additional_special_tokens=[SYSTEM, USER, ASSISTANT], chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=1024, **named,
    )


def load(folder):
    """Load the tokenizer saved in a folder, or that of the bundled model in it."""
    return AutoTokenizer.from_pretrained(tokenizer_folder(Path(folder)))


def turns(tokenizer, item):
    """Token ids (question, answer) of every turn: the question with role tokens, the answer with its end token."""
    return [
        (tokenizer.encode(f"{USER} {prompt.strip()}{ASSISTANT}", add_special_tokens=False),
         tokenizer.encode(f" {answer.strip()}{END}", add_special_tokens=False))
        for prompt, answer in [*item.before, (item.prompt, item.answer)]
    ]


def exchange(tokenizer, item):
    """Token ids of everything before the last answer, and of that answer."""
    *before, (question, answer) = turns(tokenizer, item)
    return [token for turn in before for ids in turn for token in ids] + question, answer
