"""The library's speculative decoding on the same prompts, observed from outside: what it feeds and what it writes."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer

from playground.bench.speculation.speculative_lanes import Pair
from playground.bench.speed.baselines import TwinModels, settings
from playground.bench.speed.text_baselines import MAX_NGRAM, assistant


class Watched(BaseStreamer):
    """One text: the draft tokens fed in each target forward, and the tokens that followed from it.

    `streamed` begins with the prompt, which the library passes to a streamer first.
    """

    def __init__(self):
        self.drafts: list[list[int]] = []  # by target forward
        self.streamed: list[list[int]] = []
        self.draft_forwards = 0

    def before_target_forward(self, network: nn.Module, args: tuple, given: dict[str, Any]) -> None:
        """Record the draft tokens: they follow the known tokens, which are the prompt at first and one token later."""
        known = 1 if self.drafts else len(self.streamed[0])
        self.drafts.append(given["input_ids"][0, known:].tolist())

    def before_draft_forward(self, network: nn.Module, args: tuple) -> None:
        self.draft_forwards += 1

    def put(self, value: torch.Tensor) -> None:
        self.streamed.append(value.flatten().tolist())

    def end(self) -> None:
        pass

    @property
    def written(self) -> list[list[int]]:
        """Tokens of the text, by target forward."""
        return self.streamed[1:]

    @property
    def forwards(self) -> dict[str, int]:
        """Forwards by stream, prefill excluded, although the target's prefill verifies draft tokens too."""
        draft = {"draft": self.draft_forwards - 1} if self.draft_forwards else {}
        return {"target": len(self.drafts) - 1, **draft}

    @property
    def ids(self) -> list[int]:
        return [token for tokens in self.written for token in tokens]

    def trials(self) -> list[tuple[int, int]]:
        """Draft tokens (accepted, tested) at each position, counted as in a lane: up to and including the first that is
        rejected.
        """
        rounds = [_verified(draft, tokens) for draft, tokens in zip(self.drafts, self.written)]
        depth = max(map(len, rounds), default=0)
        columns = [[round[position] for round in rounds if position < len(round)] for position in range(depth)]
        return [(sum(column), len(column)) for column in columns]


def _verified(draft: list[int], tokens: list[int]) -> list[bool]:
    """Whether each tested draft token was accepted."""
    tested = min(len(draft), len(tokens))
    accepted = next((i for i, (proposed, token) in enumerate(zip(draft, tokens)) if proposed != token), tested)
    return [True] * accepted + [False] * (accepted < tested)


@dataclass(frozen=True)
class Library:
    """`generate` with the target and, for assisted generation, the draft model."""

    target: TwinModels
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, pair: Pair, target: TwinModels, draft: TwinModels | None, length: int) -> Library:
        """The counterpart of a lane: as many draft tokens per round, and the same maximum length."""
        speculation = ({"assistant_model": assistant(draft, pair.depth)} if pair.kind == "assisted"
                       else {"prompt_lookup_num_tokens": pair.depth, "max_matching_ngram_size": MAX_NGRAM})
        return cls(target, settings(target.model, length) | speculation)

    def write(self, prompt: list[int]) -> Watched:
        network, watched = self.target.untouched, Watched()
        ids = torch.tensor([prompt], device=self.target.model.device)
        hooks = [network.register_forward_pre_hook(watched.before_target_forward, with_kwargs=True)]
        if draft := self.options.get("assistant_model"):
            hooks.append(draft.register_forward_pre_hook(watched.before_draft_forward))
        try:
            with torch.inference_mode():
                network.generate(ids, attention_mask=torch.ones_like(ids), streamer=watched, **self.options)
        finally:
            for hook in hooks:
                hook.remove()
        return watched
