"""The HTTP endpoints of the page: over small random models through Gradio's client, and over
sessions that only count.
"""
from __future__ import annotations

import json
from types import SimpleNamespace

import gradio as gr
import pytest
import saved
from chromium import PATIENCE
from completion_server import CompletionServer, text
from gradio_client import Client
from gradio_client.exceptions import AppError

import playground
from playground.cli import main
from playground.contract import discover, find
from playground.contract.lane_config import LaneConfig
from playground.contract.metadata import facts
from playground.request_limits import Rules
from playground.trace.comparison import baseline_of, compared
from playground.ui import start
from playground.ui.components.settings import Settings
from playground.ui.play.gallery import examples
from playground.ui.server.api import compare_endpoint, run_endpoint
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.launched import launched

PROMPT = "The red fox"
NAMES = {"/run", "/compare", "/strategies", "/examples", "/questions"}
GREEDY, SAMPLE, GUESSING = (
    {"strategy": "greedy"},
    {"strategy": "sample", "knobs": {"temperature": 1.5, "top_k": 3}},
    {"strategy": "speculative"},
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return saved.save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(pair):
    with launched(build(Site(ModelRequest(pair.target, pair.draft)))) as address:
        yield Client(address, verbose=False)


def compare(client: Client, *lanes: dict, **more) -> list[dict]:
    return client.predict(PROMPT, list(lanes), api_name="/compare", **({"length": 12} | more))


def refused(client: Client, *lanes, **more) -> str:
    """The message a program gets instead of an answer."""
    with pytest.raises(AppError) as answer:
        compare(client, *lanes, **more)
    return str(answer.value)


# --- list of endpoints ---

@pytest.mark.slow
def test_a_stream_message_changes_only_what_it_contains():
    """Gradio notifies each component that shows a listener's progress of every message, and copies its value each time.
    """
    config = build(Site(load=None)).config
    listeners = [listener for listener in config["dependencies"] if listener["api_visibility"] == "private"]
    assert len(listeners) > 20
    assert all(listener["show_progress_on"] == [] for listener in listeners if listener["outputs"])


@pytest.mark.slow
def test_the_public_endpoints_are_exactly_these(client):
    described = client.view_api(return_format="dict")
    assert set(described["named_endpoints"]) == NAMES and not described["unnamed_endpoints"]


def test_every_argument_is_typed_and_every_endpoint_described(client):
    info = client.view_api(return_format="dict")["named_endpoints"]
    assert all(
        argument["type"] and argument["parameter_name"]
        for endpoint in info.values()
        for argument in endpoint["parameters"]
    )
    assert all(endpoint["description"] for endpoint in info.values())
    assert names_of(info["/run"]) == names_of(info["/compare"])


def names_of(endpoint: dict) -> list[str]:
    return [argument["parameter_name"] for argument in endpoint["parameters"]]


# --- run ---

def test_run_streams_every_token_of_every_lane(client):
    job = client.submit(PROMPT, [GREEDY, GUESSING], length=9, api_name="/run")
    job.result(60)
    frames = [json.loads(text) for text in job.outputs()]
    commits = [event for frame in frames for event in frame["events"] if event["kind"] == "commit"]
    assert frames[-1]["state"] == "done" and [header["lane"] for header in frames[0]["headers"]] == [0, 1]
    assert [sum(len(commit["ids"]) for commit in commits if commit["lane"] == lane) for lane in (0, 1)] == [9, 9]


# --- compare ---

def test_compare_returns_what_python_returns(client, pair):
    answer = compare(client, GREEDY, GUESSING, SAMPLE, seed=3)
    configs = [LaneConfig(lane["strategy"], lane.get("knobs", {})) for lane in (GREEDY, GUESSING, SAMPLE)]
    expected = compared(
        playground.compare(configs, PROMPT, models=playground.load(pair.target, pair.draft), seed=3, max_new_tokens=12),
        0,
    )
    for lane, other in zip(answer, expected, strict=True):
        assert without_clocks(lane) == without_clocks(other)
        assert lane["metrics"]["tokens_per_second"] > 0


def without_clocks(lane: dict) -> dict:
    """The fields that do not depend on the machine; numbers are rounded in transit."""
    clocks = ("seconds", "tokens_per_second", "time_to_first_token", "mask_seconds_per_token")
    answer = {**lane, "metrics": {name: value for name, value in lane["metrics"].items() if name not in clocks}}
    answer["difference"] = answer["difference"] and {
        **answer["difference"],
        "sentence": answer["difference"]["sentence"].partition(";")[0],
    }
    return json.loads(json.dumps(answer), parse_float=lambda number: round(float(number), 3))


def test_compare_compares_every_lane_with_the_first(client):
    sampled, plain, guessed = compare(client, SAMPLE, GREEDY, GUESSING)
    assert {lane["against"] for lane in (sampled, plain, guessed)} == {"sample"} and sampled["same_text"]
    assert plain["difference"] == guessed["difference"] and plain["difference"]["margin"] > 0
    assert plain["token_ids"][plain["difference"]["token"]] != sampled["token_ids"][plain["difference"]["token"]]
    assert guessed["metrics"]["acceptance_rate"] is not None and guessed["metrics"]["draft_forwards"] > 0


def test_a_lane_that_fails_says_why_and_the_others_are_reported(client):
    wrong, plain = compare(client, {"strategy": "sample", "knobs": {"temperature": 9}}, GREEDY)
    assert wrong["reason"] == "failed" and "Temperature must be between" in wrong["message"]
    assert plain["same_text"] is None and len(plain["token_ids"]) == 12


@pytest.mark.parametrize("lanes, more, sentence", [
    ([], {}, "There is no lane to run"),
    ([GREEDY] * 5, {}, "list of one to 4"),
    ([GREEDY, {"name": "greedy"}], {}, "Lane 2 is malformed"),
    ([{"strategy": "greedy", "extras": ["top_p"]}], {}, "Lane 1 is malformed"),
    ([{"strategy": "greedy", "knobs": {"file": "/etc/passwd"}}], {}, "Lane 1 is malformed"),
    ([{"strategy": "gredy"}], {}, "Did you mean greedy"),
    ([GREEDY], {"mode": "chatt"}, "mode must be one of raw, chat, not 'chatt'"),
    ([GREEDY], {"length": 100_000}, "number of tokens must be from 1 to"),
    ([GREEDY], {"seed": "3"}, "seed must be a whole number"),
    ([GREEDY], {"model": "/no/such/folder"}, "no folder /no/such/folder"),
])
def test_bad_input_is_answered_with_a_sentence(client, lanes, more, sentence):
    assert sentence in refused(client, *lanes, **more)


def test_lanes_that_are_no_list_are_answered_with_a_sentence(client):
    with pytest.raises(AppError, match="must be a list of one to 4"):
        client.predict(PROMPT, "greedy", api_name="/compare")


@pytest.mark.slow
def test_a_public_page_keeps_its_limits_for_programs(pair):
    with launched(build(Site(ModelRequest(pair.target, pair.draft), Rules.for_visitors()))) as address:
        client = Client(address, verbose=False)
        assert "from 1 to 256" in refused(client, GREEDY, length=300)
        assert "only the models in its list" in refused(client, GREEDY, model=pair.target)


@pytest.mark.slow
def test_a_program_that_leaves_ends_its_comparison():
    from counting import Counting
    begun, models = [], SimpleNamespace(target=SimpleNamespace(name="counter", dtype="int", device="cpu"), draft=None)
    site = Site(load=lambda *names, **how: models, prepare=lambda *asked: begun.append(Counting([])) or begun[-1])
    with launched(build(site)) as address:
        job = Client(address, verbose=False).submit(PROMPT, [GREEDY], api_name="/compare")
        while len(job.outputs()) < 3:
            assert not job.done()
        job.cancel()
        assert begun[0].stopped.wait(PATIENCE)


def test_the_baseline_of_the_shell_is_greedy_if_it_ran(pair):
    results = playground.compare(["sample", "greedy"], PROMPT, models=playground.load(pair.target), max_new_tokens=3)
    assert baseline_of(results) == 1 and {lane["against"] for lane in compared(results, baseline_of(results))} == {
        "greedy"
    }


# --- strategies and examples ---

def test_strategies_are_reported_as_they_are_declared(client):
    answer = client.predict(api_name="/strategies")
    assert answer == json.loads(json.dumps([facts(cls) for cls in discover().values()]))
    assert client.predict("asap", api_name="/strategies")[0]["needs"] == ["constraint"]


def test_the_slots_and_refusals_of_a_strategy_are_reported():
    assert facts(find("speculative"))["slots"] == [{"field": "drafter", "kind": "drafter", "default": "draft_model"},
                                                   {"field": "verifier", "kind": "verifier", "default": "rejection"}]
    assert facts(find("beam_search"))["refuses"] == ["drawing"] and facts(find("top_p"))["refuses"] == []


def test_an_unknown_strategy_is_answered_with_a_sentence(client):
    with pytest.raises(AppError, match="Did you mean"):
        client.predict("top_q", api_name="/strategies")


def test_examples_are_those_of_the_gallery_and_can_be_compared(client):
    answer = client.predict(api_name="/examples")
    assert answer == examples()
    assert all(Settings.read(example).prompt == example["prompt"] for example in answer)


@pytest.mark.slow
def test_questions_are_reported_by_task_and_a_lane_s_answer_to_one_is_judged(client):
    answer = client.predict(api_name="/questions")
    task = answer[0]["task"]
    some = client.predict(task, api_name="/questions")
    assert some == [question for question in answer if question["task"] == task] and len(some) < len(answer)
    asked = {name: some[0][name] for name in ("prompt", "mode", "context", "before")}
    lane, = client.predict(lanes=[GREEDY], length=4, api_name="/compare", **asked)
    assert lane["judged"]["expected"] == some[0]["expected"] and lane["judged"]["score"] < 1
    assert "judged" not in compare(client, GREEDY)[0]


@pytest.mark.slow
def test_tools_are_a_list_or_its_json_and_need_a_chat_template_with_a_place_for_them(client):
    tools = [{"type": "function", "function": {"name": "add"}}]
    for given in (tools, json.dumps(tools)):
        assert "no place for tools" in refused(client, GREEDY, mode="chat", tools=given)
        assert "Tools require a chat" in refused(client, GREEDY, tools=given)
    assert "tools must be" in refused(client, GREEDY, mode="chat", tools=3)


def test_a_schema_is_a_text_or_an_object(client):
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"], "additionalProperties": False}
    lanes = [
        {"strategy": "greedy", "extras": [["json_schema", {"source": source}]]}
        for source in (schema, json.dumps(schema))
    ]
    given, written = compare(client, *lanes, length=40)
    assert given["text"] == written["text"] and "ok" in json.loads(given["text"])


def test_an_object_in_the_place_of_another_knob_is_refused(client):
    lane = {"strategy": "greedy", "extras": [["regex", {"pattern": {"type": "object"}}]]}
    assert "malformed" in refused(client, lane)


def test_an_unknown_task_is_answered_with_a_sentence(client):
    with pytest.raises(AppError, match="There is no task 'alchemy'"):
        client.predict("alchemy", api_name="/questions")


# --- tools for Model Context Protocol clients ---

def test_without_its_package_the_option_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    ended = main(["serve", "--mcp"])
    said = capsys.readouterr().err
    assert ended == 2 and "pip install" in said and said.count("\n") == 1


# --- a lane of a server ---

@pytest.mark.slow
def test_a_program_adds_the_lane_of_a_server(client):
    with CompletionServer([text(" fox", " runs")]).running() as server:
        local, remote = compare(client, GREEDY, remote=server.address, remote_model="fox")
        assert (remote["strategy"], remote["text"]) == ("remote", " fox runs")
        assert remote["metrics"]["target_forwards"] is None
        assert local["strategy"] == "greedy" and "Authorization" not in server.requests[0]["headers"]
        four = refused(client, *[GREEDY] * 4, remote=server.address, remote_model="fox")
        assert "more than 4 lanes" in four and len(server.requests) == 1
    assert "is not the address of a server" in refused(client, GREEDY, remote="file:///etc", remote_model="fox")


@pytest.mark.parametrize("endpoint", [run_endpoint, compare_endpoint])
def test_a_public_page_refuses_the_lane_of_a_server(endpoint):
    site = Site(load=None, rules=Rules.for_visitors())
    with pytest.raises(gr.Error, match="does not connect to other servers"):
        next(endpoint(site)(PROMPT, [GREEDY], remote="http://127.0.0.1:1", remote_model="fox"))
