"""Early exits: rows of the lm_head on an inner layer."""
from __future__ import annotations

from torch import Tensor

from playground.contract.token_tree import TokenTree
from playground.decoding.requests import Feed, Request, Steps, StepsTo
from playground.decoding.rows import Rows
from playground.decoding.stream.forwards import consulted, input_tree
from playground.decoding.stream.prompt_chunks import PromptReading
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan


class Exit:
    """An early exit of a model: its lm_head on an inner layer. It shares the KV cache of the model's first layers.

    Rows that exited early continue through the other layers at the next request to the stream for the same tree.
    """

    takes_unread = False

    def __init__(self, stream: PromptReading, layer: int):
        self.stream, self.layer = stream, layer
        # states after its layers, [new, hidden_size]: of committed tokens it has just read, then of nodes
        self.hidden: Tensor | None = None
        self.inputs: dict[int, Tensor] = {}  # of the same rows, the inputs of earlier layers whose states are kept

    def extend(self, tree: TokenTree | None = None) -> Request:
        """Request rows of the early exit for the root and for every node of `tree` that it has not read yet."""
        return Request(self._extend(tree if tree is not None else TokenTree()))

    def _extend(self, tree: TokenTree) -> Steps:
        stream = self.stream
        if tree is not stream._tree:
            yield from stream._catch_up()
            stream._start_tree(tree)
        grown = bool(stream._left_early)
        # the whole model has read the last token, so the first layers have to read it again
        if not grown and not stream.behind():
            if stream.cache_manager and stream.cache_manager.policy:
                raise RuntimeError(
                    "the last token was read before the cache policy evicted slots: exit early from the next token on"
                )
            stream.store.roll_back(1)
        raw = yield from self.feed_new(tree)
        before_root = 0 if grown else stream._left_early.missing - 1
        raw = raw[before_root:, :stream.lane.vocabulary]
        self.inputs = stream._left_early.captured[-1]
        self.hidden = self.inputs[self.layer]
        rows = Rows("exit", raw, stream.lane.main, tree, len(tree) - len(raw))
        yield from consulted(rows)
        return rows

    def feed_new(self, tree: TokenTree) -> StepsTo[Tensor]:
        """Run unread text and nodes of `tree` through the first layers; returns rows [new, V]."""
        stream, early = self.stream, self.stream._left_early
        missing = [] if early else stream.unread()
        early.layer, early.missing = self.layer, early.missing or len(missing)
        fed = max(0, len(stream.store.parents) - early.missing)
        if not missing and fed == len(tree):
            return early.captured[-1][self.layer][:0]
        work = ForwardInput(stream.store, *input_tree(early.missing, missing, tree, fed))
        feed = Feed(
            stream,
            stream._watched(work),
            LayerPlan(
                stop=self.layer,
                capture=stream._captures_up_to(self.layer),
                routing=stream._routing(),
            ),
            name="exit",
        )
        yield [feed]
        early.tokens += work.tokens
        early.captured.append(feed.captured)
        return feed.result()
