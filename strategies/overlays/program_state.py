"""What a network's states tell of the values that a program has computed so far."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from playground.algorithms.overlays.linear_probe import LinearProbe, accuracy
from playground.algorithms.overlays.token_figures import bars, matrix, shaded
from playground.algorithms.programs.program_states import EXAMPLES, ProgramText, program_in
from playground.contract import ReadsStates, knob
from playground.errors import Refusal
from playground.events import Note

AHEAD = (0, 1)  # steps between the one that was just written and the one whose state is read
HELD_OUT = 10  # one program in so many is not trained on
COUNTED = 8  # items of a list that have a class of their own, and groups of four letters of a text
LARGEST = (0, 10, 30, 100)  # bounds between classes of the largest number
FEATURES: dict[str, list[str]] = {
    "kind": ["a text", "numbers", "words"],
    "length": [*(f"{count} items" for count in range(COUNTED)), f"{COUNTED} or more items",
               *(f"{4 * part} to {4 * part + 3} letters" for part in range(COUNTED)), f"{4 * COUNTED} or more letters"],
    "order": ["ascending", "descending", "in no order", "all equal"],
    "largest": ["no number", "negative", "0 to 9", "10 to 29", "30 to 99", "100 or more"],
    "repeats": ["without repeats", "with repeats"],
}
CLASSES = [len(words) for words in FEATURES.values()]
CONTROLS = ("this model", "its states, changed meaning", "untrained layers", "the tokens alone", "shuffled labels",
            "the most frequent")


SHARE = "share of the state that is read right"


class Examples(NamedTuple):
    """Steps of programs, those of one program next to each other."""

    states: Tensor  # [n, d]
    tokens: Tensor  # [n, V], how often each token is in the text so far
    labels: Tensor  # [n, labels], of the state
    changed: Tensor  # [n, labels], if the symbols had another meaning
    held_out: Tensor  # [n]
    program: Tensor  # [n], its number

    def ahead(self, steps: int) -> Examples:
        """The steps that so many of the same program follow, with the labels of the last of these."""
        if not steps:
            return self
        kept = self.program[:-steps] == self.program[steps:]
        earlier, later = (Examples(*(part[kept] for part in parts)) for parts in (
            (each[:-steps] for each in self), (each[steps:] for each in self)))
        return earlier._replace(labels=later.labels, changed=later.changed)


class ProgramState(ReadsStates):
    """Read from the hidden states what a program's variable holds after each of its steps, and check that reading.

    When a line of a program is complete, a linear probe of the mean of all layers' states says what the variable now
    is for one example argument: its kind, length, order, largest number and repeats. An interpreter knows the truth,
    and a token has the share of these that are read right. With `ahead` the probe reads the state after the next step,
    which is not written yet, though the prompt may describe it. The bars compare held-out scores with those of the
    same states under a changed meaning of the symbols (< for >, + for -), of layers without training, of the tokens
    without a network, and of shuffled labels. Where these are as high, the probe computes the value, and not the
    network. It correlates; nothing is switched off. The paper's programs steer robots; here they are the small world's,
    the control has trained embeddings, and the probe is a ridge regression. Jin and Rinard 2023, arXiv 2305.11169.
    """

    name, title, paper, sheet = "program_state", "Program state", "2305.11169", "overlays/program-state-probe"
    reconstruction, sure = True, "medium"
    fitted_to_target, prefers_trained, questions_per_task = True, True, 1000
    calibration_tasks = ("programs",)

    ahead: int = knob(0, AHEAD[0], AHEAD[-1], step=1, help="steps ahead whose state is read; 0: the one just written")

    _text = _weights = None

    def begin_fitted(self, weights):
        self._weights = weights

    def begin(self, text, model):
        self._text, self._states = text, []

    def read_states(self, first, states):
        self._states.append(mean_of(states).cpu())

    def draw(self):
        if self._text is None or self._text.generated < 1:
            return
        pieces = self._text.written()
        program = program_in("".join(pieces))
        if self._weights is not None and program and program.steps:
            yield from self._drawn(pieces, program)
            return
        yield shaded(SHARE, [0.0] * len(pieces), ["in no step of a program that is read"] * len(pieces))
        yield Note(
            "No probe is fitted to this model: `python -m playground fit program_state` fits one."
            if self._weights is None else
            "Program state: the text has no function of items, words or text with steps that change it."
        )

    def _drawn(self, pieces: list[str], program: ProgramText):
        rows = last_tokens(pieces, program)
        states = torch.cat(self._states)[self._text.start:][rows]
        found, truth = self._probe().read(states, CLASSES), self._truth(program)
        yield self._shaded(pieces, program, rows, found.tolist(), truth)
        known = [step for step, label in enumerate(truth) if label is not None]
        if known:
            yield matrix("what is read right, by step", list(FEATURES), [f"step {step + 1}" for step in known], [
                [float(found[step, at] == truth[step][at]) for step in known] for at in range(len(FEATURES))
            ])
        yield from self._scores(program)

    def _probe(self) -> LinearProbe:
        return LinearProbe(*(self._weights[name][self.ahead].float() for name in LinearProbe._fields))

    def _truth(self, program: ProgramText) -> list[list[int] | None]:
        """The labels of the state that each step's row should tell; None where it is not known."""
        values = program.values()
        labels = [None] * len(program.steps) if values is None else [labels_of(value) for value in values]
        return [labels[at + self.ahead] if at + self.ahead < len(labels) else None for at in range(len(labels))]

    def _shaded(self, pieces, program, rows, found, truth):
        """Each step's tokens in the colour of the share of features read right."""
        shares, words = [torch.nan] * len(pieces), [""] * len(pieces)
        ends = list(accumulate(map(len, pieces)))
        for (start, _), row, read, label in zip(program.steps, rows, found, truth):
            for at in range(bisect_left(ends, start + 1), row + 1):
                shares[at] = torch.nan if label is None else sum(map(int.__eq__, read, label)) / len(label)
                words[at] = f"read: {in_words(read)}" + (f"; true: {in_words(label)}" if label else "; not known")
        return shaded(SHARE, shares, words)

    def _scores(self, program: ProgramText):
        scores = self._weights["accuracy"][self.ahead].float()
        yield bars("read right on held-out programs, mean of the features", list(CONTROLS), scores.mean(1).tolist())
        best = max(range(1, len(CONTROLS)), key=lambda at: float(scores[at].mean()))
        yield Note(
            f"The probe reads {float(scores[0].mean()):.0%} of the features of held-out programs, and "
            f"{float(scores[best].mean()):.0%} from {CONTROLS[best]}. Only what it reads beyond its controls speaks "
            f"for the network. The example argument is {EXAMPLES[program.argument]!r}."
        )

    @classmethod
    def untrained(cls, width: int, seed: int = 0) -> dict[str, Tensor]:
        """Weights of a random probe."""
        chance = torch.Generator().manual_seed(seed)
        sizes = {"mean": (width,), "scale": (width,), "weight": (width, sum(CLASSES)), "bias": (sum(CLASSES),)}
        made = {name: torch.randn(len(AHEAD), *size, generator=chance) for name, size in sizes.items()}
        return {**made, "accuracy": torch.zeros(len(AHEAD), len(CONTROLS), len(CLASSES))}

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Fit a probe for each number of steps ahead, and measure it beside its controls."""
        whole, plain = (examples_in(each) for each in (texts, texts.without_training(seed)))
        fitted, measured = [], []
        for ahead in AHEAD:
            examples, control = whole.ahead(ahead), plain.ahead(ahead)
            fitted.append(LinearProbe.fit(*trained_on(examples.states, examples.labels, examples), CLASSES))
            measured.append(torch.stack(list(scores(examples, control.states, seed))))
            yield from _told(ahead, measured[-1], examples)
        stored = {name: torch.stack([getattr(probe, name) for probe in fitted]).half() for name in LinearProbe._fields}
        return {**stored, "accuracy": torch.stack(measured).half()}


def mean_of(states: dict[int, Tensor]) -> Tensor:
    """The mean [n, d] over layers of their states."""
    return torch.stack([rows.float() for rows in states.values()]).mean(0)


def last_tokens(pieces: list[str], program: ProgramText) -> list[int]:
    """The token that completes each step."""
    ends = list(accumulate(map(len, pieces)))
    return [min(bisect_left(ends, end), len(ends) - 1) for _, end in program.steps]


def labels_of(value: str | list) -> list[int]:
    """The class of each of `FEATURES`."""
    numbers = isinstance(value, list) and all(isinstance(each, int) for each in value)
    kind = 0 if isinstance(value, str) else 1 if numbers else 2
    length = min(len(value), COUNTED) if kind else COUNTED + 1 + min(len(value) // 4, COUNTED)
    pairs = list(zip(value, value[1:]))
    rising, falling = all(a <= b for a, b in pairs), all(a >= b for a, b in pairs)
    order = 3 if rising and falling else 0 if rising else 1 if falling else 2
    largest = 1 + sum(max(value) >= bound for bound in LARGEST) if numbers and value else 0
    return [kind, length, order, largest, int(len(set(value)) < len(value))]


def in_words(labels: list[int]) -> str:
    return ", ".join(words[label] for words, label in zip(FEATURES.values(), labels))


def examples_in(texts) -> Examples:
    """The steps of the programs whose states are known in both meanings.

    Programs with the same steps are all trained on, or none of them.
    """
    found: list[tuple[Any, ...]] = []
    for number, ids in enumerate(texts.texts):
        pieces = [texts.piece(token) for token in ids]
        program = program_in("".join(pieces))
        both = program and (program.values(), program.changed_values())
        if not program or not program.steps or None in both:
            continue
        states = mean_of(texts.states(ids, range(texts.model.depth + 1))[1]).cpu()
        code = "".join(pieces)[program.steps[0][0]:program.steps[-1][1]]
        for row, value, changed in zip(last_tokens(pieces, program), *both):
            counts = torch.bincount(torch.tensor(ids[:row + 1]), minlength=texts.model.vocabulary).half()
            found.append((states[row], counts, torch.tensor(labels_of(value)), torch.tensor(labels_of(changed)),
                          torch.tensor(not crc32(code.encode()) % HELD_OUT), torch.tensor(number)))
    if len(found) < HELD_OUT:
        raise Refusal("The texts have no programs whose steps can be interpreted: leave out --texts.", "texts")
    return Examples(*(torch.stack(parts) for parts in zip(*found)))


def trained_on(states: Tensor, labels: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
    return states[~examples.held_out], labels[~examples.held_out]


def scores(examples: Examples, untrained: Tensor, seed: int) -> Iterator[Tensor]:
    """The accuracy of each feature [labels] for each of `CONTROLS`, on programs that no probe was fitted to."""
    known, labels = ~examples.held_out, examples.labels
    used = examples.tokens[:, (examples.tokens[known] > 0).float().mean(0) > 0.005].float()
    shuffled = labels[known][torch.randperm(int(known.sum()), generator=torch.Generator().manual_seed(seed))]
    for states, truth, given in (
        (examples.states, labels, labels[known]),
        (examples.states, examples.changed, examples.changed[known]),
        (untrained, labels, labels[known]), (used, labels, labels[known]), (examples.states, labels, shuffled),
    ):
        probe = LinearProbe.fit(states[known], given, CLASSES)
        yield accuracy(probe.read(states[~known], CLASSES), truth[~known])
    yield accuracy(labels[known].mode(0).values.expand_as(labels[~known]), labels[~known])


def _told(ahead: int, measured: Tensor, examples: Examples) -> Iterator[Note]:
    held_out = int(examples.held_out.sum())
    yield Note(f"{ahead} steps ahead, {held_out} held-out of {len(examples.held_out)} states; right: " + "; ".join(
        f"{name} {row.mean():.3f} ({', '.join(f'{value:.2f}' for value in row.tolist())})"
        for name, row in zip(CONTROLS, measured)
    ))
