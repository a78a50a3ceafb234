"""What the command line refuses, in one line and with a hint."""
from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from saved import CONTEXT

from playground.cli import remaining_time
from playground.cli.bench import speed as bench_speed
from playground.cli.lane_options import read_extra
from playground.cli.terminal_view import Screen
from playground.contract import find
from playground.errors import Refusal
from playground.trace import Trace
from support.shell_runs import PROMPT, ROOT, assert_one_line, no_models, pair, saved, shell, show  # noqa: F401

IMPOSSIBLE = {"type": "object", "properties": {"ok": False}, "required": ["ok"]}


# --- what was meant ---

@pytest.mark.parametrize(("words", "sentence"), [
    ("run eagle_3 P", "`run speculative --with eagle_3` does that."),
    ("run greedy P --with eagle_3", "`run speculative --with eagle_3` does that."),
    ("run top_p P", "`run greedy --with top_p` does that."),
    ("run greedy_match P", "`run speculative --with greedy_match` does that."),
    ("run fastdraft P", "`variant fastdraft` does that."),
    ("run parallelbench P", "`study parallelbench` does that."),
    ("run greedy P --with sample", "choose it as the decoder of a lane."),
    ("run greedy --promt x", "There is no option '--promt'; did you mean --prompt?"),
    ("run greedy --max-new-token=5 P", "There is no option '--max-new-token'; did you mean --max-new-tokens?"),
    ("run greedy P --zzz", "There is no option '--zzz'. `python"),
    ("run greedy P --with top_k:k=5,temprature=3", "top_k has no knob 'temprature'; its knobs are k."),
    ("run greedy P --with adacad:floor=0,bse=3", "adacad has no knob 'bse'; did you mean base?"),
])
def test_a_name_in_the_wrong_place_or_misspelt_is_answered_with_what_was_meant(shell, no_models, words, sentence):
    code, out, err = shell(*(part for word in words.split() for part in (PROMPT if word == "P" else [word])))
    assert code == 2 and not out and sentence in err
    assert_one_line(err)


@pytest.mark.parametrize("name", ["prompt_lookup", "top_p", "greedy_match"])
def test_the_corrected_command_runs(shell, pair, name):
    command = shell("run", name, *PROMPT)[2].split("`")[1]
    code, out, _ = shell(*command.split(), *PROMPT, *pair, "--max-new-tokens", "2")
    assert code == 0 and out


def test_a_value_may_look_like_an_option_or_a_knob(shell, pair):
    for words in (["--prompt=--promt"], ["--prompt", "--promt is misspelt"]):
        assert shell("run", "greedy", *words, *pair, "--max-new-tokens", "2")[0] == 0
    assert read_extra("regex:pattern=a,b=c") == ("regex", {"pattern": "a,b=c"})


# --- refusals ---

@pytest.mark.parametrize(
    "words",
    [
        "",
        "fly",
        "list gredy",
        "run",
        "run greedy",
        "run gredy P",
        "run top_p P",
        "run greedy P --set k=3",
        "run sample P --set temperature=9",
        "run sample P --set temperature=hot",
        "run sample P --set temperature",
        "run sample P --set top_k=1.5",
        "run sample P --set top_k=1 --set top_k=2",
        "run greedy --prompt-file /nowhere",
        "run greedy --prompt-file EMPTY",
        "run greedy --prompt-file BYTES",
        "run greedy P --prompt-file EMPTY",
        "run greedy P --seed one",
        "run greedy P --seed -1",
        "run greedy P --max-new-tokens 0",
        "run greedy P --nonsense",
        "run greedy P --system Be",
        "run greedy P --trace /no/where",
        "run greedy P --with adacad",
        "run greedy P --context \udcff",
        "run greedy P --stop \udcff",
        "run greedy --prompt \udcff",
        "run greedy P --with regex:patern=1",
        "run greedy P --with regex:1",
        "run greedy P --with prompt_lookup",
        "run greedy P --with json_schema:file=/nowhere",
        "run greedy P --with regex:file=EMPTY",
        "run greedy P --with regex --with choice",
        "run speculative P --with greedy_match --with top_p",
        "compare P",
        "compare greedy gredy P",
        "compare greedy sample P --set k=3",
        "replay /nowhere",
        "replay EMPTY",
        "replay EMPTY --speed -1",
        "replay TRACE --csv /no/where",
        "replay TRACE --html /",
        "bench --repeats 0",
        "bench --prompts /nowhere",
        "bench --prompts EMPTY",
        "bench --json /no/where",
    ],
)
def test_wrong_input_is_refused_in_one_line_before_a_model_is_loaded(shell, no_models, tmp_path, words):
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    files = {
        "EMPTY": str(tmp_path / "empty"),
        "BYTES": str(tmp_path / "bytes"),
        "TRACE": str(ROOT / "assets" / "traces" / "first_view.jsonl"),
    }
    line = words.replace("P ", "--prompt Once ").removesuffix(" P") + (" --prompt Once" if words.endswith(" P") else "")
    for name, path in files.items():
        line = line.replace(name, path)
    code, out, err = shell(*line.split())
    assert code == 2 and out == ""
    assert_one_line(err)


def test_bench_announces_its_plan_before_anything_is_loaded(shell, monkeypatch):
    def stop(options):
        raise Refusal("Nothing was loaded yet.")

    monkeypatch.setattr(bench_speed, "prepare_machine", stop)
    for words, said in ((["bench"], "10 prompts of 64 tokens"), (["bench", "--repeats", "1"], "2 times each")):
        err = shell(*words)[2]
        assert said in err and re.search(r"about \d+ minutes", err) and err.endswith("error: Nothing was loaded yet.\n")


def test_after_the_first_part_the_rest_is_estimated_once_at_the_same_pace(monkeypatch, capsys):
    clock = iter([10.0, 40.0, 41.0, 42.0])
    monkeypatch.setattr(remaining_time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = remaining_time.RemainingTime()
    for share in (0.0, 0.1, 0.2, 1.0):
        progress(share, "round 1")
    said = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if "left" in line]
    assert said == ["10% done, about 4 minutes left on this machine: round 1"]  # nine times the 30 s of a tenth


def test_a_log_says_every_half_minute_how_long_the_rest_takes_and_begins_anew_with_each_part(monkeypatch, capsys):
    seconds = iter([0.0, 4.0, 10.0, 20.0, 41.0, 42.0, 52.0])
    monkeypatch.setattr(remaining_time, "perf_counter", lambda: next(seconds))
    progress = remaining_time.RemainingTime()
    for share, text in ((0.0, "a"), (0.1, "a"), (0.2, "a"), (0.3, "a"), (0.5, "a"), (0.0, "b"), (0.5, "b")):
        progress(share, text)
    assert capsys.readouterr().err.splitlines() == [
        "20% done, about 40 seconds left on this machine: a",
        "50% done, about 41 seconds left on this machine: a",
        "50% done, about 10 seconds left on this machine: b",
    ]


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_refused(shell, no_models, prompt):
    code, _, err = shell("run", "greedy", "--prompt", prompt)
    assert code == 2 and "prompt is empty" in err


@pytest.mark.parametrize(
    "extra, says",
    [
        ("regex:pattern=(", "unclosed group"),
        ("lark:source=start: nowhere", "nowhere"),
        ("json_schema:source={", "not valid JSON"),
        (f"json_schema:source={json.dumps(IMPOSSIBLE)}", "nsatisfiable"),
        ("choice:options=a||b", "empty"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_engines_reason(shell, pair, extra, says):
    code, out, err = shell("run", "greedy", *PROMPT, *pair, "--with", extra, "--json")
    assert code == 2 and out == "" and says in err
    assert_one_line(err)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--model", "/nowhere"], "no folder"),
        (["--model", "EMPTY"], "config.json"),
        (["--device", "toaster"], "toaster"),
        (["--dtype", "int3"], "int3"),
        (["--quantization", "q4"], "q4"),
        (["--prompt", "bird " * CONTEXT], "shorten"),
    ],
)
def test_models_and_prompts_that_do_not_fit_are_refused(shell, saved, tmp_path, options, says):
    words = ["--prompt", "The"] if "--prompt" not in options else []
    code, out, err = shell(
        "run",
        "greedy",
        *words,
        "--model",
        saved.target,
        *[str(tmp_path) if word == "EMPTY" else word for word in options],
    )
    assert code == 2 and out == "" and says in err
    assert_one_line(err)


def test_a_draft_with_other_tokens_is_refused_by_the_lane_that_would_use_it_and_by_no_other(shell, saved):
    code, _, err = shell("run", "speculative", *PROMPT, "--model", saved.target, "--draft", saved.stranger)
    assert code == 2 and "OmniDraft" in err
    assert_one_line(err)
    assert shell("run", "greedy", *PROMPT, "--model", saved.target, "--draft", saved.stranger)[0] == 0


def test_a_missing_draft_that_is_needed_is_refused_with_advice(shell, saved):
    code, _, err = shell("run", "speculative", *PROMPT, "--model", saved.target)
    assert code == 2 and "needs a draft model" in err


def test_a_lane_that_fails_midway_shows_its_text(shell, pair, monkeypatch):
    def stumble(self, lm):
        rows = yield lm.prefill()
        yield lm.keep(lm.pick(rows))
        raise Refusal("It stumbled: try another strategy.")

    monkeypatch.setattr(find("greedy"), "decode", stumble)
    code, out, err = shell("run", "greedy", *PROMPT, *pair, "--json")
    result = json.loads(out)
    assert code == 2 and err == "error: It stumbled: try another strategy.\n"
    assert (
        result["reason"] == "failed" and result["message"].startswith("It stumbled") and len(result["token_ids"]) == 1
    )


def test_ctrl_c_stops_and_keeps_what_was_written(shell, pair, tmp_path, monkeypatch):
    show, seen = Screen.show, []

    def interrupted(self, stamped):
        seen.append(stamped)
        if len(seen) == 10:
            raise KeyboardInterrupt
        show(self, stamped)

    monkeypatch.setattr(Screen, "show", interrupted)
    code, out, err = shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 60, "--trace", tmp_path / "t.jsonl")
    assert code == 130 and "error" not in err and "stopped" in out
    assert Trace.load(tmp_path / "t.jsonl").events[-1].event.reason == "stopped"


@pytest.mark.slow
def test_as_a_command_only_json_reaches_standard_output(pair):
    seen = subprocess.run(
        [sys.executable, "-m", "playground", "run", "speculative", *PROMPT, *pair, "--max-new-tokens", "6", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert seen.returncode == 0 and seen.stderr == "" and len(json.loads(seen.stdout)["token_ids"]) == 6
