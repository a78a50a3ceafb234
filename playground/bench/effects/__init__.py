"""Effects of strategies that the bundled models are meant to show, one module each.

Each module has one function that returns an Effect: its claim, entrants and questions, and the rule that decides
whether the effect is shown.
"""
from __future__ import annotations

from collections.abc import Callable

from playground.bench.effects.context_effect import context
from playground.bench.effects.effect import Effect
from playground.bench.effects.eviction_effect import eviction
from playground.bench.effects.grammar_effect import grammar
from playground.bench.effects.intervention_effect import interventions
from playground.bench.effects.speculation_effect import speculation
from playground.bench.effects.switching_effect import switching
from playground.bench.effects.voting_effect import votes

EFFECTS: dict[str, Callable[..., Effect]] = {
    make.__name__: make for make in (switching, context, eviction, grammar, speculation, votes, interventions)
}
