"""Fitting of tree probes to the layers of a model, and their scores beside trees that need no network."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from playground.algorithms.overlays.code_states import PairTable, ReadProgram
from playground.algorithms.overlays.tree_probe import TreeProbe, mean_f1, train
from playground.algorithms.programs.syntax_tree import TreeSequences
from playground.errors import Refusal

TESTED, CHOOSING = 0, 1  # parts of the programs that are not trained on
FEWEST = 20  # programs that are fitted to


class ProbeFitting:
    """Trains and scores probes of one set of programs, in which every program keeps its part."""

    def __init__(self, texts, programs: Sequence[ReadProgram], seed: int):
        self._texts, self._programs, self._seed = texts, programs, seed
        known = self.trained_on(programs)
        if len(known) < FEWEST or not (self.part(programs, TESTED) and self.part(programs, CHOOSING)):
            raise Refusal("The texts have too few programs whose trees can be read: leave out --texts.", "texts")
        self.labels = sorted({label for each in known for label in each.tree.labels})
        self.unary = sorted({label for each in known for label in each.tree.unary})

    def part(self, programs: Sequence[ReadProgram], part: int) -> list[ReadProgram]:
        return [each for each in programs if each.tokens.part == part]

    def trained_on(self, programs: Sequence[ReadProgram]) -> list[ReadProgram]:
        return [each for each in programs if each.tokens.part not in (TESTED, CHOOSING)]

    def probe(self, programs: Sequence[ReadProgram], layer: int, phase: str) -> Iterator:
        """Train a probe of one layer and return it."""
        examples = [each.example(layer, self.labels, self.unary) for each in self.trained_on(programs)]
        begun = TreeProbe.random(examples[0].states.shape[1], len(self.labels), len(self.unary), self._seed)
        return (yield from train(examples, begun, self._seed, self._texts.phase(phase)))

    def trees(self, probe: TreeProbe, programs: Sequence[ReadProgram], layer: int) -> list[TreeSequences]:
        return [probe.tree(each.states[layer].float(), self.labels, self.unary) for each in programs]

    def f1(self, probe: TreeProbe, programs: Sequence[ReadProgram], layer: int, part: int) -> float:
        """Mean F1 of the programs of a part."""
        chosen = self.part(programs, part)
        return mean_f1(self.trees(probe, chosen, layer), [each.tokens.code.constituents for each in chosen])

    def without_network(self, probe: TreeProbe, layer: int) -> Iterator[float]:
        """F1 of the table of pairs, and of a tree that branches to the right with the labels that the probe reads."""
        table, tested = PairTable(self.trained_on(self._programs)), self.part(self._programs, TESTED)
        true = [each.tokens.code.constituents for each in tested]
        yield mean_f1([table.tree(each.tokens.words) for each in tested], true)
        falling = [tree._replace(distances=[-float(at) for at in range(len(tree.distances))])
                   for tree in self.trees(probe, tested, layer)]
        yield mean_f1(falling, true)
