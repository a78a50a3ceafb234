"""Lexical unit tuning: packed placeholders equal separate texts, and training makes a model certain of its units."""
from __future__ import annotations

import pytest
import torch
from pairs import TOKENIZER, network
from runs import run
from transformers import LlamaConfig, LlamaForCausalLM

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Figure, Forward
from strategies.variants.lexical_unit_tuning import PackedCuts, logits_of, pack

PAD = 3
WINDOWS = torch.randint(5, 300, (2, 12), generator=torch.Generator().manual_seed(0))
STARTS = torch.tensor([0, 4, 7])


def difference(packed: PackedCuts) -> float:
    """Largest difference of the placeholders' logits from those of each beginning read on its own."""
    own, largest = network("llama"), 0.0
    with torch.inference_mode():
        found = logits_of(own, packed)[:, 12:].unflatten(1, (3, 3))
        for row, window in enumerate(WINDOWS.tolist()):
            for block, start in enumerate(STARTS.tolist()):
                ids = torch.tensor([[*window[:start + 1], PAD, PAD, PAD]])
                alone = own(input_ids=ids, use_cache=False).logits[0, -3:]
                largest = max(largest, float((found[row, block] - alone).abs().max()))
    return largest


@pytest.mark.oracle("lexical_unit_tuning")
def test_packed_placeholders_see_what_they_would_see_after_their_own_beginning():
    packed = pack(WINDOWS, STARTS, 4, PAD)
    assert difference(packed) < 1e-9
    assert packed.labels[1, 2].tolist() == WINDOWS[1, [9, 10, 11]].tolist(), "token 8 is not a placeholder's"


@pytest.mark.refuses("lexical_unit_tuning")
@pytest.mark.parametrize("wrong", ["sees the future", "counts on", "sees other blocks"])
def test_a_wrong_mask_and_wrong_positions_are_refused(wrong):
    packed = pack(WINDOWS, STARTS, 4, PAD)
    if wrong == "sees the future":
        packed.mask[12:, :12] = True
    if wrong == "counts on":
        packed = packed._replace(positions=torch.arange(len(packed.positions)))
    if wrong == "sees other blocks":
        packed.mask[12:, 12:] = torch.ones(9, 9).tril().bool()
    assert difference(packed) > 1e-3


@pytest.mark.slow
def test_a_model_trained_on_repeated_sentences_writes_them_several_tokens_at_a_time():
    torch.manual_seed(0)
    ids = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id}
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, **ids)
    model = LlamaForCausalLM(config)
    sentence = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55]
    tuning = make("lexical_unit_tuning", length=32, epochs=24, lr=1e-2, batch=4, held_out=4, k=3)
    events = list(tuning.make(model, [sentence * 48], 0))
    series = [event.data["series"] for event in events if isinstance(event, Figure)]
    assert series[0]["certain placeholders"] < 0.1 and series[-1]["certain placeholders"] > 0.5
    target = Model(model.eval(), TOKENIZER, "tuned")
    prompt, greedy = sentence[:8], [sentence[(8 + i) % 16] for i in range(18)]
    lane, steps = run(Assembly(find("lexical_units")(k=3, beta=0.8)), {"target": target}, prompt, 18)
    assert lane.main.written == greedy and target.lexical_units == 3
    assert sum(isinstance(event, Forward) for event in steps) < 14


def test_too_little_text_is_refused():
    with pytest.raises(Refusal, match="have to be held out"):
        list(make("lexical_unit_tuning").make(network("llama"), [list(range(200))], 0))


def test_the_saved_config_says_how_many_tokens_it_was_tuned_for(tmp_path):
    own = network("llama").float()
    list(make("lexical_unit_tuning", length=16, epochs=0, k=3).make(own, [list(range(200))], 0))
    own.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert Model(again.eval(), TOKENIZER, "again").lexical_units == 3
