"""Published heads: what a folder holds is read as its formula says, and what does not fit is refused in a sentence."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pairs import pair
from safetensors.torch import save_file
from torch import Tensor

from playground.cli import main
from playground.contract import find
from playground.errors import Refusal
from playground.training.public_heads import read_head
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
        "kind": ({**CONFIG, "speculators_model_type": "peagle"}, eagle, "of the kind peagle, which is not supported"),
        "two layers": (CONFIG, {**eagle, "layers.1.mlp.up_proj.weight": torch.zeros(96, 32)}, "has several layers"),
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
