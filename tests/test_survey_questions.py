"""Surveys with one's own questions, and from a shell."""
from __future__ import annotations

import csv
import json
import logging
import re
import subprocess
from pathlib import Path

import pytest
from saved import save_models

from playground.bench.survey.survey import score
from playground.cli import main
from playground.cli.bench.survey import read_entrants
from playground.cli.lane_options import read_lane
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from playground.questions.questions import Question
from playground.questions.user_questions import (
    LONGEST,
    MOST_BYTES,
    MOST_LINES,
    how_judged,
    own_score,
    questions_in,
    read_questions,
)

ROOT = Path(__file__).resolve().parents[1]


# --- questions of one's own ---

def test_user_questions_are_read_with_their_rule():
    exact, within, unknown = questions_in("""{"prompt": "p", "answer": " 5 ", "exact": true}

        {"prompt": "p", "answer": "5", "contains": true, "chat": false}
        {"prompt": "p"}""")
    assert own_score(exact, "5\n") == 1.0 and own_score(exact, "about 5") == 0.0
    assert own_score(within, "about 5") == 1.0 and own_score(within, "about 6") == 0.0 and not within.chat
    assert own_score(unknown, "5") is None and unknown.task == "own"


@pytest.mark.parametrize(("answer", "text", "right"), [
    ("19", "12 + 7 = 19\n#### 19", True),
    ("19", "The answer is 19.", True),
    ("19", "19.0", True),
    ("0.5", "\\boxed{1/2}", True),
    ("19", "#### 18", False),
    ("19", "19 and 20", False),
    ("Paris", "Paris\n", True),
    ("Paris", "\\boxed{Paris}", True),
    ("Paris", "It is not Paris.", False),
])
def test_an_answer_is_judged_by_its_final_answer(answer, text, right):
    question, = questions_in(json.dumps({"prompt": "p", "answer": answer}))
    assert own_score(question, text) == right


def test_it_is_said_how_answers_are_judged():
    own = questions_in("""{"prompt": "p", "answer": "5"}
        {"prompt": "p", "answer": "6"}
        {"prompt": "p", "answer": "5", "contains": true}
        {"prompt": "p"}""")
    assert how_judged(own) == ('Your own questions are judged: 2 by their final answer, such as 19 in "#### 19", '
                               "1 by whether they contain the answer.")
    assert how_judged(own[3:]) == "" == how_judged([Question("facts", "p", "a")])


def test_a_user_question_is_never_judged_by_a_tasks_rule():
    programs, = questions_in('{"task": "programs", "prompt": "Write it.", "answer": "raise SystemExit"}')
    assert score(programs, "raise SystemExit") == 1.0 and score(programs, "pass") == 0.0


@pytest.mark.parametrize(
    "line, says",
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not an object"),
        ('{"prompt": 1}', "quotation marks"),
        ('{"prompt": " "}', "prompt is missing"),
        ('{"answer": "x"}', "prompt is missing"),
        ('{"prompt": "p", "answr": "x"}', "no field 'answr'"),
        ('{"prompt": "p", "contains": 1}', "true or false"),
        ('{"prompt": "p", "answer": "x", "contains": true, "exact": true}', "exclude each other"),
        ('{"prompt": "p", "answer": ""}', "answer is empty"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "p", "task": "%s"}' % ("t" * 100), "60"),
        (json.dumps({"prompt": "p" * (LONGEST["prompt"] + 1)}), "20,000"),
    ],
)
def test_a_bad_line_is_named(line, says):
    with pytest.raises(Refusal, match="Line 2 of the questions") as refusal:
        questions_in(f'{{"prompt": "fine"}}\n{line}\n')
    assert says in str(refusal.value)


@pytest.mark.parametrize("text", ["", "\n \n", '{"prompt": "p"}\n' * (MOST_LINES + 1)])
def test_empty_and_oversized_lists_are_refused(text):
    with pytest.raises(Refusal):
        questions_in(text)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_bytes('\ufeff{"prompt": "Größe"}\n'.encode())
    assert [question.prompt for question in read_questions(path)] == ["Größe"]
    for content in (b"\xff\xfe\x00", b" " * (MOST_BYTES + 1)):
        path.write_bytes(content)
        with pytest.raises(Refusal, match="own.jsonl"):
            read_questions(path)
    with pytest.raises(Refusal, match="cannot be read"):
        read_questions(tmp_path / "missing.jsonl")


# --- from a shell ---

@pytest.mark.parametrize(
    "text, config",
    [
        ("greedy", LaneConfig("greedy")),
        ("ead:threshold=0.4,window=3", LaneConfig("ead", {"threshold": "0.4", "window": "3"})),
        (
            "speculative+prompt_lookup:depth=8+greedy_match",
            LaneConfig("speculative", extras=[("prompt_lookup", {"depth": "8"}), ("greedy_match", {})]),
        ),
        ("greedy+regex:pattern=a+b", LaneConfig("greedy", extras=[("regex", {"pattern": "a+b"})])),
    ],
)
def test_a_lane_is_written_as_one_argument(text, config):
    assert read_lane(text) == config


def test_the_command_asks_prints_and_writes(tmp_path, capsys):
    saved, level = save_models(tmp_path), logging.getLogger("playground").level
    (tmp_path / "own.jsonl").write_text('{"prompt": "The green bird", "answer": "x"}\n{"prompt": "The red fox"}\n')
    out, lines = tmp_path / "s.json", tmp_path / "s.csv"
    code = main(
        [
            "bench",
            "survey",
            "--with",
            "greedy",
            "speculative",
            "greedy+cad",
            "--file",
            str(tmp_path / "own.jsonl"),
            "--model",
            saved.target,
            "--draft",
            saved.draft,
            "--repeats",
            "2",
            "--max-new-tokens",
            "8",
            "--out",
            str(out),
            "--csv",
            str(lines),
            "--page",
            str(tmp_path / "s.md"),
        ]
    )
    logging.getLogger("playground").setLevel(level)
    printed, recorded = capsys.readouterr().out, json.loads(out.read_text())
    assert code == 0 and "a passage for greedy+cad" in printed
    assert "judged: 1 by their final answer" in printed and "judged: 1 by" in recorded["settings"]["judged"]
    assert [row["entrant"] for row in recorded["table"]] == ["greedy", "speculative", "greedy+cad"]
    assert recorded["table"][1]["same_text"] == recorded["table"][1]["compared"] == 4 and (
        recorded["table"][2]["unasked"],
        recorded["table"][2]["failed"],
    ) == (4, 0)
    assert len(list(csv.DictReader(lines.open(newline="")))) == len(recorded["answers"]) == 12
    assert (
        recorded["machine"]["torch"]
        and recorded["settings"]["repeats"] == 2
        and "## own" in (tmp_path / "s.md").read_text()
    )


def test_every_entrant_of_the_page_about_strategies_could_be_asked():
    command = re.search(r"```bash\n(.*?)```", (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8"), re.DOTALL)[
        1
    ]
    words = subprocess.run(
        ["bash", "-c", f"set -- {command}\nprintf '%s\\n' \"$@\""], capture_output=True, text=True, check=True
    ).stdout.split()
    names = words[words.index("--with") + 1:]
    assert [entrant.name for entrant in read_entrants(names)] == names and len(set(names)) > 40
    assert {
        "cad",
        "adacad",
        "caad",
        "exact_extract",
        "gencls_ppl",
        "pg_td",
        "smc",
        "smc_steering",
        "awrs",
        "asap",
        "in_context_navigation",
    } <= set(re.findall(r"\w+", " ".join(names)))


@pytest.mark.parametrize(
    "more, says",
    [
        (["--with", "gencls_ppl:labels={answer}", "--tasks", "facts"], "{labels}"),
        ([], "no question to ask"),
        (["--tasks", "nonsense"], "no task 'nonsense'"),
        (["--file", "missing.jsonl"], "cannot be read"),
    ],
)
def test_the_command_refuses_before_a_model_is_loaded(more, says, capsys):
    assert main(["bench", "survey", "--with", "greedy", "--model", "no/such", *more]) == 2
    assert says in capsys.readouterr().err
