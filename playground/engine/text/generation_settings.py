"""What the author of a checkpoint set for generation: the tokens that end a text, and generation_config.json.

Entries that change the text of the library's greedy `generate` are applied by its own logits processors, so that a
plain lane writes the same. Sampling settings are only named, since a lane has its own.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.request_limits import quoted

SHOWN = 4  # end tokens that are named
CONTEXTS = ("max_position_embeddings", "max_target_positions", "max_seq_len")  # entries of a config
UNSTATED_CONTEXT = 2048  # tokens that a model may read whose config has none of them


class TextFrame(NamedTuple):
    """What processors have to know about a text."""

    start: int  # tokens of the prompt
    most: int  # tokens of the prompt and the longest text
    ends: list[int]
    device: str | torch.device = "cpu"


def _begin(value: Any, at: TextFrame, forced_bos: Any = None) -> LogitsProcessor:
    first = at.start if at.start > 1 or forced_bos is None else at.start + 1
    return SuppressTokensAtBeginLogitsProcessor(value, first, at.device)


# how each entry is applied, in the order of the library
PROCESSORS: dict[str, Callable[[Any, TextFrame], LogitsProcessor]] = {
    "sequence_bias": lambda value, at: SequenceBiasLogitsProcessor(value),
    "repetition_penalty": lambda value, at: RepetitionPenaltyLogitsProcessor(float(value)),
    "no_repeat_ngram_size": lambda value, at: NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, at: NoBadWordsLogitsProcessor(value, at.ends or None),
    "min_length": lambda value, at: MinLengthLogitsProcessor(value, at.ends, at.device),
    "min_new_tokens": lambda value, at: MinNewTokensLengthLogitsProcessor(at.start, value, at.ends, at.device),
    "forced_bos_token_id": lambda value, at: ForcedBOSTokenLogitsProcessor(value),
    "forced_eos_token_id": lambda value, at: ForcedEOSTokenLogitsProcessor(at.most, value, at.device),
    "exponential_decay_length_penalty": lambda value, at: ExponentialDecayLengthPenalty(value, at.ends, at.start),
    "suppress_tokens": lambda value, at: SuppressTokensLogitsProcessor(value, at.device),
    "begin_suppress_tokens": _begin,
}
ABOUT_ENDS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")  # nothing without an end token
# the toggle of a lane that takes the place of an entry
TOGGLES = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "min_length": "min_new_tokens",
    "min_new_tokens": "min_new_tokens",
}
# what is named only, with the toggle or decoder that does it
NAMED = {
    "temperature": "temperature:t={}",
    "top_k": "top_k:k={}",
    "top_p": "top_p:p={}",
    "min_p": "min_p:m={}",
    "top_h": "top_h:h={}",
    "typical_p": "typical:mass={}",
    "epsilon_cutoff": "epsilon:epsilon={}",
    "eta_cutoff": "eta:eta={}",
    "num_beams": "beam_search:beams={}",
    "penalty_alpha": "contrastive_search",
    "dola_layers": "dola",
    "guidance_scale": "cfg",
    "prompt_lookup_num_tokens": "prompt_lookup",
    "watermarking_config": "green_list",
    "max_new_tokens": "",
    "max_length": "",
    "max_time": "",
    "diversity_penalty": "",
    "constraints": "",
    "force_words_ids": "",
    "encoder_repetition_penalty": "",
    "encoder_no_repeat_ngram_size": "",
    "token_healing": "",
}
LENGTHS = ("max_new_tokens", "max_length")
NEUTRAL = {  # values that change nothing
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "num_beams": 1,
    "guidance_scale": 1,
    "diversity_penalty": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "token_healing": False,
}


def end_ids(network: PreTrainedModel, tokens: Tokens, end: int | None) -> frozenset[int]:
    """Tokens that end a text: those of generation_config.json, of the config, also of its text part, and `end`, the
    tokenizer's.

    An end of the config counts only if the tokenizer has a special token of this id: where the file names none, the
    library puts the id of another tokenizer there.
    """
    config = network.config
    stored = {*_ids(config), *_ids(config.get_text_config(decoder=True))}
    ids = {*_ids(network.generation_config), *(id for id in stored if tokens.is_special(id)), end}
    return frozenset(id for id in ids if id is not None)


def _ids(config: Any) -> list[int]:
    found = getattr(config, "eos_token_id", None)
    return [id for id in (found if isinstance(found, (list, tuple)) else [found]) if type(id) is int and id >= 0]


@dataclass(frozen=True)
class GenerationSettings:
    """The entries of a generation_config.json that concern the text, without those that change nothing."""

    applied: dict[str, Any] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict)  # not applied
    stop: tuple[str, ...] = ()  # end a text as the run's own stop strings do

    @classmethod
    def of(cls, network: PreTrainedModel) -> GenerationSettings:
        """The settings stored with a network. Raises Refusal for an entry that the library cannot apply."""
        config = network.generation_config
        given = {name: value for name, value in vars(config).items() if _matters(name, value)} if config else {}
        stop = given.get("stop_strings") or ()
        settings = cls(
            {name: given[name] for name in PROCESSORS if name in given},
            {name: given[name] for name in NAMED if name in given},
            (stop,) if isinstance(stop, str) else tuple(text for text in stop if isinstance(text, str) and text),
        )
        settings.check(network.config.get_text_config().vocab_size)
        return settings

    def check(self, vocabulary: int) -> None:
        """Raise Refusal for an entry that the library cannot apply to rows of this size."""
        for name in self.applied:
            try:
                self.processors(TextFrame(1, 2, [0]), {*self.applied} - {name})(
                    torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, vocabulary)
                )
            except Exception as reason:  # of a file that anybody may have written
                raise Refusal(
                    f"In generation_config.json {name} is {quoted(self.applied[name])}, which cannot be applied "
                    f"({str(reason)[:100]}): mend this entry, or remove it.",
                    "model",
                ) from None

    def processors(self, at: TextFrame, without: set[str] = frozenset()) -> LogitsProcessorList:
        """The library's processors of the applied entries, but for some."""
        made = LogitsProcessorList()
        for name, value in self.applied.items():
            if name in without or name in ABOUT_ENDS and not at.ends:
                continue
            more = (self.applied.get("forced_bos_token_id"),) if name == "begin_suppress_tokens" else ()
            made.append(PROCESSORS[name](value, at, *more))
        return made

    def without_lengths(self) -> GenerationSettings:
        """The settings but for the limits of a text's length: every run has its own, which its visitor chose."""
        return replace(self, named={name: value for name, value in self.named.items() if name not in LENGTHS})

    def line(self) -> str:
        """What is applied and what is not, on one line; empty if the author set nothing."""
        applied = [_shown(name, value) for name, value in self.applied.items()]
        applied += [f"stop strings {', '.join(map(repr, self.stop))}"] if self.stop else []
        toggles = [NAMED[name].format(value) for name, value in self.named.items() if NAMED[name]]
        advice = f" (add {', '.join(toggles)})" if toggles else ""
        named = ", ".join(_shown(name, value) for name, value in self.named.items())
        parts = [f"{', '.join(applied)} applied"] if applied else []
        parts += [f"{named} not applied{advice}"] if named else []
        return "; ".join(parts)


def stated_context(config: Any) -> int | None:
    """How many tokens a model can read, from its config; None if that does not say, as with recurrent layers."""
    return next((most for name in CONTEXTS if (most := getattr(config, name, None))), None)


def bounds_line(
    ends: frozenset[int], tokens: Tokens, context: int, settings: GenerationSettings, stated: bool = True
) -> str:
    """What ends and limits a text of a model, on one line; `stated` if its config names the context."""
    names = [tokens.piece(id) for id in sorted(ends)]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    ending = f"a text ends at {', '.join(names[:SHOWN])}{more}" if names else "a text has no end token"
    author = f"; of generation_config.json, {line}" if (line := settings.line()) else ""
    named = "" if stated else ", a limit of the playground, since the config names none"
    spaces = "; texts keep spaces that the library's decode cleans up" if _cleans_up(tokens.tokenizer) else ""
    return f"{ending}; context {context:,} tokens{named}{spaces}{author}"


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the library's `decode` removes spaces before punctuation from a whole text, which no text that grows can
    follow. It leaves BPE out.
    """
    asked = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return bool(asked) and type(tokenizer.backend_tokenizer.model).__name__ != "BPE"


def kept_scores(scores: Tensor, left: Tensor) -> Tensor:
    """Rows of `left`, and of `scores` where nothing would be left."""
    return left.where((left > -torch.inf).any(-1, keepdim=True), scores)


def _matters(name: str, value: Any) -> bool:
    known = name in PROCESSORS or name in NAMED or name == "stop_strings"
    return known and value not in (None, [], {}) and not (name in NEUTRAL and value == NEUTRAL[name])


def _shown(name: str, value: Any) -> str:
    if isinstance(value, (list, tuple, dict)):
        return f"{name} ({len(value)})"
    return f"{name} {value}"
