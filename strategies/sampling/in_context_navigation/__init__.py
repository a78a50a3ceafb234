"""In-context navigation."""
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor

from playground.algorithms.search.commit_path import FoundToken, adopt
from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree, chain
from playground.events import Event, Figure, Note
from strategies.sampling.in_context_navigation.asked_prompts import LIST, WAYS, Form, ReadPrompts, Search
from strategies.sampling.in_context_navigation.lm_head_geometry import Atlas

CUE = 'Final answer (only number): "'
NUMBER = 8  # tokens of a final answer, at most
SHOWN = 12  # tokens or answers in a figure
DRAWN = 200  # best tokens that are drawn
NAMED = 5  # clusters with a colour
PLANE = "lm_head weights of the best first tokens, those tried crossed out, and the direction of each query"


class InContextNavigation(Decoder):
    """Collect different answers: add those found to the prompt and query again, which moves the model away from them
    and from similar tokens.

    Logits are products of a query, the model's hidden state, with the lm_head weights of the tokens. The tokens ranked
    next by one query have weights similar to those of the best, right or not; another query ranks differently. Each
    query tries the best `n_tol` first tokens whose text was not tried before, and each is completed greedily from the
    prompt without answers, so that the answers in the prompt affect only the first token. Without navigation, or with
    one query, it proceeds down the ranks of a single query. In the task `ways`, each solution path gives a number, and
    the majority number is the answer. The text is the list, or the first path to the winning number.

    Similar weights belong to one cluster. If the right answers are given, the tokens ranked after the best are
    completed as well: the method assumes that those outside the clusters of the best are right more often, at no better
    rank. An lm_head tied to the embeddings mixes similarity of input and of output. Peng et al. 2024, arXiv 2410.02284,
    with the prompts and settings of its code; the line that requests a final answer and the number of clusters are
    ours.
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
        help="a list of short answers in quotes, or ways to solve a problem with a majority vote on the number",
    )
    n_run: int = knob(10, 1, 20, step=1, help="queries for a list; 1 proceeds down the ranks of one query")
    n_tol: int = knob(10, 1, 10, step=1, help="new first tokens per query; 1 queries again after every answer")
    n_cot: int = knob(4, 1, 10, step=1, help="number of ways, with one query each")
    pool: int = knob(100, 10, 1000, step=10, help="best tokens from which the first of a way is taken")
    longest: int = knob(
        64, 1, 256, step=1, help="maximum tokens of an answer; without a closing quote by then it is discarded"
    )
    path: int = knob(256, 1, 1024, step=1, help="maximum tokens of a way")
    completion: str = knob(
        "clean", choices=("clean", "navigated"), help="complete answers from the prompt without or with the others"
    )
    navigate: bool = knob(
        True, help="add the answers found to the prompt; off: proceed down the ranks of one query"
    )
    strip: bool = knob(False, help="treat first tokens that differ only by whitespace as one")
    cue: str = knob(CUE, help="text after a way that requests its number, up to the number")
    known: str = knob(
        "", multiline=True, help="known answers of a list, one per line; they are in every prompt"
    )

    clusters: int = knob(64, 0, 256, step=1, help="clusters of the lm_head weights, by spherical k-means; 0: none")
    main: int = knob(10, 1, 50, step=1, help="best tokens whose clusters are the main clusters")
    ranked: int = knob(100, 10, 1000, step=10, help="best tokens that are compared by cluster")
    right: str = knob(
        "",
        multiline=True,
        help="all right answers of a list, one per line; every compared token is then completed and judged",
    )

    @property
    def reads_hidden(self) -> tuple[str, ...]:
        return ("target",) if self.clusters else ()

    def decode(self, lm: Lane) -> Iterator:
        reading, form = ReadPrompts(TokenTree(self.name)), LIST if self.task == "list" else WAYS
        prefilled = yield lm.prefill()
        reading.store_query([], prefilled, ROOT)
        search = self._initial_search(lm)
        search_tokens = self._list_tokens if self.task == "list" else self._majority_way
        text = yield from search_tokens(lm, reading, form, search)
        ids = text[:lm.remaining]
        rows = yield lm.extend(chain(ids[:-1], self.name))
        yield from adopt(lm, [FoundToken(token, rows, node) for node, token in enumerate(ids, ROOT)])

    def _initial_search(self, lm: Lane) -> Search:
        search, known = Search(), [line.strip() for line in self.known.splitlines() if line.strip()]
        for answer in known if self.task == "list" else ():
            search.answers.append(answer)
            search.queries.append(0)
            search.tried |= {self._text_of(lm, token): token for token in lm.spell(answer)[:1]}
        return search

    # --- lists ---

    def _list_tokens(self, lm: Lane, reading: ReadPrompts, form: Form, search: Search) -> Iterator:
        """Tokens of the list of all answers; if there are none, of the completion of the first token tried."""
        given, spare = list(search.answers), []
        for query in range(1, self.n_run + 1):
            nodes = yield from self._query_nodes(lm, reading, form, given, search.answers)
            firsts = self._new_first_tokens(lm, reading.rows[nodes[1]], search, self.n_tol) if nodes else []
            if not firsts:
                yield Note("The prompt fills the model's context." if not nodes else "Every token was tried.")
                break
            texts = yield from self._complete(
                lm, reading, nodes[self.completion == "navigated"], firsts, form.stop, min(self.longest, lm.remaining)
            )
            spare = spare or lm.spell(form.put(given)) + texts[0]
            yield from self._query_events(lm, reading, nodes, search, firsts, query)
            yield from self._collect(lm, form, search, texts, query)
        if search.atlas:
            yield from self._cluster_events(lm, reading, form, search, given)
        return (
            lm.spell(form.put(search.answers, open_one=False))
            if len(search.answers) > len(given)
            else spare or lm.spell(form.put(given))
        )

    def _query_nodes(
        self, lm: Lane, reading: ReadPrompts, form: Form, given: list[str], answers: list[str]
    ) -> Iterator:
        """Nodes after the clean prompt and after the one with the answers; None if one exceeds the model's context."""
        clean, full = lm.spell(form.put(given)), lm.spell(form.put(answers if self.navigate else given))
        if max(len(clean), len(full)) + 1 >= lm.target.room:
            return None
        return (yield from reading.query(lm, clean)), (yield from reading.query(lm, full))

    def _new_first_tokens(
        self, lm: Lane, row: Tensor, search: Search, count: int, pool: int | None = None
    ) -> list[int]:
        """The best tokens of logits [V] whose text was not tried yet; marks them as tried."""
        found = []
        for token in row.sort(descending=True, stable=True).indices[:pool].tolist():
            if len(found) == count:
                break
            text = self._text_of(lm, token)
            if text not in search.tried and not (lm.ends(token) or lm.special(token)):
                search.tried[text] = token
                found.append(token)
        return found

    def _text_of(self, lm: Lane, token: int) -> str:
        text = lm.bytes(token).decode(errors="backslashreplace")
        return text.strip() if self.strip else text

    def _complete(
        self, lm: Lane, reading: ReadPrompts, base: int, firsts: list[int], stop: bytes, longest: int
    ) -> Iterator:
        """Greedy completions of first tokens after node `base`, in parallel, each up to a token with `stop`."""
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

    def _collect(self, lm: Lane, form: Form, search: Search, texts: list[list[int]], query: int) -> Iterator[Event]:
        """Add the answers with a closing quote to the search."""
        found, failed = [], 0
        for text in texts:
            answer = quoted_answer(lm, text, form.stop)
            failed += not answer
            found += [answer] if answer else []
        repeats = sum(answer in search.answers or answer in found[:i] for i, answer in enumerate(found))
        search.answers += found
        search.queries += [query] * len(found)
        yield Figure(
            "scalar",
            "answers",
            {"x": query, "axis": "query", "series": {"found": len(search.answers), "different": search.different}},
        )
        yield Figure(
            "bars",
            "answers, and the query that found them",
            {"labels": marked(search.answers)[-SHOWN:], "values": search.queries[-SHOWN:]},
        )
        missed = f" {failed} had no closing quote." if failed else ""
        yield Note(
            f"Query {query} found {', '.join(map(repr, found[:SHOWN])) or 'nothing'}; repeats: {repeats}.{missed}"
        )

    def _query_events(
        self, lm: Lane, reading: ReadPrompts, nodes: tuple[int, int], search: Search, firsts: list[int], query: int
    ) -> Iterator[Event]:
        """Figures on how the answers in the prompt moved the query: ranks and logits of first tokens."""
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
                    {"x": query, "axis": "query", "series": dict(zip(("clean prompt", "with answers"), means))},
                )
        yield from self._plane_events(lm, reading, nodes, search, query)

    # --- lm_head geometry ---

    def _plane_events(
        self, lm: Lane, reading: ReadPrompts, nodes: tuple[int, int], search: Search, query: int
    ) -> Iterator[Event]:
        """The lm_head weights in a plane, drawn once; then per query the tokens tried and its direction."""
        if lm.lm_head_weight is None or nodes[1] not in reading.states:
            return
        if search.atlas is None:
            search.atlas = Atlas.of(lm.lm_head_weight, reading.rows[nodes[0]], max(DRAWN, self.ranked), self.clusters)
            yield Figure("points", PLANE, {"points": self._points(lm, search.atlas, search.atlas.tokens[:DRAWN])})
        crossed = self._points(lm, search.atlas, [*search.tried.values()][search.crossed:], True)
        search.crossed += len(crossed)
        arrow = [*search.atlas.plane.arrow(reading.states[nodes[1]]), f"query {query}"]
        yield Figure("points", PLANE, {"points": crossed, "path": [arrow]})

    def _points(self, lm: Lane, atlas: Atlas, tokens: list[int], crossed: bool = False) -> list[list]:
        names = {number: f"like {quoted(lm, those[:3])}" for number, those in atlas.largest(NAMED).items()}
        places, numbers = atlas.plane.places(atlas.weights[tokens]), atlas.clusters_of(tokens)
        return [
            [*place, lm.piece(token), names.get(number, ""), crossed]
            for place, token, number in zip(places, tokens, numbers)
        ]

    def _cluster_events(self, lm: Lane, reading: ReadPrompts, form: Form, search: Search, given: list[str]) -> Iterator:
        """Tokens ranked after the best, inside and outside their clusters: number, mean rank, share right."""
        atlas, inside = search.atlas, search.atlas.main(self.main)
        behind = range(self.main, min(self.ranked, len(atlas.tokens)))
        if not behind:
            return
        right = (
            (yield from self._judge(lm, reading, form, given, [atlas.tokens[i] for i in behind]))
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
            f"tokens ranked {self.main + 1} to {behind.stop}, by cluster",
            {
                "rows": ["in a main cluster", "elsewhere"],
                "columns": ["tokens", "mean rank", "share right"],
                "values": table,
            },
        )
        yield Note(
            f"The {self.main} best first tokens belong to {len(inside)} of {len(atlas.centres)} clusters: "
            f"{quoted(lm, atlas.tokens[: self.main])}."
        )

    def _judge(self, lm: Lane, reading: ReadPrompts, form: Form, given: list[str], tokens: list[int]) -> Iterator:
        """Whether each of these first tokens completes to a right answer from the clean prompt."""
        node, found = (yield from reading.query(lm, lm.spell(form.put(given)))), []
        known = {line.strip().casefold() for line in self.right.splitlines() if line.strip()}
        for at in range(0, len(tokens), SHOWN):  # a few in parallel
            found += yield from self._complete(
                lm, reading, node, tokens[at : at + SHOWN], form.stop, min(self.longest, lm.remaining)
            )
        return [quoted_answer(lm, text, form.stop).strip().casefold() in known for text in found]

    # --- ways ---

    def _majority_way(self, lm: Lane, reading: ReadPrompts, form: Form, search: Search) -> Iterator:
        """Tokens of the first way to the majority number, with that number."""
        ways, numbers = [], []
        for index in range(1, self.n_cot + 1):
            nodes = yield from self._query_nodes(lm, reading, form, [], search.answers)
            firsts = self._new_first_tokens(lm, reading.rows[nodes[1]], search, 1, self.pool) if nodes else []
            if not firsts:
                yield Note("Every token of the pool was tried." if nodes else "The prompt fills the model's context.")
                break
            base = nodes[self.completion == "navigated"]
            [way] = yield from self._complete(lm, reading, base, firsts, form.stop, min(self.path, lm.remaining))
            number = yield from self._number(lm, reading, form, way)
            yield from self._query_events(lm, reading, nodes, search, firsts, index)
            search.answers.append(self._way_text(lm, way, form))
            ways, numbers = [*ways, way], [*numbers, number]
            yield Note(f"Way {index} begins with {lm.piece(firsts[0])!r} and gives {number or 'no number'}.")
            yield Figure("bars", "votes", tally(numbers))
        best = winner(numbers)
        opening = lm.spell(form.put([]))
        return (
            opening + lm.spell(f"{search.answers[best]}\n{self.cue}") + lm.spell(f'{numbers[best]}"')
            if ways
            else opening
        )

    def _number(self, lm: Lane, reading: ReadPrompts, form: Form, way: list[int]) -> Iterator:
        """The number of a way, requested after it; empty if there is none."""
        ids = lm.spell(form.put([])) + lm.spell(f"{self._way_text(lm, way, form)}\n{self.cue}")
        if len(ids) + NUMBER >= lm.target.room:
            return ""
        node = yield from reading.query(lm, ids)
        [text] = yield from self._complete(lm, reading, node, [reading.best[node]], b'"', NUMBER)
        return re.sub(r"[^0-9]", "", lm.text_of(text).split('"')[0])

    def _way_text(self, lm: Lane, way: list[int], form: Form) -> str:
        return lm.text_of(way).split(form.stop.decode())[0].rstrip()


def quoted_answer(lm: Lane, text: list[int], stop: bytes) -> str:
    """The text before the closing quote; empty if there is none."""
    before, found, _ = lm.text_of(text).partition(stop.decode())
    return before if found else ""


def marked(answers: list[str]) -> list[str]:
    return [f"{answer} (again)" if answer in answers[:i] else answer for i, answer in enumerate(answers)]


def quoted(lm: Lane, tokens: list[int]) -> str:
    return " ".join(repr(lm.piece(token)) for token in tokens)


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def ranks(row: Tensor) -> list[int]:
    """Rank of every token by logits [V], 1 for the best; ties go to the lowest id."""
    return (row.sort(descending=True, stable=True).indices.argsort() + 1).tolist()


def winner(numbers: list[str]) -> int:
    """Index of the first way to the majority number; ties go to the first, ways without a number do not vote."""
    votes = Counter(number for number in numbers if number)
    return numbers.index(votes.most_common(1)[0][0]) if votes else 0


def tally(numbers: list[str]) -> dict:
    votes = Counter(number or "no number" for number in numbers)
    return {"labels": list(votes), "values": list(votes.values())}
