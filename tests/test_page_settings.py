"""Settings are untrusted: links, damaged links, refusals."""

import pytest
import torch
from tables import TableModel

from playground.decoding.models import Models
from playground.engine.loading.load import DTYPES, QUANTIZATIONS
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.run_request import RunRequest, choices
from playground.ui.components.settings import Settings
from playground.ui.models.status_line import described
from playground.ui.play.gallery import TOPICS, examples
from playground.ui.play.lane_editor import check
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.site import Site

FULL = Settings(
    "Ünïcode ☃ <script>",
    "chat",
    "be kind",
    "Feadrad has a key.",
    7,
    33,
    "a\n\\n",
    "Qwen/Qwen3-0.6B",
    "none",
    "float32",
    "nf4",
    [{"strategy": "speculative", "knobs": {"budget": 3}, "extras": [["top_p", {"p": 0.5}]], "forced": [4, 5]}],
    [["Who?", "Me."]],
    "{prompt} {context}",
    '[{"name": "add"}]',
)


def test_a_link_carries_every_setting():
    assert Settings.from_code(FULL.to_code()) == FULL
    assert Settings.from_code(Settings().to_code()) == Settings()
    assert len(Settings(prompt="Hello").to_code()) < 40
    assert FULL.stops() == ("a", "\n")


@pytest.mark.parametrize("code", ["", "!!!", "AAAA", "bnVsbA", "W10", "eyJzZWVkIjo"])
def test_a_damaged_link_is_no_link(code):
    assert Settings.from_code(code) in (None, Settings())


def test_what_does_not_fit_is_left_at_its_default():
    lanes = [{"strategy": 1}, None, {"strategy": "greedy", "knobs": {"file": "/etc/passwd", "x": [1]}}]
    raw = {"prompt": 3, "seed": True, "length": "9", "dtype": "float3", "lanes": lanes, "other": 1}
    read = Settings.read(raw)
    assert (read.prompt, read.seed, read.length) == ("", 0, Settings().length)
    assert read.lanes == [{"strategy": "greedy", "knobs": {}, "extras": [], "forced": []}]
    assert len(Settings.read({"lanes": [{"strategy": "greedy"}] * 9}).lanes) == 4


@pytest.mark.parametrize("change, about", [
    ({"prompt": " "}, "prompt"), ({"prompt": "x" * 5000}, "prompt"), ({"context": "x" * 5000}, "prompt"),
    ({"tools": "x" * 5000}, "tools"), ({"tools": "[]", "mode": "chat"}, "tools"),
    ({"tools": '[{"name": "f"}]'}, "tools"),
    ({"form": "{context}"}, "form"), ({"seed": None}, "seed"), ({"seed": -1}, "seed"), ({"length": 0}, "length"),
    ({"length": 257}, "length"), ({"lanes": []}, "lanes")])
def test_what_cannot_be_run_is_refused_at_its_control(change, about):
    settings = Settings(**{"prompt": "Hello", **change})
    with pytest.raises(Refusal) as refused:
        settings.check(Rules.for_visitors())
    assert refused.value.about == about


def test_a_public_page_opens_no_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("PLAYGROUND_PUBLIC", "1")
    site = Site.from_environment(ModelRequest())
    with pytest.raises(Refusal, match="only the models in its list"):
        site.chosen.request(Settings(model=str(tmp_path)))
    assert site.chosen.request(Settings()) == ModelRequest()


def test_a_page_does_not_start_for_a_draft_on_a_device_that_is_not_there():
    Site(ModelRequest(draft_device="cpu")).check()
    with pytest.raises(Refusal, match="There is no device 'gpu'"):
        Site(ModelRequest(draft_device="gpu")).check()


def test_the_line_of_the_models_says_where_a_draft_of_another_device_lies():
    target, draft = TableModel("abc", seed=1), TableModel("abc", seed=2)
    assert f" · {draft.name} · " in described(Models(target, draft)) and " on " not in described(Models(target, draft))
    draft.device = torch.device("cuda:1")  # a table has no file, so any name is accepted
    assert f" · {draft.name} on cuda:1 · " in described(Models(target, draft))


def test_the_page_offers_only_what_the_engine_knows():
    assert set(choices(RunRequest)["dtype"]) <= set(DTYPES) and choices(RunRequest)["quantization"] == QUANTIZATIONS


def test_examples_hold_only_lanes_that_can_run():
    for example in examples():
        assert Settings.read(example).prompt == example["prompt"] and example["note"] and example["topic"] in TOPICS
        assert [checked["problem"] for checked in check(example["lanes"])] == [""] * len(example["lanes"])
