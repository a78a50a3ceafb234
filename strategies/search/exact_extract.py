"""Exact extraction."""
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from playground.algorithms.search.commit_path import FoundToken, adopt
from playground.contract import Decoder, Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.errors import Refusal
from playground.events import Event, Figure, Note

SHOWN = 10  # spans in the bar chart
MAX_SPANS = 8192  # per run: the KV cache of each is held until the end
MAX_PASSAGE = 1024  # tokens: all spans of one length are read in one forward
OUTLINED = 40  # start positions in the matrix


@dataclass
class SpanSearch:
    """Tree of the spans of a passage that grows by one token per step, with the cost of each span in nats.

    A node is a span; equal spans share it. `spent` is -log p of its tokens, `ending` -log p that the text ends there. A
    token costs at least 0, so a span that already costs as much as the best complete answer can no longer win.
    """

    ends: list[int]
    # divides sums before they are compared: tokens of the longest answer if costs are per token
    per: int = 1
    tree: TokenTree = field(default_factory=lambda: TokenTree("exact_extract"))
    starts: list[list[int]] = field(default_factory=list)  # suffixes that begin with the span, by node
    spent: list[float] = field(default_factory=list)
    ending: list[float] = field(default_factory=list)
    rows: dict[int, object] = field(default_factory=dict)  # rows that predict the token after a node, by node
    best: int | None = None

    def grow(self, suffixes: list[list[int]], nodes: list[int], length: int) -> list[int]:
        """Extend these nodes to spans of `length` tokens; returns the new nodes."""
        new, first = {}, len(self.tree)
        for node in nodes:
            logp = -self.rows[node].logp[self.rows[node].row(node)]
            for start in self.starts[node] if node != ROOT else range(len(suffixes)):
                if len(suffixes[start]) >= length:
                    self._add(node, suffixes[start][length - 1], start, logp, new)
        return list(range(first, len(self.tree)))

    def _add(self, parent: int, token: int, start: int, cost, new: dict) -> None:
        if (parent, token) not in new:
            new[parent, token] = self.tree.add(token, parent)
            self.spent.append((self.spent[parent] if parent != ROOT else 0.0) + float(cost[token]))
            self.starts.append([])
        self.starts[new[parent, token]].append(start)

    def close(self, rows, nodes: list[int], mean: bool) -> None:
        """Record the cost of ending after each of these nodes, and update the best answer so far."""
        for node in nodes:
            self.rows[node] = rows
            stops = rows.logp[rows.row(node)][self.ends]
            self.ending.append(-float(stops.logsumexp(0)) if self.ends else 0.0)
            if self.best is None or self.cost(node, mean) < self.cost(self.best, mean):
                self.best = node

    def total(self, node: int) -> float:
        """-log p of the span followed by an end token, in nats."""
        return self.spent[node] + self.ending[node]

    def cost(self, node: int, mean: bool) -> float:
        return self.total(node) / (len(self.tree.path(node)) + bool(self.ends)) if mean else self.total(node)

    def living(self, nodes: list[int], bound: float) -> list[int]:
        """Those nodes of which a longer span could still cost less than `bound`."""
        return [node for node in nodes if self.spent[node] / self.per < bound]


class ExactExtract(Decoder):
    """Answer with the span of the passage that is most probable as a complete answer, found by exact search.

    Spans that start at the same position are prefixes of one suffix. One forward per length reads one more token of
    every span that can still win, and yields p(next token) and p(end) after each. A span that is no more probable than
    the best complete answer is pruned with all its extensions, which keeps the search exact. The passage is the
    context, or the prompt if there is none; a span may also begin with a space that is not in the passage. Castel et
    al. 2021, arXiv 2108.05857; the pruning and the form for autoregressive models are ours.
    """

    name, title, paper, sheet = "exact_extract", "Exact extraction", "2108.05857", "search/exact-extract"
    guarantee, several, whole_answers, refuses = ("heuristic",), True, True, ("sampler", "constraint")

    longest: int = knob(12, 1, 40, step=1, help="longest span, in tokens")
    score: str = knob(
        "sum",
        choices=("sum", "mean"),
        help="log-probability of the complete answer, as in the paper, or its mean per token",
    )
    newline: bool = knob(False, help="a line break also ends the answer, for models without chat training")
    prune: bool = knob(True, help="drop spans that can no longer win; off reads all spans")
    passage: str = knob(
        "",
        multiline=True,
        file=True,
        help="text the answer is extracted from; empty: the context, or the prompt if there is none",
    )

    def decode(self, lm: Lane) -> Iterator:
        rows, suffixes, longest = (yield lm.prefill()), self._suffixes(lm), min(self.longest, lm.remaining)
        search = SpanSearch(self._ends(lm), longest + 1 if self.score == "mean" else 1, rows={ROOT: rows})
        nodes = [ROOT]
        for length in range(1, longest + 1):
            new = search.grow(suffixes, nodes, length)
            if not new:
                break
            if len(search.tree) > MAX_SPANS:
                raise Refusal(
                    f"More than {MAX_SPANS:,} spans would be read: shorten the passage or the longest span, or prune.",
                    "passage",
                )
            rows = yield lm.extend(search.tree)
            search.close(rows, new, self.score == "mean")
            nodes = search.living(new, search.cost(search.best, self.score == "mean")) if self.prune else new
            yield self._progress_figure(search, length, len(new), len(nodes))
        yield from self._summary_events(lm, search, suffixes)
        yield from adopt(lm, self._answer(search))

    def _suffixes(self, lm: Lane) -> list[list[int]]:
        """Suffixes of the passage as token ids, one for each position where an answer could begin."""
        text = (self.passage or lm.passage or lm.text_of(lm.tokens[:lm.prompt_length], after=[])).strip()
        tokens = lm.spell(f" {text}") or lm.spell(text)
        if not tokens:
            raise Refusal("There is no passage to extract an answer from: give one as context.", "passage")
        if len(tokens) > MAX_PASSAGE:
            raise Refusal(
                f"The passage has {len(tokens):,} tokens, and the maximum is {MAX_PASSAGE:,}: shorten it.", "passage"
            )
        suffixes = [tokens[i:i + self.longest] for i in range(len(tokens))]
        return suffixes + self._respelt(lm, tokens)

    def _respelt(self, lm: Lane, tokens: list[int]) -> list[list[int]]:
        """Suffixes whose first word follows a quote or a bracket, with the leading space that answers begin with."""
        pieces, found = [lm.piece(token) for token in tokens], []
        for i in range(1, len(tokens)):
            if pieces[i][:1].isalnum() and pieces[i - 1] and not pieces[i - 1][-1].isalnum():
                found.append(lm.spell(" " + "".join(pieces[i:i + self.longest]))[:self.longest])
        return [suffix for suffix in found if suffix]

    def _ends(self, lm: Lane) -> list[int]:
        breaks = {lm.spell(text)[-1] for text in ("\n", "\n\n") if lm.spell(text)} if self.newline else set()
        return sorted({*lm.end_ids, *breaks})

    def _answer(self, search: SpanSearch) -> list[FoundToken]:
        """The best span, followed by the most probable of the end tokens if there are any."""
        path = [ROOT, *search.tree.path(search.best)]
        tokens, rows = search.tree.tokens, search.rows
        found = [FoundToken(tokens[node], rows[before], before) for before, node in zip(path, path[1:])]
        after = rows[search.best]
        logp = after.logp[after.row(search.best)]
        last = [max(search.ends, key=lambda token: float(logp[token]))] if search.ends else []
        return found + [FoundToken(token, after, search.best) for token in last]

    def _progress_figure(self, search: SpanSearch, length: int, read: int, left: int) -> Figure:
        data = {
            "x": length,
            "axis": "span length",
            "series": {"spans read": read, "spans that can still win": left},
        }
        return Figure("scalar", "spans", data)

    def _summary_events(self, lm: Lane, search: SpanSearch, suffixes: list[list[int]]) -> Iterator[Event]:
        mean = self.score == "mean"
        ranked = sorted(range(len(search.tree)), key=lambda node: search.cost(node, mean))
        names = ["".join(map(lm.piece, search.tree.prefix(node))) for node in ranked[:SHOWN]]
        yield Figure(
            "bars",
            "probability of a span as the whole answer",
            {"labels": names, "values": [math.exp(-search.total(node)) for node in ranked[:SHOWN]]},
        )
        yield self._map(lm, search, suffixes)
        every = len(
            {tuple(suffix[:length]) for suffix in suffixes for length in range(1, min(len(suffix), lm.remaining) + 1)}
        )
        places = len(search.starts[search.best])
        yield Note(
            f"{names[0]!r} is the whole answer with probability {math.exp(-search.total(search.best)):.3g}; it occurs "
            f"{places} time{'s' * (places > 1)} in the passage. {len(ranked)} of {every} spans were read."
        )

    def _map(self, lm: Lane, search: SpanSearch, suffixes: list[list[int]]) -> Figure:
        """-log p of each span as the complete answer, by start and length; None for pruned spans."""
        columns = list(range(1, search.tree.depth() + 1))
        cells = [[None] * len(columns) for _ in suffixes[:OUTLINED]]
        for node in range(len(search.tree)):
            for start in search.starts[node]:
                if start < len(cells):
                    cells[start][len(search.tree.path(node)) - 1] = search.total(node)
        rows = [f"{start + 1} {lm.piece(suffix[0])}" for start, suffix in enumerate(suffixes[:OUTLINED])]
        return Figure(
            "matrix",
            "-log p, by start and length",
            {"rows": rows, "columns": [str(length) for length in columns], "values": cells},
        )
