"""Guaranteed output distributions of lanes, and wrong verifiers and drafters."""
from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from registry import can_be_had
from tables import Enumerating, Law, TableModel, distance, law, prepared, product_law, without_context
from torch import Tensor

from playground.algorithms.speculative.verification import Ruling, match, reject, walk
from playground.contract import Drafter, Sampler, Verifier
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.sampler_chain import Chain

EXACT = 1e-9
WRONG = 1e-3  # a smaller error could be rounding
AT_ONE = ("temperature", {"t": 1.0})


def tables(letters: str = "abc", ends: str = "", seed: int = 0) -> dict[str, TableModel]:
    """A target, and a draft that disagrees with it in every row."""
    return {"target": TableModel(letters, ends, seed), "draft": TableModel(letters, ends, seed + 1)}


def added(config: LaneConfig, *more: tuple[str, dict]) -> LaneConfig:
    return replace(config, extras=[*config.extras, *more])


def drawing(configs: list[LaneConfig]) -> list[LaneConfig]:
    """The configs, made to sample from the model instead of taking the argmax; without those that cannot."""
    made = [config if any(s.draws for s in assemble(config).samplers) else added(config, AT_ONE) for config in configs]
    return [config for config in made if can_be_had(config)]


def promised(lane: LaneConfig | Assembly, models: dict[str, TableModel], prompt: list[int], length: int) -> Law:
    """The output distribution of plain decoding with the samplers of a lane, by the chain rule, summed over the random
    choices of the samplers themselves.
    """
    target, assembly = models["target"], lane if isinstance(lane, Assembly) else assemble(lane)
    fresh, draws, found = prepared(assembly.samplers, models, prompt), Enumerating(), defaultdict(float)

    def reshape(scores, history):
        samplers = copy.deepcopy(fresh)
        Chain(samplers, coin=draws.coin).follow(SimpleNamespace(lineage=0))
        for end in range(len(prompt), len(history)):  # samplers with state see all committed tokens
            passed(samplers, target, prompt, history[:end], history[end])
        return passed(samplers, target, prompt, history)

    for _ in draws.runs():
        for text, p in product_law(target, prompt, length, reshape).items():
            found[text] += draws.weight * p
    return dict(found)


def passed(
    samplers: list[Sampler], target: TableModel, prompt: list[int], history: list[int], kept: int | None = None
) -> Tensor:
    """Scores [V] after a history and all samplers; each sampler is then informed that `kept` was committed."""
    place, given = len(history) - len(prompt), []
    whole, short = tuple(history), (*without_context(prompt), *history[len(prompt):])
    rows = {"target": target.scores(whole), "hidden": target.state(target.depth, whole)}
    for sampler in samplers:
        rows |= {name: target.scores(short) for name in sampler.streams}
        rows |= {
            at: target.state(at.layer, whole if at.stream == "target" else short)
            for at in sampler.inner(target.depth, target.tied)
        }
    for sampler in samplers:
        given.append(dict(rows))
        stacked = {name: row[None] for name, row in rows.items()}
        rows["target"] = (
            sampler.mix(stacked) if sampler.stage == "mix" else sampler.apply(stacked["target"], [history])
        )[0]
    for sampler, seen in zip(samplers, given) if kept is not None else ():
        deque(sampler.observe(seen if sampler.stage == "mix" else {"target": seen["target"]}, kept, place), maxlen=0)
    return rows["target"]


def off(lane: LaneConfig | Assembly, models: dict[str, TableModel], prompt: list[int], length: int) -> float:
    """Distance of a lane's output distribution from the guaranteed one."""
    return distance(law(lane, models, prompt, length), promised(lane, models, prompt, length))


Rule = Callable[..., Ruling]


class Judged(Verifier):
    """A verifier made of one rule(lm, tree, rows, node, children)."""

    def __init__(self, rule: Rule):
        self.rule = rule

    def judge(self, lm, tree, rows):
        return walk(lm, tree, rows, lambda node, children: self.rule(lm, tree, rows, node, children))


def by_the_book(lm, tree, rows, node, children, drawn=None, redraw=None) -> Ruling:
    p, position = rows.p[rows.row(node)], rows.position(node)
    return reject(p, children, replace(tree, drawn=drawn or tree.drawn), lambda ratio: lm.flip(ratio, position),
                  lambda rest: lm.draw(rest if redraw is None else p, position, "redraw"))


def redraws_from_p(*case) -> Ruling:
    return by_the_book(*case, redraw="from p")


def draws_again_after_a_miss(lm, tree, rows, node, children) -> Ruling:
    ruling = match(lm.pick(rows, node).token, children, tree, rows.p[rows.row(node)])
    return ruling if ruling.child is not None else replace(ruling, token=lm.pick(rows, node, "again").token)


class Siblings(Drafter):
    """One level of draft tokens from the draft's row q, sampled in one of several ways."""

    def __init__(self, how: Callable, drawn: str = "independent"):
        self.how, self.drawn = how, drawn

    def propose(self, lm, budget):
        tree = TokenTree(source="siblings", drawn=self.drawn)
        rows = yield lm.stream("draft").extend(tree)
        q = rows.p[0]
        for token in self.how(lambda p, count: lm.draw(p, rows.position(ROOT), f"draft/{count}"), q) if budget else ():
            tree.add(token, ROOT, q)
        return tree


def independent(draw, q) -> list[int]:
    return [draw(q, 0), draw(q, 1)]
