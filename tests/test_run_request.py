"""Every field of a request survives each way in and out; old links open; the JSON Schema is the API's."""
from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
import torch
from jsonschema import Draft202012Validator, ValidationError

import playground
from playground.cli import main
from playground.decoding import session
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.errors import Refusal
from playground.lane_fields import LaneConfig
from playground.request_limits import Rules
from playground.run_request import RunRequest, schema
from playground.trace import Trace
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.components.settings import Fork, Settings
from playground.ui.models.chosen_models import ChosenModels
from playground.ui.play import gallery, lessons
from playground.ui.play.kept_runs import kept_run
from playground.ui.play.playground_page import Page
from playground.ui.play.run_handlers import RunHandlers
from playground.ui.play.settings_handlers import SettingsHandlers
from playground.ui.server.api import REMOTE, compare_endpoint, run_endpoint
from playground.ui.server.gpu_work import GpuWork
from playground.ui.server.site import Site

ROOT = Path(__file__).parents[1]
LANE = {
    "strategy": "speculative", "knobs": {"drafter": "prompt_lookup"}, "extras": [["top_p", {"p": 0.5}]],
    "forced": [5, 6, 7], "seed": 11, "forked_at": 2, "weights": "int8",
}
WHOLE = RunRequest(
    "Once é🙂 {x}", "chat", "Be brief.", "Mia.", 5, 7, "a\\nb\nc", "pocket-moe", "none", "float32", "int8", [LANE],
    [["Hi", "Hello"]], "{prompt} / {context}", '[{"name": "add"}]',
)
IN_PYTHON = {
    "chat": True, "system": WHOLE.system, "context": WHOLE.context, "seed": WHOLE.seed, "max_new_tokens": WHOLE.length,
    "stop": ["a\nb", "c"], "before": WHOLE.before, "form": WHOLE.form, "tools": WHOLE.tools,
}
OF_MODELS = ("model", "draft", "dtype", "quantization")
TARGET = SimpleNamespace(name="pocket-moe", revision="", dtype="int", device=torch.device("cpu"), quantization="none")
MODELS = SimpleNamespace(target=TARGET, draft=None)
RECORDED = Trace.load(ROOT / "assets" / "traces" / "first_view.jsonl")


def fields_of(request: RunRequest) -> dict[str, Any]:
    """The fields of a request, with its lanes and stop strings in one form."""
    return {**{name: getattr(request, name) for name in RunRequest.names()},
            "lanes": request.configs(), "stop": request.stops()}


EXPECTED = fields_of(WHOLE)


@pytest.fixture
def taken(monkeypatch) -> dict[str, Any]:
    """What a session and the loading of models are given."""
    found: dict[str, Any] = {}

    def prepare(models: Any, lanes: list[LaneConfig], prompt: Prompt, limits: Limits, **more: Any):
        found.update(
            prompt=prompt.text, mode="chat" if prompt.chat else "raw", system=prompt.system, context=prompt.context,
            seed=limits.seed, length=limits.max_new_tokens, stop=limits.stop, lanes=lanes,
            before=[[*turn] for turn in prompt.before], form=prompt.form, tools=prompt.tools,
        )
        raise Refusal("taken")

    def load(*place: Any, **how: Any):
        named = dict(zip(("model", "draft", "device", "dtype", "quantization"), place)) | how
        found.update((name, named.get(name)) for name in OF_MODELS)
        return MODELS

    monkeypatch.setattr(session, "prepare", prepare)
    monkeypatch.setattr(playground, "load", load)
    monkeypatch.setattr(playground, "with_weights", lambda models, *more: models)
    monkeypatch.setattr("playground.cli.run_lanes.with_weights", lambda models, *more: models)
    monkeypatch.setattr(GpuWork, "_with_weights", lambda work, models, settings: models)
    monkeypatch.setattr(ChosenModels, "weight_loads", lambda chosen, settings: {})
    return found


# --- a session gets every field ---

def by_run() -> None:
    added = {name: LANE[name] for name in ("knobs", "extras")}
    playground.run(LANE["strategy"], WHOLE.prompt, models=None, **added, **IN_PYTHON)


def by_compare() -> None:
    playground.compare([LANE], WHOLE.prompt, **IN_PYTHON)


def by_shell() -> None:
    folder = Path("tools.json")
    folder.write_text(WHOLE.tools)
    main([
        "compare", json.dumps(LANE), "--prompt", WHOLE.prompt, "--chat", "--system", WHOLE.system, "--before",
        *WHOLE.before[0], "--context", WHOLE.context, "--form", WHOLE.form, "--tools", "tools.json", "--seed",
        str(WHOLE.seed), "--max-new-tokens", str(WHOLE.length), "--stop", "a\\nb", "--stop", "c", "--model",
        WHOLE.model, "--draft", WHOLE.draft, "--dtype", WHOLE.dtype, "--quantization", WHOLE.quantization,
    ])


def by_http(endpoint: Callable[[Site], Any]) -> Callable[[], None]:
    return lambda: [*endpoint(Site())(**asdict(WHOLE))]


def by_page() -> None:
    page = opened_page()
    [*RunHandlers(page.site, page).run(None, *(getattr(WHOLE, name) for name in RunRequest.names()))]


def opened_page() -> Page:
    with gr.Blocks():
        return Page(Site(), gr.Row())


INTO_A_SESSION = {
    "compare of a program": by_compare,
    "the shell": by_shell,
    "run over HTTP": by_http(run_endpoint),
    "compare over HTTP": by_http(compare_endpoint),
    "the controls of the page": by_page,
}


def test_the_request_of_these_tests_sets_every_field():
    blank = RunRequest()
    assert [name for name in RunRequest.names() if getattr(WHOLE, name) == getattr(blank, name)] == []
    assert set(LANE) == {each.name for each in fields(LaneConfig)}


@pytest.mark.parametrize("way", INTO_A_SESSION)
def test_every_field_reaches_the_session_and_its_models(way, taken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        INTO_A_SESSION[way]()
    except (Refusal, gr.Error) as refusal:
        assert "taken" in str(refusal)
    by_a_program = way.endswith("program")  # it loads models itself
    taken |= {name: EXPECTED[name] for name in OF_MODELS} if by_a_program else {}
    assert taken == EXPECTED


def test_run_has_the_arguments_of_compare_and_one_lane(taken):
    with pytest.raises(Refusal, match="taken"):
        by_run()
    lane = LaneConfig(LANE["strategy"], LANE["knobs"], [tuple(extra) for extra in LANE["extras"]])
    assert {name: value for name, value in taken.items() if name not in OF_MODELS} == {
        name: value for name, value in {**EXPECTED, "lanes": [lane]}.items() if name not in OF_MODELS
    }
    assert set(signature(playground.compare).parameters) - {"lanes", "remote"} == (
        set(signature(playground.run).parameters) - {"strategy"}
    )


# --- out of the page and in again ---

def by_lesson(tmp_path, monkeypatch) -> RunRequest:
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in asdict(WHOLE).items())
    (tmp_path / "07-mine.md").write_text(
        f"title: A\nminutes: 3\nabout: B.\nremember: C.\n{lines}\n## First\nshow: prompt\n\nWords.\n"
    )
    lesson = lessons.read_lesson(tmp_path / "07-mine.md")
    monkeypatch.setattr(lessons, "lessons", lambda: {"mine": lesson})
    return shown(lambda handlers, event: handlers.set_up("default", "default", event), lesson="mine", step=0)


def by_gallery(tmp_path, monkeypatch) -> RunRequest:
    monkeypatch.setattr(gallery, "examples", lambda: [{"title": "T", "note": "N", "topic": "words", **asdict(WHOLE)}])
    return shown(lambda handlers, event: handlers.pick("default", "default", event), part="examples", index=0)


def by_storage(tmp_path, monkeypatch) -> RunRequest:
    stored = json.loads(json.dumps({"reloaded": True, **asdict(WHOLE)}))
    return shown(lambda handlers, event: handlers.open(stored, SimpleNamespace(query_params={})))


def by_undo(tmp_path, monkeypatch) -> RunRequest:
    return shown(lambda handlers, event: handlers.restore(event), settings=json.loads(json.dumps(asdict(WHOLE))))


def by_link(tmp_path, monkeypatch) -> RunRequest:
    page = opened_page()
    _, copied = SettingsHandlers(page.site, page).share(*(getattr(WHOLE, name) for name in RunRequest.names()))
    opened = SimpleNamespace(query_params={"s": copied[page.link]})
    return shown(lambda handlers, event: handlers.open(None, opened))


def shown(act: Callable[[SettingsHandlers, Any], dict], **event: Any) -> RunRequest:
    """What the controls of a page show after an event."""
    page = opened_page()
    changes = act(SettingsHandlers(page.site, page), SimpleNamespace(**event))
    values = {name: changes.get(control) for name, control in zip(RunRequest.names(), page.controls())}
    return RunRequest(**{
        name: value["value"] if isinstance(value, dict) else value for name, value in values.items()
    })


def by_kept_run(tmp_path, monkeypatch) -> RunRequest:
    headers = [asdict(header) for header in RECORDED.headers[1:]]
    headers[0].update(lane=0, strategy=LANE["strategy"])
    packed = base64.b64encode(gzip.compress(json.dumps({"headers": headers, "events": []}).encode())).decode()
    return kept_run(SimpleNamespace(run="ab", settings=WHOLE.to_code(), kept=packed), Rules()).settings


OUT_AND_IN = {
    "a lesson": by_lesson, "the gallery": by_gallery, "a browser's storage": by_storage, "undo": by_undo,
    "a link": by_link, "a kept run": by_kept_run,
}


@pytest.mark.parametrize("way", OUT_AND_IN)
def test_every_field_comes_back_as_it_went_out(way, tmp_path, monkeypatch):
    assert fields_of(OUT_AND_IN[way](tmp_path, monkeypatch)) == EXPECTED


def test_a_fork_and_a_repeated_lane_keep_every_other_field():
    settings = Settings(**asdict(WHOLE))
    forked, repeated = settings.with_copy(Fork(0, [5, 6, 8], 2)), settings.repeated(0, 2, Rules())
    for made in (forked, repeated):
        assert fields_of(made) | {"lanes": []} == EXPECTED | {"lanes": []}
    assert forked.lanes == [LANE, LANE | {"forced": [5, 6, 8], "forked_at": 2}]
    assert repeated.lanes == [LANE, LANE | {"seed": 12}]


# --- old links ---

PLAIN = {"strategy": "sample", "knobs": {"k": 3}, "extras": [], "forced": [1]}
OLD_LINKS = {
    "eyJwcm9tcHQiOiJPbmNlIn0": Settings("Once"),
    "eyJwcm9tcHQiOiJUZWxsIG1lIGEgc3RvcnkgYWJvdXQgTWlhLiIsIm1vZGUiOiJjaGF0Iiwic2VlZCI6MywibGVuZ3RoIjoxNjAs"
    "ImxhbmVzIjpbeyJzdHJhdGVneSI6ImdyZWVkeSJ9LHsic3RyYXRlZ3kiOiJzcGVjdWxhdGl2ZSIsImV4dHJhcyI6W1siZHJhZnRf"
    "bW9kZWwiLHsiZGVwdGgiOjV9XSxbImdyZWVkeV9tYXRjaCIse31dXX1dfQ": Settings(
        "Tell me a story about Mia.", "chat", seed=3, length=160, lanes=[
            {"strategy": "greedy", "knobs": {}, "extras": [], "forced": []},
            {"strategy": "speculative", "knobs": {}, "extras": [["draft_model", {"depth": 5}], ["greedy_match", {}]],
             "forced": []},
        ]),
    "eyJwcm9tcHQiOiJPbmNlIMOp8J-ZgiB7eH0iLCJtb2RlIjoiY2hhdCIsInN5c3RlbSI6IkJlIGJyaWVmLiIsImNvbnRleHQiOiJN"
    "aWEuIiwic2VlZCI6NSwibGVuZ3RoIjo3LCJzdG9wIjoiYVxcbmJcbmMiLCJtb2RlbCI6IlF3ZW4vUXdlbjMtMC42QiIsImRyYWZ0"
    "Ijoibm9uZSIsImR0eXBlIjoiZmxvYXQzMiIsInF1YW50aXphdGlvbiI6ImludDgiLCJsYW5lcyI6W3sic3RyYXRlZ3kiOiJzcGVj"
    "dWxhdGl2ZSIsImtub2JzIjp7ImRyYWZ0ZXIiOiJwcm9tcHRfbG9va3VwIn0sImV4dHJhcyI6W1sidG9wX3AiLHsicCI6MC41fV1d"
    "LCJmb3JjZWQiOls1LDYsN10sInNlZWQiOjExLCJmb3JrZWRfYXQiOjIsIndlaWdodHMiOiJpbnQ4In1dLCJiZWZvcmUiOltbIkhp"
    "IiwiSGVsbG8iXV0sImZvcm0iOiJ7cHJvbXB0fSAvIHtjb250ZXh0fSIsInRvb2xzIjoiW3tcIm5hbWVcIjpcImFkZFwifV0ifQ":
        Settings(**{**asdict(WHOLE), "model": "Qwen/Qwen3-0.6B", "tools": '[{"name":"add"}]'}),
    # from the survey's page, with settings of its own
    "eyJ0YXNrcyI6WyJyZWNvcmRzIl0sImNvdW50IjozLCJyZXBlYXRzIjoxLCJvd24iOiJ4In0": SurveySettings(
        tasks=["records"], count=3, repeats=1, own="x"),
    # malformed lanes, an unknown field, and values of wrong types; weights that there are not are the lane's to refuse
    "eyJwcm9tcHQiOiAiT25jZSIsICJsYW5lcyI6IFt7InN0cmF0ZWd5IjogImdyZWVkeSJ9LCB7Im5hbWUiOiAieCJ9LCAzLCB7InN0"
    "cmF0ZWd5IjogInNhbXBsZSIsICJzZWVkIjogLTEsICJ3ZWlnaHRzIjogImludDMiLCAiZm9ya2VkX2F0IjogNCwgImZvcmNlZCI6"
    "IFsxLCAieCJdLCAia25vYnMiOiB7ImZpbGUiOiAiL2V0Yy9wYXNzd2QiLCAiayI6IDMsICJkZWVwIjoge319fV0sICJzZWVkIjog"
    "IjMiLCAibW9kZSI6ICJjaGF0dCIsICJjb2xvdXIiOiAicmVkIiwgImJlZm9yZSI6IFtbImEiLCAiYiJdLCBbImMiXSwgM119": Settings(
        "Once", before=[["a", "b"]], lanes=[
            {"strategy": "greedy", "knobs": {}, "extras": [], "forced": []}, {**PLAIN, "weights": "int3"}]),
}


@pytest.mark.parametrize("code", OLD_LINKS, ids=lambda code: zlib.crc32(code.encode()))
def test_an_old_link_opens(code):
    expected = OLD_LINKS[code]
    assert type(expected).from_code(code) == expected
    if code.endswith("0"):  # what the page writes today
        assert expected.to_code() == code


# --- the schema, and what is refused ---

def test_the_schema_is_stored_and_describes_every_field():
    stored = json.loads((ROOT / "assets" / "run_request.schema.json").read_text())
    assert stored == schema(), "write json.dumps(schema(), indent=1) and a newline to assets/run_request.schema.json"
    assert all("description" in about for about in schema()["properties"].values())
    Draft202012Validator(schema()).validate(asdict(WHOLE))


@pytest.mark.parametrize(("change", "said"), [
    ({"seed": "3"}, "seed must be a whole number, not '3'"),
    ({"length": True}, "length must be a whole number"),
    ({"mode": "chatt"}, "mode must be one of raw, chat, not 'chatt'"),
    ({"quantization": "int3"}, "quantization must be one of none, int8, nf4, fp4"),
    ({"tools": 3}, "tools must be text"),
    ({"before": [["a"]]}, "before must be a list of"),
    ({"stop": [3]}, "stop must be text, or a list of texts"),
    ({"lanes": [{"strategy": "greedy", "forcd": []}]}, "did you mean forced?"),
    ({"lanes": ["greedy"]}, "Lane 1 is malformed"),
])
def test_what_the_schema_refuses_is_refused_with_a_sentence(change, said):
    with pytest.raises(ValidationError):
        Draft202012Validator(schema()).validate(asdict(WHOLE) | change)
    with pytest.raises(Refusal) as refused:
        RunRequest.given(asdict(WHOLE) | change)
    assert said in str(refused.value)


def test_an_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(Refusal, match="no field 'promt'; did you mean prompt?"):
        RunRequest.given({"promt": "Once"})


@pytest.mark.parametrize("endpoint", [run_endpoint, compare_endpoint])
def test_the_arguments_of_the_api_are_the_fields_and_keep_their_places(endpoint):
    arguments = signature(endpoint(Site(load=None))).parameters
    assert {*arguments} == {*RunRequest.names(), *REMOTE}
    assert [*arguments][:16] == [
        "prompt", "lanes", "seed", "length", "mode", "system", "stop", "context", "model", "draft", "before", "remote",
        "remote_model", "remote_key", "form", "tools",
    ]
    assert all(f"            {name}: " in endpoint(Site(load=None)).__doc__ for name in arguments)


def test_a_lesson_in_the_address_goes_before_what_is_stored_but_not_before_what_a_reload_brings():
    """The lesson sets up its step by itself: an answer that came after it would undo that."""
    page, stored = opened_page(), json.loads(json.dumps(asdict(WHOLE)))
    acts, visit = SettingsHandlers(page.site, page), SimpleNamespace(query_params={"lesson": "entropy"})
    assert page.prompt not in acts.open(stored, visit)
    assert page.prompt in acts.open(stored | {"reloaded": True}, visit)
