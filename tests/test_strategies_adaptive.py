"""Decoding that looks at its own uncertainty: AdaDec, context-aware decoding, Mirostat. Each is held against a plain reckoning of our own."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from tables import TableModel, without_context
from torch import Tensor

from playground.draws import Draws
from playground.engine.model import Work
from playground.engine.sampling import contrast, entropy, jensen_shannon
from playground.errors import Refusal
from playground.events import Commit, Event, Figure, Note, Step
from playground.lane import Lane, Limits
from playground.parts.reading import Reading
from playground.recipe import Assembly, Recipe, assemble
from playground.recorder import Recorder
from playground.session import Prompt, Runner, prepare
from playground.strategy import Decoder, find, make
from strategies.sampling.mirostat import zipf_exponent, zipf_size

GREEDY, MODEL = Recipe("greedy"), Recipe("greedy", {}, [("temperature", {"t": 1.0})])
LN2 = math.log(2)


def alone(name: str, **knobs) -> Recipe:
    return Recipe("greedy", {}, [(name, knobs)])


def adadec(**knobs) -> Recipe:
    return Recipe("adadec", knobs)


COLLAPSES = {
    "adadec": [Collapse(adadec(tau=4.0), GREEDY), Collapse(adadec(tau=0.0, width=1), GREEDY), Collapse(adadec(tau=0.0, depth=0), GREEDY)],
    "cad": [Collapse(alone("cad", alpha=0.0), GREEDY), Collapse(Recipe("greedy", {}, [("cad", {"alpha": 0.0}), ("temperature", {"t": 1.0})]), MODEL)],
    "adacad": [Collapse(alone("adacad", floor=1.0), alone("cad", alpha=1.0)), Collapse(alone("adacad", floor=0.7), alone("cad", alpha=0.7)),
               Collapse(alone("adacad", floor=1.0, base="2"), alone("cad", alpha=1.0))],
    "mirostat": [Collapse(alone("mirostat", tau=0.0, version=version, surprise=surprise), GREEDY)
                 for version in "12" for surprise in ("full", "renormalised")],
}


def run(lane: Recipe | Assembly, models: dict, prompt: list[int], length: int, seed: int = 0, other: list[int] | None = None) -> tuple[Lane, list[Event]]:
    """A lane run to its end, with all it told; `other` is what the stream without context reads."""
    assembly = lane if isinstance(lane, Assembly) else assemble(lane)
    prompts = {name: other or without_context(prompt) for name in assembly.prompts()}
    runner = Runner(Lane(prompt, models, assembly, Limits(seed, length), Recorder(models["target"].tokens), prompts), assembly)
    events = []
    while not runner.finished:
        events += runner.advance()
    return runner.lane, events


def written(*case, **more) -> list[int]:
    return run(*case, **more)[0].main.written


def figures(events: list[Event], name: str) -> list[dict]:
    return [event.data for event in events if isinstance(event, Figure) and event.name == name]


def series(events: list[Event], name: str, line: str) -> list[float]:
    return [data["series"][line] for data in figures(events, name)]


def same(found: list[float], expected: list[float], within: float = 1e-9) -> bool:
    return len(found) == len(expected) and all(abs(a - b) < within for a, b in zip(found, expected))


# --- AdaDec: every pause reckoned again by reading each candidate's rollout from the beginning ---

ROLLOUTS = "candidates: mean probability per token"
Reads = Callable[[list[int]], Tensor]  # log-probabilities [V] after a text
Score = Callable[[list[float]], float]  # of the candidate's own log-probability and those of its rollout


def per_token(logps: list[float]) -> float:
    return sum(logps) / len(logps)


def rollout(reads: Reads, text: list[int], depth: int, ends: frozenset[int]) -> list[int]:
    new = []
    while len(new) < depth and not {text[-1], *new} & ends:
        new.append(int(reads(text + new).argmax()))
    return new


def best_candidate(reads: Reads, text: list[int], depth: int, ends: frozenset[int], score: Score, width: int = 3) -> tuple[int, list[float]]:
    """The token to commit, and the score of each candidate."""
    scores, candidates = [], reads(text).topk(width).indices.tolist()
    for token in candidates:
        tokens = [token, *rollout(reads, [*text, token], depth, ends)]
        scores.append(score([float(reads(text + tokens[:i])[next_]) for i, next_ in enumerate(tokens)]))
    return candidates[scores.index(max(scores))], scores


def reckoned(reads: Reads, prompt: list[int], length: int, depth: int, ends: frozenset[int], score: Score = per_token) -> tuple[list[int], list[list[float]]]:
    """What AdaDec writes where it pauses at every token, and the scores at each pause."""
    text, pauses = list(prompt), []
    while len(text) < len(prompt) + length and not set(text[len(prompt):]) & ends:
        token, scores = best_candidate(reads, text, depth, ends, score)
        text.append(token)
        pauses.append(scores)
    return text[len(prompt):], pauses


def table_reads(model: TableModel) -> Reads:
    return lambda text, model=model: model.scores(tuple(text)).log_softmax(-1)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_at_every_pause_the_candidate_that_leads_to_the_likeliest_tokens_is_committed(depth):
    for seed in range(5):
        model = TableModel("abcde", "e", seed)
        lane, events = run(adadec(tau=0.0, depth=depth), {"target": model}, [0, 1], 7)
        tokens, pauses = reckoned(table_reads(model), [0, 1], 7, depth, model.end_ids)
        assert lane.main.written == tokens
        shown = [[math.log(value) for value in data["values"]] for data in figures(events, ROLLOUTS)]
        assert len(shown) == len(pauses) and all(map(same, shown, pauses))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_rollouts_of_a_network_are_what_the_library_reads_from_the_beginning(architecture):
    library, models, prompt = network(architecture), {"target": pair(architecture).target}, [54, 71, 71, 9]

    def reads(text: list[int]) -> Tensor:
        return library(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].log_softmax(-1)

    with torch.inference_mode():
        tokens, pauses = reckoned(reads, prompt, 5, 3, models["target"].end_ids)
    lane, events = run(adadec(tau=0.0, depth=3), models, prompt, 5)
    assert lane.main.written == tokens
    shown = [[math.log(value) for value in data["values"]] for data in figures(events, ROLLOUTS)]
    assert all(same(a, b, 1e-6) for a, b in zip(shown, pauses)) and len(shown) == len(tokens)


WRONG_SCORES = {
    "a sum, which favours rollouts that end early": sum,
    "a sum over the tokens of the rollout alone": lambda logps: sum(logps) / max(1, len(logps) - 1),
    "the candidate left out": lambda logps: per_token(logps[1:] or logps),
    "the last token twice, as where a finished rollout goes on counting": lambda logps: sum([*logps, logps[-1]]) / len(logps),
}


@pytest.mark.parametrize("score", WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_a_wrong_score_of_a_rollout_writes_another_text(score):
    models = [TableModel("abcde", "e", seed) for seed in range(12)]
    differ = [reckoned(table_reads(model), [0, 1], 7, 5, model.end_ids, score)[0] != written(adadec(tau=0.0), {"target": model}, [0, 1], 7)
              for model in models]
    assert any(differ)


def of_letters(following: dict[str, list[float]], letters: str = "abc.") -> TableModel:
    """Probabilities of the next letter by the text so far; "" stands for every other text."""
    def rule(context):
        text = "".join(letters[token] for token in context)
        return torch.tensor(following.get(text, following[""]), dtype=torch.float64).log()

    return TableModel(letters, ".", rule=rule)


def test_by_hand_the_second_choice_wins_where_what_follows_is_surer():
    model = of_letters({"a": [0.1, 0.5, 0.4, 0], "ab": [0.34, 0.33, 0.33, 0], "ac": [0.01, 0.01, 0.98, 0], "": [0.9, 0.04, 0.03, 0.03]})
    lane, events = run(adadec(tau=0.5, width=2, depth=1), {"target": model}, [0], 3)
    assert lane.text == "cca"
    assert figures(events, ROLLOUTS)[0] == {"labels": ["ba", "cc"], "values": [pytest.approx(math.sqrt(0.5 * 0.34)), pytest.approx(math.sqrt(0.4 * 0.98))]}
    notes = [event.text for event in events if isinstance(event, Note)]
    assert len(notes) == 1 and notes[0].startswith("'c' in place of 'b'")


def test_a_rollout_ends_with_the_end_token_and_is_scored_by_the_tokens_it_has():
    model = of_letters({"a": [0, 0.5, 0.3, 0.2], "ab": [0, 0, 0.4, 0.6], "": [0.7, 0.1, 0.1, 0.1]})
    _, events = run(adadec(tau=0.0, width=3, depth=3), {"target": model}, [0], 1)
    assert figures(events, ROLLOUTS)[0] == {"labels": ["b<.>", "caaa", "<.>"], "values": [
        pytest.approx(math.sqrt(0.5 * 0.6)), pytest.approx((0.3 * 0.7 ** 3) ** 0.25), pytest.approx(0.2)]}


def test_it_pauses_exactly_where_the_entropy_reaches_the_threshold():
    steps, pauses = [], []
    for seed in range(3):
        _, events = run(adadec(tau=1.0), {"target": TableModel("abcde", seed=seed)}, [0, 1], 12)
        steps += [(seed, event.position, event.entropy) for event in events if isinstance(event, Step)]
        pauses += [(seed, data["spans"][0][0], data["spans"][0][3]) for data in figures(events, "pauses")]
    unsure = [step for step in steps if step[2] >= 1.0]
    assert [pause[:2] for pause in pauses] == [step[:2] for step in unsure] and 0 < len(pauses) < len(steps)
    assert same([pause[2] for pause in pauses], [step[2] for step in unsure])


def test_an_entropy_that_equals_the_threshold_is_a_pause():
    undecided = TableModel("abcd", rule=lambda context: torch.zeros(4, dtype=torch.float64))
    (level,) = series(run(adadec(tau=0.0), {"target": undecided}, [0], 1)[1], "entropy", "entropy, nats")
    for tau, count in ((level, 3), (math.nextafter(level, 9), 0)):
        assert len(figures(run(adadec(tau=tau), {"target": undecided}, [0], 3)[1], "pauses")) == count


@pytest.mark.parametrize("depth, forwards", [(0, 6), (1, 7), (4, 6 * 5)])  # at depth 1 the row after the winner is known already
def test_looking_ahead_costs_one_forward_for_each_level(depth, forwards):
    model = TableModel("abcde")
    run(adadec(tau=0.0, depth=depth), {"target": model}, [0, 1], 6)
    assert model.forwards == forwards


def test_only_the_candidate_is_committed_and_a_longer_limit_changes_no_token():
    model = TableModel("abcde", seed=2)
    _, events = run(adadec(tau=0.0), {"target": model}, [0, 1], 12)
    commits = [event.ids for event in events if isinstance(event, Commit)]
    assert [len(ids) for ids in commits] == [1] * 12
    assert written(adadec(tau=0.0), {"target": model}, [0, 1], 5) == sum(commits[:5], [])


def test_adadec_leaves_nothing_to_chance():
    with pytest.raises(Refusal, match="adadec does not work with a sampler such as temperature"):
        assemble(Recipe("adadec", {}, [("temperature", {})]))
    assert assemble(Recipe("adadec", {}, [("repetition_penalty", {})])).decoder.name == "adadec"


def reading(rest: float, rank: int, count: int = 40) -> Reading:
    """Rows whose other seven tokens have `rest` of the weight of the first, before tokens that each stand at this rank."""
    p = torch.full((8,), rest / 7).index_fill(0, torch.tensor([0]), 1.0)
    return Reading(torch.full((count,), rank), p.log().repeat(count, 1) - torch.arange(8) * 1e-4)


def test_its_threshold_is_learnt_from_texts_and_lies_where_the_model_begins_to_be_wrong():
    sure, unsure = reading(0.1, rank=0), reading(5.0, rank=2)
    low, high = (float(entropy(part.logits)[0]) for part in (sure, unsure))
    assert low < find("adadec").fit([sure, unsure])["tau"] < high


# --- CAD and AdaCAD: rows by hand ---

def rows(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def random_rows(seed: int = 0, count: int = 40, size: int = 30) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def test_the_contrast_of_a_conflict_by_hand():
    assert contrast(rows(2, 1, 0), rows(0, 2.4, 0), 1.0)[0].tolist() == pytest.approx([4, -0.4, 0])
    assert torch.equal(contrast(random_rows(0), random_rows(1), -1.0), random_rows(1))


def test_a_huge_alpha_ranks_by_what_the_context_adds_alone():
    z1, z2 = random_rows(0), random_rows(1)
    assert torch.equal(contrast(z1, z2, 1e6).argmax(-1), (z1 - z2).argmax(-1))


def divergence(p: list[float], q: list[float]) -> float:
    """Jensen-Shannon by its definition, in nats."""
    middle = [(a + b) / 2 for a, b in zip(p, q)]
    return sum(0.5 * a * math.log(a / m) for half in (p, q) for a, m in zip(half, middle) if a > 0)


def test_the_divergence_is_that_of_its_definition():
    z1, z2 = random_rows(2), random_rows(3)
    expected = [divergence(p, q) for p, q in zip(z1.softmax(-1).tolist(), z2.softmax(-1).tolist())]
    assert same(jensen_shannon(z1, z2).tolist(), expected, 1e-12)
    closed = 0.5 * (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2))  # of (1, 0) and (1/2, 1/2)
    assert float(jensen_shannon(rows(0, -math.inf), rows(0, 0))) == pytest.approx(closed)


def test_the_divergence_is_symmetric_between_zero_and_ln_2_and_blind_to_shifts():
    z1, z2 = random_rows(4), random_rows(5)
    found = jensen_shannon(z1, z2)
    assert torch.allclose(found, jensen_shannon(z2, z1)) and torch.allclose(found, jensen_shannon(z1 + 7, z2 - 3))
    assert bool((found > 0).all()) and bool((found < LN2).all())
    assert bool((jensen_shannon(z1, z1) == 0).all())
    assert float(jensen_shannon(rows(200, 0, 0), rows(0, 200, 0))) == pytest.approx(LN2)


def test_adacads_strength_is_the_divergence_of_each_row_in_the_chosen_base_and_never_below_the_floor():
    z = {"target": random_rows(6), "without_context": random_rows(7)}
    nats = jensen_shannon(*z.values())
    for knobs, alpha in [({}, nats), ({"base": "2"}, nats / LN2), ({"floor": 0.5}, nats.clamp(min=0.5))]:
        expected = torch.stack([(1 + a) * one - a * two for a, one, two in zip(alpha, *z.values())])
        assert torch.allclose(make("adacad", **knobs).mix(z), expected)


# --- ... and whole texts: both streams are read again from the beginning for every token ---

CONTEXT, QUESTION = "The red fox listens, and the green bird sings.", "The green bird"
CONTEXTUAL = {"cad": {"alpha": 0.8}, "adacad": {}}
ARCHITECTURES = ("llama", "gemma2", "gpt_neox", "qwen3")


def told(recipe: Recipe, prompt: Prompt, architecture: str = "llama", length: int = 12) -> tuple[list[int], list[Event]]:
    session = prepare(pair(architecture), [recipe], prompt, Limits(0, length))
    events = [stamped.event for stamped in session]
    return [token for event in events if isinstance(event, Commit) for token in event.ids], events


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_at_alpha_minus_one_the_text_is_greedys_without_the_context_and_at_zero_greedys_with_it(architecture):
    given = Prompt(QUESTION, context=CONTEXT)
    without, with_context = (told(GREEDY, prompt, architecture)[0] for prompt in (Prompt(QUESTION), given))
    assert without != with_context
    assert told(alone("cad", alpha=-1.0), given, architecture)[0] == without
    assert told(alone("cad", alpha=0.0), given, architecture)[0] == with_context


def mixed_text(reads: Reads, prompts: tuple[list[int], list[int]], length: int, alpha: Callable) -> list[int]:
    new = []
    for _ in range(length):
        z1, z2 = (reads(prompt + new) for prompt in prompts)
        strength = alpha(z1, z2)
        new.append(int(((1 + strength) * z1 - strength * z2).argmax()))
    return new


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("name", CONTEXTUAL)
def test_both_streams_of_a_network_are_what_the_library_reads_from_the_beginning(name, architecture):
    library, model = network(architecture), pair(architecture).target
    prompts = [54, 71, 9, 9, 80, 71], [80, 71]
    strength = {"cad": lambda z1, z2: 0.8, "adacad": lambda z1, z2: divergence(z1.softmax(-1).tolist(), z2.softmax(-1).tolist())}[name]
    with torch.inference_mode():
        expected = mixed_text(lambda text: library(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1], prompts, 10, strength)
    lane, _ = run(alone(name, **CONTEXTUAL[name]), {"target": model}, prompts[0], 10, other=prompts[1])
    assert lane.main.written == expected
    for stream, prompt in zip((lane.target, lane.stream("without_context")), prompts):
        text = (prompt + expected)[:stream.store.length]
        fresh = model.new_store()
        model.forward([Work(fresh, text, list(range(-1, len(text) - 1)))])
        assert len(text) == len(prompt) + 9
        assert all((held.rows[:, :len(text)] - new.rows[:, :len(text)]).abs().max() < 1e-9 for held, new in zip(stream.store.keys, fresh.keys))


def jsd(z1: Tensor, z2: Tensor) -> float:
    return float(jensen_shannon(z1, z2))


FAULTS: dict[str, Callable[[Reads, list[int], list[int]], list[int]]] = {
    "swapped streams": lambda reads, a, b: mixed_text(reads, (b, a), 12, jsd),
    "the distance, which is the root of the divergence": lambda reads, a, b: mixed_text(reads, (a, b), 12, lambda z1, z2: jsd(z1, z2) ** 0.5),
    "the contrast the other way round": lambda reads, a, b: mixed_text(reads, (a, b), 12, lambda z1, z2: -jsd(z1, z2)),
    "a second stream that never hears what was written":
        lambda reads, a, b: mixed_text(lambda text: reads(b) if text[:len(a)] != a else reads(text), (a, b), 12, jsd),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_faulty_contrast_writes_another_text(fault):
    differ = []
    for seed in range(6):
        model = TableModel("abcde", seed=seed)
        found = written(alone("adacad"), {"target": model}, [0, 1, 2, 3], 12, other=[3])
        assert found == mixed_text(lambda text, model=model: model.scores(tuple(text)), ([0, 1, 2, 3], [3]), 12, jsd)
        differ.append(found != fault(lambda text, model=model: model.scores(tuple(text)), [0, 1, 2, 3], [3]))
    assert sum(differ) >= 3


def test_a_text_that_is_the_same_in_both_streams_is_greedys_and_diverges_nowhere():
    for name in CONTEXTUAL:
        model = TableModel("abcde", seed=1)
        lane, events = run(alone(name, **CONTEXTUAL[name]), {"target": model}, [0, 1], 12, other=[0, 1])
        assert lane.main.written == written(GREEDY, {"target": model}, [0, 1], 12)
        assert series(events, "context against memory", "divergence, nats") == [0.0] * 12
        assert not [event for event in events if isinstance(event, Note)]


def test_a_context_that_memory_drowns_out_is_heard_and_the_learner_is_told():
    def rule(context):  # memory says b; the context, an a at the beginning, makes c nearly as likely
        return torch.tensor([-9.0, 2.0, 1.6] if context[0] == 0 else [-9.0, 3.0, -4.0], dtype=torch.float64)

    model = TableModel("abc", rule=rule)
    assert run(GREEDY, {"target": model}, [0, 1], 2)[0].text == "bb"
    lane, events = run(alone("adacad"), {"target": model}, [0, 1], 2, other=[1])
    assert lane.text == "cc"
    assert len([event for event in events if isinstance(event, Note)]) == 2
    chances = figures(events, "probability of the chosen token")[1]
    assert chances["x"] == 1 and chances["series"]["adjusted"] > 0.5 > chances["series"]["with context"] > chances["series"]["without"]
    assert not figures(events, "where context and memory disagree")  # both streams put b first


def test_where_the_streams_put_another_token_first_is_marked():
    model = TableModel("abcde", seed=3)
    lane, events = run(alone("cad", alpha=0.0), {"target": model}, [0, 1, 2], 12, other=[2])
    marked = [data["spans"][0][0] for data in figures(events, "where context and memory disagree")]
    first = [[int(model.scores((*prompt, *lane.main.written[:place])).argmax()) for prompt in ([0, 1, 2], [2])] for place in range(12)]
    assert marked == [place for place, (one, two) in enumerate(first) if one != two] and 0 < len(marked) < 12


def test_a_lane_that_needs_a_context_says_so_where_there_is_none():
    for name in CONTEXTUAL:
        (event,) = told(alone(name), Prompt(QUESTION))[1]
        assert "give a passage as context" in event.message


# --- Mirostat: rows by hand ---

def mirostat(mu: float, **knobs):
    """The sampler with its cut set by hand."""
    made = make("mirostat", **knobs)
    made.mu = mu
    return made


def left(sampler, scores: Tensor) -> list[int]:
    return (sampler.apply(scores, [[]])[0] > -math.inf).nonzero().flatten().tolist()


def test_the_cut_is_in_bits():
    scores = rows(0.8, 0.2).log()
    assert left(mirostat(2.0), scores) == [0]  # ln 5 = 1.61 would stay, log2 5 = 2.32 does not
    assert left(mirostat(2.33), scores) == [0, 1]


def test_where_all_are_too_surprising_the_most_probable_stays():
    for version in "12":
        assert left(mirostat(-3.0, version=version), rows(1.0, 1.1, 1.0)) == [1]


def test_version_two_keeps_what_is_more_probable_than_a_fixed_floor():
    scores = random_rows(8)
    p = scores.softmax(-1)
    for mu in (1.5, 4.0, 9.0):
        floor = torch.where((p >= 2 ** -mu) | (p == p.amax(-1, keepdim=True)), scores, -math.inf)
        assert torch.equal(mirostat(mu).apply(scores, [[]] * len(scores)), floor)


def zipf(s: float, count: int) -> Tensor:
    return -s * torch.arange(1, count + 1, dtype=torch.float64).log()[None]


@pytest.mark.parametrize("s", [0.8, 1.0, 1.1, 1.5])
def test_the_exponent_of_a_zipf_law_is_found(s):
    shuffled = zipf(s, 2000)[:, torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    assert float(zipf_exponent(shuffled, 100)) == pytest.approx(s, abs=1e-9)


@pytest.mark.parametrize("s, mu, size, cut", [(1.1, 8, 27.8, 25), (1.5, 10, 64.2, 53), (0.8, 10, 60.4, 59)])
def test_version_ones_k_is_close_to_and_above_what_the_cut_of_version_two_keeps(s, mu, size, cut):
    scores = zipf(s, 50_000)
    assert float(zipf_size(scores, mu, 100)) == round(size)
    assert len(left(mirostat(mu), scores)) == cut
    assert len(left(mirostat(mu, version="1"), scores)) == round(size)


def test_the_size_has_no_gap_where_the_exponent_is_one():
    sizes = [float(zipf_size(zipf(1 + off, 2000), 9.0, 100)) for off in (-1e-4, -1e-9, 0.0, 1e-9, 1e-4)]
    by_hand = 2 ** 9 / math.log(2000)
    assert sizes == [round(by_hand)] * 5


@pytest.mark.parametrize("scores", [rows(0, 0, 0, 0), rows(5, -math.inf, -math.inf), rows(1, 0.5, -math.inf), rows(900, 0, -900)], ids=str)
@pytest.mark.parametrize("mu", [-5.0, 0.0, 3.0, 1e4, math.inf])
def test_version_one_survives_any_row_and_never_brings_back_what_was_removed(scores, mu):
    kept = left(mirostat(mu, version="1"), scores)
    assert int(scores.argmax()) in kept and set(kept) <= set((scores[0] > -math.inf).nonzero().flatten().tolist())
    assert mu < 1e3 or kept == (scores[0] > -math.inf).nonzero().flatten().tolist()


def test_by_hand_a_token_moves_mu_by_eta_times_its_error():
    scores, sampler = rows(0.5, 0.25, 0.25).log()[0], mirostat(1.5, tau=3.0, eta=0.1)
    list(sampler.observe({"target": scores}, 1, 0))
    assert sampler.mu == pytest.approx(1.5 - 0.1 * (2 - 3))
    renormalised = mirostat(1.5, tau=3.0, eta=0.1, surprise="renormalised")
    list(renormalised.observe({"target": scores}, 0, 0))  # it is the only one left, so it surprises by nothing
    assert renormalised.mu == pytest.approx(1.5 + 0.1 * 3)


# --- ... and whole texts ---

def surprises(model: TableModel, prompt: list[int], new: list[int], t: float = 1.0) -> list[float]:
    """Bits of every token under the whole distribution, read off the table."""
    return [-float((model.scores((*prompt, *new[:i])) / t).log_softmax(-1)[token]) / LN2 for i, token in enumerate(new)]


def drift(lane: Lane, knobs: dict) -> float:
    """What the errors of a run must add up to: the way mu went, over eta."""
    sampler = next(sampler for sampler in lane.chain.samplers if sampler.name == "mirostat")
    return (2 * knobs["tau"] - sampler.mu) / knobs["eta"]


@pytest.mark.parametrize("version", "12")
@pytest.mark.parametrize("eta", [0.1, 1.0])
def test_all_errors_add_up_to_the_way_mu_went(version, eta):
    knobs, model = {"tau": 1.5, "eta": eta, "version": version}, TableModel("abcdefgh")
    for extra, t in ([], 1.0), ([("temperature", {"t": 2.0})], 2.0):
        lane, events = run(Recipe("greedy", {}, [("mirostat", knobs), *extra]), {"target": model}, [0, 1], 40)
        bits = surprises(model, [0, 1], lane.main.written, t)
        assert sum(bits) - 40 * 1.5 == pytest.approx(drift(lane, knobs), abs=1e-9)
        assert same(series(events, "surprise", "surprise, bits"), bits)
        assert [data["x"] for data in figures(events, "surprise")] == list(range(40))


def test_they_add_up_for_no_wrong_notion_of_surprise():
    knobs, model = {"tau": 1.5, "eta": 0.5}, TableModel("abcdefgh")
    lane, _ = run(alone("mirostat", **knobs, surprise="renormalised"), {"target": model}, [0, 1], 40)
    bits = surprises(model, [0, 1], lane.main.written)
    assert abs(sum(bits) - 60 - drift(lane, knobs)) > 1  # a cut distribution surprises less
    lane, _ = run(alone("mirostat", **knobs), {"target": model}, [0, 1], 40)
    bits = surprises(model, [0, 1], lane.main.written)
    assert abs(sum(bits) * LN2 - 60 - drift(lane, knobs)) > 1  # nats


def test_with_the_cut_wide_open_and_no_correction_it_draws_from_the_model_itself():
    model = TableModel("abcdefgh")
    for seed in range(3):
        assembly = assemble(alone("mirostat", eta=0.0))
        assembly.samplers[0].mu = math.inf
        assert written(assembly, {"target": model}, [0, 1], 30, seed=seed) == written(MODEL, {"target": model}, [0, 1], 30, seed=seed)


def course(sampler, spread: float, count: int, size: int = 256) -> list[tuple[float, float, bool]]:
    """Draws from random rows: for each mu before, surprise, and whether it was the most probable token."""
    chance, found = torch.Generator().manual_seed(0), []
    draws = Draws(0)
    for position in range(count):
        scores = torch.randn(size, generator=chance, dtype=torch.float64) * spread
        token = draws.pick(sampler.apply(scores[None], [[]])[0].softmax(-1), "token", position)
        before = sampler.mu
        list(sampler.observe({"target": scores}, token, position))
        found.append((before, -float(scores.log_softmax(-1)[token]) / LN2, token == int(scores.argmax())))
    return found


@pytest.mark.parametrize("eta", [0.1, 1.0])
def test_the_mean_surprise_comes_to_the_target_and_no_token_surprises_more_than_mu(eta):
    found = course(mirostat(6.0, tau=3.0, eta=eta), spread=2.0, count=1500)
    assert sum(bits for _, bits, _ in found) / len(found) == pytest.approx(3.0, abs=0.1)
    assert all(bits <= mu or best for mu, bits, best in found)
    assert len({best for _, _, best in found}) == 2


def test_the_renormalised_surprise_is_a_controller_that_ends_above_the_target():
    found = course(mirostat(6.0, tau=3.0, eta=0.5, surprise="renormalised"), spread=2.0, count=600)
    assert sum(bits for _, bits, _ in found) / len(found) > 3.2


def test_a_target_beyond_the_models_entropy_is_reported_once():
    model = TableModel("abcd", spread=3.0)
    lane, events = run(alone("mirostat", tau=9.0, eta=0.5), {"target": model}, [0, 1], 30)
    mus = series(events, "surprise", "mu")
    assert mus == sorted(mus) and mus[-1] > 2 * mus[0]
    (note,) = [event.text for event in events if isinstance(event, Note)]
    assert "9 bits is out of reach" in note


def test_what_was_guessed_and_refused_moves_nothing():
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
    knobs = {"tau": 1.2, "eta": 0.5}
    recipe = Recipe("speculative", {}, [("draft_model", {}), ("sample_match", {}), ("mirostat", knobs)])
    lane, _ = run(recipe, models, [0, 1], 30)
    assert sum(surprises(models["target"], [0, 1], lane.main.written)) - 30 * 1.2 == pytest.approx(drift(lane, knobs), abs=1e-9)
    assert assemble(recipe).guarantee() == ["heuristic"]


def test_a_token_that_was_given_though_nothing_could_draw_it_leaves_mu_alone():
    recipe = replace(Recipe("greedy", {}, [("temperature", {"t": 0.0}), ("mirostat", {})]), forced=[70, 71])
    _, events = told(recipe, Prompt(QUESTION))
    mus = series(events, "surprise", "mu")
    assert mus and all(map(math.isfinite, mus)) and mus[0] == 6.0


class Swaps(Decoder):
    """Two sequences; the second takes the row of the first for every token it keeps."""

    def decode(self, lm):
        yield lm.prefill()
        first, second = lm.fork(2)
        rows, _ = yield lm.extend([first, second])
        yield lm.keep([lm.choose(rows, 0), lm.choose(rows, 1, leaf=second)])
        self.samplers = first.chain.samplers, second.chain.samplers
        yield lm.keep(second)


def test_a_sequence_that_takes_anothers_row_learns_by_itself():
    model, decoder = TableModel("ab", rule=lambda context: torch.tensor([0.9, 0.1], dtype=torch.float64).log()), Swaps()
    _, events = run(Assembly(decoder, [make("mirostat", tau=1.0, eta=1.0)]), {"target": model}, [0], 3)
    expected = [2.0 - (-math.log2(p) - 1.0) for p in (0.9, 0.1)]
    assert [sampler.mu for (sampler,) in decoder.samplers] == pytest.approx(expected)
    assert [event.sequence for event in events if isinstance(event, Figure) and event.name == "surprise"] == [1, 2]
