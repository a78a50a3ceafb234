"""PPD: trained prompt tokens, read by the target itself, guess the tokens further on."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear

from playground.algorithms.draft_heads.accuracy_tree import rank_tree
from playground.algorithms.draft_heads.draft_head import MEASURED, DraftHead
from playground.algorithms.draft_heads.feature_networks import soft_loss
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ranks,
    trained,
)
from playground.algorithms.draft_heads.pseudo_rows import ProbedGuesses, row_groups
from playground.algorithms.speculative.latency import at, seconds_by_rows
from playground.contract import Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import read_lists
from playground.events import Figure, Note
from strategies.draft_heads.ppd.prompt_trees import (
    ROOT_PATH,
    SIZES,
    Accuracy,
    PromptTree,
    prompt_trees,
    round_sizes,
    tokens_per_round,
)

PROMPTS, RANKS = 3, 10
MACHINE, FIXED = "machine", "fixed"
DECAY = 0.8  # weight of each further prompt token in the loss


class PromptTokens(Module):
    """Input embeddings that belong to no token."""

    def __init__(self, embeddings: Tensor):
        super().__init__()
        self.prompt_embeddings = Parameter(embeddings)

    def after(self, batch: HeadBatch, texts: HeadTexts) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each prompt token: its outputs [n, width], the target's own there, and the right tokens [n]."""
        count = len(self.prompt_embeddings)
        groups = row_groups(batch, count)
        rows = self.prompt_embeddings.repeat(groups.cuts.shape[1], 1).expand(len(batch.ids), -1, -1)
        found = texts.frozen.hidden(batch.ids, rows, groups.positions, groups.seen(batch.ids.shape[1]))
        yield from groups.each(found, batch, texts.depth)


class Ppd(DraftHead):
    """Trained prompt tokens follow the text and every draft token, and the target's logits after them guess the tokens
    further on.

    Nothing is added to the model but a few input embeddings. One forward verifies the draft tokens of this round and
    makes the guesses of the next: each draft token carries a chain of prompt tokens, and those of the last accepted one
    count. How many guesses a round begins with is its state; each state has a tree of its own, whose draft tokens and
    prompt tokens are balanced for the number of inputs. That number is the one with the most expected tokens per second
    on this machine: the tokens by the accuracies measured when the prompt tokens were trained, the seconds by forwards
    that are measured before the first round, once in a process. Where no number promises more than plain decoding, it
    is 0. Prompt tokens are dropped from the KV cache. The first round has no guesses, and reads prompt tokens only.
    inputs = 0 is plain decoding. Ensembles of prompt tokens, which the paper tries and its release does not use, are
    left out. Chen et al. 2024, arXiv 2405.18628.
    """

    name, title, paper, sheet = "ppd", "PPD", "2405.18628", "draft-heads/ppd"
    guarantee = ("collapses",)

    inputs: int = knob(48, 0, 128, step=1, help="most draft tokens and prompt tokens of a forward; 0 is plain decoding")
    sized: str = knob(
        MACHINE, choices=(MACHINE, FIXED), help="inputs by the time of forwards on this machine, or as many as `inputs`"
    )
    depth: int = knob(PROMPTS, 1, 8, step=1, help="prompt tokens after a draft token, at most those that were trained")
    ranks: int = knob(RANKS, 1, RANKS, step=1, help="tokens per guess that may enter the tree; 1 makes it a chain")

    def __post_init__(self):
        super().__post_init__()
        self._guesses = ProbedGuesses()  # after the prompt tokens of the last accepted token
        self._state = 0  # of this round
        self._size = self.inputs if self.sized == FIXED else None  # inputs of a round, once they are chosen

    def state_layers(self, depth):
        return ()

    @classmethod
    def widths(cls, weights):
        return {weights["prompt_embeddings"].shape[1]}

    @classmethod
    def untrained(cls, width, depth):
        halving = 0.5 ** torch.arange(1, RANKS + 1)
        accuracy = torch.stack([halving * DECAY**prompt for prompt in range(PROMPTS)])
        return {"prompt_embeddings": torch.zeros(PROMPTS, width), MEASURED: accuracy}

    @classmethod
    def build(cls, weights):
        network = PromptTokens(weights["prompt_embeddings"])
        network.accuracy = weights[MEASURED].float()  # no buffer: it stays on the host, which plans the tree
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the prompt tokens on the target's own distributions, and measure how often each rank is right."""
        beginning = next(iter(texts.batches(0))).ids[0, :PROMPTS]
        network = PromptTokens(texts.embeddings[beginning].clone())

        def losses(batch: HeadBatch) -> list[Tensor]:
            found = []
            for prompt, (guess, true, _) in enumerate(network.after(batch, texts)):
                teacher = linear(true, texts.lm_head).softmax(-1)
                found.append(DECAY**prompt * soft_loss(linear(guess, texts.lm_head), teacher))
            return found

        yield from trained(network, texts, losses, HeadTraining(epochs=6, rate=1e-2, warmup=0.0))
        counts = RankCounts(PROMPTS, RANKS)
        with torch.no_grad():
            for batch in texts.held_out():
                for prompt, (guess, _, labels) in enumerate(network.after(batch, texts)):
                    counts.add(prompt, ranks(guess, texts.lm_head, labels))
        yield counts.note()
        yield _expectations(counts.shares)
        return {**network.state_dict(), MEASURED: counts.shares}

    def drafted(self, lm: Lane, budget):
        if self._size is None:
            yield from self._choose_size(lm)
        return (yield from self._drafted(lm, budget))

    def _choose_size(self, lm: Lane) -> Iterator:
        """Choose the number of inputs with the most expected tokens per second on this machine."""
        seconds = seconds_by_rows((yield lm.forward_times()))
        sizes = round_sizes(self._accuracy(), self.inputs, partial(at, seconds))
        best = max(sizes, key=lambda size: size.speed)
        self._size = best.inputs
        speeds = {"labels": [str(size.inputs) for size in sizes], "values": [size.speed for size in sizes]}
        yield Figure("bars", "tokens per second that a number of inputs promises on this machine", speeds)
        yield Note(
            f"Rounds of {best.inputs} inputs promise most on this machine: {best.tokens:.2f} tokens in "
            f"{1000 * best.seconds:.3g} ms. Plain decoding takes {1000 * sizes[0].seconds:.3g} ms for one."
        )

    def _accuracy(self) -> Accuracy:
        """How often each rank is right, by prompt token that is used."""
        return _sorted(self.network.accuracy[:min(self.depth, len(self.network.prompt_embeddings)), :self.ranks])

    @torch.inference_mode()
    def _drafted(self, lm: Lane, budget):
        guesses, prompts = self._guesses.after(lm), self.network.prompt_embeddings[:self.depth]
        trees = prompt_trees(self._accuracy(), self._size)
        self._state = min(len(guesses), budget, len(trees) - 1)
        chosen = trees[self._state]
        tree, nodes = TokenTree(self.name), {ROOT_PATH: ROOT}
        if self._state:
            best = guesses[:self._state].softmax(-1).topk(min(self.ranks, guesses.shape[-1]))
            tree, nodes = rank_tree(self.name, *read_lists(*best), chosen.paths, lm.ends)
        tree.probes = {
            node: prompts[:count]
            for path, node in nodes.items()
            if (count := min(chosen.prompts[path], budget - len(path) - 1)) > 0
        }
        yield self._figure(lm, tree, chosen)
        return tree

    def observe(self, tree, rows, verdict):
        self._guesses.read(tree, rows, verdict)

    def _figure(self, lm: Lane, tree: TokenTree, chosen: PromptTree) -> Figure:
        series = {
            "state": float(self._state), "draft tokens": float(len(tree)),
            "prompt tokens": float(sum(map(len, tree.probes.values()))),
        }
        return Figure("scalar", "guesses a round began with, and its inputs", {"x": lm.generated, "series": series})


def _sorted(accuracy: Tensor) -> Accuracy:
    return tuple(map(tuple, accuracy.sort(1, descending=True).values.tolist()))


def _expectations(accuracy: Tensor) -> Note:
    """What the measured accuracies promise for some numbers of inputs."""
    each = {inputs: tokens_per_round(prompt_trees(_sorted(accuracy), inputs)) for inputs in SIZES}
    promised = ", ".join(f"{tokens:.2f} with {inputs}" for inputs, tokens in each.items())
    return Note(f"Expected tokens per round by the number of inputs: {promised}.")
