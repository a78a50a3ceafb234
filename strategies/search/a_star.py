"""A*-decoding: always expand the most promising partial solution."""
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from playground.algorithms.search.reasoning_steps import DELIMITERS, Reasoning, StepEnd, take_step
from playground.algorithms.search.reward_head import GradedAnswer, train_reward_head
from playground.algorithms.search.rewards import Rewarded, classifier_knob, reward_knob
from playground.contract import Lane, Strategy, knob, make
from playground.contract.token_tree import ROOT
from playground.events import Branches, Figure, Note

UNKNOWN = 0.5  # reward of the prompt alone
SHOWN = 24  # states in a figure
QUOTED = 24  # characters of a step in a figure


@dataclass(eq=False)
class SearchedState:
    """A partial solution with its reward r, and its costs: h = 1 - r, and g of the steps up to it."""

    number: int
    reasoning: Reasoning
    parent: "SearchedState | None" = None
    r: float = UNKNOWN
    g: float = 0.0
    popped: int = 0  # in which order it was expanded, from 1; 0 if not yet
    step: str = field(default="", repr=False)

    @property
    def h(self) -> float:
        return 1 - self.r

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def complete(self) -> bool:
        return self.reasoning.leaf.reason is not None

    @property
    def goal(self) -> bool:
        """Whether the text ended by itself."""
        return self.reasoning.leaf.reason not in (None, "length")


class AStar(Rewarded):
    """Sample several next steps of the most promising partial solution, score each with a process reward model, and
    go on with the best of all partial solutions found so far.

    A state is the text up to the end of a step. It costs f = g + h: h = 1 - r is how far its reward is from 1, and g
    adds up cost on the way, which is by default the reward lost in each step. The open list holds all states that were
    not expanded; the one with the lowest f is next, so that the search returns to an earlier state if all continuations
    of a later one look worse. The first complete text that is taken from the list is the answer. At `budget` tokens the
    best complete text is, or the best state is completed greedily. k = 1 is plain sampling. With `keeps` local the
    search never returns. Chatziveroglou 2025, arXiv 2505.13672, of which the edge cost and the open list are our
    reading.
    """

    name, title, paper, sheet = "a_star", "A*-decoding", "2505.13672", "search/a-star-decoding"
    guarantee, several, refuses, counts_forced = ("heuristic", "collapses"), True, ("sampler",), True
    reconstruction, sure, weights_of = True, "medium", ""

    k: int = knob(4, 1, 8, step=1, help="continuations sampled from each expanded state; 1 is plain sampling")
    reward: str = reward_knob()
    classifier: str = classifier_knob()
    cost: str = knob(
        "lost reward",
        choices=("lost reward", "gained reward", "none"),
        help="what a step adds to g: the reward it loses; the reward it gains, so that f never falls along a path; "
        "nothing, which is best-first search by reward",
    )
    keeps: str = knob(
        "all", choices=("all", "local"), help="open list: all states, or only the continuations of the last one"
    )
    weight: float = knob(1.0, 0.0, 2.0, step=0.1, help="weight of h in f")
    step: str = knob("line", choices=tuple(DELIMITERS), help="what ends a step")
    step_tokens: int = knob(48, 1, 512, step=1, help="tokens after which a step ends in any case")
    budget: int = knob(512, 1, 8192, step=1, help="sampled tokens, over all states, after which the search ends")
    temperature: float = knob(0.8, 0.0, 2.0, step=0.05, help="of the sampled steps; at 0 all continuations are equal")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    @classmethod
    def train_on_grades(cls, answers: list[GradedAnswer], seed: int) -> Iterator:
        """Train the reward models that the searches share; returns the weights."""
        return (yield from train_reward_head(answers, seed))

    def decode(self, lm: Lane) -> Iterator:
        row = yield lm.prefill()
        [leaf] = lm.fork(1)
        states, found = [SearchedState(0, Reasoning(leaf, row))], []
        opened, spent, last = [(self._key(states[0]), 0)], 0, None
        while opened:
            state = states[heapq.heappop(opened)[1]]
            if state.complete:
                found.append(state)
                if state.goal:
                    break
                continue
            if spent >= self.budget:
                found += [state, *(states[number] for _, number in opened)]
                break
            yield from self._backtrack(state, last)
            last, state.popped = state, 1 + sum(other.popped > 0 for other in states)
            tokens, successors = yield from self._expanded(lm, state, len(states))
            spent += tokens
            states += successors
            if self.keeps == "local":
                lm.drop(states[number].reasoning.leaf for _, number in opened)
                opened = []
            for successor in successors:
                heapq.heappush(opened, (self._key(successor), successor.number))
            yield from self._shown(states, opened, spent)
        yield from self._answered(lm, found, len(states) - 1, spent)

    def _key(self, state: SearchedState) -> tuple:
        """Order of the open list: lowest f, then lowest h, deepest, earliest."""
        return self._f(state), state.h, -state.depth, state.number

    def _f(self, state: SearchedState) -> float:
        return state.g + self.weight * state.h

    def _edge(self, before: float, after: float) -> float:
        """Cost of a step that changes the reward."""
        change = {"lost reward": before - after, "gained reward": after - before, "none": 0.0}[self.cost]
        return max(0.0, change)

    def _expanded(self, lm: Lane, state: SearchedState, first: int) -> Iterator:
        """Sample the continuations of a state; returns the number of sampled tokens and the different new states."""
        begun = state.reasoning.leaf.generated
        text = len(state.reasoning.leaf.text)
        growing = state.reasoning.continued(lm, self.k)
        tokens = yield from take_step(lm, growing, StepEnd(DELIMITERS[self.step], self.step_tokens))
        different = {tuple(each.leaf.tokens): each for each in reversed(growing)}
        kept = [each for each in growing if different[tuple(each.leaf.tokens)] is each]
        lm.drop(each.leaf for each in growing if each not in kept)
        scores = yield from self.rewards(lm, [each.text for each in kept])
        return tokens, [
            SearchedState(
                first + i, each, state, r, state.g + self.weight * self._edge(state.r, r), step=each.leaf.text[text:]
            )
            for i, (each, r) in enumerate(zip(kept, scores))
            if each.leaf.generated > begun
        ]

    def _answered(self, lm: Lane, found: list[SearchedState], scored: int, spent: int) -> Iterator:
        """Commit the answer; an unfinished one is completed greedily."""
        goals = [state for state in found if state.goal]
        best = min(goals or found, key=self._key)
        yield Note(f"{scored} partial solutions were scored and {spent} tokens sampled; {self._outcome(best)}")
        yield lm.keep(best.reasoning.leaf)
        while not lm.reason:
            rows = yield lm.extend()
            yield lm.keep(lm.choose(rows, rows.best()))

    def _outcome(self, best: SearchedState) -> str:
        shown = f"the answer has reward {best.r:.2f} and f {self._f(best):.2f}."
        return shown if best.complete else f"the budget is spent: the best of them is completed greedily; {shown}"

    def _backtrack(self, state: SearchedState, last: SearchedState | None) -> Iterator:
        if last and state.parent is not last:
            yield Note(f"Back to state {state.number}: its f of {self._f(state):.2f} is the lowest in the open list.")

    def _shown(self, states: list[SearchedState], opened: list, spent: int) -> Iterator:
        yield Branches(scores={states[number].reasoning.leaf.number: states[number].r for _, number in opened})
        ranked = [states[number] for _, number in sorted(opened)[:SHOWN]]
        labels = [f"{state.number}: g {state.g:.2f} h {state.h:.2f} {_quoted(state)}" for state in ranked]
        yield Figure("bars", "open list by f, lowest first", {"labels": labels, "values": [*map(self._f, ranked)]})
        shown = states[:SHOWN]
        yield Figure(
            "tree",
            "states by reward; # is the order of expansion",
            {
                "labels": [f"{'' if not s.popped else f'#{s.popped} '}{_quoted(s) or 'the prompt'}" for s in shown],
                "parents": [ROOT if s.parent is None else s.parent.number for s in shown],
                "values": [s.r for s in shown],
            },
        )
        yield Figure("scalar", "sampled tokens", {"x": spent, "axis": "tokens", "series": {"states": len(states)}})


def _quoted(state: SearchedState) -> str:
    text = " ".join(state.step.split())
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}…"
