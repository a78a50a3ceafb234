"""The recorded runs in the library: what the rules of their strategies say of their events, and right stories."""
from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from itertools import takewhile
from xml.etree import ElementTree

import pytest
import record_library_runs as tool

import playground
from playground.contract import Strategy, discover, find
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.checkpoint.catalogue import BUNDLED
from playground.errors import Refusal
from playground.events import Commit, Event, Failed, Figure, Fill, Forward
from playground.trace import Trace, check
from playground.trace.result import Result
from playground.ui.library import library_page as library
from playground.ui.library import recorded_runs as runs
from playground.ui.library.demo_lanes import settings_for

RECORDED = sorted(path.stem for path in runs.RUNS.glob("*.jsonl"))
LANES = [cls for cls in discover().values() if settings_for(cls)]
STORY = re.compile(
    r"(?P<name>Mia|Ada|Eva|Tom|Ben|Leo) has a (?P<colour>\w+) (?P<thing>\w+) \. (?P<who>she|he) "
    r"(walks|rides|hurries) to the (river|wood|town|mill) and meets a (?P<animal>fox|hare|bird|fish|frog) \. "
    r"the (?P=animal) (wants|likes|takes) the (?P=colour) (?P=thing) of (?P=name) \. "
    r"then the (?P=animal) (?P<moves>runs|flies|swims|jumps) home \."
)
MOVES = {"fox": "runs", "hare": "runs", "bird": "flies", "fish": "swims", "frog": "jumps"}
ENDS = (Failed, Commit, Fill)  # of what is waited for
WHY = re.compile("No bundled model|No head is bundled")
every_recording = pytest.mark.parametrize("name", RECORDED)


def events_of(trace: Trace) -> list[Event]:
    return [stamped.event for stamped in trace.events]


def stored(name: str) -> Trace:
    return Trace.load(runs.RUNS / f"{name}.jsonl")


# --- what the rules say ---

def wedlm_problems(events: list[Event], threshold: float = 0.4, penalty: float = 0.02, window: int = 16) -> list[str]:
    """Forwards after which other positions were filled than those below the threshold, or else the lowest one."""
    size, filled, found, sums = length_of(events), set(), [], {}
    for event in events:
        if isinstance(event, Figure) and event.shape == "bars":
            sums = values_of(event)
        elif isinstance(event, Fill):
            first = min(set(range(size)) - filled)
            wanted = [at for at, value in sums.items() if value < threshold] or [min(sums, key=sums.get)]
            nats = [value + penalty * (at - first) for at, value in zip(event.positions, event.entropies)]
            if [*sums] != sorted(set(range(first, min(first + window, size))) - filled):
                found.append(f"{[*sums]} are not the masks of the window from {first}")
            if event.positions != wanted or nats != pytest.approx([sums[at] for at in wanted], abs=1e-4):
                found.append(f"{event.positions} were filled instead of {wanted}")
            filled.update(event.positions)
    return found


def bound_problems(events: list[Event], bound: float = 0.1, steps: int = 48, certain: float = 0.005) -> list[str]:
    """Forwards that accepted others than the lowest entropies within the bound; blocks that ended too early or late."""
    found, figures = [], []
    for event in events:
        if isinstance(event, Figure) and event.shape == "bars":
            figures.append(event)
            ordered = sorted(event.data["values"])
            sums = [sum(ordered[:count]) for count in range(len(ordered))]  # without the largest of those accepted
            many = len([*takewhile(lambda total: total <= bound, sums)])
            accepted = [value for label, value in zip(*event.data.values()) if label.endswith("accepted")]
            if sorted(accepted) != ordered[:many]:
                found.append(f"{len(accepted)} positions were accepted instead of {many}")
        elif isinstance(event, Fill):
            last = figures[-1].data["values"]
            if event.positions != [*values_of(figures[-1])] or len(figures) > steps or (
                len(figures) < steps and not sum(last) / len(last) < certain
            ):
                found.append(f"the block {event.positions} ended after {len(figures)} forwards")
            figures = []
    return found


def values_of(figure: Figure) -> dict[int, float]:
    """The values of bars by position."""
    return {int(label.split()[0]) - 1: value for label, value in zip(figure.data["labels"], figure.data["values"])}


def length_of(events: list[Event]) -> int:
    return 1 + max(at for event in events if isinstance(event, Fill) for at in event.positions)


PROBLEMS: dict[str, Callable[..., list[str]]] = {"wedlm": wedlm_problems, "entropy_bound": bound_problems}


def is_right(story: str) -> bool:
    found = STORY.fullmatch(story)
    return bool(found) and found["who"] == ("she" if found["name"] in ("Mia", "Ada", "Eva") else "he") and (
        MOVES[found["animal"]] == found["moves"]
    )


@every_recording
def test_a_recorded_run_follows_the_rule_of_its_strategy(name):
    trace = stored(name)
    assert not check(trace) and not PROBLEMS[name](events_of(trace))
    (header,) = trace.headers
    (own,) = [part for part in header.parts if part.name == name]
    assert header.strategy == name and own.knobs == find(name)().values()


@every_recording
def test_a_run_that_breaks_the_rule_is_detected(name):
    events = deepcopy(events_of(stored(name)))
    if name == "wedlm":
        one, other = [event for event in events if isinstance(event, Fill)][:2]
        other.positions.append(one.positions.pop())
    else:
        figure = next(event for event in events if isinstance(event, Figure) and event.shape == "bars")
        figure.data["labels"][0] = "1 noise" if figure.data["labels"][0] == "1 accepted" else "1 accepted"
    assert PROBLEMS[name](events)


@every_recording
def test_a_recorded_run_tells_a_story_that_follows_from_its_first_sentence(name):
    result = Result(stored(name))
    assert is_right(result.header.prompt + result.text) and result.reason == "end"


def test_a_story_in_which_another_animal_comes_home_is_wrong():
    story = "Tom has a blue hat . he rides to the mill and meets a frog . the frog takes the blue hat of Tom . then "
    assert is_right(f"{story}the frog jumps home .")
    assert not is_right(f"{story}the fish swims home .") and not is_right(f"{story}the frog flies home .")


@every_recording
def test_what_is_recorded_is_small(name):
    assert (runs.RUNS / f"{name}.jsonl").stat().st_size < 40_000


@pytest.mark.bench
@pytest.mark.slow
@every_recording
def test_the_script_records_a_run_of_this_kind_today(name):
    """After a few steps of its training a model knows nothing, but the rule holds."""
    trace = tool.recorded(name, steps=3)
    assert not check(trace) and not PROBLEMS[name](events_of(trace))
    then, now = stored(name).headers[0], trace.headers[0]
    assert (now.parts, now.prompt, now.canvas) == (then.parts, then.prompt, then.canvas)


# --- what the page shows ---

def test_an_entry_draws_a_column_for_each_position_and_a_row_for_each_forward():
    for name in RECORDED:
        trace = stored(name)
        shown, result = runs.recorded_run(find(name)), Result(trace)
        drawn = ElementTree.fromstring(re.search("<svg.*</svg>", shown)[0])
        words = [text.text for text in drawn.iter("text") if text.get("class") == "word"]
        forwards = [event for event in events_of(trace) if isinstance(event, Forward)]
        assert [word for word in words if word != "<end>"] == result.text.split()
        cells = {kind: path.get("d").count("z") for path in drawn.iter("path") for kind in [path.get("class")]}
        assert cells["now"] == len(words) == length_of(events_of(trace))
        assert f"{len(forwards)} forwards" in drawn.get("aria-label")
        assert runs.LOAD[name] in shown and result.header.model in shown and shown in library.entry(find(name))


def test_rows_say_what_each_forward_filled_and_left_open():
    bars = Figure("bars", "entropy", {"labels": ["1 certain", "2 open"], "values": [0.1, 2.0]})
    rows = runs.rows_of([Forward(), bars, Fill([0], [5], ["a"], [1.0]), Forward(), Fill([1], [6], ["b"], [1.0])])
    assert rows == [runs.Row({0}, {0}, {1}, set()), runs.Row({1}, set(), set(), {0})]


def test_what_has_no_recorded_run_shows_none():
    assert runs.recorded_run(find("greedy")) == "" and "recorded'" not in library.entry(find("greedy"))


# --- what no bundled model runs ---

@cache
def bundled(name: str) -> Models:
    return playground.load(name)


def runs_on(cls: type[Strategy], name: str) -> bool:
    """Whether a lane with the strategy writes something on a bundled model."""
    settings = settings_for(cls)
    (lane,), length = settings.configs()[-1:], settings.length if cls.kind == "canvas_decoder" else 8
    try:
        models = playground.with_weights(bundled(name), [lane])
        session = prepare(models, [lane], Prompt.of(settings), Limits(0, length))
    except Refusal:
        return False
    event = next((event for event in (stamped.event for stamped in session) if isinstance(event, ENDS)), None)
    return not isinstance(event, Failed)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("cls", LANES, ids=lambda cls: cls.name)
def test_what_no_bundled_model_runs_has_a_recorded_run_or_says_why(cls):
    can_run, has_recording = any(runs_on(cls, entry.name) for entry in BUNDLED), bool(runs.recorded_run(cls))
    assert can_run != (has_recording or WHY.search(" ".join(cls.__doc__.split())) is not None)
