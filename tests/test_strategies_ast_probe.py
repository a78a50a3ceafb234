"""AST-Probe: against Python's own trees, brute force over spans, and numpy on the states of the library."""
from __future__ import annotations

import ast
import heapq
import inspect
import io
import shutil
import statistics
import textwrap
import tokenize
from collections import Counter
from functools import cache, partial
from itertools import combinations
from random import Random

import numpy as np
import pytest
import torch
from pairs import network, pair

from playground.algorithms.kv_cache.cache_training import Descent
from playground.algorithms.overlays import code_states, tree_figures, tree_probe
from playground.algorithms.overlays.code_states import PairTable, ReadProgram, code_tokens
from playground.algorithms.overlays.tree_probe import TreeExample, TreeProbe, TreeScore, mean_f1, ranking_loss, train
from playground.algorithms.programs import syntax_tree
from playground.algorithms.programs.syntax_tree import (
    EMPTY,
    JOINT,
    MOST_TOKENS,
    TreeSequences,
    constituents,
    parsed,
    sequences,
)
from playground.contract import find
from playground.errors import Refusal
from playground.events import Figure, Note
from playground.questions.world.show import items
from playground.training.calibration import CalibrationTexts
from support.overlay_runs import named, read_by, shades

AstProbe = find("ast_probe")
LEFT_OUT = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
CODES = [
    "@a.b\n@c\ndef f(x, *, y=1, **z):\n    return {x: 1, 'b': [2, -y]}, z;\n",
    "é = 'ü'; ö = {'ä': é + 'ß', **{}}\n",
    "def f(x):\n    # nothing\n    return x if x else f'{x}!' 'b'\n",
    "x\n", "x = 1;\n", "def f(x):\n    while (x := g(x)) and not x[1:, ::2]:\n        del x\n    else:\n        pass",
]


def functions() -> list[str]:
    """Functions of Python's library, and programs of the small world."""
    modules = (textwrap, heapq, statistics, shutil)
    sources = [textwrap.dedent(inspect.getsource(each)) for module in modules for each in vars(module).values()
               if inspect.isfunction(each)]
    return [*CODES, *sources, *(item.answer for item in items("programs", 40, seed=5))]


def by_python(code: str) -> Counter:
    """Every node with the tokens between the first and the last place of anything below it, in bytes of a line."""
    lines = code.split("\n")

    def in_bytes(place: tuple[int, int]) -> tuple[int, int]:
        return place[0], len((lines + [""])[place[0] - 1][:place[1]].encode())

    spelt = tokenize.generate_tokens(io.StringIO(code).readline)
    tokens = [(in_bytes(each.start), in_bytes(each.end)) for each in spelt
              if tokenize.tok_name[each.type] not in LEFT_OUT]

    def below(node):
        yield node
        for child in () if isinstance(node, ast.JoinedStr) else ast.iter_child_nodes(node):
            yield from below(child)

    found: Counter = Counter()
    for node in below(ast.parse(code)):
        placed = [each for each in below(node) if hasattr(each, "lineno")]
        if not placed:
            continue
        begin = min((each.lineno, each.col_offset) for each in placed)
        end = max((each.end_lineno, each.end_col_offset) for each in placed)
        inside = [at for at, (first, last) in enumerate(tokens) if first >= begin and last <= end]
        whole = isinstance(node, ast.Module)
        found[type(node).__name__, 0 if whole else inside[0], len(tokens) if whole else inside[-1] + 1] += 1
    return found


def check_trees(flatten) -> None:
    read = 0
    for code in functions():
        program = parsed(code)
        if program is None:
            continue
        assert Counter(map(tuple, constituents(flatten(program)))) == by_python(code), code
        read += 1
    assert read > 80


def depths(program) -> TreeSequences:
    """Wrong: how deep below the root two neighbours meet, in place of how high."""
    tree = sequences(program)
    return tree._replace(distances=[max(tree.distances, default=0) - each for each in tree.distances])


def without_unary(program) -> TreeSequences:
    """Wrong: words have no nodes of their own."""
    tree = sequences(program)
    return tree._replace(unary=[EMPTY] * len(tree.unary))


def stretched(program) -> TreeSequences:
    """Any increasing map of the heights."""
    tree = sequences(program)
    return tree._replace(distances=[each ** 3 - 7 for each in tree.distances])


@pytest.mark.oracle("ast_probe")
@pytest.mark.parametrize("flatten", [sequences, stretched])
def test_distances_and_labels_give_back_the_tree_of_python(flatten):
    check_trees(flatten)


@pytest.mark.refuses("ast_probe")
@pytest.mark.parametrize("wrong", [depths, without_unary])
def test_depths_and_missing_unary_labels_fail(wrong):
    with pytest.raises(AssertionError):
        check_trees(wrong)


@pytest.mark.refuses("ast_probe")
def test_bytes_taken_for_characters_fail(monkeypatch):
    monkeypatch.setattr(syntax_tree._Places, "_of_byte", syntax_tree._Places.begin)
    with pytest.raises((AssertionError, IndexError)):
        check_trees(sequences)


@pytest.mark.strategy("ast_probe")
@pytest.mark.parametrize("code", [
    "def f(:\n", "", "# only this\n", "x = 1\ry = 2\n", "x = '\ud800'\n", "x\0\n", "(" * 300 + ")" * 300,
    f"x = [{'1, ' * MOST_TOKENS}]\n",
])
def test_what_is_no_program_or_too_long_has_no_tree(code):
    assert parsed(code) is None


@pytest.mark.strategy("ast_probe")
def test_the_deepest_program_that_is_read_has_a_tree():
    code = "-" * (MOST_TOKENS - 1) + "x"
    try:
        ast.parse(code)
    except (MemoryError, RecursionError):
        assert parsed(code) is None
    else:
        assert Counter(constituents(sequences(parsed(code)))) == Counter(parsed(code).constituents)


# --- distances and labels to a tree ---

def by_spans(tree: TreeSequences) -> Counter:
    """A span of words is a node where every distance within is smaller than both at its ends; of equal ones the left
    one splits first.
    """
    count, found = len(tree.unary), Counter()
    for first, end in combinations(range(count + 1), 2):
        within = tree.distances[first:end - 1]
        top = max(within, default=-1.0)
        left = np.inf if not first else tree.distances[first - 1]
        right = np.inf if end == count else tree.distances[end - 1]
        if end - first == 1:
            label = tree.unary[first]
        elif left < top or right <= top:
            continue
        else:
            label = tree.labels[first + within.index(top)]
            label = "bad_root" if label == EMPTY and end - first == count else label
        for part in label.split(JOINT):
            if part != EMPTY:
                found[part, first, end] += 1
    return found


def random_tree(seed: int) -> TreeSequences:
    chance = Random(seed)
    count = chance.randint(1, 9)
    words = [EMPTY, "Call", f"Expr{JOINT}Call", "Name"]
    return TreeSequences(
        [float(chance.randint(0, 4)) for _ in range(count - 1)], [chance.choice(words) for _ in range(count - 1)],
        [chance.choice(words) for _ in range(count)],
    )


@pytest.mark.oracle("ast_probe")
def test_the_tree_of_distances_is_that_of_all_spans():
    for seed in range(400):
        tree = random_tree(seed)
        assert Counter(map(tuple, constituents(tree))) == by_spans(tree), tree


# --- the probe ---

def planted(
    tree: TreeSequences, labels: list[str], unary: list[str], mark: float = 1e-2
) -> tuple[TreeProbe, torch.Tensor]:
    """States whose steps have the squared lengths of a tree in one direction for each label, up to the unary marks."""
    size = len(labels) + len(unary)
    steps = torch.zeros(len(tree.unary), size)
    for at, (distance, label) in enumerate(zip(tree.distances, tree.labels), 1):
        steps[at, labels.index(label)] = distance ** 0.5
    places = steps.cumsum(0)
    for at, name in enumerate(tree.unary):
        places[at, len(labels) + unary.index(name)] = mark
    basis = torch.linalg.qr(torch.randn(40, size, generator=torch.Generator().manual_seed(2)))[0]
    eye = torch.eye(size)
    return TreeProbe(basis, eye[:, :len(labels)], eye[:, len(labels):]), places @ basis.T


@pytest.mark.oracle("ast_probe")
def test_planted_trees_are_read_without_training():
    for item in items("programs", 12, seed=8):
        program = parsed(item.answer)
        tree = sequences(program)
        labels, unary = sorted(set(tree.labels)), sorted(set(tree.unary))
        probe, states = planted(tree, labels, unary)
        assert TreeScore.of(constituents(probe.tree(states, labels, unary)), program.constituents) == (1, 1, 1)


@pytest.mark.oracle("ast_probe")
def test_the_loss_is_the_mean_over_pairs_of_one_program_that_differ_in_height():
    chance = torch.Generator().manual_seed(3)
    found, heights = torch.rand(3, 7, generator=chance) * 4, torch.randint(1, 5, (3, 7), generator=chance)
    real = torch.arange(7)[None] < torch.tensor([7, 4, 1])[:, None]
    lost = [max(0.0, 1 - float(found[at, i] - found[at, j])) for at, count in enumerate((7, 4, 1))
            for i in range(count) for j in range(count) if heights[at, i] > heights[at, j]]
    assert float(ranking_loss(found, heights, real)) == pytest.approx(sum(lost) / len(lost), rel=1e-5)
    assert float(ranking_loss(2.0 * heights, heights, real)) == 0


@pytest.mark.oracle("ast_probe")
def test_padding_and_labels_that_were_never_seen_change_no_loss():
    chance = torch.Generator().manual_seed(4)
    probe = TreeProbe.random(12, 3, 2, 1)
    short, long = (TreeExample(
        torch.randn(count, 12, generator=chance), torch.arange(count - 1.0), torch.arange(count - 1) % 3,
        torch.arange(count) % 2,
    ) for count in (4, 9))
    alone = tree_probe.tree_loss(probe, [short._replace(labels=torch.tensor([0, -1, 2]))])
    places = short.states @ probe.basis
    steps = places[1:] - places[:-1]
    logs = (steps @ probe.labels).log_softmax(1), (places @ probe.unary).log_softmax(1)
    lengths = steps.square().sum(1)
    ranked = [max(0.0, 1 - float(lengths[i] - lengths[j])) for i in range(3) for j in range(i)]
    apart = float((probe.basis.T @ probe.basis - torch.eye(12)).square().sum())
    expected = sum(ranked) / 3 + 5 * apart - float(logs[0][0, 0] + logs[0][2, 2]) / 2 - float(
        sum(logs[1][at, at % 2] for at in range(4))) / 4
    assert float(alone) == pytest.approx(expected, rel=1e-5)
    both = tree_probe.tree_loss(probe, [short, long])
    assert float(both) == pytest.approx(float(tree_probe.tree_loss(probe, [long, short])), rel=1e-6)


class NothingSaved:
    def resumed(self):
        return None

    def save(self, state):
        pass


def fitted(examples: list[TreeExample], labels: int, unary: int, steps: int = 250) -> TreeProbe:
    begun = TreeProbe.random(examples[0].states.shape[1], labels, unary, 0)
    training = train(examples, begun, 0, NothingSaved())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration) as done:
        patch.setattr(tree_probe, "PLAN", Descent("loss", steps, 1e-2, every=steps))
        while True:
            next(training)
    return done.value.value


@pytest.mark.strategy("ast_probe")
def test_training_finds_a_planted_tree_among_noise_and_none_in_shuffled_ones():
    codes = [parsed(item.answer) for item in items("programs", 16, seed=8)]
    trees = list(map(sequences, codes))
    labels, unary = (sorted({name for tree in trees for name in tree[part]}) for part in (1, 2))
    chance = torch.Generator().manual_seed(5)
    programs = []
    for tree in trees:
        states = planted(tree, labels, unary, mark=0.7)[1]
        noise = 0.02 * torch.randn(states.shape, generator=chance)
        programs.append(ReadProgram(None, tree, (states + noise)[None].half()))
    f1 = []
    for used in (programs, [each.shuffled(at) for at, each in enumerate(programs)]):
        probe = fitted([each.example(0, labels, unary) for each in used[:12]], len(labels), len(unary))
        read = [probe.tree(each.states[0].float(), labels, unary) for each in used[12:]]
        f1.append(mean_f1(read, [code.constituents for code in codes[12:]]))
    assert f1[0] > 0.5 and f1[1] < f1[0] - 0.3, f1


@pytest.mark.strategy("ast_probe")
def test_scores_count_every_constituent_once():
    true, found = [("A", 0, 3), ("A", 0, 3), ("B", 1, 2)], [("A", 0, 3), ("C", 0, 3)]
    assert TreeScore.of(found, true) == (1 / 2, 1 / 3, 2 / 5)
    assert tree_figures.are_right([*found, *found, ("A", 0, 3)], true) == [True, False, True, False, False]
    assert TreeScore.of([], []) == (0, 0, 0)


@pytest.mark.strategy("ast_probe")
def test_a_table_of_pairs_has_means_and_most_frequent_labels():
    tokens = code_tokens(["def f(x):\n", "    return 1\n"])
    programs = [ReadProgram(tokens, sequences(tokens.code), torch.zeros(1, 7, 2)) for _ in range(2)]
    other = programs[1].tree._replace(distances=[2 + each for each in programs[1].tree.distances])
    table = PairTable([programs[0], programs[1]._replace(tree=other)])
    assert table.tree(tokens.words).distances == [1 + each for each in programs[0].tree.distances]
    assert constituents(table.tree(tokens.words)) == constituents(programs[0].tree)
    assert table.tree(["x", "y"]) == TreeSequences(
        [0.0], [EMPTY], [f"arguments{JOINT}arg", EMPTY])


# --- the overlay ---

SHORT = "def f(items):\n    items = [x + 1 for x in items]\n    return sum(items[1:])\n"
WORDS = ["def", "f", "(", "items", ")", ":", "items", "=", "[", "x", "+", "1", "for", "x", "in", "items", "]", "return",
         "sum", "(", "items", "[", "1", ":", "]", ")"]
LAYER = 1


@cache
def read_text() -> tuple[list[int], int, np.ndarray, list[int]]:
    """Token ids of a prompt with a program, the prompt's length, the library's mean state of each word [n, d], and of
    how many tokens it is the mean.
    """
    tokens = pair().target.tokens
    prompt, ids = tokens.encode("Go:"), tokens.encode_continuation(SHORT)
    library, seen = network("llama"), []
    library.model.layers[LAYER].register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    with torch.no_grad():
        library(input_ids=torch.tensor([prompt + ids]), use_cache=False)
    states, lengths = seen[0][len(prompt):].double().numpy(), [len(tokens.piece(token)) for token in ids]
    letters = np.repeat(np.arange(len(ids)), lengths)
    rows, counts, at = [], [], 0
    for word in WORDS:
        at = SHORT.index(word, at)
        spelt = np.unique(letters[at:at + len(word)])
        rows.append(states[spelt].mean(0))
        counts.append(len(spelt))
        at += len(word)
    return prompt + ids, len(prompt), np.stack(rows), counts


@cache
def weights() -> dict[str, torch.Tensor]:
    """A probe that was trained on this one text until it reads a part of it."""
    tree, states = sequences(parsed(SHORT)), torch.tensor(read_text()[2]).float()
    labels, unary = sorted(set(tree.labels)), sorted(set(tree.unary))
    example = ReadProgram(None, tree, states[None]).example(0, labels, unary)
    probe = fitted([example], len(labels), len(unary), steps=250)
    from strategies.overlays import ast_probe
    return ast_probe.stored(probe, (labels, unary), layer=LAYER, f1=[0.8, 0.5, 0.4, 0.2, 0.6, 0.3], curve=[0.5, 0.8])


def by_numpy() -> tuple[list[float], list[float]]:
    """Distances, and the share of right nodes around each word."""
    basis, scores, unary = (weights()[name].double().numpy() for name in ("basis", "labels", "unary"))
    places = read_text()[2] @ basis
    steps = np.diff(places, axis=0)
    names, own = (bytes(weights()[name].tolist()).decode().split("\n") for name in ("label_words", "unary_words"))
    lengths = (steps ** 2).sum(1)
    tree = TreeSequences(lengths.tolist(), [names[at] for at in (steps @ scores).argmax(1)],
                         [own[at] for at in (places @ unary).argmax(1)])
    found, true = by_spans(tree), by_python(SHORT)
    shares = []
    for at in range(len(WORDS)):
        around = {each: count for each, count in found.items() if each[1] <= at < each[2]}
        good = sum(min(count, true[each]) for each, count in around.items())
        shares.append(good / max(sum(around.values()), 1))
    return lengths.tolist(), shares


def events(cls=AstProbe, **changed) -> list:
    ids, start, *_ = read_text()
    overlay = cls()
    overlay.begin_fitted({**weights(), **changed})
    return read_by(overlay, pair().target, ids, start)


def check(cls) -> None:
    lengths, shares = by_numpy()
    drawn = events(cls)
    curve = [event.data["series"] for event in drawn if isinstance(event, Figure) and event.name.startswith("distance")]
    read = [point["read"] for point in curve if "read" in point]
    assert read == pytest.approx(lengths, rel=1e-3, abs=1e-3)
    assert shades(drawn) == pytest.approx(np.repeat(shares, read_text()[3]).tolist(), abs=1e-3)
    assert 0.1 < sum(shares) / len(shares) and len(set(shares)) > 3


class OfTheRowBefore(AstProbe):
    """Wrong: the state that has not read the piece."""

    def read_states(self, first, states):
        super().read_states(first, {layer: rows.roll(1, 0) for layer, rows in states.items()})


class OfTheLayerBefore(AstProbe):
    """Wrong: another layer."""

    def layers(self, depth):
        return (LAYER - 1,)


class OfTheTransposedSteps(AstProbe):
    """Wrong: labels of the step from a word to the one before."""

    def _probe(self):
        probe = super()._probe()
        return probe._replace(labels=-probe.labels)


def last_piece(tokens, states) -> torch.Tensor:
    return states[..., [end - 1 for _, end in tokens.pieces], :].float()


@pytest.mark.oracle("ast_probe")
def test_words_have_the_distances_and_shares_that_numpy_reads_off_the_librarys_states():
    check(AstProbe)


@pytest.mark.refuses("ast_probe")
@pytest.mark.parametrize("wrong", [OfTheRowBefore, OfTheLayerBefore, OfTheTransposedSteps])
def test_another_row_layer_or_sign_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.refuses("ast_probe")
def test_the_last_piece_in_place_of_the_mean_fails(monkeypatch):
    monkeypatch.setattr(code_states.CodeTokens, "pooled", last_piece)
    with pytest.raises(AssertionError):
        check(AstProbe)


@pytest.mark.strategy("ast_probe")
def test_a_tree_is_drawn_only_where_the_model_is_better_than_all_controls():
    drawn = events()
    tree = named(drawn, "syntax tree")
    assert tree["labels"][0].startswith("Module: def f") or tree["values"][0] == 0
    assert tree["parents"][0] == -1 and all(-1 < parent < at for at, parent in enumerate(tree["parents"][1:], 1))
    right = sum(Counter(map(tuple, constituents(sequences(parsed(SHORT))))).values())
    assert 0 < sum(tree["values"]) <= right
    close = events(f1=torch.tensor([0.8, 0.5, 0.4, 0.2, 0.71, 0.3]))
    assert not [event for event in close if isinstance(event, Figure) and event.shape == "tree"]
    notes = [event.text for event in close if isinstance(event, Note)]
    assert "pairs of words" in notes[0] and "no tree is drawn" in notes[0]
    assert named(close, "F1 of trees")["values"] == pytest.approx([0.8, 0.5, 0.4, 0.2, 0.71, 0.3])


@pytest.mark.strategy("ast_probe")
def test_a_text_without_a_program_and_a_model_without_a_probe_get_a_note():
    tokens = pair().target.tokens
    for text, given, said in (("no code", weights(), "no complete line"), (SHORT, None, "fit ast_probe")):
        overlay = AstProbe()
        if given:
            overlay.begin_fitted(given)
        drawn = read_by(overlay, pair().target, tokens.encode("Go:") + tokens.encode_continuation(text), 3)
        assert said in drawn[-1].text


# --- the fit ---

@pytest.mark.strategy("ast_probe")
def test_texts_without_programs_are_refused_in_a_fit():
    with pytest.raises(Refusal, match="too few programs"):
        list(AstProbe.calibrate(CalibrationTexts(pair().target, [[70, 71, 72]]), 0))


@pytest.mark.strategy("ast_probe")
@pytest.mark.bench
def test_a_fit_measures_every_control_on_programs_it_was_not_fitted_to(monkeypatch):
    monkeypatch.setattr(tree_probe, "PLAN", Descent("loss", 3, 1e-2, every=3))
    model = pair().target
    codes = [f"def f(items):\n    items = [x + {k} for x in items]\n    return items[{k % 7}:]\n" for k in range(60)]
    parts = Counter(code_tokens([code]).part for code in codes)
    fitting, notes = AstProbe.calibrate(CalibrationTexts(model, [model.tokens.encode(code) for code in codes]), 0), []
    with pytest.raises(StopIteration) as done:
        while True:
            notes.append(next(fitting))
    stored = done.value.value
    assert stored["f1"].shape == (6,) and stored["curve"].shape == (model.depth + 1,)
    assert ((stored["f1"] >= 0) & (stored["f1"] <= 1)).all() and stored["f1"][4] > 0.7  # pairs are enough for these
    assert f"on {parts[0]} of 60" in notes[-1].text
    assert {name: tensor.dtype for name, tensor in stored.items() if tensor.dim() > 1} == dict.fromkeys(
        ("basis", "labels", "unary"), torch.float16)
    begun = partial(AstProbe.untrained, model.width)
    assert begun().keys() == stored.keys() and torch.equal(begun()["basis"], begun()["basis"])
