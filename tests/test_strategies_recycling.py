"""Draft tokens from a table of candidates of earlier rows."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from tables import TableModel, watch, write
from toys import byte_tokenizer

from playground.contract import Drafter, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import assemble
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.events import Draft, Figure
from playground.trace import metrics
from support.commits import ids
from support.speculation import GREEDY, collapses, speculative_lane

COLLAPSES = {
    "token_recycling": collapses("token_recycling", nodes=0),
}

module = __import__(find("token_recycling").__module__, fromlist=["template"])


def test_the_papers_tree_has_eighty_nodes_and_every_prefix_of_its_paths():
    paths = module.template(80)
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 8)] == [8, 21, 25, 15, 8, 3, 0]
    for count in range(81):
        chosen = set(module.template(count))
        assert len(chosen) == count and all(path[:-1] in chosen or len(path) == 1 for path in chosen)
        assert all((*path[:-1], path[-1] - 1) in chosen for path in chosen if path[-1])


def test_draft_tokens_are_looked_up_along_the_ranks_of_the_tree():
    memory, tree = module.Successors(), TokenTree()
    memory.known = {1: (2, 3), 2: (4, 0), 3: (1, 1)}
    memory.grow(tree, 1, [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)], ends=lambda token: False)
    assert (tree.tokens, tree.parents) == ([2, 3, 4, 0, 1], [-1, -1, 0, 0, 1])


def test_nothing_is_drafted_after_a_draft_token_that_ends_the_text():
    memory, tree = module.Successors(), TokenTree()
    memory.known = {1: (2,), 2: (1,)}
    memory.grow(tree, 1, [(0,), (0, 0)], ends=lambda token: token == 2)
    assert tree.tokens == [2]


def test_rejected_draft_tokens_update_the_matrix_and_the_last_row_of_a_token_counts():
    memory = module.Successors()
    rows = torch.tensor([[0.0, 1, 2, 3], [3.0, 2, 1, 0], [0.0, 3, 2, 1]])
    memory.learn([0, 3, 3], rows, k=2)
    assert memory.known == {0: (3, 2), 3: (1, 2)}


def circle(size: int = 9) -> TableModel:
    """Writes its letters in a cycle."""
    return TableModel(
        "abcdefghijk"[:size], rule=lambda context: torch.eye(size, dtype=torch.float64)[(context[-1] + 1) % size] * 50
    )


@pytest.mark.parametrize("k", [1, 3])
def test_on_a_repeating_text_every_round_accepts_the_full_depth(k):
    model, ahead = circle(), []
    for lane in watch(
        assemble(speculative_lane("token_recycling", "greedy_match", k=k)),
        {"target": model},
        [0],
        Limits(0, 44),
        Draws(0),
    ):
        ahead.append(lane.generated)
    steps = [b - a for a, b in zip(ahead, ahead[1:]) if b > a]
    assert max(steps) == 7 and steps[-4:-1] == [7, 7, 7]


def learned_from(nodes: str) -> type[Drafter]:
    class Learning(find("token_recycling")):
        def observe(self, tree, rows, verdict):
            chosen = list(range(len(tree))) if nodes == "all" else verdict.kept
            self._memory.learn(
                [rows.committed[-1], *(tree.tokens[n] for n in chosen)], rows.raw[[0, *(n + 1 for n in chosen)]], self.k
            )

    return Learning


def forwards_of(drafter: Drafter) -> int:
    """Of the target, over several texts of a model whose next token depends on the last alone."""
    chance = torch.randn(26, 26, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    model = TableModel([chr(97 + i) for i in range(26)], rule=lambda context: chance[context[-1]])
    for seed in range(4):
        decoder = make("speculative", verifier="sample_match")
        decoder.drafter = drafter
        write(Assembly(decoder, [make("temperature", t=1.0)]), {"target": model}, [0], Limits(seed, 60), Draws(seed))
    return model.forwards


def test_learning_from_accepted_draft_tokens_only_is_slower():
    learn_all, learn_kept = (forwards_of(learned_from(nodes)(80, 8)) for nodes in ("all", "kept"))
    assert forwards_of(make("token_recycling")) == learn_all < 0.97 * learn_kept


def recycled(memory: Memory, prompt: str = "The green bird", **knobs):
    session = prepare(
        Models(pair().target),
        [speculative_lane("token_recycling", "greedy_match", **knobs)],
        Prompt(prompt),
        Limits(0, 24),
        memory=memory,
    )
    events = [stamped.event for stamped in session]
    return session, events


def test_memory_serves_the_same_visitors_next_run_only():
    memory = Memory()
    (cold, recorded), (warm, again), (other, _) = recycled(memory), recycled(memory), recycled(Memory())
    assert cold.headers[0].memory == "" != warm.headers[0].memory
    passes = [metrics(session.trace)["target_forwards"] for session in (warm, cold, other)]
    assert passes[0] < passes[1] == passes[2]
    known = [[event.data["series"] for event in events if isinstance(event, Figure)][0] for events in (recorded, again)]
    assert known[0] == {"tokens with known successors": 0} != known[1]


class Garbage(Memory):
    """Has a memory of wrong tokens."""

    def __init__(self, seed: int):
        super().__init__()
        self.chance = torch.Generator().manual_seed(seed)

    def recall(self, name, make):
        thing = make()
        thing.known = {
            token: tuple(torch.randint(1, 320, (8,), generator=self.chance).tolist()) for token in range(320)
        }
        return thing


def test_wrong_memory_wastes_draft_tokens_without_changing_the_text():
    texts = []
    for seed in range(3):
        session, events = recycled(Garbage(seed))
        assert len(next(event for event in events if isinstance(event, Draft)).tokens) == 80, "the garbage was not used"
        texts.append(ids(events))
    plain = prepare(Models(pair().target), [GREEDY], Prompt("The green bird"), Limits(0, 24))
    assert texts == [ids(stamped.event for stamped in plain)] * 3


def test_the_matrix_learns_model_probabilities_without_the_token_mask():
    tokenizer = byte_tokenizer()
    model = TableModel(tokenizer=tokenizer)
    learned: dict = {}

    class Watched(find("token_recycling")):
        def observe(self, tree, rows, verdict):
            super().observe(tree, rows, verdict)
            learned.update(self._memory.known)

    assembly = assemble(speculative_lane("token_recycling", "greedy_match", ("regex", {"pattern": "[ab]{6}"})))
    assembly.decoder.drafter = Watched()
    write(assembly, {"target": model}, [5], Limits(0, 6), Draws(0))
    assert learned[5] == tuple(model.scores((5,)).topk(8).indices.tolist())
