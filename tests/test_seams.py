"""Layer plans: skipped layers, early exits, late entries, and captured hidden states."""
from __future__ import annotations

import pytest
import torch
from architectures import tiny
from tables import write
from toys import byte_tokenizer

from playground.contract import Decoder, EarlyExit, Sampler
from playground.contract.assembly import Assembly
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model

PROMPT = [5, 9, 2, 7, 7, 1]
EXACT = 1e-9
NORMED = 1e-5  # the library computes norms in float32 for every dtype


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def model(request) -> Model:
    return Model(tiny(request.param), byte_tokenizer(), request.param)


def rows(model: Model, plan: LayerPlan | None = None) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    (logits,), captured = model.forward(
        [ForwardInput(model.new_store(), PROMPT, list(range(-1, len(PROMPT) - 1)))], plan
    )
    return logits, captured


def test_stopping_early_equals_a_model_without_its_last_layers(model):
    stopped, _ = rows(model, LayerPlan(stop=2))
    skipped, _ = rows(model, LayerPlan(skip=frozenset({2})))
    assert (stopped - skipped).abs().max() < EXACT
    assert (stopped - rows(model)[0]).abs().max() > 1e-3


def test_resuming_from_captured_hidden_states_equals_running_through(model):
    whole, captured = rows(model, LayerPlan(capture=frozenset({2})))
    resumed, _ = rows(model, LayerPlan(resume=(2, captured[2])))
    assert (whole - resumed).abs().max() < EXACT


def test_an_early_exit_can_be_finished_later_in_the_same_store():
    model = Model(tiny("llama"), byte_tokenizer(), "llama")
    store, parents = model.new_store(), list(range(-1, len(PROMPT) - 1))
    (_,), captured = model.forward([ForwardInput(store, PROMPT, parents)], LayerPlan(stop=2, capture=frozenset({2})))
    store.crop_scratch()
    (late,), _ = model.forward([ForwardInput(store, PROMPT, parents)], LayerPlan(resume=(2, captured[2])))
    assert (late - rows(model)[0]).abs().max() < EXACT


def test_skipping_every_layer_leaves_the_embedding(model):
    bare, captured = rows(model, LayerPlan(skip=frozenset(range(3)), capture=frozenset({0, 1})))
    assert (captured[0] - captured[1]).abs().max() == 0
    assert (bare - rows(model, LayerPlan(stop=0))[0]).abs().max() < EXACT


def test_a_plan_leaves_nothing_behind(model):
    before, _ = rows(model)
    rows(model, LayerPlan(stop=1))
    assert (rows(model)[0] - before).abs().max() == 0


# --- hidden states for strategies ---

def library(architecture: str, ids: list[int]) -> tuple[torch.Tensor, ...]:
    """States [rows, d] by the library: the embeddings, the output of each layer, and at the end the input of the
    lm_head.
    """
    with torch.no_grad():
        return tuple(
            states[0]
            for states in tiny(architecture)(
                input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False
            ).hidden_states
        )


def test_the_last_hidden_states_give_the_models_logits(model):
    logits, captured = rows(model, LayerPlan(capture=frozenset({model.depth})))
    assert (model.read_out(captured[model.depth]) - logits).abs().max() < EXACT
    assert (model.normed(captured[model.depth]) - library(model.name, PROMPT)[-1]).abs().max() < NORMED


def test_inner_states_are_decoded_with_or_without_the_final_norm(model):
    _, captured = rows(model, LayerPlan(capture=frozenset({1, 2})))
    assert (model.read_out(captured[2]) - rows(model, LayerPlan(stop=2))[0]).abs().max() < EXACT
    bare = model.read_out(captured[2], norm=False)
    assert (
        bare - library(model.name, PROMPT)[2] @ model.network.get_output_embeddings().weight.detach().T
    ).abs().max() < NORMED
    assert (bare - model.read_out(captured[1], norm=False)).abs().max() > 1e-3


class Looking(Decoder):
    """Uses every request that gives rows, and records the source of each row: the text, its state, its early
    exits.
    """

    needs = ("hidden_states",)

    def decode(self, lm):
        self.seen = []
        rows = yield from self._look(lm, (yield lm.prefill()))
        yield lm.keep(lm.pick(rows))
        tree = TokenTree()
        first = tree.add(7)
        tree.add(8, first), tree.add(9, first), tree.add(5)
        rows = yield from self._look(lm, (yield lm.extend(tree)))
        tree.add(3, first)
        yield from self._look(lm, (yield lm.extend(tree)))
        later = TokenTree()
        yield lm.exit(2).extend(later)
        later.add(2)
        yield lm.exit(2).extend(later)
        rows = yield from self._look(lm, (yield lm.extend(later)))  # rows resumed after an early exit
        yield lm.keep(lm.pick(rows))
        leaves = lm.fork(2)
        rows = yield lm.extend(leaves)
        yield lm.keep([lm.choose(row, token) for row, token in zip(rows, (4, 6))])
        for row in (yield lm.extend(leaves)):
            yield from self._look(lm, row)
        for request in lm.reading(PROMPT):
            piece = yield request
            self.seen += [(piece.tokens[:i + 1], piece.hidden[i], {}) for i in range(len(piece.tokens))]

    def _look(self, lm, rows):
        yield from ()
        for i in range(len(rows.raw)):
            text = rows.committed + rows.tree.prefix(rows.first + i)
            self.seen.append(
                (text, rows.hidden[i], {at: rows.others[at][i] for at in rows.others if isinstance(at, EarlyExit)})
            )
        return rows


class TwoExits(Sampler):
    stage, draws = "mix", False

    def inner(self, depth, tied):
        return [EarlyExit("target", 1), EarlyExit("target", 2, norm=False)]

    def mix(self, rows):
        return rows["target"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "qwen3"])
def test_rows_carry_the_state_their_head_reads_and_early_exits_however_they_were_asked_for(architecture):
    model = Model(tiny(architecture), byte_tokenizer(), architecture)
    assembly = Assembly(Looking(), [TwoExits()])
    seen = write(assembly, {"target": model}, PROMPT, Limits(0, 20), Draws(0)).assembly.decoder.seen
    assert len(seen) == 1 + 5 + 1 + 2 + 2 + len(PROMPT)
    for text, hidden, exits in seen:
        states = library(architecture, text)
        assert (hidden - states[-1][-1]).abs().max() < NORMED
        if exits:
            assert (exits[EarlyExit("target", 1)] - model.read_out(states[1][-1:])[0]).abs().max() < NORMED
            assert (
                exits[EarlyExit("target", 2, False)] - model.read_out(states[2][-1:], norm=False)[0]
            ).abs().max() < NORMED


def test_rows_carry_no_hidden_states_unless_requested():
    class Blind(Looking):
        needs = ()

        def _look(self, lm, rows):
            yield from ()
            assert rows.hidden is None and not rows.others
            return rows

    model = Model(tiny("llama"), byte_tokenizer(), "llama")
    assert write(Assembly(Blind(), []), {"target": model}, PROMPT, Limits(0, 2), Draws(0)).generated == 2
