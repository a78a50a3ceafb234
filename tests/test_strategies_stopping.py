"""How far to guess, and from which layer: chains that stop by odds, two models at once, guesses by goodput, and guesses for the guesser."""
from __future__ import annotations

from itertools import product
from random import Random
from types import SimpleNamespace

import pytest
import torch
from architectures import tiny
from pairs import pair
from registry import Collapse
from tables import TableModel, distance, law, product_law, write
from test_strategies_trees import AT_ONE, EXACT, GREEDY, MODEL, WRONG, EarlyTable, at_rest, first_drafts, guessing, tables
from toys import byte_tokenizer

from playground import load
from playground.draws import Draws
from playground.engine.model import Model, Work
from playground.engine.seams import Plan
from playground.errors import Refusal
from playground.events import Draft, Figure, Forward, Switch, Verdict
from playground.events import Test as Looked
from playground.lane import Limits
from playground.parts.drafting import chain_until, new_tree
from playground.parts.tree import ROOT
from playground.recipe import Assembly, Recipe, assemble
from playground.session import Models, Prompt, prepare
from playground.strategy import Verifier, find, make
from playground.trace import metrics

CHAIN = guessing("draft_model", "rejection", AT_ONE, depth=3)


def pearl(*samplers: tuple[str, dict], **knobs) -> Recipe:
    return Recipe("pearl", knobs, list(samplers))


def smart(drafter: str = "draft_model", *samplers: tuple[str, dict], depth: int = 5, **knobs) -> Recipe:
    return Recipe("smartspec", knobs, [(drafter, {"depth": depth}), *samplers])


COLLAPSES = {
    "specdec_plus_plus": [*at_rest("specdec_plus_plus", most=0), Collapse(guessing("specdec_plus_plus", "rejection", AT_ONE, h=1.0, most=3), CHAIN),
                          Collapse(guessing("specdec_plus_plus", "rejection", AT_ONE, h=0.0, least=3, most=3), CHAIN)],
    "del_exit": at_rest("del_exit", most=0),
    "pearl": [Collapse(pearl(gamma=0), GREEDY), Collapse(pearl(AT_ONE, gamma=0), MODEL), Collapse(pearl(AT_ONE, gamma=3, pre=False, post=False), CHAIN)],
    "smartspec": [Collapse(smart(depth=0), GREEDY), Collapse(smart("prompt_lookup", AT_ONE, depth=0), MODEL),
                  Collapse(smart("draft_model", AT_ONE, depth=3, load=1, row=0.0, kv=0.0, draft=0.0), CHAIN)],
    "reflective": [Collapse(Recipe("reflective", {"alpha": 0.0}), GREEDY),
                   Collapse(Recipe("reflective", {"alpha": 0.0}, [("draft_model", {"depth": 3}), AT_ONE]), CHAIN),
                   Collapse(Recipe("reflective", {"alpha": 0.0, "mix": "probabilities"}, [("draft_model", {"depth": 3}), AT_ONE]), CHAIN)],
    "hierarchical": [*at_rest("hierarchical", least=0), Collapse(guessing("hierarchical", "rejection", AT_ONE, least=3, ahead=0), CHAIN)],
}


def told(recipe: Recipe | Assembly, models: Models | None = None, length: int = 24, prompt: str = "The green bird"):
    """A session that has run to its end, and its events."""
    session = prepare(models or pair(), [recipe], Prompt(prompt), Limits(0, length))
    return session, [stamped.event for stamped in session]


def of(kind: type, events: list) -> list:
    return [event for event in events if isinstance(event, kind)]


def figures(events: list, name: str) -> list[dict]:
    return [event.data for event in of(Figure, events) if name in event.name]


def with_drafter(drafter, *samplers: tuple[str, dict], verifier: str = "rejection") -> Assembly:
    """Speculation with a drafter of the test's own making."""
    assembly = assemble(guessing("draft_model", verifier, *samplers))
    assembly.decoder.drafter = drafter
    return assembly


def law_is_off(lane: Recipe | Assembly, models: dict, length: int = 4, prompt: tuple[int, ...] = (0, 1, 0)) -> float:
    return distance(law(lane, models, list(prompt), length), product_law(TableModel(models["target"].letters, models["target"].ends), list(prompt), length))


# --- SpecDec++: stop where a refusal gets likely ---

def saying(*chances: float) -> TableModel:
    """Behind a prompt of one token it gives its best guess these probabilities, one after another."""
    def scores(context):
        chance = chances[min(len(context), len(chances)) - 1]
        return torch.tensor([chance, (1 - chance) / 2, (1 - chance) / 2], dtype=torch.float64).log()

    return TableModel("abc", rule=scores)


def first_chain(models: dict, **knobs) -> list[int]:
    """What SpecDec++ guesses first, by the draft's own probabilities."""
    recipe = guessing("specdec_plus_plus", "greedy_match", estimate="draft", **knobs)
    ((_, tree, _),) = first_drafts(recipe, models, 30)
    return tree.tokens


@pytest.mark.parametrize("late, guesses", [(True, 4), (False, 3)])
def test_a_chain_ends_where_the_product_of_its_chances_falls_below_one_minus_h(late, guesses):
    """1 - .9 = .1, 1 - .72 = .28, 1 - .36 = .64: the third guess makes it doubtful, and the head of the paper would see that one guess later."""
    models = {"target": TableModel("abc"), "draft": saying(.9, .8, .5, .99)}
    assert len(first_chain(models, h=0.5, least=1, late=late)) == guesses


@pytest.mark.parametrize("h, least, most, late, guesses", [
    (0.0, 1, 20, True, 2), (0.0, 1, 20, False, 1), (0.0, 3, 20, True, 3), (1.0, 1, 20, True, 20), (1.0, 1, 7, False, 7), (0.0, 4, 2, True, 2)])
def test_h_zero_makes_the_shortest_chain_and_h_one_the_longest(h, least, most, late, guesses):
    models = {"target": TableModel("abc"), "draft": saying(.6)}
    assert len(first_chain(models, h=h, least=least, most=most, late=late)) == guesses


def test_a_chance_is_what_the_draft_says_until_guesses_were_seen_and_then_what_was_seen():
    known = type(make("specdec_plus_plus")._reliability)()
    assert known.chance(0.85) == pytest.approx(0.85)
    for stood in [True] * 30 + [False] * 70:
        known.learn(0.88, stood)
    assert known.chance(0.85) == pytest.approx(0.3, abs=0.02)
    assert known.chance(0.15) == pytest.approx(0.15), "other probabilities are not touched"
    assert known.figure("what was said").data["values"] == [0.3]


class CountsAll(find("specdec_plus_plus")):
    """Takes guesses nobody looked at for refused."""

    def observe(self, tree, rows, verdict):
        for node in range(len(tree)):
            self._reliability.learn(tree.confidence[node], node in verdict.kept)


@pytest.mark.parametrize("cls, right", [(find("specdec_plus_plus"), True), (CountsAll, False)], ids=["tested", "all"])
def test_only_guesses_that_were_looked_at_teach_how_far_the_draft_can_be_trusted(cls, right):
    """Draft and target agree in six places of ten, whatever came before: so do sixty guesses of a hundred, if only they are counted."""
    certain = torch.eye(3, dtype=torch.float64) * 50
    target, draft = (lambda context: certain[int(len(context) % 10 >= 6)]), (lambda context: certain[0])
    models = {"target": TableModel("abc", rule=target), "draft": TableModel("abc", rule=draft)}
    assembly = with_drafter(cls(h=1.0, most=8, estimate="draft"))
    lane = write(assembly, models, [0], Limits(0, 200), Draws(0))
    known = lane.assembly.decoder.drafter._reliability
    measured = sum(known.stood) / sum(known.seen)
    assert (abs(measured - 0.6) < 0.05) == right


def test_a_draft_that_is_sure_and_wrong_is_soon_stopped_early():
    certain = torch.tensor([[9.0, 0, 0], [0, 9.0, 0]], dtype=torch.float64)
    models = {"target": TableModel("abc", rule=lambda context: certain[len(context) % 2]), "draft": TableModel("abc", rule=lambda context: certain[0])}
    lengths = []

    class Watched(find("specdec_plus_plus")):
        def observe(self, tree, rows, verdict):
            lengths.append(len(tree))
            super().observe(tree, rows, verdict)

    write(with_drafter(Watched(h=0.4, least=1, most=8)), models, [0], Limits(0, 60), Draws(0))
    assert lengths[0] == 8 and max(lengths[5:-2]) <= 3


class DropsDoubtful(find("specdec_plus_plus")):
    """Takes back a guess whose own chance is small, instead of sending it."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        return tree.only(list(range(len(tree) - 1))) if len(tree) and self._doubtful(tree) else tree


SHORT = {"h": 0.5, "least": 1, "late": False}


@pytest.mark.parametrize("knobs", [SHORT, SHORT | {"late": True}, SHORT | {"estimate": "draft"}], ids=str)
def test_a_chain_may_stop_for_what_its_guesses_are_as_long_as_all_are_sent(knobs):
    assert law_is_off(with_drafter(find("specdec_plus_plus")(**knobs), AT_ONE), tables("ab")) < EXACT


def test_a_doubtful_guess_that_is_taken_back_bends_the_law():
    assert law_is_off(with_drafter(DropsDoubtful(**SHORT), AT_ONE), tables("ab")) > WRONG


# --- DEL: the layer that guesses is chosen by what all layers would have guessed ---

DEL = find("del_exit")
tokens_per_layer = DEL.plan.__globals__["tokens_per_layer"]


def layered(architecture: str) -> Model:
    return Model(tiny(architecture), byte_tokenizer(), architecture)


def counted(hits: dict[int, tuple[float, float]], depth: int = 8, **knobs):
    """DEL after counting so many hits and misses, by layer."""
    drafter = make("del_exit", **knobs)
    drafter.inner(depth, False)
    for layer, (right, wrong) in hits.items():
        drafter.tallies[layer].hits, drafter.tallies[layer].misses = right, wrong
    return drafter


@pytest.mark.parametrize("alpha, guesses, layer", product([0.0, 0.3, 0.9, 1.0], [0, 1, 5], [1, 4]))
def test_expected_tokens_for_a_layer_are_those_of_every_course_a_round_can_take(alpha, guesses, layer):
    expected = sum((alpha ** stood * (1 - alpha) if stood < guesses else alpha ** stood) * (stood + 1) for stood in range(guesses + 1))
    assert tokens_per_layer(alpha, guesses, layer, 8) == pytest.approx(expected / (8 + guesses * layer))


@pytest.mark.parametrize("hits, plan", [
    ({}, (1, 1)),
    ({layer: (5, 0) for layer in range(1, 8)}, (1, 17)),
    ({layer: (0, 5) for layer in range(1, 8)}, (1, 0)),
    ({layer: (9, 1) if layer == 3 else (0, 9) for layer in range(1, 8)}, (3, 4)),
], ids=["nothing known", "all right", "all wrong", "one right"])
def test_the_plan_is_the_best_of_all_plans_and_of_equals_the_lowest_layer(hits, plan):
    drafter = counted(hits)
    assert drafter.plan() == plan
    worth = {(layer, n): sum((h / (h + m)) ** j for j in range(n + 1)) / (8 + n * layer) for layer, (h, m) in hits.items() for n in range(18)}
    assert not hits or worth[plan] == pytest.approx(max(worth.values()))


def test_a_layer_nothing_is_known_of_is_not_chosen():
    assert counted({5: (9, 1)}).plan()[0] == 5


def test_what_was_counted_fades_round_by_round():
    tally = counted({}).tallies[1]
    for right in (True, False, True):
        tally.add([right], [0.5], 0.5)
    assert (tally.hits, tally.misses) == (1 + 0.25, 0.5)
    tally.add([True, True, False], [0.9, 0.7, 0.2], 0.0)
    assert (tally.hits, tally.misses, tally.threshold) == (2, 1, pytest.approx((0.8 + 0.2) / 2)), "at decay 0 only the last round counts"


def read_by_layers(model: Model, tokens: list[int]) -> dict[int, torch.Tensor]:
    """The head's rows [n, V] after every layer of a fresh reading, the last by its own number."""
    inner = range(1, model.depth)
    work = Work(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))
    (logits,), captured = model.forward([work], Plan(capture=frozenset(inner)))
    return {**{layer: model.read_out(captured[layer]) for layer in inner}, model.depth: logits}


START = [5, 9, 2, 7, 7, 1]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_every_layers_rows_are_those_of_a_fresh_reading_and_the_chosen_layers_are_the_guesses(architecture, samplers):
    model, compared = layered(architecture), set()

    class Comparing(Verifier):
        def judge(self, lm, tree, rows):
            verdict = make("rejection").judge(lm, tree, rows)
            for node in (ROOT, *verdict.kept):
                fresh = read_by_layers(model, lm.tokens + tree.prefix(node))
                for exit, found in rows.others.items():
                    assert (found[rows.row(node)] - fresh[exit.layer][-1]).abs().max() < 1e-9
                    compared.add((exit.layer, len(tree) > 0))
            return verdict

    assembly = assemble(guessing("del_exit", "rejection", *samplers))
    assembly.decoder.verifier = Comparing()
    write(assembly, {"target": model}, START, Limits(0, 18), Draws(0))
    assert compared == set(product([1, 2], [True, False]))


class CountsRefused(DEL):
    """Counts what layers thought behind a guess that was refused."""

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, Verdict(kept=list(range(len(tree)))))


@pytest.mark.parametrize("cls, right", [(DEL, True), (CountsRefused, False)], ids=["standing", "refused too"])
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_counts_are_what_one_reading_of_the_finished_text_would_give(cls, right, samplers):
    model = layered("llama")
    lane = write(with_drafter(cls(decay=1.0), *samplers), {"target": model}, START, Limits(0, 30), Draws(1))
    fresh = {layer: rows[len(START) - 1:].argmax(-1) for layer, rows in read_by_layers(model, lane.tokens[:-1]).items()}
    expected = {layer: int((fresh[layer] == fresh[model.depth]).sum()) for layer in (1, 2)}
    found = lane.assembly.decoder.drafter.tallies
    assert ({layer: (tally.hits, tally.misses) for layer, tally in found.items()} == {n: (hits, 30 - hits) for n, hits in expected.items()}) == right


def test_a_chain_ends_with_its_first_unsure_guess_and_that_guess_is_sent():
    chains = []

    class Watched(DEL):
        def propose(self, lm, budget):
            bar = self.tallies[self.plan()[0]].threshold
            tree = yield from super().propose(lm, budget)
            chains.append((tree.confidence, bar, budget))
            return tree

    write(with_drafter(Watched()), {"target": layered("llama")}, START, Limits(0, 60), Draws(0))
    ended = [(made, bar) for made, bar, budget in chains if made and len(made) < min(budget, 18)]
    assert len(ended) > 3 and all(made[-1] < bar <= min(made[:-1], default=1) for made, bar in ended)


class TwoLayers(EarlyTable):
    """Its first layer has opinions of its own, and they can be read."""

    depth = 2

    def state(self, layer, context):
        return self.early.scores(context) if layer == 1 else super().state(layer, context)


class DropsUnsure(DEL):
    """Takes back a last guess that its layer was unsure of."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        return tree.only(list(range(len(tree) - 1))) if len(tree) and tree.confidence[-1] < 0.5 else tree


@pytest.mark.parametrize("knobs, verifier", [({}, "rejection"), ({}, "k_seq"), ({"dynamic": False}, "rejection"), ({"decay": 0.0}, "rejection")], ids=str)
def test_the_law_is_the_whole_models_whatever_its_layers_think(knobs, verifier):
    assert law_is_off(with_drafter(DEL(**knobs), AT_ONE, verifier=verifier), {"target": TwoLayers("ab")}, 4) < EXACT


def test_an_unsure_guess_that_is_taken_back_bends_the_law():
    assert law_is_off(with_drafter(DropsUnsure(), AT_ONE), {"target": TwoLayers("ab")}, 4) > WRONG


def test_del_goes_beside_a_sampler_that_reads_inner_layers_itself():
    plain, guessed = (told(recipe, length=12)[0] for recipe in (Recipe("greedy", {}, [("dola", {})]), guessing("del_exit", "rejection", ("dola", {}))))
    assert guessed._runners[0].lane.tokens == plain._runners[0].lane.tokens


def test_a_model_of_one_layer_has_none_to_leave_early_and_is_decoded_plainly():
    lane = write(assemble(guessing("del_exit")), tables("abc"), [0], Limits(0, 8), Draws(0))
    assert not lane.target._left_early and set(lane.main.origins) == {"sampled"}


# --- PEARL: guess while checking ---

def steps(models: dict, recipe: Recipe, length: int = 40) -> tuple[list[Draft], list[Verdict], list]:
    session = prepare(Models(models["target"], models["draft"]), [recipe], Prompt("abc"), Limits(0, length))
    events = [stamped.event for stamped in session]
    return of(Draft, events), of(Verdict, events), events


def agreeing(share: int, ends: str = "") -> dict[str, TableModel]:
    """A draft that says what the target says in all places but every `share`-th."""
    certain = torch.eye(4, dtype=torch.float64) * 50
    return {"target": TableModel("abcd", ends, rule=lambda context: certain[len(context) % 3]),
            "draft": TableModel("abcd", ends, rule=lambda context: certain[3 if len(context) % share == 0 else len(context) % 3])}


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_with_a_draft_that_is_always_right_every_pass_checks_all_guesses_of_the_step_before(gamma):
    drafts, verdicts, events = steps(agreeing(1000), pearl(gamma=gamma), 41)
    assert [len(verdict.kept) for verdict in verdicts[:-1]] == [1] + [gamma] * (len(verdicts) - 2)
    assert all(verdict.token == -1 for verdict in verdicts[:-1]), "the first new guess has the bonus token's place"
    assert len([event for event in of(Switch, events)]) == (gamma > 1), "once something is pending, something always is"


def test_with_a_draft_that_is_always_wrong_every_token_costs_a_pass_of_the_target():
    models = agreeing(1)
    _, verdicts, events = steps(models, pearl(), 20)
    assert all(verdict.kept == [] for verdict in verdicts) and not of(Switch, events)
    passes = [event for event in of(Forward, events) if event.stream == "target"]
    assert len(passes) == 20 and {event.tokens for event in passes[1:]} == {1}


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_pending_are_none_or_all_guesses_of_a_step_but_the_first(gamma, samplers):
    """Seen from the text: the draft reads what is pending again, with the end of the text, in the pass that makes the next guess."""
    pending, session = set(), prepare(pair(), [pearl(*samplers, gamma=gamma)], Prompt("The green bird"), Limits(0, 40))
    while not session.finished:
        lane = session._runners[0].lane
        if lane.generated and not lane.reason and not lane.target.store.parents:
            assert lane.target.behind() <= 1
        for stamped in session.advance():
            if isinstance(stamped.event, Draft) and lane.remaining > 2 * gamma + 1:
                pending.add(len(stamped.event.tokens) - gamma)
    assert pending == {0, gamma - 1}


@pytest.mark.parametrize("knobs", [{"pre": pre, "post": post, "gamma": gamma} for pre, post, gamma in product([True, False], [True, False], [1, 4])], ids=str)
def test_nothing_unchecked_is_in_the_text_wherever_it_is_cut(knobs):
    models = tables("abcde", ends="e", seed=3)
    whole = write(assemble(GREEDY), models, [0, 1], Limits(0, 12), Draws(0)).tokens
    for length in range(1, 13):
        assert write(assemble(pearl(**knobs)), models, [0, 1], Limits(0, length), Draws(0)).tokens == whole[:2 + length]


def test_passes_of_both_models_are_gamma_and_one_a_step():
    drafts, verdicts, events = steps(agreeing(7), pearl(gamma=3), 60)
    by_stream = {name: [event for event in of(Forward, events) if event.stream == name] for name in ("target", "draft")}
    assert len(by_stream["target"]) == len(verdicts), "the prompt's pass is the first step's"
    assert 3 * (len(drafts) - 3) <= len(by_stream["draft"]) <= 3 * len(drafts), "the last steps have no room for three guesses"


@pytest.mark.parametrize("knobs, verifier", [({"gamma": 3}, "rejection"), ({"gamma": 3}, "k_seq"), ({"gamma": 2}, "sample_match"),
                                             ({"gamma": 2, "pre": False}, "rejection"), ({"gamma": 3, "post": False}, "rejection")], ids=str)
def test_the_law_of_pearl_is_the_targets(knobs, verifier):
    assert law_is_off(Recipe("pearl", knobs, [(verifier, {}), AT_ONE]), tables("ab"), 4) < EXACT


@pytest.mark.parametrize("knobs", [{}, {"pre": False}], ids=str)
def test_the_law_of_pearl_is_the_targets_where_pending_guesses_may_end_the_text(knobs):
    assert law_is_off(Recipe("pearl", {"gamma": 2, **knobs}, [AT_ONE]), tables("ab.", ends="."), 3) < EXACT


class BelievesPending(Verifier):
    """Asks about the guess nobody has read yet, and lets all that were pending stand."""

    def judge(self, lm, tree, rows):
        pending = [node for node in range(len(tree)) if not rows.unread(node)]
        first = pending[-1] + 1 if pending else 0
        if first == len(tree):
            return Verdict(kept=pending, token=lm.pick(rows, first - 1).token)
        accepted = lm.flip(min(1.0, float(rows.chances(first - 1)[tree.tokens[first]] / tree.q[first][tree.tokens[first]])), rows.position(first - 1))[0]
        return Verdict(kept=pending + [first] * accepted, token=-1 if accepted else lm.pick(rows, first - 1).token)


class BonusBesidePending(find("pearl")):
    """Adds the token after a checked chain, and keeps the guesses that were made for its place."""

    def _checked(self, lm, tree, rows, clock):
        rest = yield from super()._checked(lm, tree, rows, clock)
        if len(rest):
            row = yield lm.extend()
            yield lm.keep(lm.choose(row, rest.tokens[0]))
        return new_tree(lm, self)


def test_pending_guesses_that_nobody_checks_bend_the_law():
    assembly = assemble(pearl(AT_ONE, gamma=3))
    assembly.decoder.verifier = BelievesPending()
    assert law_is_off(assembly, tables("ab"), 3) > WRONG


def test_a_pending_guess_that_is_written_at_once_bends_the_law():
    assembly = assemble(pearl(AT_ONE, gamma=2))
    assembly.decoder = BonusBesidePending(assembly.decoder.verifier, gamma=2)
    assert law_is_off(assembly, tables("ab"), 3) > WRONG


def test_the_virtual_clock_counts_the_slower_model_of_each_step_and_says_that_it_measures_nothing():
    _, verdicts, events = steps(agreeing(1000), pearl(gamma=4, cost=4.0), 41)
    *_, last = figures(events, "time so far")
    count = len(verdicts)
    assert last["series"] == {"both models at once": pytest.approx(4 * (count - 1) + 4, abs=4), "plain decoding": 4.0 * 41,
                              "the same steps in turn": pytest.approx(8 * (count - 1) + 8, abs=8)}
    clocks = [event.name for event in of(Figure, events) if "clock" in event.name]
    assert clocks and all("reckoned, not measured" in name for name in clocks)
    one = figures(events, "one step")[1]
    assert one == {"labels": ["the draft guesses", "the target checks"], "values": [4, 4.0]}


def test_where_one_model_waits_for_the_other_the_clock_shows_it():
    times = {cost: figures(steps(agreeing(1000), pearl(gamma=4, cost=cost), 41)[2], "time so far")[-2]["series"] for cost in (1.0, 4.0, 16.0)}
    gain = {cost: found["the same steps in turn"] / found["both models at once"] for cost, found in times.items()}
    assert gain[4.0] == pytest.approx(2) and gain[1.0] == gain[16.0] == pytest.approx(1.25)


# --- SmartSpec: as many guesses as pay ---

Server = find("smartspec").decode.__globals__["Server"]
Paced = find("smartspec").decode.__globals__["Paced"]


def best(server, alpha: float, context: int = 100, most: int = 8) -> int:
    return max(range(most + 1), key=lambda length: (server.goodput(length, alpha, context), -length))


def test_goodput_is_expected_tokens_over_the_time_of_a_step():
    server = Server(load=3, row=0.1, kv=0.001, draft=0.5)
    time = 2 * 0.5 * (1 + 3 * (0.1 + 0.001 * 50)) + (1 + 3 * (0.1 * 3 + 0.001 * 50))
    assert server.time(2, 50) == pytest.approx(time)
    assert server.goodput(2, 0.6, 50) == pytest.approx(3 * (1 + 0.6 + 0.36) / time)


@pytest.mark.parametrize("server, alpha, guesses", [
    (Server(1, 0.0, 0.0, 1e6), 0.99, 0),
    (Server(1, 0.0, 0.0, 0.0), 0.5, 8),
    (Server(1, 0.0, 0.0, 0.6), 0.6, 0),
    (Server(64, 0.5, 0.0, 0.1), 0.7, 0),
], ids=["dear guesses", "free guesses and rows", "a chance no larger than the cost", "a busy server"])
def test_the_best_length_in_extreme_cases(server, alpha, guesses):
    assert best(server, alpha) == guesses


def test_a_busier_server_guesses_less_and_a_better_draft_more():
    loads, alphas = [1, 2, 4, 8, 16, 32, 64], [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    grid = [[best(Server(load, 0.02, 0.0001, 0.2), alpha) for alpha in alphas] for load in loads]
    assert all(row == sorted(row) for row in grid) and all(list(column) == sorted(column, reverse=True) for column in zip(*grid))
    assert grid[0][-1] == 8 and grid[-1][0] == 0


class DividesByDrafted(Paced):
    """Takes guesses nobody looked at for refused."""

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, SimpleNamespace(kept=verdict.kept, tests=[Looked(node, 0, 0, None, False) for node in range(len(tree))]))


@pytest.mark.parametrize("cls, estimate", [(Paced, 0.7), (DividesByDrafted, 0.44)], ids=["tested", "drafted"])
def test_the_estimate_is_the_share_of_guesses_that_stood_among_those_that_were_looked_at(cls, estimate):
    """4000 rounds of four guesses that each stand with .7. At a weight of .005 some 500 looked-at guesses count: a standard error of .02."""
    chance = Random(0)
    paced = cls(make("draft_model"), Server(1, 0, 0, 0), SimpleNamespace(accept=0.5, weight=0.005, probe=9))
    for _ in range(4000):
        kept = next((i for i in range(4) if chance.random() >= 0.7), 4)
        tests = [Looked(node, 1, 1, None, node < kept) for node in range(min(4, kept + 1))]
        paced.observe([0] * 4, None, SimpleNamespace(kept=list(range(kept)), tests=tests))
    assert paced.alpha == pytest.approx(estimate, abs=0.08)


def test_a_heavy_load_turns_guessing_off_and_a_light_one_on_and_the_text_is_the_same():
    (busy, told_busy), (idle, told_idle) = (told(smart(load=load), length=30) for load in (64, 1))
    assert busy._runners[0].lane.tokens == idle._runners[0].lane.tokens
    assert metrics(busy.trace)["target_forwards"] > metrics(idle.trace)["target_forwards"]
    assert not of(Draft, told_busy) and len(of(Draft, told_idle)) > 5
    names = {event.name for event in of(Figure, told_busy) if "goodput" in event.name}
    assert names and all("64 texts at once, simulated" in name for name in names)


def test_after_many_rounds_without_a_guess_one_is_made_to_see_whether_it_stands():
    _, events = told(smart(load=64, probe=5), length=20)
    assert [len(draft.tokens) for draft in of(Draft, events)] == [1] * 3


@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup"])
def test_the_law_is_the_targets_however_the_length_changes(drafter):
    assert law_is_off(smart(drafter, AT_ONE, depth=3, load=1, weight=0.5, draft=0.6), tables("ab"), 4) < EXACT


def test_smartspec_reckons_with_chains_alone():
    for drafter, knobs in (("dyspec", {}), ("draft_model", {"width": 2})):
        with pytest.raises(Refusal, match="chains"):
            assemble(Recipe("smartspec", {}, [(drafter, knobs)]))


# --- a drafter for the drafter ---

def chains_of(recipe: Recipe, models: dict, prompt: list[int]) -> list[list[int]]:
    """What was sent to be checked, round by round."""
    seen = []

    class Watched(Verifier):
        def judge(self, lm, tree, rows):
            seen.append(tree.tokens)
            return make("sample_match").judge(lm, tree, rows)

    assembly = assemble(recipe)
    assembly.decoder.verifier = Watched()
    write(assembly, models, prompt, Limits(0, 40), Draws(4))
    return seen


@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_guesses_that_were_guessed_themselves_are_the_draft_models_own(samplers):
    """A chain is drawn by the same chances whoever saves the draft model its passes."""
    models, prompt = tables("ab", seed=2), [0, 1, 0, 1, 1]
    first = {}
    for name, knobs in (("hierarchical", {"least": 6, "ahead": 4}), ("draft_model", {"depth": 12})):
        first[name] = chains_of(guessing(name, "sample_match", *samplers, **knobs), models, prompt)[0]
    assert 6 <= len(first["hierarchical"]) <= 10 and first["hierarchical"] == first["draft_model"][:len(first["hierarchical"])]


def test_the_target_gets_at_least_as_many_tokens_as_was_asked_and_at_most_one_inner_guess_more():
    lengths = [len(chain) for chain in chains_of(guessing("hierarchical", "sample_match", least=5, ahead=3), tables("ab", seed=2), [0, 1, 0, 1, 1])]
    assert len(lengths) > 4 and all(5 <= length <= 8 for length in lengths[:-4]) and max(lengths) > 5


def test_where_the_text_repeats_itself_the_draft_model_needs_few_passes():
    models = agreeing(1000)
    (_, alone), (_, helped) = (told(guessing("hierarchical", least=6, ahead=ahead), Models(**models), 48, "abcabcabc") for ahead in (0, 5))
    passes = [sum(event.stream == "draft" for event in of(Forward, events)) for events in (alone, helped)]
    assert passes[1] <= passes[0] / 3


class BelievesLookup(find("hierarchical")):
    """Takes the inner guess for the draft model's own choice."""

    def _follow(self, lm, inner, rows, leaf, chain):
        while children := inner.children(leaf):
            leaf = children[0]
            chain.add(inner.tokens[leaf], len(chain) - 1, rows.p[rows.row(inner.parents[leaf])])
        return super()._follow(lm, inner, rows, leaf, chain)


@pytest.mark.parametrize("cls, right", [(find("hierarchical"), True), (BelievesLookup, False)], ids=["checked", "believed"])
def test_the_law_is_the_targets_only_where_the_inner_guess_is_checked_by_the_draft_model(cls, right):
    off = law_is_off(with_drafter(cls(least=3, ahead=2), AT_ONE), tables("ab"), 4, (0, 1, 0, 1, 1))
    assert off < EXACT if right else off > WRONG


# --- reflective verification: the guesses are read twice ---

Reflective = find("reflective")


class Shifted(Reflective):
    """Takes each second row for that of the place before it."""

    def mixed(self, first, second):
        return super().mixed(first, second.roll(1, 0))


def reflecting(cls: type = Reflective, drafter: str = "draft_model", **knobs) -> Assembly:
    assembly = assemble(Recipe("reflective", {}, [(drafter, {"depth": 3})]))
    return Assembly(cls(assembly.decoder.drafter, assembly.decoder.verifier, **knobs))


def read_after(model: Model, tokens: list[int], count: int) -> torch.Tensor:
    """The last `count` rows [count, V] of a fresh reading."""
    return model.forward([Work(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))])[0][0][-count:]


@pytest.mark.parametrize("cls, right", [(Reflective, True), (Shifted, False)], ids=["aligned", "shifted"])
@pytest.mark.parametrize("ending", [0, 4])
def test_guesses_are_judged_by_a_mixture_of_two_fresh_readings(cls, right, ending):
    models, off = {"target": pair().target, "draft": pair().draft}, []

    class Comparing(Verifier):
        def judge(self, lm, tree, rows):
            if len(tree) and lm.generated:
                behind = [*lm.spell("again:"), *lm.tokens[len(lm.tokens) - ending:], *tree.tokens]
                first = read_after(models["target"], lm.tokens + tree.tokens, len(tree) + 1)
                second = read_after(models["target"], lm.tokens + tree.tokens + behind, len(tree) + 1)
                off.append(float((rows.scores[:len(tree) + 1] - (0.7 * first + 0.3 * second)).abs().max()))
            return make("rejection").judge(lm, tree, rows)

    assembly = reflecting(cls, ask="again:", ending=ending)
    assembly.decoder.verifier = Comparing()
    write(assembly, models, START, Limits(0, 16), Draws(0))
    assert len(off) > 2 and (max(off) < 1e-9) == right


def copying() -> TableModel:
    """Goes on as the same two tokens went on before, and where they are new, as it likes."""
    opinion = TableModel("abcdefgh", seed=5)

    def scores(context):
        earlier = [context[i + 2] for i in range(len(context) - 2) if context[i:i + 2] == context[-2:]]
        return 9 * torch.eye(8, dtype=torch.float64)[earlier[-1]] if earlier else opinion.scores(context)

    return TableModel("abcdefgh", rule=scores)


def accepted(alpha: float, **knobs) -> float:
    """Share of a clueless draft's guesses that stand with a target that copies what it has read."""
    models = Models(copying(), TableModel("abcdefgh", seed=9))
    recipe = Recipe("reflective", {"alpha": alpha, "ask": "", **knobs}, [("draft_model", {"depth": 4})])
    return metrics(told(recipe, models, 40, "abc")[0].trace)["acceptance_rate"]


def test_a_target_that_copies_accepts_more_nonsense_the_more_the_second_reading_counts():
    shares = [accepted(alpha) for alpha in (0.0, 0.5, 1.0)]
    assert shares[0] < 0.3 and shares == sorted(shares) and shares[-1] > 0.6


def test_what_stands_only_by_reflection_is_told():
    models = Models(copying(), TableModel("abcdefgh", seed=9))
    recipe = Recipe("reflective", {"alpha": 1.0, "ask": ""}, [("draft_model", {"depth": 4})])
    notes = [event.text for event in told(recipe, models, 40, "abc")[1] if event.kind == "note"]
    assert notes and all("own choice" in note for note in notes)
    assert not [event for event in told(Recipe("reflective", {"alpha": 0.0}), models, 40, "abc")[1] if event.kind == "note"]


def test_where_there_is_no_room_for_a_second_reading_there_is_one():
    models = {"target": TableModel("abcde", context=24), "draft": TableModel("abcde", seed=1, context=24)}
    plain, reflected = (write(assemble(recipe), models, [0, 1, 2], Limits(0, 50), Draws(0)) for recipe in
                        (GREEDY, Recipe("reflective", {"alpha": 0.0, "ending": 4})))
    assert plain.tokens == reflected.tokens and len(plain.tokens) == 24


# --- a model as its own draft ---

@pytest.fixture(scope="module")
def packed() -> Models:
    return load(draft="nf4")


def test_a_model_in_nf4_guesses_for_itself_in_full_and_is_named_as_what_it_is(packed):
    session, events = told(Recipe("speculative"), packed, 30, "Once upon a time")
    assert (packed.target.quantization, packed.draft.quantization) == ("none", "nf4")
    assert (session.headers[0].draft, session.headers[0].quantization) == ("pocket in nf4", "none")
    assert metrics(session.trace)["acceptance_rate"] > 0.8, "what four bits lose changes few first choices"


def test_the_text_is_that_of_the_full_weights_and_their_rows_are_not_those_of_the_packed_ones(packed):
    texts = [told(recipe, packed, 30, "Once upon a time")[0]._runners[0].lane.tokens for recipe in (GREEDY, Recipe("speculative"), pearl())]
    assert texts[0] == texts[1] == texts[2]
    full, small = (model.forward([Work(model.new_store(), [40, 50, 60], [-1, 0, 1])])[0][0] for model in (packed.target, packed.draft))
    assert (full - small).abs().max() > 1e-3


# --- what they share ---

def test_a_stop_rule_is_asked_after_each_guess_and_ends_the_chain():
    asked = []

    class Stopping(find("draft_model")):
        def propose(self, lm, budget):
            return (yield from chain_until(lm, lm.stream("draft"), new_tree(lm, self), budget, lambda chain: asked.append(len(chain)) or len(chain) == 3))

    write(with_drafter(Stopping()), tables("abc"), [0], Limits(0, 20), Draws(0))
    assert asked[:3] == [1, 2, 3] and max(asked) == 3
