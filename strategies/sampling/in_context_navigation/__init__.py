"""In-context navigation."""
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from playground.algorithms.search.commit_path import FoundToken, adopt
from playground.algorithms.search.explored_prefixes import Explored
from playground.contract import Decoder, knob
from playground.contract.token_tree import ROOT, TokenTree, chain
from playground.events import Event, Figure, Note
from strategies.sampling.in_context_navigation.lm_head_geometry import Atlas

ASKED = (
    "\n\nPlease show me some different ways to solve this problem.\n\nHere are different ways to solve the problem:\n"
)
CUE = 'Final answer (only number): "'
NUMBER = 8  # tokens of a final answer, at most
SHOWN = 12  # tokens or answers in a figure
DRAWN = 200  # best tokens whose keys are drawn
NAMED = 5  # clusters that have a colour
PLANE = "keys of the best first tokens, those tried crossed out, and where each query points"


class Form(NamedTuple):
    """How answers stand in a prompt, up to where the next one begins, and what ends one."""

    opening: str
    item: str  # what stands before an answer, {n} its number
    after: str
    stop: bytes  # a token with this in it ends an answer, and is none of it

    def put(self, answers: list[str], open_one: bool = True) -> str:
        items = [f"{self.item.format(n=n)}{answer}{self.after}" for n, answer in enumerate(answers, 1)]
        return self.opening + "".join(items) + self.item.format(n=len(answers) + 1) * open_one


LIST = Form("\n\nAnswer:\n", '{n}. "', '"\n', b'"')
WAYS = Form(ASKED, "### Way {n}:\n* **Step 1:**\n", "\n", b"#")


@dataclass
class ReadPrompts(Explored):
    """All that was read of prompts and answers: the best token after each node, and whole rows where a query was made.
    """

    best: dict[int, int] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)  # logits [V]
    states: dict[int, Tensor] = field(default_factory=dict)  # what the head read, [width], where it is drawn
    queries: dict[tuple[int, ...], int] = field(default_factory=dict)

    def learn(self, rows) -> None:
        self.best |= {rows.first + i: token for i, token in enumerate(rows.raw.argmax(-1).tolist())}

    def query(self, lm, ids: list[int]) -> Iterator:
        """The node after these tokens, whose row is read and kept."""
        if tuple(ids) in self.queries:
            return self.queries[tuple(ids)]
        # a node of its own: another of this token may have been read and its row let go
        node = self.tree.add(ids[-1], self.follow(ids[:-1]))
        rows = yield lm.extend(self.tree)
        self.asked(ids, rows, node)
        return node

    def asked(self, ids: list[int], rows, node: int) -> None:
        """Note what these tokens, up to a node, were read for."""
        self.learn(rows)
        self.rows[node], self.queries[tuple(ids)] = rows.raw[rows.row(node)], node
        if rows.hidden is not None:
            self.states[node] = rows.hidden[rows.row(node)]

    def unread(self, node: int) -> bool:
        return node not in self.best


@dataclass
class Search:
    """What was found so far. Answers may repeat; first tokens never do."""

    answers: list[str] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)  # number of the query that found each answer, 0 for those given
    tried: dict[str, int] = field(default_factory=dict)  # first tokens by what they read
    atlas: Atlas | None = None  # of the keys, once they are drawn
    crossed: int = 0  # first tokens that are crossed out there

    @property
    def different(self) -> int:
        return len(set(self.answers))


class InContextNavigation(Decoder):
    """Collect different answers: write those that were found into the prompt and ask again, which turns the model away
    from them and from all tokens like them.

    Scores of the next token are products of one query, the model's state, with fixed keys, one a token. Down the ranks
    of one query stand tokens whose keys are like those of the best, right or not; another query ranks anew. Each query
    tries the best `n_tol` first tokens whose text was not tried before, and every one is completed greedily from the
    prompt without any answers, so these decide what is tried and not how it goes on. Without navigation it walks down
    the ranks of a single query, and so it does with one query. In ways, each path to a solution names a number, and the
    numbers vote. The text is the list, or the first path to the number that won. Keys that are alike lie in one
    cluster. Where the right answers are given, the tokens ranked behind the best are completed too: the method rests on
    those outside the clusters of the best being right more often, though ranked no better. A head that is the
    embeddings too mixes what tokens mean and what they follow. Peng et al. 2024, arXiv 2410.02284, with the prompts and
    settings of its code; the line that asks for a final answer and the number of clusters are ours.
    """

    name, title, paper, sheet = (
        "in_context_navigation",
        "In-context navigation",
        "2410.02284",
        "sampling/vocab-key-navigation",
    )
    guarantee, refuses, whole_answers = ("heuristic", "collapses"), ("sampler", "constraint"), True
    sure = "medium"

    task: str = knob(
        "list",
        choices=("list", "ways"),
        help="a list of short answers in quotes, or ways to solve a problem, whose numbers vote",
    )
    n_run: int = knob(10, 1, 20, step=1, help="queries for a list; 1 is a walk down the ranks")
    n_tol: int = knob(10, 1, 10, step=1, help="new first tokens a query tries; 1 asks anew after every answer")
    n_cot: int = knob(4, 1, 10, step=1, help="ways that are tried, each with a query of its own")
    pool: int = knob(100, 10, 1000, step=10, help="best tokens among which a way may begin")
    longest: int = knob(
        64, 1, 256, step=1, help="tokens of an answer; one that has not closed its quote by then is none"
    )
    path: int = knob(256, 1, 1024, step=1, help="tokens of a way")
    completion: str = knob(
        "clean", choices=("clean", "navigated"), help="answers go on from the prompt without the others, or with them"
    )
    navigate: bool = knob(
        True, help="put what was found into the prompt; without, it is a walk down the ranks of one query"
    )
    strip: bool = knob(False, help="count first tokens that differ only by blanks as one")
    cue: str = knob(CUE, help="line behind a way that asks for its number, up to where that begins")
    known: str = knob(
        "", multiline=True, help="answers of a list that are known already, one a line: they stand in every prompt"
    )

    clusters: int = knob(64, 0, 256, step=1, help="clusters of the keys, by k-means with cosines; 0 draws no keys")
    main: int = knob(10, 1, 50, step=1, help="best tokens whose clusters are the main ones")
    ranked: int = knob(100, 10, 1000, step=10, help="best tokens that are looked at by cluster")
    right: str = knob(
        "",
        multiline=True,
        help="all right answers of a list, one a line: every token looked at is then completed and judged",
    )

    @property
    def reads_hidden(self) -> tuple[str, ...]:
        return ("target",) if self.clusters else ()

    def decode(self, lm) -> Iterator:
        reading, form = ReadPrompts(TokenTree(self.name)), LIST if self.task == "list" else WAYS
        prefilled = yield lm.prefill()
        reading.asked([], prefilled, ROOT)
        search = self._begun(lm)
        text = yield from (
            self._listed(lm, reading, form, search) if self.task == "list" else self._voted(lm, reading, form, search)
        )
        ids = text[:lm.remaining]
        rows = yield lm.extend(chain(ids[:-1], self.name))
        yield from adopt(lm, [FoundToken(token, rows, node) for node, token in enumerate(ids, ROOT)])

    def _begun(self, lm) -> Search:
        search, known = Search(), [line.strip() for line in self.known.splitlines() if line.strip()]
        for answer in known if self.task == "list" else ():
            search.answers.append(answer)
            search.queries.append(0)
            search.tried |= {self._read(lm, token): token for token in lm.spell(answer)[:1]}
        return search

    # --- lists ---

    def _listed(self, lm, reading: ReadPrompts, form: Form, search: Search) -> Iterator:
        """Tokens of the list of all answers; where there are none, of what came of the first token tried."""
        given, spare = list(search.answers), []
        for turn in range(1, self.n_run + 1):
            nodes = yield from self._asked(lm, reading, form, given, search.answers)
            firsts = self._new(lm, reading.rows[nodes[1]], search, self.n_tol) if nodes else []
            if not firsts:
                yield Note("The prompt is full." if not nodes else "Every token was tried.")
                break
            texts = yield from self._completed(
                lm, reading, nodes[self.completion == "navigated"], firsts, form.stop, min(self.longest, lm.remaining)
            )
            spare = spare or lm.spell(form.put(given)) + texts[0]
            yield from self._moved(lm, reading, nodes, search, firsts, turn)
            yield from self._gathered(lm, form, search, texts, turn)
        if search.atlas:
            yield from self._compared(lm, reading, form, search, given)
        return (
            lm.spell(form.put(search.answers, open_one=False))
            if len(search.answers) > len(given)
            else spare or lm.spell(form.put(given))
        )

    def _asked(self, lm, reading: ReadPrompts, form: Form, given: list[str], answers: list[str]) -> Iterator:
        """Nodes after the clean prompt and after the one with the answers so far; none where that is longer than the
        model reads.
        """
        clean, full = lm.spell(form.put(given)), lm.spell(form.put(answers if self.navigate else given))
        if max(len(clean), len(full)) + 1 >= lm.target.room:
            return None
        return (yield from reading.query(lm, clean)), (yield from reading.query(lm, full))

    def _new(self, lm, row: Tensor, search: Search, count: int, pool: int | None = None) -> list[int]:
        """The best tokens of a row [V] whose text was not tried yet; from now on they have been."""
        found = []
        for token in row.sort(descending=True, stable=True).indices[:pool].tolist():
            if len(found) == count:
                break
            text = self._read(lm, token)
            if text not in search.tried and not (lm.ends(token) or lm.special(token)):
                search.tried[text] = token
                found.append(token)
        return found

    def _read(self, lm, token: int) -> str:
        text = lm.bytes(token).decode(errors="backslashreplace")
        return text.strip() if self.strip else text

    def _completed(self, lm, reading: ReadPrompts, base: int, firsts: list[int], stop: bytes, longest: int) -> Iterator:
        """Each first token with what follows it greedily after node `base`, side by side, up to a token with `stop` in
        it.
        """
        texts, nodes = [[token] for token in firsts], [base] * len(firsts)
        most = min(longest, lm.target.room - 1 - len(reading.tree.path(base)))
        while growing := [
            i
            for i, text in enumerate(texts)
            if len(text) < most and not lm.ends(text[-1]) and stop not in lm.bytes(text[-1])
        ]:
            for i in growing:
                nodes[i] = reading.place(texts[i][-1], nodes[i])
            if any(reading.unread(nodes[i]) for i in growing):
                reading.learn((yield lm.extend(reading.tree)))
            for i in growing:
                texts[i].append(reading.best[nodes[i]])
        return texts

    def _gathered(self, lm, form: Form, search: Search, texts: list[list[int]], turn: int) -> Iterator[Event]:
        """Answers that closed their quote join the search."""
        found, failed = [], 0
        for text in texts:
            answer = closed(lm, text, form.stop)
            failed += not answer
            found += [answer] if answer else []
        again = sum(answer in search.answers or answer in found[:i] for i, answer in enumerate(found))
        search.answers += found
        search.queries += [turn] * len(found)
        yield Figure(
            "scalar",
            "answers",
            {"x": turn, "axis": "query", "series": {"found": len(search.answers), "different": search.different}},
        )
        yield Figure(
            "bars",
            "answers, and the query that found them",
            {"labels": marked(search.answers)[-SHOWN:], "values": search.queries[-SHOWN:]},
        )
        missed = f" {failed} closed no quote." if failed else ""
        yield Note(
            f"Query {turn} found {', '.join(map(repr, found[:SHOWN])) or 'nothing'}; {again} of them a repeat.{missed}"
        )

    def _moved(
        self, lm, reading: ReadPrompts, nodes: tuple[int, int], search: Search, firsts: list[int], turn: int
    ) -> Iterator[Event]:
        """How the answers in the prompt moved the query: ranks and scores, products with the keys, of first tokens
        before and after.
        """
        clean, full = (reading.rows[node] for node in nodes)
        places = [ranks(row) for row in (clean, full)]
        names = [lm.piece(token) for token in firsts[:SHOWN]]
        table = [[place[token] for place in places] for token in firsts[:SHOWN]]
        yield Figure(
            "matrix",
            "ranks of the new first tokens",
            {"rows": names, "columns": ["clean prompt", "with answers"], "values": table},
        )
        explored = [token for token in search.tried.values() if token not in firsts]
        if explored:
            for what, rows in (("rank", places), ("score", (clean.tolist(), full.tolist()))):
                means = [sum(row[token] for token in explored) / len(explored) for row in rows]
                yield Figure(
                    "scalar",
                    f"mean {what} of first tokens tried before",
                    {"x": turn, "axis": "query", "series": dict(zip(("clean prompt", "with answers"), means))},
                )
        yield from self._drawn(lm, reading, nodes, search, turn)

    # --- keys ---

    def _drawn(self, lm, reading: ReadPrompts, nodes: tuple[int, int], search: Search, turn: int) -> Iterator[Event]:
        """The keys in a plane, drawn once; then, query by query, what is crossed out and where the query points."""
        if lm.keys is None or nodes[1] not in reading.states:
            return
        if search.atlas is None:
            search.atlas = Atlas.of(lm.keys, reading.rows[nodes[0]], max(DRAWN, self.ranked), self.clusters)
            yield Figure("points", PLANE, {"points": self._points(lm, search.atlas, search.atlas.tokens[:DRAWN])})
        crossed = self._points(lm, search.atlas, [*search.tried.values()][search.crossed:], True)
        search.crossed += len(crossed)
        arrow = [*search.atlas.plane.arrow(reading.states[nodes[1]]), f"query {turn}"]
        yield Figure("points", PLANE, {"points": crossed, "path": [arrow]})

    def _points(self, lm, atlas: Atlas, tokens: list[int], crossed: bool = False) -> list[list]:
        names = {number: f"like {quoted(lm, those[:3])}" for number, those in atlas.largest(NAMED).items()}
        places, numbers = atlas.plane.places(atlas.keys[tokens]), atlas.clusters_of(tokens)
        return [
            [*place, lm.piece(token), names.get(number, ""), crossed]
            for place, token, number in zip(places, tokens, numbers)
        ]

    def _compared(self, lm, reading: ReadPrompts, form: Form, search: Search, given: list[str]) -> Iterator:
        """Tokens ranked behind the best, in the clusters of these and elsewhere: how many, their ranks, and how many
        complete to a right answer.
        """
        atlas, inside = search.atlas, search.atlas.main(self.main)
        behind = range(self.main, min(self.ranked, len(atlas.tokens)))
        if not behind:
            return
        right = (
            (yield from self._judged(lm, reading, form, given, [atlas.tokens[i] for i in behind]))
            if self.right.strip()
            else None
        )
        sides = [[i for i in behind if (atlas.cluster[i] in inside) == main] for main in (True, False)]
        table = [
            [len(side), mean(i + 1 for i in side), mean(right[i - self.main] for i in side) if right else None]
            for side in sides
        ]
        yield Figure(
            "matrix",
            f"tokens ranked {self.main + 1} to {behind.stop}, by the cluster of their key",
            {
                "rows": ["in a main cluster", "elsewhere"],
                "columns": ["tokens", "mean rank", "share right"],
                "values": table,
            },
        )
        yield Note(
            f"The {self.main} best first tokens lie in {len(inside)} of {len(atlas.centres)} clusters of keys: {quoted(lm, atlas.tokens[: self.main])}."
        )

    def _judged(self, lm, reading: ReadPrompts, form: Form, given: list[str], tokens: list[int]) -> Iterator:
        """Whether each of these first tokens, completed from the clean prompt, gives one of the right answers."""
        node, found = (yield from reading.query(lm, lm.spell(form.put(given)))), []
        known = {line.strip().casefold() for line in self.right.splitlines() if line.strip()}
        for at in range(0, len(tokens), SHOWN):  # a few side by side
            found += yield from self._completed(
                lm, reading, node, tokens[at : at + SHOWN], form.stop, min(self.longest, lm.remaining)
            )
        return [closed(lm, text, form.stop).strip().casefold() in known for text in found]

    # --- ways ---

    def _voted(self, lm, reading: ReadPrompts, form: Form, search: Search) -> Iterator:
        """Tokens of the first way that came to the number most ways came to, with that number."""
        ways, numbers = [], []
        for turn in range(1, self.n_cot + 1):
            nodes = yield from self._asked(lm, reading, form, [], search.answers)
            firsts = self._new(lm, reading.rows[nodes[1]], search, 1, self.pool) if nodes else []
            if not firsts:
                yield Note("The prompt is full." if not nodes else "Every token of the pool was tried.")
                break
            base = nodes[self.completion == "navigated"]
            [way] = yield from self._completed(lm, reading, base, firsts, form.stop, min(self.path, lm.remaining))
            number = yield from self._number(lm, reading, form, way)
            yield from self._moved(lm, reading, nodes, search, firsts, turn)
            search.answers.append(self._shown(lm, way, form))
            ways, numbers = [*ways, way], [*numbers, number]
            yield Note(f"Way {turn} begins with {lm.piece(firsts[0])!r} and comes to {number or 'no number'}.")
            yield Figure("bars", "votes", tally(numbers))
        best = winner(numbers)
        opening = lm.spell(form.put([]))
        return (
            opening + lm.spell(f"{search.answers[best]}\n{self.cue}") + lm.spell(f'{numbers[best]}"')
            if ways
            else opening
        )

    def _number(self, lm, reading: ReadPrompts, form: Form, way: list[int]) -> Iterator:
        """What a way comes to, asked for behind it; empty where that is no number."""
        ids = lm.spell(form.put([])) + lm.spell(f"{self._shown(lm, way, form)}\n{self.cue}")
        if len(ids) + NUMBER >= lm.target.room:
            return ""
        node = yield from reading.query(lm, ids)
        [text] = yield from self._completed(lm, reading, node, [reading.best[node]], b'"', NUMBER)
        return re.sub(r"[^0-9]", "", lm.text_of(text).split('"')[0])

    def _shown(self, lm, way: list[int], form: Form) -> str:
        return lm.text_of(way).split(form.stop.decode())[0].rstrip()


def closed(lm, text: list[int], stop: bytes) -> str:
    """What stands before the closing quote; empty where there is none."""
    before, found, _ = lm.text_of(text).partition(stop.decode())
    return before if found else ""


def marked(answers: list[str]) -> list[str]:
    return [f"{answer} (again)" if answer in answers[:i] else answer for i, answer in enumerate(answers)]


def quoted(lm, tokens: list[int]) -> str:
    return " ".join(repr(lm.piece(token)) for token in tokens)


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def ranks(row: Tensor) -> list[int]:
    """Place of every token in a row [V], 1 for the best; of equals the lowest id comes first."""
    return (row.sort(descending=True, stable=True).indices.argsort() + 1).tolist()


def winner(numbers: list[str]) -> int:
    """Index of the first way to the number with most votes, of equals the first; ways without a number have none."""
    votes = Counter(number for number in numbers if number)
    return numbers.index(votes.most_common(1)[0][0]) if votes else 0


def tally(numbers: list[str]) -> dict:
    votes = Counter(number or "no number" for number in numbers)
    return {"labels": list(votes), "values": list(votes.values())}
