"""Published heads: what a folder holds is read as its formula says, and what does not fit is refused in a sentence."""
from __future__ import annotations

import json
import re
from pathlib import Path
from time import process_time

import pytest
import torch
from pairs import pair
from safetensors.torch import save_file
from torch import Tensor

from playground.cli import main
from playground.contract import find
from playground.errors import Refusal
from playground.training.public_heads import names_head, read_head
from support.draft_heads import (
    LibraryAttention,
    differing,
    embed,
    feed_forward,
    head,
    most_probable_tree,
    norm,
    states,
)
from support.eagle import features_after

VOCABULARY, WIDTH, DRAFT = 320, 32, 40
LAYERS = [0, 1, 2]
CONFIG = {
    "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT, "eagle_aux_hidden_state_layer_ids": LAYERS,
    "norm_before_residual": False,
    "transformer_layer_config": {"num_attention_heads": 1, "head_dim": WIDTH, "rope_theta": 10000.0,
                                 "rms_norm_eps": 1e-5},
}  # fmt: skip


def eagle_3(seed: int = 0) -> dict[str, Tensor]:
    """Random weights with the names of vLLM's `speculators`."""
    chance = torch.Generator().manual_seed(seed)
    sizes = {
        "fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (DRAFT, WIDTH),
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        "layers.0.input_layernorm.weight": (WIDTH,), "layers.0.hidden_norm.weight": (WIDTH,),
        "layers.0.post_attention_layernorm.weight": (WIDTH,),
        "layers.0.self_attn.q_proj.weight": (WIDTH, 2 * WIDTH), "layers.0.self_attn.k_proj.weight": (WIDTH, 2 * WIDTH),
        "layers.0.self_attn.v_proj.weight": (WIDTH, 2 * WIDTH), "layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
        "layers.0.mlp.gate_proj.weight": (96, WIDTH), "layers.0.mlp.up_proj.weight": (96, WIDTH),
        "layers.0.mlp.down_proj.weight": (WIDTH, 96),
    }  # fmt: skip
    weights = {name: torch.randn(size, generator=chance) * 0.5 for name, size in sizes.items()}
    ids = torch.randperm(VOCABULARY, generator=chance)[:DRAFT].sort().values
    used = torch.zeros(VOCABULARY, dtype=torch.bool)
    used[ids] = True
    return {**weights, "d2t": ids - torch.arange(DRAFT), "t2d": used}


def folder(tmp_path: Path, config: dict, weights: dict[str, Tensor]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path


def expected(weights: dict[str, Tensor], normed_residual: bool):
    """The tree by the formula of the format, in forwards without a cache."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    attention, mlp = LibraryAttention(named, "midlayer.", reads=2 * WIDTH), feed_forward(named, "midlayer.")
    embedding, hidden, after, last = (
        norm(named, name)
        for name in (*(f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")), "norm")
    )
    lm_head, ids = weights["lm_head.weight"].double(), weights["t2d"].nonzero()[:, 0]

    def run(embeddings, features):
        normed = hidden(features)
        rows = attention(torch.cat([embedding(embeddings), normed], -1)) + (normed if normed_residual else features)
        return rows + mlp(after(rows))

    def of(proposal):
        read = states(proposal.tokens[:-proposal.unread])
        known = torch.cat([read[layer] for layer in LAYERS], -1) @ weights["fc.weight"].double().T

        def row(path):
            found = torch.full((VOCABULARY,), float("-inf"), dtype=torch.float64)
            features = last(features_after(run, known, embed([*proposal.tokens, *path])))
            found[ids] = (features @ lm_head.T).log_softmax(-1)
            return found

        return most_probable_tree(row, depth=3, width=2, nodes=8)

    return of


def drafter(path: Path):
    """EAGLE-3 with the head of a folder."""
    found = read_head(path, pair().target)
    made = head(found.strategy, found.weights, nodes=8, depth=3, width=2)
    made.begin_fitted(found.weights)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("normed_residual", [False, True])
def test_an_eagle_3_head_of_speculators_drafts_by_its_formula(tmp_path, normed_residual):
    weights, config = eagle_3(), {**CONFIG, "norm_before_residual": normed_residual}
    made = drafter(folder(tmp_path, config, weights))
    assert list(differing(made, expected(weights, normed_residual))) == []


@pytest.mark.slow
def test_wrong_layers_and_a_wrong_residual_would_be_noticed(tmp_path):
    weights = eagle_3()
    shifted = {**CONFIG, "eagle_aux_hidden_state_layer_ids": [1, 1, 2]}
    assert list(differing(drafter(folder(tmp_path, shifted, weights)), expected(weights, False)))
    assert list(differing(drafter(folder(tmp_path, CONFIG, weights)), expected(weights, True)))


def test_the_authors_eagle_3_files_are_read_too(tmp_path):
    weights = eagle_3()
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT,
              **CONFIG["transformer_layer_config"]}  # fmt: skip
    found = read_head(folder(tmp_path, config, named), pair().target)
    assert found.strategy == "eagle_3" and found.weights["layers"].tolist() == [2, 1, 0]
    find("eagle_3").build(found.weights)


def test_medusa_heads_of_the_second_version_are_read(tmp_path):
    weights = {
        f"{k}.0.linear.{part}": torch.randn(*size) for k in range(3)
        for part, size in (("weight", (32, 32)), ("bias", (32,)))
    }  # fmt: skip
    found = read_head(folder(tmp_path, {"version": "2"}, weights), pair().target)
    network = find("medusa").build(found.weights)
    assert found.strategy == "medusa" and len(network.heads) == 3
    assert torch.equal(network.heads[2][0].linear.bias, weights["2.0.linear.bias"])


def cases() -> dict[str, tuple[dict, dict, str]]:
    eagle = eagle_3()
    own = {"0.0.linear.weight": torch.zeros(32, 32), "0.0.linear.bias": torch.zeros(32), "0.1.weight": torch.ones(9, 9)}
    return {
        "width": (CONFIG, {**eagle, "fc.weight": torch.zeros(32, 3 * 48)}, "hidden size 48, and llama has 32"),
        "vocabulary": (CONFIG, {**eagle, "t2d": torch.zeros(99, dtype=torch.bool)}, "vocabulary 99, and llama has 320"),
        "layers": (
            {**CONFIG, "eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, eagle, "reads layer 9, and llama has 3 layers"
        ),
        "kind": ({**CONFIG, "speculators_model_type": "other"}, eagle, "of the kind other, which is not supported"),
        "half a layer": (
            CONFIG, {**eagle, "layers.1.mlp.up_proj.weight": torch.zeros(96, 32)}, "no network can be made"
        ),
        "windows": (
            {**CONFIG, "transformer_layer_config": {"layer_types": ["sliding_attention"]}}, eagle, "see a window of the"
        ),
        "own lm_heads": ({}, own, "have lm_heads of their own"),
        "another model": ({"model_type": "llama"}, {"a.weight": torch.zeros(2, 2)}, "is no EAGLE or Medusa head"),
        "missing": (CONFIG, {"norm.weight": torch.zeros(32)}, "lacks the weights fc.weight"),
    }


@pytest.mark.parametrize("case", cases().values(), ids=cases())
def test_a_head_that_does_not_fit_is_refused_with_both_sizes(tmp_path, case):
    config, weights, says = case
    with pytest.raises(Refusal, match=says):
        read_head(folder(tmp_path, config, weights), pair().target)


def test_pickles_cut_files_and_folders_without_config_are_refused(tmp_path):
    target = pair().target
    with pytest.raises(Refusal, match="no readable config.json"):
        read_head(tmp_path, target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match="has no weights"):
        read_head(tmp_path, target)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Refusal, match="a pickle, which can execute code"):
        read_head(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(Refusal, match="is damaged"):
        read_head(tmp_path, target)


def hostile() -> dict[str, tuple[dict, dict]]:
    """Folders that are made to break what reads them."""
    eagle, layer = eagle_3(), CONFIG["transformer_layer_config"]
    medusa = {"0.0.linear.weight": torch.zeros(32, 32), "0.0.linear.bias": torch.zeros(32)}
    configs = {
        "layers are texts": {"eagle_aux_hidden_state_layer_ids": ["0", "1", "2"]},
        "layers are an object": {"eagle_aux_hidden_state_layer_ids": {"a": 1}},
        "layers are a number": {"eagle_aux_hidden_state_layer_ids": 3},
        "layers below the first": {"eagle_aux_hidden_state_layer_ids": [-1, -2, -3]},
        "half a layer": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1.5]},
        "an enormous layer": {"eagle_aux_hidden_state_layer_ids": [0, 1, 10**30]},
        "a layer that is a list": {"transformer_layer_config": [1]},
        "a layer that is a text": {"transformer_layer_config": "llama"},
        "architectures are a number": {"speculators_model_type": None, "architectures": 5},
        "architectures are lists": {"speculators_model_type": None, "architectures": [[1], {}]},
        "a kind that is a list": {"speculators_model_type": [1] * 1000},
        "heads are a text": {"transformer_layer_config": {**layer, "head_dim": None, "num_attention_heads": "many"}},
        "wide heads": {"transformer_layer_config": {**layer, "head_dim": 10**9}},
        "heads below zero": {"transformer_layer_config": {**layer, "head_dim": -8}},
        "heads that do not divide": {"transformer_layer_config": {**layer, "head_dim": 7}},
        "a base below zero": {"transformer_layer_config": {**layer, "rope_theta": -1.0}},
        "a base that is a list": {"transformer_layer_config": {**layer, "rope_theta": [1]}},
        "parameters that are a text": {"transformer_layer_config": {**layer, "rope_parameters": "linear"}},
        "a norm that is infinite": {"transformer_layer_config": {**layer, "rms_norm_eps": float("inf")}},
        "ten million layers": {"transformer_layer_config": {**layer, "num_hidden_layers": 10**7}},
    }
    weights = {
        "a number in place of a matrix": {"fc.weight": torch.tensor(1.0)},
        "a vector in place of a matrix": {"layers.0.self_attn.q_proj.weight": torch.zeros(32)},
        "an empty matrix": {"layers.0.mlp.up_proj.weight": torch.zeros(0, 32)},
        "other sizes": {"layers.0.mlp.down_proj.weight": torch.zeros(5, 5)},
        "not a number": {"norm.weight": torch.full((32,), float("nan"))},
        "infinite": {"fc.weight": torch.full((32, 96), float("inf"))},
        "tokens beyond the vocabulary": {"d2t": torch.full((DRAFT,), 10**6)},
        "tokens below zero": {"d2t": torch.full((DRAFT,), -10**6)},
        "tokens that are fractions": {"d2t": torch.full((DRAFT,), 0.5)},
        "tokens for nothing": {"d2t": torch.zeros(0, dtype=torch.long)},
        "a layer of a billion": {"layers.999999999.mlp.up_proj.weight": torch.zeros(96, 32)},
    }
    numbers = {"a head of a billion": {"999999999.0.linear.weight": torch.zeros(32, 32)},
               "a head that is a word": {"first.0.linear.weight": torch.zeros(32, 32)}}
    return {
        **{name: ({**CONFIG, **changes}, eagle) for name, changes in configs.items()},
        **{name: (CONFIG, {**eagle, **changes}) for name, changes in weights.items()},
        **{name: ({}, {**medusa, **changes}) for name, changes in numbers.items()},
    }


@pytest.mark.parametrize("config, weights", hostile().values(), ids=hostile())
def test_a_hostile_head_is_refused_in_one_sentence_when_it_is_read(tmp_path, config, weights):
    begun = process_time()
    with pytest.raises(Refusal) as refused:
        read_head(folder(tmp_path, config, weights), pair().target)
    assert re.fullmatch(r"[^\n]{20,400}\.", str(refused.value)) and process_time() - begun < 2


def test_a_hostile_config_is_no_head(tmp_path):
    for text in ('{"architectures": [[1]]}', '{"architectures": 5}', "[" * 10**6, '{"a": "' + "x" * 2**22):
        (tmp_path / "config.json").write_text(text)
        assert not names_head(str(tmp_path))


def test_weights_larger_than_the_memory_are_refused_before_they_are_read(tmp_path):
    """A file of zeros that takes no room on the disk."""
    folder(tmp_path, CONFIG, eagle_3())
    with (tmp_path / "more.safetensors").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(Refusal, match="of memory are free"):
        read_head(tmp_path, pair().target)


def test_the_command_says_which_strategy_a_folder_is_for(tmp_path, capsys):
    from saved import save_models
    saved = save_models(tmp_path / "models").target
    weights = {"0.0.linear.weight": torch.zeros(32, 32), "0.0.linear.bias": torch.zeros(32)}
    (tmp_path / "head").mkdir()
    place = folder(tmp_path / "head", {}, weights)
    assert main(["fit", "eagle", "--model", saved, "--from", str(place)]) == 2
    assert "holds a head for medusa: run `fit medusa" in capsys.readouterr().err
    assert main(["fit", "medusa", "--model", saved, "--from", str(place)]) == 0
    assert "medusa is fitted to" in capsys.readouterr().out
