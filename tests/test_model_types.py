"""Models of the transformers library: what a model must do at loading, and the table of what each type supports."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from architectures import tiny
from toys import byte_tokenizer, save
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

from playground.bench.models.models_report import page
from playground.bench.models.tiny_networks import causal_types, tiny_network
from playground.bench.models.trial import FAILS, WORKS, Finding, try_network, try_type
from playground.cli import main
from playground.engine import hooks
from playground.engine import implementations as models
from playground.engine.attention import library_cache
from playground.engine.attention.attention_mask import Chunks
from playground.engine.attention.library_masks import layer_reaches
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import attend_all
from playground.engine.implementations import Implementations
from playground.engine.loading.load import Loading, Shelf
from playground.engine.loading.load_check import LONGEST_PROMPT, ordinary_tokens, prompt_length
from playground.engine.model import Model
from playground.errors import Refusal

DOCS = Path(__file__).parents[1] / "docs"
STORED = json.loads((DOCS / "models.json").read_text())
TABLE = {
    entry["model_type"]: Finding(**{**entry, "supports": tuple(entry.get("supports", ()))}) for entry in STORED["types"]
}
SAMPLE = sorted(TABLE, key=lambda name: crc32(name.encode()))[:12]


# --- the table ---

@pytest.mark.parametrize("model_type", [
    pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in TABLE
])
def test_a_type_does_what_the_table_says(model_type):
    found, stored = try_type(model_type), TABLE[model_type]
    assert (found.outcome, found.supports, found.attention) == (stored.outcome, stored.supports, stored.attention)


def test_the_table_has_every_causal_type_of_the_library_and_none_that_differs_or_fails():
    assert list(TABLE) == causal_types()
    assert {finding.outcome for finding in TABLE.values()} <= {"works", "refused", "not built"}
    assert all(finding.reason for finding in TABLE.values() if finding.outcome != WORKS)


@pytest.mark.parametrize(
    "model_type", ["llama4", "llama4_text", "gpt_oss", "gptj", "bloom", "falcon", "mpt", "nemotron", "stablelm"]
)
def test_types_that_people_run_work(model_type):
    assert TABLE[model_type].outcome == WORKS


def test_the_readme_says_as_many_types_as_the_table_has():
    works = sum(finding.outcome == WORKS for finding in TABLE.values())
    assert f"{works} of the {len(TABLE)} causal types" in (DOCS.parent / "README.md").read_text()


def test_the_page_is_written_from_the_stored_table():
    assert (DOCS / "models.md").read_text() == page(STORED["transformers"], list(TABLE.values()))


def test_the_command_tries_the_types_it_is_given_and_no_others(tmp_path, capsys):
    assert main(["bench", "models", "gpt2", "--json", str(tmp_path / "found.json")]) == 0
    assert [entry["model_type"] for entry in json.loads((tmp_path / "found.json").read_text())["types"]] == ["gpt2"]
    assert main(["bench", "models", "gpt17"]) == 2
    assert "no causal type gpt17" in capsys.readouterr().err


# --- windows and chunks, read from the library's masks ---

def large(model_type: str, **sizes: int) -> torch.nn.Module:
    """A narrow network with the windows of a large one."""
    config = tiny_network(model_type).config
    for name, value in sizes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.inference_mode()
def test_chunks_of_any_size_are_read_from_the_librarys_masks_without_reading_as_many_tokens():
    reaches = layer_reaches(large("llama4_text", attention_chunk_size=8192))
    assert set(reaches.values()) == {None, Chunks(8192)}


@torch.inference_mode()
def test_a_window_that_is_in_the_mask_only_is_found():
    assert set(layer_reaches(large("phimoe", sliding_window=100_000)).values()) == {100_000}


@torch.inference_mode()
def test_a_mask_that_is_neither_causal_nor_a_window_nor_chunks_is_refused(monkeypatch):
    network, own = tiny("llama"), modeling_llama.create_causal_mask

    def every_other(batch, head, query, key):
        return (query - key) % 2 == 0

    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **given: own(**given, and_mask_function=every_other)
    )
    with pytest.raises(Refusal, match="mask that the playground cannot build"):
        layer_reaches(network)


def test_the_check_exceeds_small_windows_without_reading_a_long_text():
    assert prompt_length(LlamaConfig()) == 5
    assert prompt_length(AutoConfig.for_model("mistral", sliding_window=40)) == 45
    assert prompt_length(AutoConfig.for_model("mistral", sliding_window=4096)) < LONGEST_PROMPT


def test_the_check_avoids_special_tokens():
    config = LlamaConfig(vocab_size=40, pad_token_id=3, bos_token_id=1, eos_token_id=2)
    assert not {1, 2, 3} & set(ordinary_tokens(config, 60)) and len(ordinary_tokens(config, 60)) == 60


# --- the check at loading ---

def load(network: torch.nn.Module) -> Model:
    return Model(network, byte_tokenizer(), "toy")


def only_own_attention(monkeypatch) -> None:
    """No second attempt with the library's attention."""
    def refuse(self, implementation, reference):
        raise Refusal("no other attention")
    monkeypatch.setattr(Implementations, "_install_library_attention", refuse)


class Shift(torch.nn.Module):
    """Adds to every row the row before it, as a convolution does, without a state between forwards."""

    def __init__(self, mlp: torch.nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden) + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def test_state_that_is_lost_between_forwards_is_refused():
    network = tiny("gemma2")
    network.model.layers[1].mlp = Shift(network.model.layers[1].mlp)
    with pytest.raises(Refusal, match="gemma2 models cannot be run here, because .*: choose another model"):
        load(network)


def test_a_window_missing_from_the_masks_is_refused(monkeypatch):
    only_own_attention(monkeypatch)
    load(tiny_network("llama4_text"))
    monkeypatch.setattr(models, "layer_reaches", lambda network: {})
    with pytest.raises(Refusal, match="no other attention"):
        load(tiny_network("llama4_text"))


def test_a_layer_that_writes_its_cache_twice_is_refused(monkeypatch):
    only_own_attention(monkeypatch)

    def twice(layer, new, call, *settings):
        attend_all(layer, new, call, *settings)
        return attend_all(layer, new, call, *settings)

    load(tiny("gemma2"))
    monkeypatch.setattr(hooks, "attend_all", twice)  # the second time over the same slots: the logits do not change
    with pytest.raises(Refusal, match="no other attention"):
        load(tiny("gemma2"))


def test_siblings_that_see_each_other_are_refused(monkeypatch):
    monkeypatch.setattr(library_cache, "_ancestors", lambda branch: None)
    with pytest.raises(Refusal, match="bloom models cannot be run here"):
        load(tiny_network("bloom"))


def test_an_exception_of_the_library_becomes_a_refusal_without_internals():
    network = tiny("llama")
    network.model.forward = lambda *args, **kwargs: SimpleNamespace(a=1).b
    with pytest.raises(Refusal) as refused:
        load(network)
    assert "Error" not in str(refused.value) and "attribute" not in str(refused.value)


def test_a_model_that_fails_while_it_is_made_is_refused_without_internals(tmp_path):
    def fails(*loaded):
        return {}["layers"]

    with pytest.raises(Refusal, match="cannot be used .an unexpected error inside the library.: choose") as refused:
        Shelf(fails).get(str(save(tmp_path)), Loading("cpu"))
    assert "layers" not in str(refused.value)


def test_a_mixture_of_experts_runs_in_float64_however_it_was_loaded():
    network = tiny_network("mixtral")
    network.set_experts_implementation("grouped_mm")
    assert load(network).dtype == torch.float64


def test_the_trial_itself_sees_another_text():
    network = tiny_network("gpt2")
    assert try_network("gpt2", network, [1] * 16).outcome == "differs"


def test_the_trial_itself_sees_an_unexpected_error(monkeypatch):
    monkeypatch.setattr(Model, "forward", lambda self, works, plan=None: [][0])
    monkeypatch.setattr(Implementations, "_install_attention", lambda self, reference: None)
    assert try_network("gpt2", tiny_network("gpt2"), []).outcome == FAILS


# --- the library's own attention over the playground's cache ---

@torch.inference_mode()
def test_without_tree_attention_a_tree_is_read_branch_by_branch():
    network, text = tiny_network("bloom"), [5, 9, 2, 7]
    after = {
        tail: network(input_ids=torch.tensor([text + list(tail)])).logits[0, -1] for tail in [(3, 4), (3, 6), (8,)]
    }
    model = load(network)
    assert not model.attends
    store = model.new_store()
    model.forward([ForwardInput(store, text, [-1, 0, 1, 2])])
    store.commit(3)
    (rows,), _ = model.forward([ForwardInput(store, [3, 8, 4, 6], [-1, -1, 0, 0])])
    for row, tail in ((1, (8,)), (2, (3, 4)), (3, (3, 6))):
        assert (rows[row] - after[tail]).abs().max() < 1e-9


def test_attention_weights_of_the_librarys_own_attention_are_refused():
    model = load(tiny_network("bloom"))
    with pytest.raises(Refusal, match="inside the transformers library"):
        model.forward([ForwardInput(model.new_store(), [5, 9], [-1, 0], watch=lambda position: True)])
