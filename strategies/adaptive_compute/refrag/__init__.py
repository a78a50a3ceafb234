"""REFRAG: one vector in place of each chunk of a context, except for chunks that a policy expands."""
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from playground.algorithms.sampling.plain_decoding import plain
from playground.algorithms.search.similarity import words
from playground.contract import Decoder, Lane, knob
from playground.errors import Refusal
from playground.events import Figure, Note
from strategies.adaptive_compute.refrag.chunk_encoder import CHUNK, ChunkEncoder, ExpansionPolicy
from strategies.adaptive_compute.refrag.context_chunks import ChunkVectors, chunks_of, shortened
from strategies.adaptive_compute.refrag.refrag_training import train_refrag

SHOWN = 32  # chunks in the figure


class Refrag(Decoder):
    """The model reads one vector in place of each chunk of the context; a policy chooses chunks that stay tokens. The
    model itself is not trained further, unlike the authors', so vectors tell it far less than tokens.

    A small bidirectional encoder reads the k tokens of a chunk, and a projection makes one input embedding of them. It
    sees neither the question nor other chunks, so vectors are cached by the content of the chunk, also for later runs.
    Positions are consecutive over the shorter input. Blank lines in the context separate passages; the last tokens of a
    passage that fill no chunk stay. The share `p` of the chunks with the highest scores stays, too: of the trained
    policy, which reads all vectors; by the model's perplexity, which takes a forward over the whole context; by words
    of the question, which is our addition; or at random. p = 1, and a prompt without context, are plain decoding. The
    prompt still has to fit the model as tokens. `python -m playground fit refrag` trains encoder and projection on the
    text after the chunks with a tenth of them expanded, and the policy by REINFORCE with the advantage within a group,
    on how well that text is predicted. Two stages of the authors are missing: continual training of the model, and the
    reconstruction of chunks before it, which gave nearly all chunks one vector here, as the model does not learn along.
    For the bundled model held-out text after the chunks has 2.03 nats per token with the trained vectors, 2.56 with
    mean embeddings, 3.60 without the chunks and 1.39 with all their tokens; the wording of a chunk cannot be read back
    from its vector, and chunks that the policy chooses are no better than random ones (1.97 and 1.88). The fit prints
    these figures. `mean` uses the mean embedding of each chunk, as an untrained baseline. Lin et al. 2025, arXiv
    2509.01092.
    """

    name, title, paper, sheet = "refrag", "Compressed context (REFRAG)", "2509.01092", "adaptive-compute/refrag"
    guarantee, refuses = ("collapses",), ("cache_policy", "compute_policy")
    fitted_to_target = prefers_trained = replaces_prompt = remembers = True
    reconstruction, sure = True, "low"
    calibration_tasks, questions_per_task = ("context_qa",), 2500

    p: float = knob(0.25, 0.0, 1.0, step=0.05, help="share of the chunks that stay tokens; 1 is plain decoding")
    selector: str = knob(
        "policy", choices=("policy", "perplexity", "overlap", "random"), help="what chooses the chunks that stay tokens"
    )
    encoder: str = knob("trained", choices=("trained", "mean"), help="a chunk's vector: trained, or its mean embedding")
    cache: bool = knob(True, help="use the chunk vectors of earlier runs again")

    _encoder = _policy = None  # the trained networks
    _digest = ""  # of their weights

    def check(self):
        if self.encoder == "mean" and self.selector == "policy":
            raise Refusal("The policy scores trained vectors, and mean embeddings are chosen: choose another selector.",
                          "selector")

    def begin_fitted(self, weights):
        self._encoder, self._policy = ChunkEncoder.of(weights), ExpansionPolicy.of(weights)
        contents = b"".join(weights[name].cpu().numpy().tobytes() for name in sorted(weights))
        self._digest = blake2b(contents, digest_size=8).hexdigest()

    def decode(self, lm: Lane) -> Iterator:
        if self.encoder == "trained" and self._encoder is None:
            yield Note("No encoder for this model: the context stays tokens. `python -m playground fit refrag` trains "
                       "one.")
        elif not lm.passage:
            yield Note("No context: the prompt is read as it is.")
        elif chunks := self._chunks(lm):
            yield from self._compress(lm, chunks)
        else:
            yield Note(f"No passage of the context has {self._size} tokens: the prompt is read as it is.")
        yield from plain(lm)

    @property
    def _size(self) -> int:
        """Tokens of a chunk."""
        return len(self._encoder.place) if self.encoder == "trained" else CHUNK

    def _chunks(self, lm: Lane) -> list[range]:
        """Positions of the chunks in the prompt."""
        pieces = [lm.bytes(token) for token in lm.tokens[:lm.prompt_length]]
        return chunks_of(pieces, lm.passage, lm.question, self._size)

    def _compress(self, lm: Lane, chunks: list[range]) -> Iterator:
        """Replace the prompt by the shorter input, and show which chunks stay tokens."""
        vectors, reused = self._vectors(lm, chunks)
        scores = yield from self._scores(lm, chunks, vectors)
        expanded = highest(scores, round(self.p * len(chunks)))
        inputs = self._inputs(lm.tokens[:lm.prompt_length], chunks, vectors, expanded)
        lm.replace_prompt(inputs)
        yield from shown_chunks(lm, chunks, scores, expanded)
        lengths = {"labels": ["tokens of the prompt", "positions read"], "values": [lm.prompt_length, len(inputs)]}
        yield Figure("bars", "length of the prompt", lengths)
        yield Note(f"{len(chunks) - len(expanded)} of {len(chunks)} chunks of {self._size} tokens are one vector each, "
                   f"{len(expanded)} stay tokens: {len(inputs)} positions instead of {lm.prompt_length}. {reused} "
                   "vectors were known from earlier runs.")

    def _inputs(self, prompt, chunks, vectors, expanded) -> list[int | Tensor]:
        return shortened(prompt, chunks, vectors, expanded)

    # --- vectors ---

    def _vectors(self, lm: Lane, chunks: list[range]) -> tuple[Tensor, int]:
        """The vector of each chunk, [n, hidden_size], and how many were known."""
        contents = [tuple(lm.tokens[chunk.start:chunk.stop]) for chunk in chunks]
        about = (self.encoder, self._digest)
        store = lm.memory(self.name, ChunkVectors, *about) if self.cache else ChunkVectors()
        known = dict(store.known())
        unknown = [content for content in dict.fromkeys(contents) if content not in known]
        if unknown:
            embedded = lm.embed([token for content in unknown for token in content])
            fresh = dict(zip(unknown, self._encode(lm, embedded.unflatten(0, (-1, self._size)))))
            store.add(fresh)
            known |= fresh
        return torch.stack([known[content] for content in contents]), len(set(contents)) - len(unknown)

    def _encode(self, lm: Lane, embedded: Tensor) -> Tensor:
        """Vectors [n, hidden_size] of chunks of embeddings [n, k, hidden_size], in float32 or wider."""
        embedded = embedded.to(torch.promote_types(embedded.dtype, torch.float32))
        return embedded.mean(1) if self.encoder == "mean" else self._encoder.to(embedded)(embedded)

    # --- the chunks that stay ---

    def _scores(self, lm: Lane, chunks: list[range], vectors: Tensor) -> Iterator:
        """The score of each chunk; those with the highest stay tokens."""
        if self.selector == "policy":
            return self._policy.to(vectors)(vectors).tolist()
        if self.selector == "perplexity":
            return (yield from self._surprises(lm, chunks))
        if self.selector == "random":
            return [lm.uniform(number, "expand") for number in range(len(chunks))]
        return overlaps([_text_of(lm, chunk) for chunk in chunks], lm.question)

    def _surprises(self, lm: Lane, chunks: list[range]) -> Iterator:
        """The mean negative log-probability of each chunk's tokens after all tokens before them, in nats."""
        ids, pieces = lm.tokens[:chunks[-1].stop], []
        for request in lm.reading(ids):
            pieces.append((yield request).logits)
        logp = torch.cat(pieces)[:-1].log_softmax(-1)
        own = torch.tensor(ids[1:], device=logp.device)
        losses = [0.0, *(-logp.gather(1, own[:, None])[:, 0]).tolist()]  # nothing predicts the first token
        return [sum(losses[chunk.start:chunk.stop]) / len(chunk) for chunk in chunks]

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train the encoder, then the policy; returns the weights by name."""
        return (yield from train_refrag(texts, seed))


def highest(scores: Sequence[float], count: int) -> list[int]:
    """The numbers of the `count` highest scores, highest first; of equal ones the first.

    These are the sequential picks by argmax, since the scores of the others do not change.
    """
    return sorted(range(len(scores)), key=lambda number: -scores[number])[:count]


def overlaps(chunks: Sequence[str], question: str) -> list[float]:
    """How many different words of the question each chunk has."""
    asked = {word for word in words(question) if word.isalnum()}
    return [float(len(asked.intersection(words(chunk)))) for chunk in chunks]


def _text_of(lm: Lane, chunk: range) -> str:
    return lm.text_of(lm.tokens[chunk.start:chunk.stop], after=lm.tokens[:chunk.start])


def shown_chunks(lm: Lane, chunks: list[range], scores: list[float], expanded: list[int]) -> Iterator[Figure]:
    """The chunks with the highest scores, in the order of the text."""
    numbers = sorted(highest(scores, SHOWN))
    states = ["stays tokens" if number in expanded else "one vector" for number in numbers]
    texts = [_text_of(lm, chunks[number]) for number in numbers]
    labels = [f"{number + 1}: {text}, {state}" for number, text, state in zip(numbers, texts, states)]
    values = [round(scores[number], 4) for number in numbers]
    yield Figure("bars", "chunks of the context, by score", {"labels": labels, "values": values})
