"""How a stream reads its prompt: for another lane already, in chunks, or in parts of the layers."""
from __future__ import annotations

from torch import Tensor

from playground.decoding.acting_policy import ActingPolicy
from playground.decoding.cache_manager import CacheManager
from playground.decoding.requests import Feed, Steps, StepsTo
from playground.decoding.stream.forwards import EarlyRows, StreamForwards, answer_of, chunk_of, in_chain
from playground.engine.forward_input import ForwardInput, LateInput
from playground.engine.hooks import LayerPlan
from playground.events import Note

WATCHED_CHUNK = 128  # prefill chunk size if a cache policy reads the attention weights, [chunk, slots] each


class PromptReading(StreamForwards):
    """Reads the prompt and what the text has more than was read, until at most one chunk is unread."""

    def replace_prompt(self, inputs: list[int | Tensor]) -> None:
        """Read tokens and input embeddings [hidden_size] in place of the prompt. Raises RuntimeError if it was read."""
        if self.store.length:
            raise RuntimeError("the prompt was read: replace it before the first forward")
        self._own_inputs = {place: given for place, given in enumerate(inputs) if isinstance(given, Tensor)}
        self.prompt = [0 if isinstance(given, Tensor) else given for given in inputs]
        self._longer = len(inputs) - self.lane.prompt_length

    def read_as(self, embedding: Tensor) -> None:
        """Read an input embedding [hidden_size] in place of the last token of the text. Raises RuntimeError if that was
        read.
        """
        if not self.behind():
            raise RuntimeError("the last token was read: say what to read in its place before the next forward")
        self._own_inputs[self.store.length + self.behind() - 1] = embedding

    def _read_shared_prefix(self) -> Steps:
        """Start from a prompt that several lanes of the session share."""
        prefix = None if self.store.length or self.store.parents else self.lane.prefixes.of(self)
        if prefix:
            given = yield from prefix.read(self.lane)
            self._root = prefix.begin(self.store, self.captures)
            if (captured := prefix.captured(self.states.layers)) is not None:
                self.states.read(captured, 0, len(self.prompt))
            if given:
                self.lane.record(
                    Note(
                        f"{given} of the {len(self.prompt)} prompt tokens of the {self.name} were read for another "
                        "lane; reusing their KV cache costs this lane nothing."
                    )
                )

    def _catch_up(self) -> Steps:
        """Read the text in chunks until at most one chunk is unread."""
        manager = self.cache_manager
        if manager and manager.acting and not self.store.length and (cuts := manager.cut_layers()):
            yield from self._prefill_in_segments(manager.acting, cuts)
        if self.behind() < 2:  # a decode step
            return
        chunk = self._chunk_size()
        while self.behind() > chunk:
            work = ForwardInput(self.store, self.unread()[:chunk], in_chain(chunk), last_only=True)
            self._root = yield from self._feed(work, chunk)
            self._commit(chunk - 1)
            manager = self.cache_manager
            if manager and manager.prefill_chunk and self.store.length < len(self.prompt):
                probe = manager.chunk_probe(self.prompt)
                yield from self._rehearse(manager, probe[:self.model.context - self.store.length])
                self._settle(manager, "chunk")

    def _acts_after(self) -> int:
        """Tokens of the prompt after which the cache policy acts; 0 at its end only."""
        return self.cache_manager.prefill_chunk if self.cache_manager else 0

    def _chunk_size(self) -> int:
        """Most tokens of the prompt in one forward."""
        chunk = max(chunk_of(self.model), self.store.least_chunk)
        chunk = min(WATCHED_CHUNK, chunk) if self._watch() else chunk
        return min(chunk, self._acts_after() or chunk)

    # --- the cache policy acts on the prompt ---

    def _settle_prefill(self, manager: CacheManager) -> Steps:
        """Let the cache policy act on the prompt that was read."""
        for text in manager.probe_texts(self.lane.tokens, self.model.context - self.store.length):
            yield from self._rehearse(manager, text)
        self._settle(manager, "prefill")

    def _settle(self, manager: CacheManager, moment: str) -> None:
        """Let the cache policy act on what was read."""
        for event in manager.settle(moment, self.store.length):
            self.lane.record(event)

    def _rehearse(self, manager: CacheManager, tokens: list[int]) -> Steps:
        """Read tokens after the text, pass their attention to the cache policy, and discard them."""
        if not tokens:
            return
        plan = LayerPlan(compute=self._compute(), routing=self._routing())
        with manager.rehearsal():
            for start in range(0, len(tokens), WATCHED_CHUNK):
                chunk = tokens[start:start + WATCHED_CHUNK]
                parents = list(range(start - 1, start - 1 + len(chunk)))
                yield [Feed(self, ForwardInput(self.store, chunk, parents, watch=lambda position: True), plan)]
        self.store.crop_scratch()

    # --- a prompt that becomes shorter at some layers ---

    def _prefill_in_segments(self, acting: ActingPolicy, cuts: list[int]) -> Steps:
        """Prefill that continues at each cut with the tokens that the cache policy retains.

        The layers before the first cut read the whole prompt. The row after the last token becomes the root.
        """
        first, *others = cuts
        early = yield from self._read_before(first)
        for end in (*others, self.model.depth):
            feed, early = yield from self._read_segment(acting, early, end)
        self._root = answer_of(feed, self.captures)

    def _read_before(self, cut: int) -> StepsTo[EarlyRows]:
        """Run all tokens of the prompt through the layers before `cut`."""
        early = EarlyRows(cut)
        for start in range(0, len(self.prompt), self._chunk_size()):
            chunk = self.prompt[start:start + self._chunk_size()]
            work = ForwardInput(self.store, chunk, in_chain(len(chunk)), last_only=True)
            plan = LayerPlan(
                stop=cut, capture=self._captures_up_to(cut), routing=self._routing()
            )
            feed = Feed(self, self._watched(work), plan)
            yield [feed]
            early.captured.append(feed.captured)
            self.store.commit(len(chunk) - 1)
        return early

    def _read_segment(
        self, acting: ActingPolicy, early: EarlyRows, end: int
    ) -> StepsTo[tuple[Feed, EarlyRows]]:
        """Run the retained tokens through the layers from one cut to `end`, the next cut or the model's depth.

        What earlier layers captured of the last token is added to the last feed.
        """
        onward = acting.select_prompt(early.layer)
        states, late = early.entering(early.layer)[onward], EarlyRows(end)
        positions = self.store.slots_of(early.layer).positions[0].tolist()
        for start in range(0, len(positions), self._chunk_size()):
            chunk = slice(start, start + self._chunk_size())
            work = LateInput(
                self.store,
                [self.prompt[position] for position in positions[chunk]],
                [],
                last_only=True,
                first=start,
                positions=positions[chunk],
            )
            feed = Feed(
                self,
                self._watched(work),
                LayerPlan(
                    stop=end,
                    resume=(early.layer, states[chunk]),
                    capture=self._captures_up_to(end),
                    routing=self._routing(),
                ),
            )
            yield [feed]
            late.captured.append(feed.captured)
        feed.captured |= {layer: early.captured[-1][layer] for layer in self._captured_layers if layer < early.layer}
        last = {layer: rows[-1:] for layer, rows in feed.captured.items()}
        if end == self.model.depth:
            self.states.read(last, len(self.prompt) - 1, 1)
        return feed, late
