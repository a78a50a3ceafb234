"""The syntax tree of a program, read off the states of its tokens."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from playground.algorithms.overlays.code_states import CodeTokens, code_tokens, programs_in
from playground.algorithms.overlays.token_figures import bars, numbered, over_tokens, shaded
from playground.algorithms.overlays.tree_figures import are_right, cards, coloured, distances, drawn_tree
from playground.algorithms.overlays.tree_fitting import CHOOSING, TESTED, ProbeFitting
from playground.algorithms.overlays.tree_probe import TreeProbe, TreeScore
from playground.algorithms.programs.syntax_tree import EMPTY, constituents
from playground.contract import ReadsStates
from playground.events import Note

CONTROLS = ("this model", "its embeddings alone", "untrained layers", "shuffled trees", "pairs of words, no network",
            "right-branching, its labels")
BETTER = 0.1  # F1 above the best control, without which no tree is drawn
SHARE = "share of the constituents around a token that are read right"


class AstProbe(ReadsStates):
    """Read the syntax tree of a program off the hidden states of one layer, and check it against Python's own parser.

    A projection to 64 dimensions is trained so that the squared distance of neighbouring words of the program orders
    like the height of their lowest common ancestor; two small classifiers give the labels, and from both the whole tree
    is built. A token has the share of the constituents around it that are right, and its card says how far it is from
    the word before. Bars compare F1 on held-out programs with the embeddings alone, untrained layers, shuffled trees, a
    table of pairs of words, and a tree that always branches to the right; where the model is not 0.1 better than all of
    them, no tree is drawn. The paper probes encoders, which see the code that follows; a causal model knows only what
    came before, and `(` alone does not say what it opens. Words that share one piece of the vocabulary have distance 0.
    Docstrings stay, as one word; trees are those of Python's `ast`, states are scaled, and the learning rate decays by
    a plan. It correlates: it says what can be read, not what the network does. Hernandez Lopez, Weyssow, Sanchez
    Cuadrado and Sahraoui 2022, arXiv 2206.11719.
    """

    name, title, paper, sheet = "ast_probe", "AST-Probe", "2206.11719", "overlays/ast-probe"
    reconstruction, sure = True, "high"
    fitted_to_target, prefers_trained, questions_per_task = True, True, 800
    calibration_tasks = ("programs",)

    _text = _weights = None

    def begin_fitted(self, weights):
        self._weights = weights

    def layers(self, depth):
        return (depth // 2 if self._weights is None else min(depth, int(self._weights["layer"])),)

    def begin(self, text, model):
        self._text, self._states = text, []

    def read_states(self, first, states):
        self._states += [rows.float().cpu() for rows in states.values()]

    def draw(self):
        if self._text is None or self._text.generated < 1:
            return
        pieces = self._text.written()
        tokens = code_tokens(pieces)
        if self._weights is not None and tokens and len(tokens.words) > 1:
            yield from self._drawn(pieces, tokens)
            return
        yield shaded(SHARE, [0.0] * len(pieces), ["in no program that is read"] * len(pieces))
        yield Note(
            "No probe is fitted to this model: `python -m playground fit ast_probe` fits one."
            if self._weights is None else "AST-Probe: the text has no complete line of a function of one argument."
        )

    def _drawn(self, pieces: list[str], tokens: CodeTokens):
        states = tokens.pooled(torch.cat(self._states)[self._text.start:])
        probe, labels = self._probe(), words_of(self._weights["label_words"])
        tree = probe.tree(states, labels, words_of(self._weights["unary_words"]))
        found = constituents(tree)
        right = are_right(found, tokens.code.constituents)
        if self._gain() >= BETTER:
            yield drawn_tree(tokens, found, right)
        yield from self._scores(TreeScore.of(found, tokens.code.constituents), len(found))
        yield shaded(SHARE, *coloured(len(pieces), tokens, found, right, cards(tree, probe.read(states)[1], labels)))
        yield from over_tokens("distance to the word before", distances(len(pieces), tokens, tree))

    def _probe(self) -> TreeProbe:
        return TreeProbe(*(self._weights[name].float() for name in TreeProbe._fields))

    def _gain(self) -> float:
        model, *controls = self._weights["f1"].tolist()
        return model - max(controls)

    def _scores(self, here: TreeScore, count: int):
        scores, layer = self._weights["f1"].tolist(), int(self._weights["layer"])
        yield bars("F1 of trees of held-out programs", list(CONTROLS), scores)
        curve = self._weights["curve"].tolist()
        yield bars("F1 of these programs by layer", numbered("input of layer", len(curve)), curve)
        best = max(range(1, len(CONTROLS)), key=scores.__getitem__)
        yield Note(
            f"Layer {layer} tells {count} constituents of this program: {here.precision:.0%} are true, and "
            f"{here.recall:.0%} of the true ones are among them (F1 {here.f1:.2f}). On held-out programs F1 is "
            f"{scores[0]:.2f}, and {scores[best]:.2f} for the best control ({CONTROLS[best]})."
            + ("" if self._gain() >= BETTER else f" That is not {BETTER} better, so no tree is drawn.")
        )

    @classmethod
    def untrained(cls, width: int, seed: int = 0) -> dict[str, Tensor]:
        """Weights of a random probe."""
        probe = TreeProbe.random(width, 2, 2, seed)
        words = ["Module", EMPTY], ["Name", EMPTY]
        return stored(probe, words, layer=0, f1=[0.0] * len(CONTROLS), curve=[0.0])

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train a probe of every layer, choose one on programs of its own, and measure it beside its controls."""
        programs = programs_in(texts)
        fit = ProbeFitting(texts, programs, seed)
        probes = []
        for layer in range(texts.model.depth + 1):
            probes.append((yield from fit.probe(programs, layer, f"layer {layer}")))
        chosen = max(range(len(probes)), key=lambda layer: fit.f1(probes[layer], programs, layer, CHOOSING))
        curve = [fit.f1(probe, programs, layer, TESTED) for layer, probe in enumerate(probes)]
        plain = programs_in(texts.without_training(seed))
        untrained = yield from fit.probe(plain, chosen, "untrained layers")
        mixed = [each.shuffled(number) for number, each in enumerate(programs)]
        shuffled = yield from fit.probe(mixed, chosen, "shuffled trees")
        scores = [curve[chosen], curve[0], fit.f1(untrained, plain, chosen, TESTED),
                  fit.f1(shuffled, programs, chosen, TESTED), *fit.without_network(probes[chosen], chosen)]
        yield Note(f"Layer {chosen} of {len(curve) - 1}; F1 on {len(fit.part(programs, TESTED))} of {len(programs)} "
                   "programs: " + "; ".join(f"{name} {score:.3f}" for name, score in zip(CONTROLS, scores))
                   + "; by layer " + ", ".join(f"{score:.3f}" for score in curve))
        return stored(probes[chosen], (fit.labels, fit.unary), layer=chosen, f1=scores, curve=curve)


def stored(
    probe: TreeProbe, words: tuple[Sequence[str], Sequence[str]], **measured: int | Sequence[float]
) -> dict[str, Tensor]:
    """What a fit keeps: matrices in half precision, labels and unary labels as bytes, and what was measured."""
    return {
        **{name: tensor.half().contiguous() for name, tensor in probe._asdict().items()},
        **{name: torch.tensor(list("\n".join(each).encode()), dtype=torch.uint8)
           for name, each in zip(("label_words", "unary_words"), words)},
        **{name: torch.tensor(value) for name, value in measured.items()},
    }


def words_of(bytes_of_words: Tensor) -> list[str]:
    return bytes(bytes_of_words.tolist()).decode().split("\n")
