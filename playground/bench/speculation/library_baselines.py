"""The library's own guessing on the same prompts, and what can be seen of it from outside: what it fed and what it
wrote.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer

from playground.bench.baselines import LONGEST, TwinModels, assistant, settings
from playground.bench.speculation.speculative_lanes import Pair


class Watched(BaseStreamer):
    """One text: the guesses that went into each pass of the network, and the tokens that came out of it.

    `told` begins with the prompt, as the library hands it to a streamer.
    """

    def __init__(self):
        self.guessed: list[list[int]] = []
        self.told: list[list[int]] = []
        self.drafted = 0  # passes of the draft

    def fed(self, network: nn.Module, args: tuple, given: dict[str, Any]) -> None:
        """Before a pass: behind the tokens that are known, all of the prompt at first and the last one later, come the
        guesses.
        """
        known = 1 if self.guessed else len(self.told[0])
        self.guessed.append(given["input_ids"][0, known:].tolist())

    def helped(self, network: nn.Module, args: tuple) -> None:
        self.drafted += 1

    def put(self, value: torch.Tensor) -> None:
        self.told.append(value.flatten().tolist())

    def end(self) -> None:
        pass

    @property
    def written(self) -> list[list[int]]:
        """Tokens of the text, pass by pass."""
        return self.told[1:]

    @property
    def forwards(self) -> dict[str, int]:
        """Passes, those over the prompt left out, though the target's checks guesses too."""
        return {"target": len(self.guessed) - 1, **({"draft": self.drafted - 1} if self.drafted else {})}

    @property
    def ids(self) -> list[int]:
        return [token for tokens in self.written for token in tokens]

    def trials(self) -> list[tuple[int, int]]:
        """Guesses (accepted, tested) at each depth, counted as those of a lane: up to the first that does not stand,
        and that one too.
        """
        fates = [_fates(guesses, tokens) for guesses, tokens in zip(self.guessed, self.written)]
        at = [[fate[depth] for fate in fates if depth < len(fate)] for depth in range(max(map(len, fates), default=0))]
        return [(sum(column), len(column)) for column in at]


def _fates(guesses: list[int], tokens: list[int]) -> list[bool]:
    stood = next(
        (place for place, (guess, token) in enumerate(zip(guesses, tokens)) if guess != token),
        min(len(guesses), len(tokens)),
    )
    return [True] * stood + [False] * (stood < min(len(guesses), len(tokens)))


@dataclass(frozen=True)
class Library:
    """`generate` of one pair of the target and, where it is assisted, the draft."""

    target: TwinModels
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, pair: Pair, target: TwinModels, draft: TwinModels | None, length: int) -> Library:
        """As many guesses in each pass as ours, and texts as long at most."""
        guessing = ({"assistant_model": assistant(draft, pair.guesses)} if pair.kind == "assisted"
                    else {"prompt_lookup_num_tokens": pair.guesses, "max_matching_ngram_size": LONGEST})
        return cls(target, settings(target.model, length) | guessing)

    def write(self, prompt: list[int]) -> Watched:
        network, watched = self.target.untouched, Watched()
        ids = torch.tensor([prompt], device=self.target.model.device)
        hooks = [network.register_forward_pre_hook(watched.fed, with_kwargs=True)]
        if draft := self.options.get("assistant_model"):
            hooks.append(draft.register_forward_pre_hook(watched.helped))
        try:
            with torch.inference_mode():
                network.generate(ids, attention_mask=torch.ones_like(ids), streamer=watched, **self.options)
        finally:
            for hook in hooks:
                hook.remove()
        return watched
