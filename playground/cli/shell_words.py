"""Advice of a refusal in the words of a shell. Refusals are written in those of the page, whose controls they name."""
from __future__ import annotations

WORDS = {
    "turn chat off": "leave out --chat",
    "turn chat on": "add --chat",
    "remove the earlier turns": "leave out --before",
    "remove the turns": "leave out --before",
    "leave the system message empty": "leave out --system",
    "leave the message out": "leave out --system",
    "enter a passage as context": "give a passage with --context",
    "choose one for this target": "name one for this target with --draft",
    "choose another model": "name another with --model",
}
"""Advice on the page, and the same in a shell."""


def in_shell_words(sentence: str) -> str:
    """The sentence with the options of the command line in the place of the page's controls."""
    for page, shell in WORDS.items():
        sentence = sentence.replace(page, shell)
    return sentence
