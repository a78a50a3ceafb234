"""Speculative lanes: configs, first rounds, wrong verifiers."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from registry import Collapse
from tables import Enumerating, distance, law, product_law, watch

from playground.algorithms.speculative.verification import Ruling, walk
from playground.contract import Drafter, Verifier, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.events import Verdict
from strategies.speculative.k_seq import optimal_transport as transport
from support.laws import AT_ONE, tables

GREEDY, MODEL = LaneConfig("greedy"), LaneConfig("greedy", {}, [AT_ONE])


def speculative_lane(drafter: str, verifier: str = "rejection", *samplers: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig("speculative", {}, [(drafter, knobs), (verifier, {}), *samplers])


def collapses(drafter: str, **knobs) -> list[Collapse]:
    return [
        Collapse(speculative_lane(drafter, **knobs), GREEDY),
        Collapse(speculative_lane(drafter, "rejection", AT_ONE, **knobs), MODEL),
    ]


def first_drafts(config: LaneConfig, models: dict, length: int) -> Iterator[tuple[float, TokenTree, Verdict]]:
    """Every possible first round: its probability, tree and verdict."""
    seen: list = []

    class Watched(Verifier):
        def judge(self, lm, tree, rows):
            seen.append((tree, verifier.judge(lm, tree, rows)))
            return seen[-1][1]

    assembly, draws = assemble(config), Enumerating()
    verifier, assembly.decoder.verifier = assembly.decoder.verifier, Watched()
    for _ in draws.runs():
        seen.clear()
        for lane in watch(assembly, models, [0], Limits(0, length), draws):
            if lane.generated:
                break
        yield draws.weight, *seen[0]


def off(drafter: Drafter, verifier: Verifier, letters: str = "abc", length: int = 2) -> float:
    """Distance of a lane's output distribution from the target's."""
    decoder, models = make("speculative"), tables(letters)
    decoder.drafter, decoder.verifier = drafter, verifier
    found = law(Assembly(decoder, [make(*AT_ONE[:1], **AT_ONE[1])]), models, [0, 1, 0], length)
    return distance(found, product_law(models["target"], [0, 1, 0], length))


class Judged(Verifier):
    """A verifier made of one rule(p, children, tree, flip, draw)."""

    def __init__(self, rule: Callable[..., Ruling]):
        self.rule = rule

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position = rows.p[rows.row(node)], rows.position(node)
            return self.rule(
                p,
                children,
                tree,
                lambda ratio: lm.flip(ratio, position),
                lambda rest: lm.draw(rest, position, "redraw"),
            )

        return walk(lm, tree, rows, rule)


def divided_by(rho: Callable[[int], float]) -> Callable[..., Ruling]:
    """k-SEQ with a given rho."""
    def rule(p, children, tree, flip, draw) -> Ruling:
        q, k = tree.q[children[0]], len(children)
        for child in children:
            token = tree.tokens[child]
            if flip(min(1.0, float(p[token] / (rho(k) * q[token]))))[0]:
                return Ruling(child)
        return Ruling(None, draw(transport.residual(p, q, k, rho(k))))

    return rule
