"""The bundled models: loaded like any other, and tested against their cards."""
from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import playground
from playground.contract.lane_config import LaneConfig
from playground.decoding.models import Models
from playground.engine.checkpoint.catalogue import BUNDLED_MODELS, OTHER_TOKENS, TEXT_MODEL
from playground.engine.loading.load import Loading, load
from playground.errors import Refusal

STORY = "Tell me a story about Mia."
RECORD = ("JSON, please: {owner: text, sells: [text], size: small|medium|large}\n"
          "The shop of Zabeast sells bread and fish, and it is large.")
EDIT = (
    "My editor says: One more in front: Nobody heard the cat behind the chair.\nIt rained in Brurin for 18 days. Dogarn"
    " sold the hunter some pears. A purple hen ran through Leavaim. The path to Serith was muddy. The potter painted"
    " the broom red."
)
SUM = "Picture Fived with 29 keys. 19 keys go missing. How many keys does Fived end up with?"
LANES = [LaneConfig("speculative", extras=[(drafter, knobs), (verifier, {})])
         for drafter, knobs in (("draft_model", {}), ("draft_model", {"width": 3}), ("prompt_lookup", {}))
         for verifier in ("rejection", "sample_match", "greedy_match")]


@pytest.fixture(scope="module")
def exact() -> Models:
    """The bundled pair in float64, so that texts do not depend on rounding."""
    return playground.load(dtype="float64")


@pytest.fixture(scope="module")
def models() -> Models:
    return playground.load()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [STORY, RECORD, EDIT])
def test_speculation_writes_what_plain_greedy_writes(exact, prompt):
    plain, *guessed = playground.compare(
        [LaneConfig("greedy"), *LANES], prompt, models=exact, chat=True, max_new_tokens=40
    )
    assert plain.reason in ("end", "length")
    assert [lane.token_ids for lane in guessed] == [plain.token_ids] * len(LANES)


@pytest.mark.slow
def test_the_draft_agrees_often_enough_to_be_useful(models):
    lane = playground.run("speculative", RECORD, models=models, chat=True)
    assert lane.metrics["acceptance_rate"] > 0.6
    assert lane.metrics["tokens_per_target_forward"] > 2.5


def test_prompt_lookup_saves_forwards_if_the_answer_repeats_the_prompt(models):
    lane = playground.run("speculative", EDIT, models=models, chat=True, extras=["prompt_lookup"])
    assert lane.metrics["tokens_per_target_forward"] > 2.5


def test_the_bundled_model_writes_a_correct_record_in_json(models):
    record = json.loads(playground.run("greedy", RECORD, models=models, chat=True).text)
    assert record == {"owner": "Zabeast", "sells": ["bread", "fish"], "size": "large"}


def test_a_card_shows_sources_tokens_and_limits():
    for name in ("pocket", "pocket-draft", "pocket-other-draft"):
        card = (BUNDLED_MODELS / name / "README.md").read_text(encoding="utf-8")
        assert all(word in card for word in ("sha256", "tokens", "loss", "imit"))


def test_the_bundled_denoiser_sorts_two_numbers_in_few_forwards():
    models = playground.load("pocket-diffusion")
    assert models.target.fills and models.target.shifted and models.draft is None
    result = playground.run("fast_dllm", "Sort these: 7, 3", models=models, chat=True, max_new_tokens=16)
    assert result.text == " 3, 7" and result.reason == "end" and result.metrics["target_forwards"] <= 4


@pytest.mark.parametrize("name", ["pocket-diffusion", "pocket-block-diffusion"])
def test_the_card_of_a_denoiser_says_how_it_was_trained_and_what_it_reached(name):
    card = (BUNDLED_MODELS / name / "README.md").read_text(encoding="utf-8")
    stored = json.loads((BUNDLED_MODELS / name / "evaluation.json").read_text(encoding="utf-8"))
    trained = (
        "NVIDIA H100", f"{60 * stored['minutes']:.0f} seconds", f"{stored['tokens_seen'] / 1e6:.2f} million tokens",
        f"steps of {stored['plan']['tokens']} tokens",
    )
    reached = [f"| {row} | {found['score']:.2f} | {found['right']:.0%} |" for row, found in stored["rows"].items()]
    assert all(words in card for words in (*trained, *reached, "held-out items per row", "Limits"))
    assert all(found["items"] >= 24 for found in stored["rows"].values())


def test_the_bundled_block_denoiser_keeps_the_states_of_finished_blocks():
    models = playground.load("pocket-block-diffusion")
    assert models.target.fills and models.target.attention == "block"
    whole, cached = playground.compare(
        [LaneConfig("masked_diffusion", {"block_length": 8}), LaneConfig("fast_dllm", {"block_length": 8})],
        SUM, models=models, chat=True, max_new_tokens=32,
    )
    assert whole.text.strip().endswith("#### 10")
    assert cached.metrics["target_forwards"] < whole.metrics["target_forwards"]
    with pytest.raises(Refusal, match="sees its block and earlier ones"):
        playground.run("dkv_cache", SUM, models=models, chat=True)


def test_the_bundled_experts_answer_as_the_dense_model_and_two_of_eight_run():
    models = playground.load("pocket-moe")
    record, summed = (playground.run("greedy", prompt, models=models, chat=True) for prompt in (RECORD, SUM))
    assert json.loads(record.text) == {"owner": "Zabeast", "sells": ["bread", "fish"], "size": "large"}
    assert summed.text.strip().endswith("#### 10")
    config = models.target.network.config
    assert (config.num_local_experts, config.num_experts_per_tok) == (8, 2)
    contrasted = playground.run("greedy", STORY, models=models, chat=True, extras=["scmoe"], max_new_tokens=40)
    assert contrasted.reason in ("end", "length")


@pytest.mark.slow
def test_the_other_draft_has_other_tokens_and_drafts_for_lanes_that_translate():
    pair = playground.load("pocket", "pocket-other-draft")
    assert len(pair.draft.tokens.encode("1234")) < len(pair.target.tokens.encode("1234")) == 4, (
        "digits by twos and threes"
    )
    plain, bound, translating = playground.compare(
        [LaneConfig("greedy"), LaneConfig("speculative"), LaneConfig("speculative", {}, [("omnidraft", {})])],
        STORY,
        models=pair,
        chat=True,
    )
    assert bound.reason == "failed" and "another vocabulary" in bound.message
    assert translating.token_ids == plain.token_ids and translating.metrics["tokens_per_target_forward"] > 1.2


def test_every_bundled_model_is_loaded_with_the_tokenizer_of_its_vocabulary():
    own, shared = (
        AutoTokenizer.from_pretrained(BUNDLED_MODELS / name).get_vocab() for name in (OTHER_TOKENS, TEXT_MODEL)
    )
    for folder in sorted(path.parent for path in BUNDLED_MODELS.glob("*/config.json")):
        for name in (folder.name, str(folder), os.path.relpath(folder)):  # from the catalogue, or as a folder
            tokenizer = load(name, Loading("cpu"))[1]
            assert tokenizer.get_vocab() == (own if folder.name == OTHER_TOKENS else shared), name
            assert tokenizer.chat_template


def test_the_cards_lines_load_model_and_tokenizer_with_the_library_alone(monkeypatch):
    monkeypatch.chdir(BUNDLED_MODELS)
    for name in (TEXT_MODEL, "pocket-draft", OTHER_TOKENS):
        card, loaded = Path(name, "README.md").read_text(encoding="utf-8"), {}
        exec(re.search("```python\n(.*?)```", card, re.DOTALL)[1], loaded)
        assert loaded["model"].config.vocab_size == len(loaded["tokenizer"])


def test_a_folder_of_another_name_or_place_gets_no_tokenizer(tmp_path):
    for name in (TEXT_MODEL, "mine"):
        shutil.copytree(BUNDLED_MODELS / "pocket-draft", tmp_path / name)
        with pytest.raises(Refusal, match="no tokenizer"):
            load(str(tmp_path / name), Loading("cpu"))


def test_bundled_files_stay_small():
    files = [path for path in BUNDLED_MODELS.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) < 50e6
    assert sum(path.stat().st_size for path in files) < 120e6
