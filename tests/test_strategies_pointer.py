"""The pointer view against the library's attention weights in plain loops."""
from __future__ import annotations

import pytest
import torch
from pairs import network, pair

from playground.contract import find
from playground.decoding import overlay_reading
from playground.events import Note
from support.overlay_runs import named, read_by, shades

Pointer = find("pointer")
TOKENS = [70, 71, 72, 70, 71, 90, 70, 71, 72, 91, 70, 95]
START = 4
ROWS = range(START - 1, len(TOKENS) - 1)  # those that predict the generated tokens


def library() -> tuple[list, torch.Tensor]:
    """Attention weights [layers][heads][rows][slots] and probabilities [rows, V], by the transformers library."""
    model = network("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(input_ids=torch.tensor([TOKENS]), output_attentions=True, use_cache=False)
    return [layer[0].tolist() for layer in found.attentions], found.logits[0].softmax(-1)


def by_hand(letters: int, theta: float) -> tuple[list[float], list[float], list[str]]:
    """Of each generated token the largest weight on its occurrences, the context's mass, and what it is called."""
    layers, p = library()
    weights, masses, kinds = [], [], []
    for at in ROWS:
        token, context = TOKENS[at + 1], TOKENS[:at + 1]
        weights.append(max(sum(w for slot, w in enumerate(head[at][:at + 1]) if context[slot] == token)
                           for layer in layers for head in layer))
        pieces = {other: pair().target.tokens.piece(other) for other in context}
        masses.append(sum(float(p[at, other]) for other, piece in pieces.items()
                          if sum(letter.isalnum() for letter in piece) >= letters))
        copied = masses[-1] > 0.5 and weights[-1] > theta
        kinds.append("generated" if token not in context else "copied" if copied else "unclear")
    return weights, masses, kinds


def check(cls: type[Pointer]) -> None:
    weights, masses, kinds = by_hand(1, 0.3)
    events = read_by(cls(letters=1), pair().target, TOKENS, START)
    assert shades(events) == pytest.approx(weights, abs=1e-4) and max(weights) > 0.3
    labels = [span[2] for span in next(e.data for e in events if getattr(e, "data", {}).get("shades"))["spans"]]
    assert [f"{100 * mass:.0f} %" in label for mass, label in zip(masses, labels)] == [True] * len(masses)
    assert [label.split(";")[0] for label in labels] == kinds
    assert named(events, "tokens")["values"] == [kinds.count(kind) for kind in ("copied", "unclear", "generated")]


class OfTheTokenRead(Pointer):
    """Wrong: weights on occurrences of the token that the row read."""

    def _following(self, first, count):
        return super()._following(first - 1, count) if first else self._tokens[:min(count, len(self._tokens) - 1)]


class WithoutTheOldest(Pointer):
    """Wrong: the first token of the text never counts."""

    def read_heads(self, layer, first, weights):
        weights = weights.clone()
        weights[..., 0] = 0
        super().read_heads(layer, first, weights)


@pytest.mark.oracle("pointer")
def test_weights_mass_and_words_are_those_of_plain_loops():
    check(Pointer)


@pytest.mark.refuses("pointer")
@pytest.mark.parametrize("wrong", [OfTheTokenRead, WithoutTheOldest])
def test_another_row_or_a_missing_slot_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.strategy("pointer")
def test_the_same_is_drawn_however_the_text_is_read(monkeypatch):
    whole = [event.to_json() for event in read_by(Pointer(), pair().target, TOKENS, START)]
    monkeypatch.setattr(overlay_reading, "PIECE", 5)
    assert [event.to_json() for event in read_by(Pointer(), pair().target, TOKENS, START)] == whole


@pytest.mark.strategy("pointer")
def test_the_card_names_head_slot_and_induction():
    layers, _ = library()
    events = read_by(Pointer(), pair().target, TOKENS, START)
    labels = [span[2] for span in next(e.data for e in events if getattr(e, "data", {}).get("shades"))["spans"]]
    for at, label in zip(ROWS, labels):
        if TOKENS[at + 1] not in TOKENS[:at + 1]:
            assert "looks at" not in label and label.startswith("generated")
            continue
        layer, head = (int(label.split(f"{word} ")[1].split(",")[0].split()[0]) for word in ("layer", "head"))
        row = layers[layer][head][at]
        own = {slot: row[slot] for slot in range(at + 1) if TOKENS[slot] == TOKENS[at + 1]}
        assert f"token {max(own, key=own.get) + 1} of the text with {sum(own.values()):.2f}" in label
        induced = max(sum(w for slot, w in enumerate(rows[at][:at + 1]) if slot and TOKENS[slot] == TOKENS[at + 1]
                          and TOKENS[slot - 1] == TOKENS[at]) for layer in layers for rows in layer)
        of_layer = max(sum(w for slot, w in enumerate(rows[at][:at + 1]) if slot and TOKENS[slot] == TOKENS[at + 1]
                           and TOKENS[slot - 1] == TOKENS[at]) for rows in layers[layer])
        assert f"induction: {of_layer:.2f}" in label and of_layer <= induced


@pytest.mark.strategy("pointer")
@pytest.mark.parametrize("mass, weight, kind", [(0.6, 0.4, "copied"), (0.4, 0.4, "unclear"), (0.6, 0.2, "unclear")])
def test_both_thresholds_have_to_be_passed(mass, weight, kind):
    overlay = Pointer()
    read_by(overlay, pair().target, TOKENS, START)
    assert overlay.named(2, weight, mass) == kind and overlay.named(5, 1.0, 1.0) == "generated"


@pytest.mark.strategy("pointer")
def test_a_note_counts_and_does_not_claim():
    (note,) = [event.text for event in read_by(Pointer(), pair().target, TOKENS, START) if isinstance(event, Note)]
    assert "of 8 tokens" in note and "correlates" in note
