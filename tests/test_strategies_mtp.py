"""Multi-token prediction: the library's own generation with the layers of a checkpoint, round by round."""
from __future__ import annotations

import json

import pytest
import torch
from pairs import TOKENIZER, greedy_text, pair
from pairs import network as architecture
from safetensors.torch import load_file, save_file
from tables import write
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Failed
from playground.training.public_heads import read_head
from support.draft_heads import PROMPT, Watching, embed, log_probabilities, norm, proposals, random_weights, states
from support.head_lessons import Lessons, differ, first_losses, targets
from support.laws import AT_ONE, EXACT, off, tables
from support.mtp_checkpoints import COUNT, save_checkpoint
from support.speculation import collapses, speculative_lane
from support.speculative_runs import recorded

NAME, LENGTH = "mtp", 24
BRIEF = {"mtp": {"depth": 2}}
COLLAPSES = {"mtp": collapses("mtp", depth=0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(path)
    return path


def network(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def target(folder) -> Model:
    return Model(network(folder), TOKENIZER, "ernie")


@pytest.fixture(scope="module")
def library(folder):
    """Of each round of the library's generation the text and the candidates, and the whole text."""
    found, get = [], MTPCandidateGenerator.get_candidates

    def kept(self, input_ids, *args, **kwargs):
        candidates, logits = get(self, input_ids, *args, **kwargs)
        if logits is not None:
            found.append((input_ids[0].tolist(), candidates[0, input_ids.shape[1]:].tolist()))
        return candidates, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", kept)
        given = {"use_mtp": True, "do_sample": False, "max_new_tokens": LENGTH}
        text = network(folder).generate(torch.tensor([PROMPT]), **given)
    return found, text[0].tolist()


def rounds(target: Model, cls=None) -> tuple[list, list[int]]:
    """The same of a lane."""
    decoder, watching = make("speculative", verifier="greedy_match"), Watching((cls or find(NAME))())
    decoder.drafter = watching
    lane = write(Assembly(decoder), {"target": target}, PROMPT, Limits(0, LENGTH), Draws(0))
    drafted = [each for each in watching.proposals if each.prefixes]
    return [(each.tokens, list(max(each.prefixes, key=len))) for each in drafted], lane.tokens


def agrees(found: list, expected: list) -> bool:
    """Whether all rounds are the same, up to the last, which may not draft as deep as it would."""
    whole = [each for each in found if len(each[1]) == COUNT]
    assert len(whole) > 8
    return whole == expected[:len(whole)]


@pytest.mark.slow
@pytest.mark.oracle("mtp")
def test_every_round_is_that_of_the_librarys_generator(target, library):
    (found, text), (expected, whole) = rounds(target), library
    assert agrees(found, expected) and text == whole


class TokensOffByOne(find("mtp")):
    """Wrong: a layer reads the token whose state it reads."""

    def propose(self, lm, budget):
        states = lm.target_model.mtp.states
        lm.target_model.mtp.states = lambda number, rows, tokens, first, cache: states(
            number, rows, [lm.tokens[first - number - 1], *tokens[:-1]], first, cache
        )
        try:
            return (yield from super().propose(lm, budget))
        finally:
            del lm.target_model.mtp.states


class StateOfTheLayerBefore(find("mtp")):
    """Wrong: the first layer reads the input of the target's last layer."""

    def state_layers(self, depth):
        return depth - 1, depth

    def propose(self, lm, budget):
        of = lm.target.states.of
        lm.target.states.of = lambda layer, start: of(layer - 1, start)
        try:
            return (yield from super().propose(lm, budget))
        finally:
            del lm.target.states.of


class KeepsStaleRows(find("mtp")):
    """Wrong: rows that read rejected tokens stay in the cache."""

    def propose(self, lm, budget):
        if self._text is not None:
            self._text._drop_stale = lambda tokens, length: None
        return (yield from super().propose(lm, budget))


@pytest.mark.refuses("mtp")
@pytest.mark.parametrize("wrong", [TokensOffByOne, StateOfTheLayerBefore, KeepsStaleRows])
def test_wrong_tokens_states_and_caches_are_detected(wrong, target, library):
    assert not agrees(rounds(target, wrong)[0], library[0])


@pytest.mark.strategy("mtp")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    assert off(speculative_lane(NAME, verifier, AT_ONE), tables("abc"), [0, 1, 0], 3) < EXACT


@pytest.mark.strategy("mtp")
def test_random_layers_leave_greedy_text_unchanged():
    assert rounds(pair().target)[1][len(PROMPT):] == greedy_text("llama", PROMPT, LENGTH)


@pytest.mark.strategy("mtp")
def test_a_model_without_such_layers_is_refused_before_the_run():
    plain = Model(architecture("qwen2"), TOKENIZER, "qwen2")
    _, events = recorded(speculative_lane(NAME, "greedy_match"), Models(plain))
    assert isinstance(events[-1], Failed) and "no layers for multi-token prediction" in events[-1].message


@pytest.mark.strategy("mtp")
def test_a_checkpoint_without_its_layers_is_refused(folder, tmp_path):
    save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if "mtp" not in name}, file, {"format": "pt"})
    with pytest.raises(Refusal, match="are not in its files"):
        _ = Model(network(tmp_path), TOKENIZER, "ernie").mtp


# --- a published head, one layer for all steps ---

STEPS, SHAPE = 2, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5}


def published() -> dict[str, torch.Tensor]:
    """Random weights with the names of vLLM's `speculators`."""
    chance, width = torch.Generator().manual_seed(2), 32
    sizes = {
        "hidden_layernorm": (width,), "token_layernorm": (width,), "final_layernorm": (width,),
        "input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_norm": (8,),
        "self_attn.k_norm": (8,), "input_proj": (width, 2 * width), "self_attn.q_proj": (32, width),
        "self_attn.k_proj": (16, width), "self_attn.v_proj": (16, width), "self_attn.o_proj": (width, 32),
        "mlp.gate_proj": (48, width), "mlp.up_proj": (48, width), "mlp.down_proj": (width, 48),
    }  # fmt: skip
    random = {name: torch.randn(size, generator=chance).double() * 0.5 for name, size in sizes.items()}
    return {f"mtp_layers.0.{name}.weight": tensor for name, tensor in random.items()}


def head_folder(path, steps: int = STEPS):
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}]}
    config = {"speculators_model_type": "mtp", "speculators_config": proposal,
              "transformer_layer_config": {"model_type": "qwen3", **SHAPE}}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    save_file(published(), path / "model.safetensors")
    return path


@torch.no_grad()
def guessed(tokens: list[int]) -> list[int]:
    """Each step over the whole text, with the library's qwen3 layer: the last step's states, tokens one further on."""
    weights = {name.removeprefix("mtp_layers.0."): tensor for name, tensor in published().items()}
    config = Qwen3Config(hidden_size=32, intermediate_size=48, attn_implementation="eager", **SHAPE)
    layer, rotary = Qwen3DecoderLayer(config, 0).double(), Qwen3RotaryEmbedding(config)
    layer.load_state_dict(weights, strict=False)
    text, count, rows = list(tokens), len(tokens) - 1, states(tokens[:-1])[-1]
    mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    for step in range(STEPS):
        read = embed(text[step + 1:])
        rows = torch.cat([norm(weights, "token_layernorm")(read), norm(weights, "hidden_layernorm")(rows)], -1)
        rows = (rows @ weights["input_proj.weight"].T)[None]
        places = rotary(rows, torch.arange(count)[None])
        rows = norm(weights, "final_layernorm")(layer(rows, attention_mask=mask, position_embeddings=places))[0]
        text.append(int(log_probabilities(rows[-1]).argmax()))
    return text[len(tokens):]


def given_head(tmp_path, cls=None):
    found = read_head(head_folder(tmp_path), pair().target)
    assert found.strategy == NAME
    drafter = (cls or find(NAME))()
    drafter.begin_fitted(found.weights)
    return drafter


def published_rounds(drafter) -> list[tuple[list[int], list[int]]]:
    found = proposals(drafter)
    return [(each.tokens, list(max(each.prefixes, key=len))) for each in found if each.budget > STEPS]


@pytest.mark.oracle("mtp")
def test_a_published_head_drafts_by_its_formula(tmp_path):
    found = published_rounds(given_head(tmp_path))
    assert len(found) > 5 and all(drafted == guessed(tokens) for tokens, drafted in found)


@pytest.mark.refuses("mtp")
@pytest.mark.parametrize("wrong", [StateOfTheLayerBefore, KeepsStaleRows])
def test_wrong_states_and_caches_of_a_published_head_are_detected(wrong, tmp_path):
    found = published_rounds(given_head(tmp_path, wrong))
    assert not all(drafted == guessed(tokens) for tokens, drafted in found)


# --- the training of one layer for all steps ---

LIKE = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-5}
SHARES = (1 / 1.96, 0.6 / 1.96, 0.36 / 1.96)  # of the losses: each 0.6 of that before it


@torch.no_grad()
def expected_losses(lessons: Lessons, shares: tuple[float, ...] = SHARES, first: int = 1) -> list[float]:
    """For each step the negative log-likelihood of what the target wrote, with the library's qwen3 layer, text by text.

    The first step reads the `first` next token.
    """
    weights = random_weights(NAME)
    config = Qwen3Config(hidden_size=32, intermediate_size=96, attn_implementation="eager", **LIKE)
    layer, rotary = Qwen3DecoderLayer(config, 0).double(), Qwen3RotaryEmbedding(config)
    layer.load_state_dict(weights, strict=False)
    count, found = lessons.states.shape[1], []
    mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    places = rotary(lessons.states, torch.arange(count)[None])
    outputs, rows = [], lessons.states
    for step in range(3):
        read = lessons.embeddings.double()[lessons.batch.ids.roll(-step - first, 1)]
        rows = torch.cat([norm(weights, "token_layernorm")(read), norm(weights, "hidden_layernorm")(rows)], -1)
        rows = layer(rows @ weights["input_proj.weight"].T, attention_mask=mask, position_embeddings=places)
        outputs.append(rows := norm(weights, "final_layernorm")(rows))
    for step, (share, rows) in enumerate(zip(shares, outputs)):
        logits = (rows @ lessons.lm_head.double().T).log_softmax(-1)
        nats = [-logits[text, at, lessons.batch.ids[text, at + step + 2]] for text, at in targets(step + 2)]
        found.append(share * float(torch.stack(nats).mean()))
    return found


@pytest.mark.oracle("mtp")
def test_each_step_learns_the_token_after_the_one_it_reads_and_counts_less():
    lessons = Lessons(NAME)
    assert not differ(first_losses(lessons), expected_losses(lessons))


@pytest.mark.refuses("mtp")
@pytest.mark.parametrize("wrong", [{"shares": (1 / 3,) * 3}, {"first": 0}, {"first": 2}])
def test_equal_losses_and_other_tokens_are_detected(wrong):
    lessons = Lessons(NAME)
    assert differ(first_losses(lessons), expected_losses(lessons, **wrong))


def test_a_layer_that_is_trained_is_used_for_three_tokens():
    drafter = find(NAME)()
    drafter.begin_fitted(find(NAME).untrained(32, 3))
    block, steps = drafter._head
    assert steps == 3 and block.input_proj.weight.shape == (32, 64)
