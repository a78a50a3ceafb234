"""A head that was fitted here is written in the format of vLLM's `speculators` and read back as the same head."""
from __future__ import annotations

import json

import pytest
import torch
from pairs import pair

from playground.cli import main
from playground.contract import find
from playground.errors import Refusal
from playground.training.public_heads import read_head
from playground.training.speculators_export import check_folder, write_folder


def random_head() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn_like(part) for name, part in find("eagle_3").untrained(32, 3).items()}


def test_a_written_head_is_read_back_with_the_same_weights_and_layers(tmp_path):
    weights, layers = random_head(), find("eagle_3")().state_layers(3)
    write_folder(tmp_path / "head", "eagle_3", weights, layers, pair().target)
    found = read_head(tmp_path / "head", pair().target)
    assert found.strategy == "eagle_3" and tuple(found.weights["layers"].tolist()) == layers
    assert all(torch.equal(found.weights[name], part) for name, part in weights.items())
    assert torch.equal(found.weights["lm_head.weight"], pair().target.lm_head_weights)


def test_a_written_head_drafts_what_the_fitted_one_drafts(tmp_path):
    weights = random_head()
    write_folder(tmp_path / "head", "eagle_3", weights, (0, 1, 2), pair().target)
    networks = [find("eagle_3").build(each) for each in (weights, read_head(tmp_path / "head", pair().target).weights)]
    rows, lm_head = torch.randn(4, 32), pair().target.lm_head_weights.float()
    own, written = (network.read_out(rows, lambda states: states @ lm_head.T) for network in networks)
    assert torch.allclose(own, written, atol=1e-5)


def random_drafter() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    network = {name: torch.randn_like(part) for name, part in find("dflash").untrained(32, 3).items()}
    network["fc.weight"] = network["fc.weight"][:, :64]  # of two layers
    return network | {"layers": torch.tensor([1, 3]), "block_size": torch.tensor(6), "mask_token_id": torch.tensor(9)}


def test_a_written_dflash_drafter_is_read_back_with_its_weights_and_settings(tmp_path):
    weights = random_drafter()
    write_folder(tmp_path / "drafter", "dflash", weights, (1, 3), pair().target)
    found = read_head(tmp_path / "drafter", pair().target)
    assert found.strategy == "dflash"
    assert all(torch.equal(found.weights[name], part) for name, part in weights.items())


def test_a_written_dflash_drafter_fills_a_block_as_the_fitted_one(tmp_path):
    weights = random_drafter()
    write_folder(tmp_path / "drafter", "dflash", weights, (1, 3), pair().target)
    states, block = torch.randn(5, 64), torch.randn(6, 32)
    found = []
    for each in (weights, read_head(tmp_path / "drafter", pair().target).weights):
        network = find("dflash").build(each)
        caches = network.new_caches()
        network.read(states, torch.arange(5), caches)
        found.append(network(block, torch.arange(5, 11), caches, 0))
    assert torch.allclose(*found, atol=1e-5)


def test_a_strategy_that_the_format_does_not_know_and_a_folder_that_exists_are_refused(tmp_path):
    with pytest.raises(Refusal, match="has no medusa heads"):
        check_folder("medusa", tmp_path / "head")
    with pytest.raises(Refusal, match="exists: name a new folder"):
        check_folder("eagle_3", tmp_path)


def test_the_command_refuses_before_it_trains(tmp_path, capsys):
    assert main(["fit", "medusa", "--to", str(tmp_path / "head")]) == 2
    assert "has no medusa heads" in capsys.readouterr().err
    assert main(["fit", "evopress", "--to", str(tmp_path / "head")]) == 2
    assert "leave out --to" in capsys.readouterr().err


def test_the_config_names_the_target_and_the_shape_of_the_layer(tmp_path):
    write_folder(tmp_path / "head", "eagle_3", random_head(), (0, 1, 2), pair().target)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == pair().target.name
    assert config["transformer_layer_config"]["hidden_size"] == 32 and config["draft_vocab_size"] == 320
