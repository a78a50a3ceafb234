"""The models of a lane: a stream for each reader of the text, and what strategies learnt."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from playground.contract import ReadsParts, ReadsProbes, Strategy
from playground.contract.assembly import Assembly
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding import fitted_weights as fitted
from playground.decoding.cache_manager import CacheManager, check_exits, check_policy
from playground.decoding.compute_manager import ComputeManager
from playground.decoding.cross_tokenizer import CrossTokenizerStream
from playground.decoding.lane.lane_state import LaneState, PrefixPool
from playground.decoding.lane.running_text import ModelsByStream, RunningText
from playground.decoding.lane.whole_layers import check_runs_whole
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.routed_streams import read_routings
from playground.decoding.rows import Rows
from playground.decoding.shared_prefix import SharedPrefixes
from playground.decoding.stream import Exit, Stream
from playground.decoding.visitor_memory import Memory
from playground.engine.expert_routing import ExpertRouting
from playground.engine.model import Model
from playground.errors import Refusal

FittedWeights = Mapping[str, dict[str, torch.Tensor]]
"""By strategy, its weights by name."""


class ModelStreams(RunningText, LaneState):
    """The text with the models that read it, each in step with it."""

    def __init__(
        self,
        prompt: list[int],
        models: ModelsByStream,
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
        prompts: dict[str, list[int]] | None = None,
        memory: Memory | None = None,
        heads: FittedWeights | None = None,
    ):
        """`prompts` maps streams to other prompts, for the target's model or for a draft with another vocabulary.
        `heads` are weights of draft heads that were given, by strategy.

        Raises Refusal if the prompt is too long, or fitted weights are missing.
        """
        check_exits(assembly.strategies(), models["target"])
        self.routings = read_routings(assembly.samplers, models["target"])
        own = {"target": prompt, **dict.fromkeys(self.routings, prompt), **(prompts or {})}
        super().__init__(own, models, assembly, limits, recorder)
        self.prefixes: PrefixPool = SharedPrefixes()  # prompts shared with other lanes
        self._streams: dict[str, Stream] = {}
        self._memory = Memory() if memory is None else memory  # an empty Memory is falsy
        self._recalled: dict[str, Any] = {}
        parts, target = assembly.strategies(), self.target_model
        self.inner = [exit for part in parts for exit in part.inner(target.depth, target.tied)]
        others = [part for part in parts if part is not assembly.compute_policy]
        self.fitted = fitted.find_all(others, models, heads or {})
        for part in parts:
            part.check_target(target)
        check_runs_whole(target, parts)

    @property
    def target(self) -> Stream:
        return self.stream("target")

    @property
    def depth(self) -> int:
        return self.target_model.depth

    @property
    def candidates(self) -> int:
        return self.recorder.top

    @property
    def lm_head_weight(self) -> torch.Tensor | None:
        weight = self.target_model.lm_head_weights
        return None if weight is None else weight[:self.vocabulary]

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return self.target_model.embed(tokens)

    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target_model.read_out(hidden, norm=False)[:, :self.vocabulary]

    def own_rows(self, logits: torch.Tensor, tree: TokenTree, first: int = ROOT) -> Rows:
        return Rows("draft", logits, self.main, tree, first, candidates=self.candidates)

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self._open_stream(name)
        return self._streams[name]

    def read_with(self, name: str, model: Model) -> Stream:
        before = self._streams.pop(name, None)
        self._models = {**self._models, name: model}
        stream = self.stream(name)
        if before:
            before.store.done, stream.reads_again = True, before.reads_again or before.store.length > 0
        return stream

    def exit(self, layer: int) -> Exit:
        return self.target.exit(min(layer, self.depth))

    def cache_bytes(self) -> int:
        """Memory of the KV caches of all streams."""
        return sum(stream.store.bytes() for stream in self._streams.values())

    def _open_stream(self, name: str) -> Stream:
        if name in self._models and name != "target" and name in self.prompts:
            return CrossTokenizerStream(name, self._models[name], self, self.prompts[name])
        if name in self._models:
            companions = [self.stream(other) for other in self.assembly.streams()] if name == "target" else []
            stream = Stream(name, self._models[name], self, self.prompts["target"], companions)
            if name == "target":
                stream.cache_manager = self._new_cache_manager(stream)
                stream.computing = self._new_compute_manager()
            return stream
        if name in self.prompts:
            return Stream(name, self.target_model, self, self.prompts[name])
        raise Refusal(f"This strategy needs a {name} model in addition to the target: choose one.", name)

    def _new_cache_manager(self, stream: Stream) -> CacheManager:
        policy, model = self.assembly.cache_policy, self.target_model
        if policy:
            check_policy(policy, stream.store, model)
            if isinstance(policy, ReadsProbes):
                policy.spell = lambda text: self.spell(text)
            if isinstance(policy, ReadsParts) and model.parts:
                policy.begin(model.parts)
            others = [part for part in self.assembly.strategies() if part is not policy]
            stream.states.kept = any(part.state_layers(model.depth) for part in others)
        manager = CacheManager(policy, stream.store, self.prompt_length, self.recorder, model.rotate_back)
        if self.assembly.takes_turns and model.attends:
            manager.take_turns()
        return manager

    def _new_compute_manager(self) -> ComputeManager | None:
        policy = self.assembly.compute_policy
        if policy is None:
            return None
        weights = fitted.find_all([policy], {"target": self.target_model})  # whatever the draft model is
        return ComputeManager(policy, self.target_model, self.prompt_length, weights.get(policy.name, {}))

    # --- when the draft model can read no more ---

    def draft_budget(self, drafter: Strategy) -> int | None:
        most = self.remaining - 1
        if "draft" not in drafter.needs:
            return most
        if self._is_draft_full():
            self.note_once("The context of the draft model is full: the text goes on without drafts, token by token.")
            return None
        # one with another vocabulary counts its own tokens
        return most if "draft" in self.prompts else min(most, self._models["draft"].context - len(self.main.tokens))

    def _is_draft_full(self) -> bool:
        """Whether the draft model can read nothing after the text."""
        if isinstance(draft := self._streams.get("draft"), CrossTokenizerStream):
            return draft.full
        return len(self.prompts.get("draft", self.main.tokens)) >= self._models["draft"].context

    # --- what the forwards of a stream have to return ---

    def routing(self, stream: str) -> ExpertRouting | None:
        model = self._models.get(stream, self.target_model)
        if model is not self.target_model or not model.experts or not (self.routings or stream == "target"):
            return None
        return ExpertRouting(self.routings.get(stream, ()))

    def readings(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        assembly = self.assembly
        alone = assembly.cache_policy or assembly.compute_policy or assembly.decoder.replaces_prompt
        own = {"target"} if alone else set()
        names = [name for name in {**self._models, **self.prompts} if name not in own | set(self.routings)]
        default = self.prompts["target"]
        return {
            name: (id(self._models.get(name, self.target_model)), tuple(self.prompts.get(name, default)))
            for name in names
        }

    def captures(self, stream: str) -> frozenset[int]:
        last = [self._models.get(stream, self.target_model).depth] if self.shows_hidden(stream) else []
        return frozenset([*(exit.layer for exit in self.inner if exit.stream == stream), *last])

    def state_layers(self, stream: str) -> tuple[int, ...]:
        depth, parts = self.target_model.depth, self.assembly.strategies() if stream == "target" else []
        return tuple(sorted({layer for part in parts for layer in part.state_layers(depth)}))

    def shows_hidden(self, stream: str) -> bool:
        return any(stream in part.reads_hidden for part in self.assembly.strategies())

    # --- memory ---

    def memory(self, name: str, make: Callable[[], Any], *about: object) -> Any:
        model = self.target_model
        key = "|".join(map(str, (name, model.name, model.revision, model.quantization, model.dtype, *about)))
        if key not in self._recalled:
            self._recalled[key] = self._memory.recall(key, make)
        return self._recalled[key]

    def remember(self) -> None:
        """At the end of the run: store what was learned, and mark the caches as no longer needed."""
        for key, thing in self._recalled.items():
            self._memory.keep(key, thing)
        for stream in self._streams.values():
            stream.store.done = True
