"""The command line: its output, its refusals, and its agreement with the page and Python."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest

import playground
from playground.cli.lane_options import read_extra
from playground.cli.terminal_view import CONTROL, baseline_of, settled, table
from playground.contract import discover, find
from playground.events import Commit, Done, Failed, Header, Rollback, Stamped
from playground.player.standalone import to_html
from playground.trace import Trace
from playground.trace.csv_export import to_csv
from playground.trace.result import Result
from support.shell_runs import PROMPT, ROOT, assert_one_line, no_models, pair, saved, shell, show  # noqa: F401

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
METRICS = {
    "tokens",
    "seconds",
    "tokens_per_second",
    "target_forwards",
    "draft_forwards",
    "tokens_per_target_forward",
    "acceptance_rate",
    "acceptance_by_position",
    "mean_entropy",
    "kv_live_peak",
    "kv_bytes_peak",
    "mask_seconds_per_token",
    "wasted_tokens",
}


def outside(code: str, *words: str) -> subprocess.CompletedProcess:
    """A separate Python process."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


# --- list ---

def test_list_json_has_everything_about_every_strategy(shell, no_models):
    code, out, _ = shell("list", "--json")
    listed = json.loads(out)
    assert code == 0 and {entry["name"] for entry in listed} == set(discover())
    for entry in listed:
        assert set(entry) == {
            "name",
            "kind",
            "family",
            "title",
            "paper",
            "sheet",
            "reconstruction",
            "sure",
            "summary",
            "guarantee",
            "needs",
            "refuses",
            "slots",
            "knobs",
        }
        assert all(set(knob) == {"name", "type", "default", "min", "max", "help", "choices"} for knob in entry["knobs"])


def test_list_shows_the_limits_of_a_knob(shell, no_models):
    sample = json.loads(shell("list", "sample", "--json")[1])[0]
    assert (
        sample["kind"] == "decoder"
        and sample["family"] == "sampling"
        and sample["guarantee"] == list(find("sample").guarantee)
    )
    temperature = next(knob for knob in sample["knobs"] if knob["name"] == "temperature")
    assert (temperature["type"], temperature["default"], temperature["min"], temperature["max"]) == (
        "float",
        0.8,
        0.0,
        5.0,
    )


def test_list_shows_names_by_kind_and_the_knobs_of_one_strategy(shell, no_models):
    assert "\n  greedy " in shell("list")[1]
    out = shell("list", "prompt_lookup")[1]
    assert "earliest | latest" in out and "1 to 8" in out


def test_list_says_in_one_line_each_what_strategies_do(shell, no_models):
    lines = shell("list")[1].splitlines()
    assert sum(line.startswith("  ") for line in lines) == len(discover())
    [line] = [line for line in lines if line.startswith("  prompt_lookup ")]
    assert line.split(None, 2) == ["prompt_lookup", find("prompt_lookup").family(), find("prompt_lookup").summary()]


def test_list_in_a_terminal_is_as_wide_as_it(shell, no_models, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = [line for line in shell("list")[1].splitlines() if line.startswith("  ")]
    assert max(map(len, lines)) <= 70 and any(line.endswith("…") for line in lines)


@pytest.mark.parametrize(("words", "found", "left_out"), [
    (["--search", "JSON schema"], "json_schema", "greedy"),
    (["--kind", "drafter", "--family", "draft_heads"], "eagle", "prompt_lookup"),
    (["--search", "tree", "--kind", "drafter"], "dyspec", "eagle"),
])
def test_list_shows_what_was_asked_for(shell, no_models, words, found, left_out):
    listed = json.loads(shell("list", *words, "--json")[1])
    names = {entry["name"] for entry in listed}
    assert found in names and left_out not in names and len(names) < 60


def test_a_search_that_finds_nothing_is_refused(shell, no_models):
    code, out, err = shell("list", "--search", "no such method")
    assert code == 2 and not out and "use fewer words" in err


# --- run ---

def test_a_remark_on_a_schema_is_printed_once(shell, pair, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object", "propertys": {}, "properties": {"a": {}}}')
    words = ["--with", f"json_schema:file={tmp_path / 'schema.json'}", "--max-new-tokens", "3"]
    assert shell("run", "greedy", *PROMPT, *pair, *words)[2].count("'propertys'") == 1


def test_run_prints_one_object(shell, pair):
    code, out, err = shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 12, "--json")
    result = json.loads(out)
    assert code == 0 and err == ""
    assert set(result) == {"strategy", "text", "token_ids", "outputs", "metrics", "reason"} and METRICS <= set(
        result["metrics"]
    )
    assert len(result["token_ids"]) == result["metrics"]["tokens"] == 12 and result["reason"] == "length"
    assert result["outputs"] == [{"text": result["text"], "token_ids": result["token_ids"]}]


@pytest.mark.slow
def test_a_seed_repeats_a_run_and_another_changes_it(shell, pair):
    def ids(seed: int) -> list[int]:
        return json.loads(
            shell("run", "sample", *PROMPT, *pair, "--set", "temperature=1.5", "--seed", seed, "--json")[1]
        )["token_ids"]

    assert ids(3) == ids(3) != ids(4)


def test_text_ends_before_a_stop_string_and_the_ids_do_not(shell, pair):
    whole = json.loads(shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 24, "--json")[1])
    stop = whole["text"][8:11]
    cut = json.loads(
        shell(
            "run", "greedy", *PROMPT, *pair, "--max-new-tokens", 24, "--stop", stop, "--stop", "never there", "--json"
        )[1]
    )
    assert cut["reason"] == "stop_string" and cut["text"] == whole["text"][:whole["text"].index(stop)]
    assert cut["token_ids"] == whole["token_ids"][:len(cut["token_ids"])] and len(cut["token_ids"]) > 0


def test_with_adds_a_toggle_whose_grammar_comes_from_a_file(shell, pair, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    code, out, _ = shell(
        "run",
        "sample",
        *PROMPT,
        *pair,
        "--with",
        f"json_schema:file={tmp_path / 'schema.json'}",
        "--max-new-tokens",
        100,
        "--json",
    )
    result = json.loads(out)
    assert code == 0 and (result["reason"] == "length" or json.loads(result["text"])["ok"] in (True, False))


def test_with_fills_slots(shell, pair, tmp_path):
    shell(
        "run",
        "speculative",
        *PROMPT,
        *pair,
        "--with",
        "prompt_lookup:depth=3",
        "--with",
        "greedy_match",
        "--max-new-tokens",
        4,
        "--trace",
        tmp_path / "t.jsonl",
    )
    parts = {part.name: part.knobs for part in Trace.load(tmp_path / "t.jsonl").headers[0].parts}
    assert set(parts) == {"speculative", "prompt_lookup", "greedy_match"} and parts["prompt_lookup"]["depth"] == 3


def test_a_choice_is_one_of_its_options(shell, pair):
    result = json.loads(shell("run", "greedy", *PROMPT, *pair, "--with", "choice:options=yes|no|perhaps", "--json")[1])
    assert result["text"] in ("yes", "no", "perhaps") and result["reason"] in ("grammar", "end")


def test_a_draft_is_loaded_only_where_it_is_named_or_needed(shell, saved, monkeypatch):
    asked = []
    load = playground.load
    monkeypatch.setattr(
        playground, "load", lambda model, draft, *how, **more: asked.append(draft) or load(model, draft, *how, **more)
    )
    for strategy in ("greedy", "speculative"):
        shell("run", strategy, *PROMPT, "--model", saved.target, "--max-new-tokens", 1)
    shell("run", "greedy", *PROMPT, "--model", saved.target, "--draft", saved.draft, "--max-new-tokens", 1)
    assert asked == [playground.NO_DRAFT, None, saved.draft]


@pytest.mark.parametrize("command", [["run", "speculative", *PROMPT], ["bench", "speed", "--only", "blocks"],
                                     ["bench", "guessing", "--tasks", "facts", "--only", "dyspec"]], ids=" ".join)
def test_a_draft_device_is_checked(shell, pair, command):
    code, _, err = shell(*command, *pair, "--draft-device", "gpu")
    assert code and err == "error: There is no device 'gpu'; choose one of auto, cuda, mps, cpu.\n"


def test_a_prompt_comes_from_a_file_verbatim(shell, pair, tmp_path):
    (tmp_path / "prompt").write_text("The red fox\n", encoding="utf-8")
    shell(
        "run",
        "greedy",
        "--prompt-file",
        tmp_path / "prompt",
        *pair,
        "--max-new-tokens",
        1,
        "--trace",
        tmp_path / "t.jsonl",
    )
    assert Trace.load(tmp_path / "t.jsonl").headers[0].prompt == "The red fox\n"


def test_prompts_are_raw_unless_chat_is_asked_for(shell, pair, tmp_path):
    def pieces(*options: str) -> list[str]:
        shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 1, "--trace", tmp_path / "t.jsonl", *options)
        return Trace.load(tmp_path / "t.jsonl").headers[0].prompt_pieces

    assert "".join(pieces()) == "The green bird"
    assert "".join(pieces("--chat")) == "<|user|> The green bird<|assistant|>"


def test_the_terminal_shows_the_text_and_then_its_costs(shell, pair):
    result = json.loads(shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 12, "--json")[1])
    out = shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 12)[1]
    text, costs = out.rsplit("\n\n", 1)
    assert text == CONTROL.sub("\ufffd", result["text"])
    assert costs.splitlines()[0].split()[:3] == ["lane", "tokens", "seconds"] and costs.splitlines()[1].split()[:2] == [
        "greedy",
        "12",
    ]


# --- compare ---

def test_compare_reports_whether_lanes_wrote_the_same_text(shell, pair):
    code, out, _ = shell(
        "compare",
        "sample",
        "greedy",
        "speculative",
        *PROMPT,
        *pair,
        "--set",
        "temperature=2",
        "--max-new-tokens",
        16,
        "--json",
    )
    sample, greedy, speculative = json.loads(out)
    assert code == 0 and {lane["against"] for lane in (sample, greedy, speculative)} == {"greedy"}
    assert speculative["same_text"] is True and speculative["token_ids"] == greedy["token_ids"]
    assert sample["same_text"] is False
    at = sample["difference"]["token"]
    assert sample["token_ids"][:at] == greedy["token_ids"][:at] and sample["token_ids"][at] != greedy["token_ids"][at]


def test_a_lane_that_refuses_a_toggle_is_reported_and_the_others_continue(shell, pair):
    words = [
        "compare",
        "greedy",
        "speculative",
        *PROMPT,
        *pair,
        "--with",
        "greedy_match",
        "--with",
        "top_p",
        "--max-new-tokens",
        3,
    ]
    code, out, err = shell(*words, "--json")
    greedy, speculative = json.loads(out)
    assert code == 0 and err == "" and greedy["reason"] == "length"
    assert (
        speculative["reason"] == "failed"
        and "Greedy match" in speculative["message"]
        and speculative["same_text"] is None
    )
    assert speculative["message"] in shell(*words)[1]


@pytest.mark.parametrize(
    "lanes, baseline",
    [
        (["sample", "greedy"], 1),
        (["sample", "speculative"], 0),
        (["greedy failed", "sample"], 1),
        (["sample failed", "greedy failed"], 0),
    ],
)
def test_lanes_are_compared_with_greedy_or_the_first_that_ran(lanes, baseline):
    def result(lane: str) -> Result:
        last = Failed("It cannot.") if lane.endswith("failed") else Done()
        return Result(Trace([Header(strategy=lane.split()[0])], [Stamped(0, 0, 0.0, last)]))

    assert baseline_of([result(lane) for lane in lanes]) == baseline


def test_compare_fails_if_every_lane_fails(shell, pair):
    code, _, err = shell("compare", "greedy", "sample", *PROMPT, *pair, "--with", "regex:pattern=(")
    assert code == 2
    assert_one_line(err)


def test_a_drafter_goes_to_the_lanes_that_have_a_slot_for_it(shell, pair):
    out = shell(
        "compare", "greedy", "speculative", *PROMPT, *pair, "--with", "prompt_lookup", "--max-new-tokens", 3, "--json"
    )[1]
    assert [lane["reason"] for lane in json.loads(out)] == ["length", "length"]


# --- replay ---

@pytest.mark.parametrize("names", [["greedy"], ["greedy", "speculative"]])
def test_a_replay_prints_what_the_run_printed(shell, pair, tmp_path, names):
    command = "run" if len(names) == 1 else "compare"
    shown = shell(command, *names, *PROMPT, *pair, "--max-new-tokens", 8, "--trace", tmp_path / "t.jsonl")[1]
    assert sorted(shell("replay", tmp_path / "t.jsonl", "--speed", 0)[1].splitlines()) == sorted(shown.splitlines())


def test_a_replay_keeps_the_pace_of_its_run(shell, pair, tmp_path, monkeypatch):
    shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 4, "--trace", tmp_path / "t.jsonl")
    waits = []
    monkeypatch.setattr("playground.cli.replay_trace.time.sleep", waits.append)
    shell("replay", tmp_path / "t.jsonl", "--speed", 2)
    assert sum(waits) == pytest.approx(Trace.load(tmp_path / "t.jsonl").events[-1].at / 2)
    waits.clear()
    shell("replay", tmp_path / "t.jsonl", "--speed", 0)
    assert waits == []


def test_a_trace_is_read_without_torch(shell, pair, tmp_path):
    shell("run", "greedy", *PROMPT, *pair, "--max-new-tokens", 2, "--trace", tmp_path / "t.jsonl")
    seen = outside(
        "import sys; from playground.cli import main; code = main(sys.argv[1:]); assert not {'torch', 'gradio'} &"
        " {*sys.modules}; sys.exit(code)",
        "replay",
        tmp_path / "t.jsonl",
        "--speed",
        "0",
    )
    assert seen.returncode == 0, seen.stderr


def test_a_run_ends_at_the_context_however_many_tokens_are_asked_for(shell, pair):
    code, out, err = shell("run", "greedy", "--prompt", "ab", *pair[:2], "--max-new-tokens", 100_000, "--json")
    result, context = json.loads(out), playground.load(pair[1], draft="none").target.context
    assert (code, result["reason"]) == (0, "length") and context - 3 <= len(result["token_ids"]) <= context


def test_a_run_imports_what_runs(pair):
    """What `run greedy` does not need makes every start slower, and a newcomer's way longer."""
    seen = outside(
        "import sys; from playground.cli import main; code = main(sys.argv[1:]); print(*sys.modules); sys.exit(code)",
        "run", "greedy", *PROMPT, *pair[:2], "--max-new-tokens", "2",
    )
    assert seen.returncode == 0, seen.stderr
    imported = seen.stdout.splitlines()[-1].split()
    rooms = "questions", "player.standalone", "remote", "bench", "training", "ui", "pocket", "grammar.compiler"
    unneeded = tuple(f"playground.{room}" for room in rooms)
    assert not [name for name in imported if name.startswith(unneeded)]
    assert not {"plotly", "gradio", "pandas", "matplotlib"}.intersection(imported)
    ours = [name for name in imported if name.split(".")[0] in ("playground", "strategies")]
    assert len(ours) <= 253  # each of them has a part in it; a file that is split counts as two
    assert [name for name in ours if name.startswith("strategies.")] == [
        "strategies.sampling", "strategies.sampling.greedy"]


def test_a_replay_is_written_as_a_table_and_as_a_page_instead_of_being_shown(shell, tmp_path):
    trace = ROOT / "assets" / "traces" / "first_view.jsonl"
    code, out, err = shell("replay", trace, "--csv", tmp_path / "t.csv", "--html", tmp_path / "t.html")
    assert (code, out, err) == (0, "", f"wrote {tmp_path / 't.csv'}\nwrote {tmp_path / 't.html'}\n")
    assert (tmp_path / "t.csv").read_bytes().decode() == to_csv(Trace.load(trace))
    assert (tmp_path / "t.html").read_text() == to_html(Trace.load(trace))


# --- helpers ---

@pytest.mark.parametrize("text, knobs", [
    ("regex", {}),
    ("regex:pattern=[0-9]{1,3}", {"pattern": "[0-9]{1,3}"}),
    ("regex:pattern=a=b,c=d", {"pattern": "a=b,c=d"}),
    ("choice:options=a|b,c|d", {"options": "a|b,c|d"}),
    ("prompt_lookup:n_max=4,depth=8", {"n_max": "4", "depth": "8"}),
    ("prompt_lookup:depth=8,occurrence=latest,n_min=2", {"depth": "8", "occurrence": "latest", "n_min": "2"}),
    ("lark:source=start: /a,b/ | file", {"source": "start: /a,b/ | file"}),
])
def test_a_comma_separates_knobs_only_where_a_known_one_follows(text, knobs):
    assert read_extra(text) == (text.partition(":")[0], knobs)


def test_a_file_fills_the_knob_that_takes_one(tmp_path):
    (tmp_path / "a,b.lark").write_text("start: /x/")
    assert read_extra(f"lark:file={tmp_path / 'a,b.lark'}") == ("lark", {"source": "start: /x/"})


@pytest.mark.parametrize(
    "text, stops, shown",
    [
        ("abc", [], "abc"),
        ("abc", ["x"], "abc"),
        ("abc", ["cd"], "ab"),
        ("abc", ["bcd", "x"], "a"),
        ("abc", ["b"], "a"),
        ("aab", ["abab"], "a"),
        ("abc", ["cde", "d"], "ab"),
    ],
)
def test_a_growing_text_holds_back_a_possible_stop_string(text, stops, shown):
    assert settled(text, stops) == shown


def test_a_text_is_shown_again_after_a_rollback(capsys):
    show(
        Commit(0, [1], ["one "], "one "),
        Commit(1, [2], ["two"], "two"),
        Rollback(1, "one "),
        Commit(1, [3], ["three"], "three"),
        Done(),
    )
    assert capsys.readouterr().out == "one two\n[rolled back]\none three\n"


def test_control_characters_do_not_reach_the_terminal(capsys):
    show(Commit(0, [1], ["x"], "a\x1b[2Jb\tc\n"), Done())
    assert capsys.readouterr().out == "a\ufffd[2Jb\tc\n\n"


def test_columns_are_aligned_under_each_other():
    assert table([["lane", "n", "note"], ["a", "10", "x"]]) == "lane   n  note\na     10  x"
