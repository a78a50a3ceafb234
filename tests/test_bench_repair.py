"""What prompts give a compressed lane is measured beside the same for the loaded model."""
from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import playground
from playground.bench.weights import prompt_repair, repair_report
from playground.cli import main
from playground.engine.checkpoint.catalogue import BUNDLED_MODELS
from playground.errors import Refusal

ROWS = [
    {"weights": "none", "prompts": "none", "questions": 2.0, "answers": 1.0, "KL": 0.0, "scores": {"facts": 0.9}},
    {"weights": "none", "prompts": "chosen", "questions": 1.5, "answers": 0.8, "KL": 0.3, "scores": {"facts": 0.9}},
    {"weights": "rtn:bits=3", "prompts": "none", "questions": 2.2, "answers": 1.4, "KL": 0.2, "scores": {"facts": 0.5}},
    {"weights": "rtn:bits=3", "prompts": "chosen", "questions": 1.7, "answers": 1.0, "KL": 0.3,
     "scores": {"facts": 0.8}},
]


@pytest.fixture(scope="module")
def target():
    return playground.load("pocket", "none").target


def test_shares_are_counted_by_themselves_and_beside_the_control():
    """Answers cost 0.4 nats: the prompt gives back 0.4, and half of the distance stays if both have prompts."""
    found = {row["measure"]: row for row in repair_report.shares(ROWS)}
    assert found["answers"]["cost"] == pytest.approx(0.4)
    assert found["answers"]["by itself"] == pytest.approx(1.0)
    assert found["answers"]["beside its control"] == pytest.approx(0.5)
    assert found["questions"]["beside its control"] == pytest.approx(0.0), "learnt by the loaded model as well"
    for way in ("by itself", "beside its control"):
        assert found["score"][way] == pytest.approx(0.75)
    assert found["KL"]["by itself"] == pytest.approx(-0.5) and found["KL"]["beside its control"] is None


def test_the_page_says_of_every_measure_whether_the_aim_is_reached():
    said = repair_report.verdict(ROWS)
    assert "answers: 100% by itself and 50% beside its control, reached" in said
    assert "questions: 250% by itself and 0% beside its control, missed" in said
    assert "KL: -50% by itself, missed" in said
    page = repair_report.page({"settings": {"model": "m"}}, ROWS)
    assert said in page and "| `rtn:bits=3` | chosen | 1.7000 | 1.0000 | 0.3000 | 0.800 |" in page


def test_weights_that_cost_nothing_have_no_share():
    rows = [row | {"answers": 1.0} for row in ROWS]
    assert {row["measure"]: row["by itself"] for row in repair_report.shares(rows)}["answers"] is None
    assert "nothing was lost" in repair_report.verdict(rows)


@pytest.fixture(scope="module")
def twin():
    """The same network of the library, without our hooks."""
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODELS / "pocket", dtype=torch.float32).eval()


@torch.inference_mode()
def test_losses_are_those_of_the_librarys_forward(target, twin):
    texts = prompt_repair.held_out_texts(target, 1)[:3]
    originals = [prompt_repair.logits_of(target, None, text) for text in texts]
    found = prompt_repair.losses(target, None, texts, originals)
    by_hand: dict[str, list[float]] = {"questions": [], "answers": []}
    for asked, answer in texts:
        ids = torch.tensor([*asked, *answer])
        each = cross_entropy(twin(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none").tolist()
        by_hand["questions"] += each[:len(asked) - 1]
        by_hand["answers"] += each[len(asked) - 1:]
    assert found["KL"] == pytest.approx(0, abs=1e-6)
    for name, losses in by_hand.items():
        assert found[name] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@torch.inference_mode()
def test_a_prompt_is_chosen_by_the_question_alone_and_read_before_it(target, twin):
    text = prompt_repair.held_out_texts(target, 1)[0]
    prompts = {"prompt.0": torch.randn(3, target.parts.width, generator=torch.Generator().manual_seed(0))}
    found = prompt_repair.logits_of(target, prompt_repair.policy_for(target, prompts), text)
    ids = torch.tensor([*text.asked, *text.answer])
    inputs = torch.cat([prompts["prompt.0"], twin.get_input_embeddings()(ids)])[None]
    expected = twin(inputs_embeds=inputs).logits[0, 3:-1]
    assert torch.allclose(found, expected, atol=1e-3)


def test_weights_without_prompts_are_refused_with_the_command_that_trains_some(target, monkeypatch, tmp_path):
    monkeypatch.setenv("PLAYGROUND_HOME", str(tmp_path))
    changed = playground.in_weights(target, "rtn:bits=2", None)
    with pytest.raises(Refusal, match="fit idp --quantization rtn:bits=2"):
        prompt_repair.prompts_of(changed)


@pytest.mark.slow
def test_the_command_writes_what_it_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PLAYGROUND_HOME", str(tmp_path))
    page, data = tmp_path / "page.md", tmp_path / "rows.json"
    main(["bench", "repair", "--only", "rtn:bits=3", "--texts", "1", "--questions", "0", "--page", str(page),
          "--out", str(data)])
    rows = json.loads(data.read_text())["rows"]
    assert {row["weights"] for row in rows} == {"none", "rtn:bits=3"}
    plain, prompted = (next(row for row in rows if row["weights"] == "rtn:bits=3" and row["prompts"] == way)
                       for way in ("none", "chosen"))
    assert all(abs(prompted[name] - plain[name]) > 1e-5 for name in ("questions", "answers", "KL"))
    assert repair_report.verdict(rows) in page.read_text()
    assert "rtn:bits=3" in capsys.readouterr().out
