"""A byte order mark, as Windows editors and PowerShell write it, is no part of a text, and never silently kept."""
from __future__ import annotations

import io
import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from completion_server import DONE, Answer, CompletionServer
from toys import save

from playground.cli.input_files import read_text
from playground.cli.lane_options import lane_given
from playground.cli.training.training_texts import read_texts
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.engine.checkpoint.hub_files import find_source
from playground.errors import Refusal
from playground.remote.completion_request import CompletionRequest
from playground.remote.remote_lane import RemoteLane
from playground.remote.remote_server import RemoteServer
from playground.request_limits import MARK
from playground.ui.play import lessons

TEXT = "Once upon a time"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def marked(path: Path, text: str) -> str:
    path.write_bytes(BOM_UTF8 + text.encode())
    return str(path)


def test_files_and_standard_input_are_read_without_it(tmp_path, monkeypatch):
    assert read_text(marked(tmp_path / "p.txt", TEXT)) == TEXT
    monkeypatch.setattr("sys.stdin", io.StringIO(MARK + TEXT))
    assert read_text("-") == TEXT
    assert read_texts([marked(tmp_path / "t.jsonl", json.dumps({"text": TEXT}))]) == [TEXT]


def test_only_the_mark_before_a_text_is_left_out(tmp_path):
    assert read_text(marked(tmp_path / "p.txt", f"a{MARK}b")) == f"a{MARK}b"


@pytest.mark.parametrize("name, knob, source", [
    ("json_schema", "source", '{"type": "integer"}'),
    ("gbnf", "source", 'root ::= "a"\n'),
    ("lark", "source", 'start: "a"'),
])
def test_a_grammar_is_read_without_it_from_a_file_and_from_a_field(tmp_path, name, knob, source):
    path = marked(tmp_path / "grammar", source)
    for lane in (
        LaneConfig("greedy", {}, [(name, {knob: MARK + source})]),
        lane_given("greedy", [], [f"{name}:file={path}"]),
    ):
        assert getattr(assemble(lane).constraint, knob) == source


def test_a_prompt_is_read_without_it_whichever_part_it_is():
    given = Prompt(MARK + TEXT, True, MARK + "s", MARK + "c", ((MARK + "u", MARK + "a"),), MARK + "{context} {prompt}")
    assert given == Prompt(TEXT, True, "s", "c", (("u", "a"),), "{context} {prompt}")


def test_a_lesson_is_read_without_it(tmp_path):
    path = tmp_path / "lesson.md"
    marked(path, "title: One")
    assert lessons._text_of(path) == "title: One"


@pytest.mark.parametrize("file", JSON_FILES)
def test_json_of_a_model_with_it_is_refused_by_its_name(folder, tmp_path, file):
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    text = (place / file).read_text(encoding="utf-8") if (place / file).exists() else "{}"
    marked(place / file, text)
    with pytest.raises(Refusal, match=f"^{file} of .* begins with a byte order mark: save it as UTF-8 without one"):
        find_source(str(place))


def test_the_first_event_of_a_server_is_read_with_it():
    event = json.dumps({"choices": [{"text": "Hi", "finish_reason": "stop"}]}).encode()
    with CompletionServer([Answer([BOM_UTF8 + b"data: " + event + b"\n\n", DONE])]).running() as server:
        lane = RemoteLane(CompletionRequest(RemoteServer(server.address, "m"), Prompt("Say"), Limits()))
        while not lane.finished:
            events = lane.go_on() if lane.arrived(5.0) else []
            if any(event.kind == "commit" and event.text == "Hi" for event in events):
                return
    pytest.fail("the text of the first event is lost")
