"""Cross-attention of a tiny T5 against its softmax written out, and against the library's own weights."""
from __future__ import annotations

import pytest
import torch
from pairs import pair

from playground.contract import find
from playground.errors import Refusal
from playground.events import Note
from support.encoder_decoder_pairs import encoder_decoders
from support.overlay_runs import named, read_by, shades

CrossAttentionView = find("cross_attention")
TEXT, ANSWER = "The green bird sings.", [9, 12, 40, 41, 52]


def tokens_of(model) -> tuple[list[int], int]:
    prompt = model.tokens.encode(TEXT)
    return [*prompt, *ANSWER], len(prompt)


def by_softmax(layer: int) -> torch.Tensor:
    """Weights [answer, source] of one layer, mean over the heads: the softmax of queries times keys, without scaling,
    as T5 has it, from the states that enter the layer's cross-attention.
    """
    model = encoder_decoders("t5").target
    tokens, start = tokens_of(model)
    source, rest = torch.tensor(tokens).tensor_split([tokens.index(model.tokens.mark)])
    attention, seen = model.network.decoder.block[layer].layer[1], []
    hook = attention.layer_norm.register_forward_hook(lambda module, given, normed: seen.append(normed))
    with torch.inference_mode():
        states = model.network.encoder(input_ids=source[None]).last_hidden_state[0]
        model.network(input_ids=source[None], decoder_input_ids=model.reading.started(rest)[None])
        hook.remove()
        part = attention.EncDecAttention
        queries, keys = (
            rows.view(len(rows), part.n_heads, -1).transpose(0, 1)
            for rows in (part.q(seen[0][0]), part.k(states))
        )
        scores = queries @ keys.mT
    return scores.softmax(-1).mean(0)[-len(ANSWER) - 1:-1]


def check(cls: type[CrossAttentionView]) -> None:
    model = encoder_decoders("t5").target
    tokens, start = tokens_of(model)
    for layer in (0, 1):
        events = read_by(cls(layer=layer), model, tokens, start)
        expected = by_softmax(layer)
        shown = torch.tensor(named(events, "cross-attention")["values"], dtype=torch.float64)
        assert torch.allclose(shown, expected.T.double(), atol=1e-3)
        assert shades(events) == pytest.approx(expected.amax(1).tolist(), abs=1e-3)
        assert named(events, "attention received")["values"] == pytest.approx(expected.sum(0).tolist(), abs=1e-3)


class OfTheNextRow(CrossAttentionView):
    """Wrong: the row that has read a token, not the one that predicted it."""

    def read(self):
        return torch.stack(self._layers[:self.layer + 1][-1:]).mean(0)[-self._text.generated:]


@pytest.mark.oracle("cross_attention")
def test_the_matrix_is_the_softmax_of_the_row_that_predicted_a_token():
    check(CrossAttentionView)


@pytest.mark.refuses("cross_attention")
def test_the_row_after_is_refused():
    with pytest.raises(AssertionError):
        check(OfTheNextRow)


@pytest.mark.parametrize("kind", ["t5", "bart", "t5gemma"])
def test_all_layers_are_the_mean_and_each_column_sums_to_one(kind):
    model = encoder_decoders(kind).target
    tokens, start = tokens_of(model)
    events = read_by(CrossAttentionView(), model, tokens, start)
    shown = torch.tensor(named(events, "cross-attention")["values"])
    assert torch.allclose(shown.sum(0), torch.ones(len(ANSWER)), atol=2e-3)
    alone = [read_by(CrossAttentionView(layer=at), model, tokens, start) for at in range(model.depth)]
    each = [torch.tensor(named(events, "cross-attention")["values"]) for events in alone]
    assert torch.allclose(torch.stack(each).mean(0), shown, atol=1e-3)


def test_a_source_token_that_no_row_reads_is_counted_as_ignored():
    overlay = CrossAttentionView()
    model = encoder_decoders("t5").target
    tokens, start = tokens_of(model)
    read_by(overlay, model, tokens, start)
    source = tokens.index(model.tokens.mark)
    weights = torch.zeros(len(ANSWER) + 1, source)
    weights[:, :2] = 0.5
    overlay._layers = [weights]
    (note,) = [event.text for event in overlay.draw() if isinstance(event, Note)]
    assert note.startswith(f"Of {source} tokens of the prompt, {source - 2} received")


def test_a_causal_model_is_refused():
    with pytest.raises(Refusal, match="has no encoder: choose an encoder-decoder model"):
        CrossAttentionView().check_target(pair().target)


def test_the_attention_function_is_the_old_one_afterwards():
    model = encoder_decoders("bart").target
    before = model.network.config._attn_implementation
    read_by(CrossAttentionView(), model, *tokens_of(model))
    assert model.network.config._attn_implementation == before
