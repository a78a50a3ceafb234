"""Planning-guided decoding."""
import ast
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from playground.algorithms.programs.sandbox import tries, unavailable
from playground.algorithms.search.commit_path import FoundToken, adopt
from playground.algorithms.search.explored_prefixes import Explored
from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree, chain
from playground.engine.sampling import ranked
from playground.errors import Refusal
from playground.events import Event, Figure, Note

PROGRAM_SECONDS = 20.0  # wall-clock time that the programs of one lane may take together
OUTLINED = 40  # edges of the search tree that are drawn
DEFAULT = 'check("") == 0\ncheck("one") == 1\ncheck("the cat sat") == 3'


@dataclass(frozen=True)
class Tests:
    """Expected return values of a function for some arguments."""

    name: str
    arguments: list
    results: list

    @classmethod
    def read(cls, text: str) -> "Tests":
        """Parse lines such as `work([1, 2]) == 3`, all of one function with one argument. Raises Refusal."""
        found = [_test(line) for line in text.splitlines() if line.strip()]
        if len({name for name, _, _ in found}) != 1:
            raise Refusal(
                "The tests must all call the same function, one call per line, such as work([1, 2]) == 3.", "tests"
            )
        names, arguments, results = zip(*found)
        return cls(names[0], list(arguments), list(results))

    def passed(self, program: str) -> float:
        """Share of the tests that a program passes. A program that does not define the function is not run."""
        if f"def {self.name}(" not in program:
            return 0.0
        found = tries(program.strip(), self.name, self.arguments)
        return sum(_same(given, wanted) for given, wanted in zip(found, self.results)) / len(self.results)


def _test(line: str) -> tuple[str, object, object]:
    try:
        [left], [right] = (
            [ast.parse(line.strip(), mode="eval").body.left],
            ast.parse(line.strip(), mode="eval").body.comparators,
        )
        [argument] = map(ast.literal_eval, left.args)
        json.dumps(argument)  # raises TypeError for what the sandbox cannot receive
        return left.func.id, argument, ast.literal_eval(right)
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        raise Refusal(f"{line.strip()[:60]!r} is not a test: write one such as work([1, 2]) == 3.", "tests") from None


def _same(given: list | None, wanted: object) -> bool:
    """Whether two values are equal as JSON, in which true is not 1."""
    return given is not None and repr(given[0]) == repr(_plain(wanted))


def _plain(value: object) -> object:
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


@dataclass(eq=False)
class SearchState:
    """A prefix, the tokens that may follow it, the most probable first, and the returns of each."""

    place: int  # node in the tree of all prefixes read
    tokens: list[int]
    priors: list[float]  # among these tokens
    visits: int = 1
    returns: list[list[float]] = field(init=False)  # share of tests passed, by token
    below: dict[int, "SearchState"] = field(default_factory=dict)  # by index of the token in `tokens`

    def __post_init__(self):
        self.returns = [[] for _ in self.tokens]

    def value(self, a: int) -> float:
        """Best return of a token, 0 if it was never tried."""
        return max(self.returns[a], default=0.0)

    def score(self, a: int, c: float, c_base: float) -> float:
        """P-UCB with an exploration weight that grows with the visits."""
        beta = math.log((self.visits + c_base + 1) / c_base) + c
        return self.value(a) + beta * self.priors[a] * math.sqrt(math.log(self.visits)) / (1 + len(self.returns[a]))

    def select(self, c: float, c_base: float) -> int:
        return max(range(len(self.tokens)), key=lambda a: self.score(a, c, c_base))


@dataclass
class ReadPrefixes(Explored):
    """All prefixes that were read, and the best next tokens after each."""

    width: int = 1
    next: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)

    def learn(self, rows) -> None:
        """Record the best tokens of all new rows; ties go to the lowest id."""
        for node in range(rows.first, rows.first + len(rows.raw)):
            scores, tokens = ranked(rows.raw[rows.row(node)], self.width)
            self.next[node] = tokens.tolist(), scores.float().softmax(0).tolist()

    def unread(self, place: int) -> bool:
        return place not in self.next


class PlanningGuided(Decoder):
    """Monte Carlo tree search over programs: try a token, complete the program greedily, and run it on the tests.

    The search tree over prefixes grows by one state per rollout. Selection follows the token with the highest value +
    beta P sqrt(ln N) / (1 + n) from the root: the value is the best share of tests passed by any program through it, P
    the model's probability among the `width` best tokens, N and n the visits of state and token. Every prefix is read
    once and stays in the KV cache, so prefixes of earlier completions need no further forward. The result is the first
    of the best programs; the first one tried is the greedy one, so the result is never worse on these tests. One
    rollout, or width 1, is greedy decoding. Each program runs in a confined process, for at most 20 seconds in total.
    Zhang et al. 2023, arXiv 2303.05510.
    """

    name, title, paper, sheet = "pg_td", "Planning-guided decoding", "2303.05510", "search/pg-td"
    guarantee, several, refuses, runs_programs = ("heuristic", "collapses"), True, ("sampler", "constraint"), True

    tests: str = knob(
        DEFAULT,
        multiline=True,
        file=True,
        help="tests of the requested function, one per line, such as work([1, 2]) == 3",
    )
    rollouts: int = knob(8, 1, 256, step=1, help="maximum number of programs to try; 1 is greedy")
    width: int = knob(3, 1, 8, step=1, help="tokens considered after each prefix; 1 is greedy")
    c: float = knob(4.0, 0.0, 16.0, step=0.5, help="exploration weight; 0 only follows the best value so far")
    c_base: float = knob(10.0, 1.0, 100.0, step=1.0, help="number of visits from which the exploration weight grows")

    def check(self) -> None:
        Tests.read(self.tests)
        if reason := unavailable():
            raise Refusal(
                f"{self.title} runs programs that a model wrote, and {reason}. Choose another strategy.", self.name
            )

    def decode(self, lm: Lane) -> Iterator:
        tests, reading, programs, spent = (
            Tests.read(self.tests),
            ReadPrefixes(TokenTree(self.name), width=self.width),
            {},
            0.0,
        )
        reading.learn((yield lm.prefill()))
        root = SearchState(ROOT, *reading.next[ROOT])
        for rollout in range(1, self.rollouts + 1):
            path = self._selected(root)
            program = yield from self._completed(lm, reading, path)
            new = program not in programs
            if new:
                begun = time.perf_counter()
                programs[program] = tests.passed(lm.text_of(list(program)))
                spent += time.perf_counter() - begun
            self._back_up(path, programs[program])
            yield from self._events(lm, root, rollout, programs, program, new)
            if programs[program] == 1:
                break
            if spent > PROGRAM_SECONDS:
                yield Note(
                    f"The search ends here: its programs took more than {PROGRAM_SECONDS:.0f} seconds in total."
                )
                break
        best = list(max(programs, key=programs.get))
        rows = yield lm.extend(chain(best[:-1], self.name))
        yield from adopt(lm, [FoundToken(token, rows, node) for node, token in enumerate(best, ROOT)])

    def _selected(self, root: SearchState) -> list[tuple[SearchState, int]]:
        """Path of states and tokens from the root to the first token outside the search tree."""
        path, state = [], root
        while state is not None:
            a = state.select(self.c, self.c_base)
            path.append((state, a))
            state = state.below.get(a)
        return path

    def _completed(self, lm: Lane, reading: ReadPrefixes, path: list[tuple[SearchState, int]]) -> Iterator:
        """Add the state at the end of the path to the tree, unless the text ends there, and complete it greedily.

        Returns the tokens of the program.
        """
        program = [state.tokens[a] for state, a in path]
        state, a = path[-1]
        place = state.place
        while not self._ended(lm, program):
            place = reading.place(program[-1], place)
            if reading.unread(place):
                reading.learn((yield lm.extend(reading.tree)))
            if a not in state.below and len(program) == len(path):
                state.below[a] = SearchState(place, *reading.next[place])
            program.append(reading.next[place][0][0])
        return tuple(program)

    def _ended(self, lm: Lane, program: list[int]) -> bool:
        return lm.ends(program[-1]) or len(program) == lm.remaining

    def _back_up(self, path: list[tuple[SearchState, int]], reward: float) -> None:
        for state, a in path:
            state.returns[a].append(reward)
            state.visits += 1

    def _events(
        self, lm: Lane, root: SearchState, rollout: int, programs: dict, program: tuple, new: bool
    ) -> Iterator[Event]:
        best, reward = max(programs.values()), programs[program]
        series = {"best so far": best, "this program": reward}
        yield Figure("scalar", "share of tests passed", {"x": rollout - 1, "axis": "rollout", "series": series})
        yield outline(lm, root)
        last = (lm.text_of(list(program)).strip().splitlines() or [""])[-1]
        again = "" if new else ", a program that was tried before"
        yield Note(f"Rollout {rollout}: {reward:.0%} of the tests pass{again}; it ends with {last.strip()[:60]!r}.")


def outline(lm: Lane, root: SearchState) -> Figure:
    """The search tree in breadth-first order: each token tried, with its prior, visits and value."""
    labels, parents, values, waiting = (
        ["the prompt"],
        [-1],
        [max(map(root.value, range(len(root.tokens))))],
        [(0, root)],
    )
    while waiting and len(labels) < OUTLINED:
        parent, state = waiting.pop(0)
        for a, token in enumerate(state.tokens):
            if state.returns[a]:
                labels.append(f"{lm.piece(token)} p {state.priors[a]:.2f} n {len(state.returns[a])}")
                parents.append(parent)
                values.append(state.value(a))
                waiting += [(len(labels) - 1, state.below[a])] if a in state.below else []
    return Figure(
        "tree",
        "prefixes, and the best share of tests passed from each",
        {"labels": labels, "parents": parents, "values": values},
    )
