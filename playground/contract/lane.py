"""The lane, as a strategy sees it: `lm`, one text with its models, sequences and random numbers.

    rows = yield lm.prefill()           forward over the prompt
    rows = yield lm.extend(tree)        one forward: rows for the end of the text and for every node of a draft tree
    choice = lm.pick(rows)              choose a token from a row: sampled if a sampler draws, argmax otherwise
    yield lm.keep(choice)               commit it; lm.keep(verdict) commits what a verifier accepted
    other = lm.stream("draft")          another model that follows the same text: other.extend(tree)
    early = lm.exit(4)                  early exit of the target after four layers: early.extend(tree)

    leaves = lm.fork(8)                 parallel sequences that start here and share the KV cache of their prefixes
    rows = yield lm.extend(leaves)      one forward: a row for the end of each
    yield lm.keep([lm.pick(row) for row in rows])
    yield lm.keep(leaves[3])            this sequence becomes the text

These protocols describe every member once; `playground.decoding.lane` implements them, a class for a class. The lane
records costs, keeps grammar, caches, policies and samplers in step with the text, and detects its end.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from playground.contract.token_tree import ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.base import Strategy
    from playground.contract.interfaces import (
        ChainInterface,
        ChoiceInterface,
        Drawn,
        ExitInterface,
        RequestInterface,
        RowsInterface,
        SequenceInterface,
        StreamInterface,
    )
    from playground.contract.token_tree import TokenTree
    from playground.engine.model import Model
    from playground.events import Event, Verdict


class LaneRandomness(Protocol):
    """Random numbers, which repeat with the seed and which tests enumerate."""

    def pick(self, rows: RowsInterface, node: int = ROOT, purpose: str = "token") -> ChoiceInterface:
        """Choose a token after `node`: sampled if a sampler draws, argmax otherwise."""
        raise NotImplementedError

    def choose(
        self, rows: RowsInterface, token: int, node: int = ROOT, leaf: SequenceInterface | None = None
    ) -> ChoiceInterface:
        """A token that the strategy chose itself; `leaf` commits it instead of the sequence of the rows."""
        raise NotImplementedError

    def draw(self, p: Tensor, position: int, purpose: str) -> int:
        """Sample a token from a distribution p [V] for a position of the sequence."""
        raise NotImplementedError

    def draw_each(self, p: Tensor, keys: list[list[tuple[str, int]]]) -> Drawn:
        """Sample tokens [n, k] from distributions p [n, V], for keys (purpose, position).

        A GPU is waited for once, and also says the probability of each token.
        """
        raise NotImplementedError

    def draw_unread(self, p: Tensor, keys: list[list[tuple[str, int]]]) -> Tensor:
        """The same tokens, [n, k] on the device of p, which the host does not wait for."""
        raise NotImplementedError

    def foresee(self, p: Tensor, keys: list[list[tuple[str, int, int]]]) -> Tensor:
        """What draws from distributions p [n, V] will choose, [n, k] on their device, if they are made next.

        Keys are (purpose, position, lineage).
        """
        raise NotImplementedError

    def undraw(self, keys: list[tuple[str, int]]) -> None:
        """Draws with these keys were not used after all: the next ones get their random numbers."""
        raise NotImplementedError

    def draw_remaining(self, remaining: Any, position: int, purpose: str) -> int:
        """The same without replacement: a token that was not taken from `remaining` before."""
        raise NotImplementedError

    def flip(self, probability: float, position: int, purpose: str = "accept") -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""
        raise NotImplementedError

    def uniform(self, position: int, purpose: str) -> float:
        """A uniform number in [0, 1), for noise of a strategy. Tests cannot enumerate what depends on it."""
        raise NotImplementedError


class LaneText(Protocol):
    """The text, texts as tokens of the target, and what is recorded."""

    prompt_length: int  # in tokens
    prompts: dict[str, list[int]]  # of the target and of streams that read another prompt
    vocabulary: int  # tokens that all models with the target's tokenizer have
    context: int  # tokens that a text may have, prompt included
    end_ids: frozenset[int]  # tokens that end the text
    stop_strings: tuple[str, ...]  # strings that end the text
    question: str  # the prompt as plain text, without template, context and earlier turns
    passage: str  # the context of the prompt as plain text

    @property
    def tokens(self) -> list[int]:
        """Everything committed, prompt included."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The generated text, without an incomplete last character."""
        raise NotImplementedError

    @property
    def reason(self) -> str | None:
        """Why the text is complete; None while it grows."""
        raise NotImplementedError

    @property
    def generated(self) -> int:
        """Tokens committed after the prompt."""
        raise NotImplementedError

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        raise NotImplementedError

    @property
    def chain(self) -> ChainInterface:
        """Samplers and constraint of the text; `chain.draws` says whether tokens are sampled."""
        raise NotImplementedError

    @property
    def padding(self) -> int:
        """A token without content of its own: the tokenizer's padding token, else an end token, else the first one."""
        raise NotImplementedError

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        raise NotImplementedError

    def special(self, token: int) -> bool:
        """Whether a token is a special token, such as one that starts a chat turn."""
        raise NotImplementedError

    def piece(self, token: int) -> str:
        """The text that is displayed for a token."""
        raise NotImplementedError

    def bytes(self, token: int) -> bytes:
        """The bytes a token adds to a text after its start; none for a special token."""
        raise NotImplementedError

    def ask(self, text: str) -> list[int]:
        """Another question as token ids, formatted like the lane's own prompt."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """A text as the target's token ids, with the special tokens that its tokenizer adds."""
        raise NotImplementedError

    def spell(self, text: str) -> list[int]:
        """A text as the target's token ids; names of special tokens become those tokens."""
        raise NotImplementedError

    def can_spell(self, text: str) -> bool:
        """Whether the target has tokens for all of a text."""
        raise NotImplementedError

    def text_of(self, tokens: list[int], after: list[int] | None = None) -> str:
        """The text that tokens add to that of the tokens before them, which are the prompt unless given."""
        raise NotImplementedError

    def record(self, event: Event) -> None:
        """Record an event at once, where it cannot be yielded. Pieces and rounds of drafts and verdicts are filled in.
        """
        raise NotImplementedError

    def note_once(self, text: str) -> None:
        """Record a note, the first time it is given."""
        raise NotImplementedError


class LaneModels(Protocol):
    """The models that read the text, and what strategies learnt about them."""

    assembly: Any  # the strategies of the lane, a `lane_config.Assembly`
    target_model: Model
    fitted: dict[str, dict[str, Tensor]]  # fitted weights by name, by strategy

    @property
    def target(self) -> StreamInterface:
        """The stream of the model that writes the text."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Decoder layers of the target."""
        raise NotImplementedError

    @property
    def lm_head_weight(self) -> Tensor | None:
        """Weights of the target's lm_head, [V, hidden_size]; None if the head is not a plain matrix."""
        raise NotImplementedError

    def embed(self, tokens: list[int]) -> Tensor:
        """The target's input embeddings of tokens, [n, hidden_size]."""
        raise NotImplementedError

    def read_out(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of inputs of the target's lm_head, [n, hidden_size]."""
        raise NotImplementedError

    def own_rows(self, logits: Tensor, tree: TokenTree, first: int = ROOT) -> RowsInterface:
        """Rows of logits [n, V] that a drafter computed itself, for the nodes of a tree from `first` on.

        The masks and samplers of the lane apply to them as to those of a draft model.
        """
        raise NotImplementedError

    def stream(self, name: str) -> StreamInterface:
        """The stream of that name. It reads the text at its first request. Raises Refusal for a missing model."""
        raise NotImplementedError

    def read_with(self, name: str, model: Model) -> StreamInterface:
        """The stream of that name, which from now on reads with this model, from the beginning of the text.

        The model has the same tokens as the one before, for example the same network with weights that were trained.
        """
        raise NotImplementedError

    def exit(self, layer: int) -> ExitInterface:
        """The early exit of the target after `layer` layers."""
        raise NotImplementedError

    def draft_budget(self, drafter: Strategy) -> int | None:
        """Tokens that a drafter may propose in a row; None if its draft model can read no more, which is noted."""
        raise NotImplementedError

    def memory(self, name: str, make: Callable[[], Any], *about: object) -> Any:
        """A copy of what a strategy learned in earlier runs of the same visitor with this model, or `make()`.

        `about` is everything else it depends on. The object has a method `digest() -> str`, equal for equal contents.
        """
        raise NotImplementedError


class LaneBranches(Protocol):
    """Sequences that grow side by side and share the KV cache of their common prefixes."""

    def fork(self, count: int, leaf: SequenceInterface | None = None) -> Sequence[SequenceInterface]:
        """Start `count` sequences at the end of the text, or of a sequence.

        The first sequence of the lane uses the same random numbers as the lane itself.
        """
        raise NotImplementedError

    def drop(self, leaves: Iterable[SequenceInterface]) -> None:
        """Discard sequences and free their KV slots."""
        raise NotImplementedError


class LaneRequests(Protocol):
    """What a strategy yields, and is answered."""

    def prefill(self) -> RequestInterface:
        """Request the forward over the prompt; answers with the row after it."""
        raise NotImplementedError

    def replace_prompt(self, inputs: list[int | Tensor]) -> None:
        """Before the first forward: what the target reads in place of the prompt, at consecutive positions.

        Each is a token id or an input embedding [hidden_size]. The text, which samplers and grammars read, keeps the
        prompt. The decoder has to set `replaces_prompt`, and to refuse cache policies, which refer to the positions of
        the text. Raises RuntimeError if the target has read something.
        """
        raise NotImplementedError

    def read_as(self, embedding: Tensor) -> None:
        """The target reads the newest token of the text as this input embedding [hidden_size], not as its own.

        The text, which samplers and grammars read, keeps the token. Raises RuntimeError if the token was read.
        """
        raise NotImplementedError

    def reading(self, ids: list[int], name: str = "target") -> Sequence[RequestInterface]:
        """Requests that read another text with the model of a stream, from an empty cache that is discarded.

        There is one request for each piece of the text, to be yielded in order; each answers with a `Piece`.
        """
        raise NotImplementedError

    def extend(self, what: TokenTree | Sequence[SequenceInterface] | None = None) -> RequestInterface:
        """Request one forward of the target.

        It answers with Rows for the end of the text and every node of a tree, or for a list of sequences with one Rows
        for the end of each.
        """
        raise NotImplementedError

    def keep(
        self, what: ChoiceInterface | Verdict | SequenceInterface | Sequence[ChoiceInterface]
    ) -> RequestInterface:
        """Commit a chosen token, the accepted path of a verdict and the token after it, or the text of a sequence.

        In a list of choices each is committed to its own sequence; the lane's text does not change yet.
        """
        raise NotImplementedError

    def roll_back(self, count: int) -> RequestInterface:
        """Remove the last `count` generated tokens."""
        raise NotImplementedError

    def together(self, *requests: RequestInterface) -> RequestInterface:
        """Serve several independent requests at the same time; answers with a tuple."""
        raise NotImplementedError

    def aside(self, request: RequestInterface) -> RequestInterface:
        """Submit a request to its model's worker thread; answers at once with a request to yield for the result.

        Until then the stream accepts no other request. Only the time spent waiting counts on the lane's clock.
        """
        raise NotImplementedError

    def pause(self) -> RequestInterface:
        """Let other lanes go first, between two parts of a long computation."""
        raise NotImplementedError

    def background(self, work: Callable[[], Any]) -> RequestInterface:
        """Run Python work in a thread while other lanes continue; answers with what it returns."""
        raise NotImplementedError

    def forward_times(self, stream: str = "target") -> RequestInterface:
        """Measure the forwards of a stream's model on this machine, once in a process; answers with seconds by (rows,
        tokens before them).
        """
        raise NotImplementedError

    def classifier(self, name: str) -> RequestInterface:
        """Load a sequence-classification model by folder or hub id; answers with a `SequenceClassifier`."""
        raise NotImplementedError


class Lane(LaneRandomness, LaneText, LaneModels, LaneBranches, LaneRequests, Protocol):
    """Everything that a strategy can access of its run: it receives this as `lm` and uses nothing else."""
