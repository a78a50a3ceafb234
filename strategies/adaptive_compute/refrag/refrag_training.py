"""Training of REFRAG: the encoder on the text that follows its chunks; the policy by reinforcement.

The target's weights do not change. The authors' first stage, the reconstruction of the chunks themselves, is left out:
before a target that is not trained along it made nearly all vectors equal.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.errors import Refusal
from playground.events import Note
from strategies.adaptive_compute.refrag.chunk_encoder import CHUNK, ChunkEncoder, ExpansionPolicy, stored

CONTINUATION = Descent("loss after the chunks", steps=500, rate=3e-4, every=50, clip=1.0)
POLICY = Descent("policy loss", steps=40, rate=1e-3, every=20)
LENGTHS, TOKENS = (1, 8), 192  # chunks of a reconstruction that is measured, and tokens of all of them
TOGETHER = 8  # texts in a step
BEFORE, MOST, AHEAD = 32, 16, 24  # tokens before the chunks of a text, chunks, and tokens after them that count
MIXED = 0.1  # share of the chunks that are expanded while the encoder is trained
GROUP, EXPANDED = 4, 0.25  # choices that are compared, and the share of the chunks they expand
SHORTEST, HELD_OUT = 12, 64  # tokens of a text; texts that are not trained on


class Excerpt(NamedTuple):
    """A part of a text whose middle is cut into chunks."""

    before: list[int]
    chunks: Tensor  # tokens, [m, k]
    after: list[int]


def train_refrag(texts, seed: int) -> Iterator:
    """All stages; yields figures and notes, and returns the weights by name. `texts` are `CalibrationTexts`."""
    network = DifferentiableLlama(texts.parts, torch.float32)
    torch.manual_seed(seed)
    scale = float(network.embeddings.square().mean().sqrt())
    encoder, policy = ChunkEncoder(network.width, CHUNK, scale), ExpansionPolicy(network.width, scale)
    long = [ids for ids in texts.texts if len(ids) >= SHORTEST]
    if not long:
        raise Refusal(f"The texts are too short to train on: name some with at least {SHORTEST} tokens.", "texts")
    held_out, long = long[:HELD_OUT], long[HELD_OUT:] or long
    yield from trained_encoder(network, encoder, long, texts, seed)
    yield from trained_policy(network, encoder, policy, long, texts, seed)
    yield Note(reconstruction_note(network, encoder, held_out, seed))
    yield Note(continuation_note(network, encoder, policy, held_out, seed))
    return stored(encoder, policy)


def trained_encoder(network: DifferentiableLlama, encoder: ChunkEncoder, long, texts, seed: int) -> Iterator:
    """The encoder's stage, in place."""

    def continuation(step: int) -> Tensor:
        chance = chance_of(seed, step)
        excerpts = random_excerpts(long, TOGETHER, chance)
        expanded = [mixed(excerpt, chance) for excerpt in excerpts]
        texts.progress(step / CONTINUATION.steps, "continuation")
        return after_losses(network, excerpts, [encoder(network.embed(e.chunks)) for e in excerpts], expanded).mean()

    yield from descend(dict(encoder.named_parameters()), continuation, CONTINUATION, texts.phase("continuation"))


def trained_policy(
    network: DifferentiableLlama, encoder: ChunkEncoder, policy: ExpansionPolicy, long, texts, seed: int
) -> Iterator:
    """The stage of reinforcement, in place."""

    def loss(step: int) -> Tensor:
        chance = chance_of(seed, CONTINUATION.steps + step)
        texts.progress(step / POLICY.steps, "policy")
        losses = [excerpt_loss(network, encoder, policy, excerpt, chance)
                  for excerpt in random_excerpts(long, TOGETHER, chance)]
        return torch.stack(losses).mean()

    yield from descend(dict(policy.named_parameters()), loss, POLICY, texts.phase("policy"))


def chance_of(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


# --- excerpts ---

def random_spans(texts: Sequence[list[int]], count: int, chance: torch.Generator) -> Tensor:
    """Tokens [n, count * k] from random places of texts; fewer chunks if no text is long enough."""
    length = min(count, max(map(len, texts)) // CHUNK) * CHUNK
    long = [ids for ids in texts if len(ids) >= length]
    chosen = [long[draw(len(long), chance)] for _ in range(max(1, TOKENS // length))]
    starts = [draw(len(ids) - length + 1, chance) for ids in chosen]
    return torch.tensor([ids[start:start + length] for ids, start in zip(chosen, starts)])


def random_excerpts(texts: Sequence[list[int]], count: int, chance: torch.Generator) -> list[Excerpt]:
    return [random_excerpt(texts[draw(len(texts), chance)], chance) for _ in range(count)]


def random_excerpt(ids: list[int], chance: torch.Generator) -> Excerpt:
    """Chunks that end at a random place of a text, with at least one token before them."""
    end = 1 + CHUNK + draw(len(ids) - CHUNK - 1, chance)
    start = end - CHUNK * (1 + draw(min(MOST, (end - 1) // CHUNK), chance))
    chunks = torch.tensor(ids[start:end]).view(-1, CHUNK)
    return Excerpt(ids[max(0, start - BEFORE):start], chunks, ids[end:end + AHEAD])


def mixed(excerpt: Excerpt, chance: torch.Generator) -> list[int]:
    """The chunks of an excerpt that are expanded at random."""
    return (torch.rand(len(excerpt.chunks), generator=chance) < MIXED).nonzero()[:, 0].tolist()


def draw(below: int, chance: torch.Generator) -> int:
    return int(torch.randint(below, (1,), generator=chance))


# --- losses ---

def reconstruction_logits(network: DifferentiableLlama, vectors: Tensor, spans: Tensor) -> Tensor:
    """Logits [n, m * k, V] of the tokens of spans [n, m * k] after nothing but chunk vectors [n, m, width].

    Each token sees those before it.
    """
    inputs = torch.cat([vectors, network.embed(spans[:, :-1])], 1)
    hidden = network(inputs, torch.arange(inputs.shape[1]), network.attend_causally)
    return network.logits(hidden[:, vectors.shape[1] - 1:])


def chunk_vectors(network: DifferentiableLlama, encoder: ChunkEncoder, spans: Tensor) -> Tensor:
    """Vectors [n, m, width] of the chunks of spans [n, m * k]."""
    embedded = network.embed(spans).unflatten(1, (-1, CHUNK))
    return encoder(embedded.flatten(0, 1)).unflatten(0, embedded.shape[:2])


def after_losses(
    network: DifferentiableLlama, excerpts: Sequence[Excerpt], vectors: Sequence[Tensor],
    expanded: Sequence[Sequence[int]],
) -> Tensor:
    """Mean loss of the tokens after the chunks of each excerpt, [n], in nats.

    The network reads vectors [m, width] in place of the chunks that are not expanded, at consecutive positions. An
    excerpt without vectors is read without its chunks.
    """
    rows = [short_input(network, *each) for each in zip(excerpts, vectors, expanded)]
    padded = pad_sequence(rows, batch_first=True)  # causal attention: what follows changes nothing
    hidden = network(padded, torch.arange(padded.shape[1]), network.attend_causally)
    losses = []
    for row, states, excerpt in zip(rows, hidden, excerpts):
        last = states[len(row) - len(excerpt.after):len(row)]
        losses.append(cross_entropy(network.logits(last), torch.tensor(excerpt.after)))
    return torch.stack(losses)


def short_input(network: DifferentiableLlama, excerpt: Excerpt, vectors: Tensor, expanded: Sequence[int]) -> Tensor:
    """Input embeddings [n, width] of an excerpt, without its last token."""
    middle = [network.embed(excerpt.chunks[number]) if number in expanded else vector[None]
              for number, vector in enumerate(vectors)]
    ends = [network.embed(torch.tensor(ids, dtype=torch.long)) for ids in (excerpt.before, excerpt.after[:-1])]
    return torch.cat([ends[0], *middle, ends[1]])


# --- the policy ---

def sample_picks(scores: Tensor, count: int, chance: torch.Generator) -> list[int]:
    """`count` different chunks, one after the other, by the softmax of scores [m] over those that are left."""
    return torch.multinomial(scores.detach().softmax(-1), count, generator=chance).tolist() if count else []


def log_probability(scores: Tensor, picks: Sequence[int]) -> Tensor:
    """Log-probability of these picks in this order."""
    total = scores.new_zeros(())
    for number, pick in enumerate(picks):
        left = [other for other in range(len(scores)) if other not in picks[:number]]
        total = total + scores[pick] - scores[left].logsumexp(-1)
    return total


def advantages(rewards: Tensor) -> Tensor:
    """Rewards [n] of a group less their mean, in standard deviations; 0 where all are equal."""
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)


def group_loss(
    scores: Tensor, count: int, rewards: Callable[[list[list[int]]], Tensor], chance: torch.Generator
) -> Tensor:
    """REINFORCE over a group of choices of `count` chunks, by scores [m].

    Each group is used for one update, in which the clipping of PPO has no effect.
    """
    group = [sample_picks(scores, count, chance) for _ in range(GROUP)]
    logp = torch.stack([log_probability(scores, picks) for picks in group])
    return -(advantages(rewards(group)) * logp).mean()


def excerpt_loss(
    network: DifferentiableLlama, encoder: ChunkEncoder, policy: ExpansionPolicy, excerpt: Excerpt,
    chance: torch.Generator,
) -> Tensor:
    """The policy's loss on one excerpt; the reward is the mean log-probability of the tokens after its chunks."""
    with torch.no_grad():
        vectors = encoder(network.embed(excerpt.chunks))

    @torch.no_grad()
    def rewards(group: list[list[int]]) -> Tensor:
        return -after_losses(network, [excerpt] * len(group), [vectors] * len(group), group)

    count = max(1, round(EXPANDED * len(vectors)))
    return group_loss(policy(vectors), count, rewards, chance)


# --- what was reached ---

@torch.no_grad()
def reconstruction_note(network: DifferentiableLlama, encoder: ChunkEncoder, texts, seed: int) -> str:
    """The share of right tokens in reconstructions of held-out texts, in words."""
    found = []
    for count in LENGTHS:
        spans = random_spans(texts, count, chance_of(seed, 0))
        vectors = chunk_vectors(network, encoder, spans)
        right = [right_tokens(network, given, spans) for given in (vectors, vectors.roll(1, 0))]
        found.append(f"{right[0]:.1%} of the tokens of {count} ({right[1]:.1%} with the vectors of another text)")
    return f"Reconstruction of held-out chunks, each token after those before it: {', '.join(found)}."


def right_tokens(network: DifferentiableLlama, vectors: Tensor, spans: Tensor) -> float:
    """The share of the tokens of spans [n, m * k] that are most probable after vectors [n, m, width]."""
    return float((reconstruction_logits(network, vectors, spans).argmax(-1) == spans).float().mean())


@torch.no_grad()
def continuation_note(
    network: DifferentiableLlama, encoder: ChunkEncoder, policy: ExpansionPolicy, texts, seed: int
) -> str:
    """The loss of the tokens after the chunks of held-out texts, read in several ways, in words."""
    chance = chance_of(seed, 1)
    excerpts = [random_excerpt(ids, chance) for ids in texts]
    vectors = [encoder(network.embed(excerpt.chunks)) for excerpt in excerpts]
    means = [network.embed(excerpt.chunks).mean(1) for excerpt in excerpts]
    counts = [round(EXPANDED * len(own)) for own in vectors]
    picks = [policy(own).topk(count).indices.tolist() for own, count in zip(vectors, counts)]
    randomly = [sample_picks(torch.zeros(len(own)), count, chance) for own, count in zip(vectors, counts)]
    none = [[]] * len(excerpts)
    ways = {
        "as tokens": (vectors, [range(len(own)) for own in vectors]), "without the chunks": ([own[:0] for own in means],
        none), "with mean embeddings": (means, none), "with trained vectors": (vectors, none),
        "with them in another order": ([own.roll(1, 0) for own in vectors], none),
        f"with {EXPANDED:.0%} of them expanded by the policy": (vectors, picks), "at random": (vectors, randomly),
    }
    losses = {way: mean_loss(network, excerpts, *given) for way, given in ways.items()}
    return (f"Loss of up to {AHEAD} tokens after the chunks of held-out texts, in nats: "
            + ", ".join(f"{loss:.3f} {way}" for way, loss in losses.items()) + ".")


def mean_loss(network: DifferentiableLlama, excerpts: Sequence[Excerpt], vectors, expanded) -> float:
    """The mean of `after_losses`, computed a few at a time."""
    cases = list(zip(excerpts, vectors, expanded))
    parts = [after_losses(network, *zip(*cases[start:start + TOGETHER])) for start in range(0, len(cases), TOGETHER)]
    return float(torch.cat(parts).mean())
