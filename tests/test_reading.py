"""A given text: the models' probabilities of its tokens, and their layers at one position."""
from __future__ import annotations

import pytest
import torch
from architectures import tiny
from pairs import network, pair
from toys import END, byte_tokenizer

from playground.decoding import logit_lens, scoring
from playground.decoding.logit_lens import look
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.scoring import score
from playground.decoding.session import Session
from playground.decoding.stream import forwards
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Done, Failed, Step
from playground.trace import check

TEXT = "The green bird sings, and Größe 🙂 is no word."
TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 5]
EXACT = 1e-9


def recorded(session: Session, lane: int, kind: type) -> list:
    list(session)
    return [stamped.event for stamped in session.trace.lane(lane).events if isinstance(stamped.event, kind)]


def logprobs(session: Session, lane: int = 0) -> torch.Tensor:
    return torch.tensor([p for commit in recorded(session, lane, Commit) for p in commit.logprobs], dtype=torch.float64)


def rows_of(library, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [n - 1, V] before each token but the first, from one forward of the library's model."""
    with torch.inference_mode():
        return library(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


# --- scoring ---

def test_a_token_s_log_probability_is_what_the_library_s_model_gives_it():
    ids = pair().target.tokens.encode(TEXT)
    rows, scored = rows_of(network("llama"), ids), logprobs(score(pair(), Prompt(TEXT)))
    expected = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(scored, expected, atol=EXACT)
    # the row after a token instead of the one before it
    shifted = rows.gather(-1, torch.tensor(ids[:-1])[:, None])[:, 0]
    assert not torch.allclose(scored, shifted, atol=0.1)


def test_every_token_but_the_first_has_a_row_with_its_rivals():
    session = score(pair(), Prompt(TEXT))
    ids = pair().target.tokens.encode(TEXT)
    steps, rows = recorded(session, 0, Step), rows_of(network("llama"), ids)
    assert [step.chosen for step in steps] == ids[1:] and [step.position for step in steps] == list(range(len(ids) - 1))
    for step, row in zip(steps, rows):
        assert step.entropy == pytest.approx(float(-(row.exp() * row).sum()))
        assert [candidate.id for candidate in step.top] == row.topk(10).indices.tolist()
        assert all(candidate.raw == candidate.final and candidate.fell is None for candidate in step.top)


def test_a_long_text_scores_the_same_in_pieces(monkeypatch):
    whole = logprobs(score(pair(), Prompt(TEXT)))
    monkeypatch.setattr(scoring, "PIECE", 3)
    pieces = score(pair(), Prompt(TEXT))
    assert torch.allclose(logprobs(pieces), whole, atol=EXACT)
    assert len(recorded(pieces, 0, Commit)) == -(-len(whole) // 3)


def test_target_and_draft_report_their_own_probabilities():
    session = score(pair(), Prompt(TEXT))
    assert [header.model for header in session.headers] == [pair().target.name, pair().draft.name]
    draft_alone = score(Models(pair().draft), Prompt(TEXT))
    assert torch.equal(logprobs(session, 1), logprobs(draft_alone))
    assert (logprobs(session, 1) - logprobs(session, 0)).abs().max() > 1e-3


def test_scoring_adds_no_token_and_ignores_end_tokens():
    text = f"The red fox{END}The green bird"
    session = score(pair(), Prompt(text))
    ids = pair().target.tokens.encode(text)
    assert pair().target.end_ids & set(ids)
    written = [token for commit in recorded(session, 0, Commit) for token in commit.ids]
    assert ids[:1] + written == ids and {
        origin for commit in recorded(session, 0, Commit) for origin in commit.origins
    } == {"forced"}
    assert session.headers[0].prompt_ids + session.headers[0].forced == ids
    assert isinstance(session.trace.events[-1].event, Done)


def test_a_chat_is_scored_in_the_model_s_own_form():
    session = score(pair(), Prompt("Who sings?", chat=True))
    assert session.headers[0].prompt_ids + session.headers[0].forced == pair().target.tokens.encode_chat("Who sings?")


def test_the_trace_of_a_scored_text_is_consistent():
    session = score(pair(), Prompt(TEXT))
    list(session)
    assert not check(session.trace)


def test_a_single_token_cannot_be_scored():
    with pytest.raises(Refusal, match="write at least two"):
        score(pair(), Prompt("a"))


def test_a_diffusion_model_cannot_score_text():
    session = score(Models(OracleDenoiser.bundled()), Prompt("the red fox"))
    assert "fills masked positions" in recorded(session, 0, Failed)[0].message


# --- inside the model ---

@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def architecture(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(architecture) -> Model:
    return Model(tiny(architecture), byte_tokenizer(0), architecture)


def test_the_logit_lens_of_the_last_layer_equals_the_model(architecture, model):
    with torch.inference_mode():
        p = tiny(architecture)(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, -1].softmax(-1)
    last = look(model, TOKENS, chosen=3).layers[-1]
    assert [token for token, _, _ in last.top] == p.topk(logit_lens.TOP).indices.tolist()
    assert [chance for _, _, chance in last.top] == pytest.approx(p.topk(logit_lens.TOP).values.tolist(), abs=1e-6)
    assert last.chosen == pytest.approx(float(p[3]), abs=1e-6)
    assert last.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-3)


def test_the_logit_lens_of_a_layer_equals_a_truncated_model(model):
    seen = look(model, TOKENS, chosen=3)
    assert len(seen.layers) == model.depth + 1
    for layer, lens in enumerate(seen.layers):
        (logits,), _ = model.forward(
            [ForwardInput(model.new_store(), TOKENS, list(range(-1, len(TOKENS) - 1)))], LayerPlan(stop=layer)
        )
        p = logits[-1].softmax(-1)
        assert [token for token, _, _ in lens.top] == p.topk(logit_lens.TOP).indices.tolist(), layer
        assert lens.chosen == pytest.approx(float(p[3]), abs=1e-6)
    assert seen.layers[0].top != seen.layers[-1].top


def test_attention_is_the_library_s_own_averaged_over_the_heads_of_a_group(architecture, model):
    library = tiny(architecture)
    library.set_attn_implementation("eager")
    with torch.inference_mode():
        attended = library(input_ids=torch.tensor([TOKENS]), use_cache=False, output_attentions=True).attentions
    seen = torch.tensor(look(model, TOKENS, chosen=3).attention, dtype=torch.float64)
    for layer, heads in enumerate(attended):
        expected = heads[0, :, -1].unflatten(0, (seen.shape[1], -1)).mean(1)
        assert torch.allclose(seen[layer], expected.double(), atol=6e-4), layer
    assert torch.allclose(seen.sum(-1), torch.ones(()).double(), atol=6e-3)


def test_a_long_text_is_read_in_chunks(monkeypatch, model):
    whole = look(model, TOKENS, chosen=3)
    monkeypatch.setattr(forwards, "CHUNK", 3)
    assert look(model, TOKENS, chosen=3) == whole


def test_the_logit_lens_works_on_a_single_token(model):
    assert look(model, TOKENS[:1], chosen=3).attention == [
        [[1.0]] * len(heads) for heads in look(model, TOKENS, chosen=3).attention
    ]


@pytest.mark.parametrize(
    "tokens, chosen, advice",
    [
        ([], 3, "between 1 and"),
        ([5] * 129, 3, "between 1 and"),
        ([5, 96], 3, "run the prompt again"),
        ([5], -1, "run the prompt again"),
    ],
)
def test_invalid_logit_lens_requests_are_refused(tokens, chosen, advice):
    with pytest.raises(Refusal, match=advice):
        look(Model(tiny("llama"), byte_tokenizer(0), "llama"), tokens, chosen)


def test_the_oracle_has_no_layers():
    with pytest.raises(Refusal, match="not a network of layers"):
        look(OracleDenoiser.bundled(), [1], 1)
