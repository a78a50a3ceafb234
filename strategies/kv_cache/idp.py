"""IDP: learnt prompts before the text, of which the input chooses one, to repair a compressed lane."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.algorithms.kv_cache.prefix_before_text import (
    AttendsPrefix,
    States,
    after_inputs,
    mean_loss,
    next_token_losses,
    padded,
    states_before,
)
from playground.contract import knob
from playground.errors import Refusal
from playground.events import Figure, Note

LENGTHS = (8, 16)  # vectors of the prompts that are trained
TOGETHER = 6  # texts of a training step
HELD_OUT = 32  # texts that are not trained on
DESCENT = Descent("loss after the prompt", steps=40, rate=2e-2, every=10, clip=1.0)


class IDP(AttendsPrefix):
    """Learnt prompts stand before the text of a compressed lane; each input chooses one of them by its attention. The
    bundled ones did not help.

    A prompt is some input embeddings that no token has. `python -m playground fit idp --quantization rtn:bits=3` trains
    one of 8 and one of 16 vectors for the lane with these weights, each alone, by the loss of the next token on texts
    that follow it; the weights stay as they are. Prompts belong to the weights that they were trained for, and lanes
    with others do not find them. When the prompt is read, the first attention layer looks at all prompts, and the one
    with the highest attention, mean over heads, rows and vectors, is kept, the first if they tie; the others are
    forgotten before the second layer. `joint` puts all prompts before the text, one after the other, as the authors do;
    `separate` puts each directly before it, since distance changes attention. With `prompts` = 0 nothing is added.
    If a long text is read in pieces, the first piece chooses.

    After 40 steps of training held-out texts cost 0.916 nats per token with 8 vectors, in place of 0.910 without, where
    weights have 3 bits, and 0.865 in place of 0.856 with all bits: nothing is repaired. What prompts did lower, by 0.19
    nats, was the loss when texts whose beginning was cut off were among them; so only whole texts are trained on.
    `bench repair` measures what they do, docs/weights-repair.md has the figures.
    The authors' sizes, layer and training are not known: ours. Hoang et al. 2023, arXiv 2310.00867.
    """

    name, title, paper, sheet = "idp", "Learnt prompts for a compressed lane (IDP)", "2310.00867", "weights/idp-repair"
    guarantee = ("collapses",)
    reconstruction, sure = True, "low"
    fitted_to_target, prefers_trained = True, True
    questions_per_task = 40
    shown = "attention to the prompt"

    prompts: int = knob(8, 0, 8, step=1, help="prompts to choose from, the shortest first; 0: none")
    mode: str = knob("joint", choices=("joint", "separate"), help="all before the text, or each alone")
    only: int = knob(0, 0, 8, step=1, help="number of the prompt that is always used, the last if there are fewer; 0: "
                                           "chosen by attention")

    def __post_init__(self):
        super().__post_init__()
        self._trained: list[Tensor] = []  # input embeddings [n, width] by prompt
        self._pool: list[States] = []
        self._first: list[Tensor] = []  # keys of the first layer by prompt, where the choice reads them
        self._scores: list[float] = []
        self._number, self._said = 0, False

    def begin_fitted(self, weights):
        self._trained = pool_of(weights)[:self.prompts]

    def begin(self, parts):
        if not self._trained:
            return
        with torch.inference_mode():
            network = DifferentiableLlama(parts)
            self._pool = [states_before(network, parts, own.to(network.embeddings)) for own in self._trained]
            self._first = [pool[0][0] for pool in self._pool]
            if self.mode == "joint":
                self._first = [parts.rotate_back(keys, torch.full((keys.shape[1],), behind, device=keys.device))
                               for keys, behind in zip(self._first, vectors_behind(self._first))]
        if self.only:
            self._use(min(self.only, len(self._pool)))

    def attend_memory(self, layer, query_states, query_positions, seen):
        if self._pool and not self.states:
            self._scores = mean_attention(query_states, seen.total, self._first, self.mode == "joint")
            self._use(1 + self._scores.index(max(self._scores)))
        return super().attend_memory(layer, query_states, query_positions, seen)

    def _use(self, number: int) -> None:
        """Let a prompt, counted from 1, stand before the text."""
        self._number, self.states = number, self._pool[number - 1]

    def explain(self, prompt, layers):
        if not self._said:
            self._said = True
            yield Note(self._choice())
        if self._scores:
            series = {f"prompt {number}": score for number, score in enumerate(self._scores, 1)}
            yield Figure("scalar", "mean attention per vector", {"x": 0, "series": series})
            self._scores = []
        yield from super().explain(prompt, layers)

    def _choice(self) -> str:
        """Which prompt stands before the text, or why none does."""
        if not self.prompts:
            return "No prompt stands before the text: raise prompts."
        if not self.states:
            return ("No prompts: `python -m playground fit idp --quantization WEIGHTS` trains them for the weights of "
                    "a lane.")
        return f"Prompt {self._number} of {len(self._pool)} stands before the text: {self.vectors} learnt vectors."

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator[Figure | Note]:
        """Train the prompts, each alone; returns their vectors by name."""
        whole = whole_texts(texts)
        if len(whole) <= HELD_OUT:
            raise Refusal(f"{len(whole)} texts are too few, since {HELD_OUT} are held out: name more text.", "texts")
        network = DifferentiableLlama(texts.parts)
        pool = {}
        for number, length in enumerate(LENGTHS):
            drawn = torch.Generator().manual_seed(seed + number)
            pool[f"prompt.{number}"] = some_embeddings(network, length, drawn)
            yield from descend({"prompt": pool[f"prompt.{number}"]}, text_loss(network, pool[f"prompt.{number}"],
                               whole[HELD_OUT:], seed + number), DESCENT, texts.phase(f"prompt-{number}"))
        yield Note(held_out_losses(network, pool_of(pool), whole[:HELD_OUT]))
        return {name: prompt.detach().half() for name, prompt in pool.items()}


def whole_texts(texts) -> list[list[int]]:
    """Texts that begin as a prompt does, with a special token, if most of them do.

    Long texts lack their beginning. A model reads those badly, a prompt mends that, and little else is learnt.
    """
    whole = [ids for ids in texts.texts if texts.begins(ids)]
    return whole if 2 * len(whole) >= len(texts.texts) else texts.texts


def pool_of(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The prompts in their order, [n, width] each."""
    return [weights[name] for name in sorted(weights)]


def vectors_behind(prompts: list[Tensor]) -> list[int]:
    """How many positions of later prompts lie between each prompt [..., n, d] and the text, if all stand before it."""
    sizes = [prompt.shape[-2] for prompt in prompts]
    return [sum(sizes[number + 1:]) for number in range(len(sizes))]


def mean_attention(query: Tensor, own: Tensor, keys: list[Tensor], joint: bool) -> list[float]:
    """By prompt, the attention weight of one of its vectors, mean over heads, rows and vectors.

    query [heads, rows, d]; `own` [heads, rows] is the log-sum-exp of the scaled scores of the text; keys [kv_heads, n,
    d] by prompt. Weights are those of a softmax over the text and the prompt, or all prompts if `joint`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = len(query) // len(keys[0])
    scores = [query.to(wide) @ each.to(wide).repeat_interleave(groups, 0).transpose(1, 2) * query.shape[2] ** -0.5
              for each in keys]
    masses = torch.stack([each.logsumexp(-1) for each in scores])  # of each prompt, [prompts, heads, rows]
    beside = masses.logsumexp(0, keepdim=True) if joint else masses
    shares = (masses - torch.logaddexp(beside, own.to(wide))).exp().mean((1, 2))
    return [float(share) / each.shape[-1] for share, each in zip(shares, scores)]


def some_embeddings(network: DifferentiableLlama, count: int, chance: torch.Generator) -> Tensor:
    """Input embeddings of random tokens, [count, width]."""
    return network.embed(torch.randint(len(network.embeddings), (count,), generator=chance)).clone()


def text_loss(network: DifferentiableLlama, prompt: Tensor, texts: list[list[int]], seed: int):
    """loss(step): mean -log p of the tokens of some texts after a prompt, in nats."""

    def loss(step: int) -> Tensor:
        chosen = torch.Generator().manual_seed(seed * DESCENT.steps + step)
        numbers = torch.randint(len(texts), (TOGETHER,), generator=chosen).tolist()
        ids, real = padded([texts[number] for number in numbers])
        return next_token_losses(after_inputs(network, prompt, ids), ids, real).mean()

    return loss


def held_out_losses(network: DifferentiableLlama, pool: list[Tensor], texts: list[list[int]]) -> str:
    """The loss of texts without a prompt and after each, in words."""
    without = mean_loss(network, pool[0][:0], texts)
    after = ", ".join(f"{mean_loss(network, prompt, texts):.3f} after {len(prompt)} vectors" for prompt in pool)
    return f"Loss of held-out texts in nats per token: {without:.3f} without a prompt, {after}."
