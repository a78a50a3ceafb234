"""XPress: logits of every pass by its own library, and the fixed point of its passes, walked token by token."""
from __future__ import annotations

import pytest
import torch
from pairs import VOCABULARY

from playground.contract import find
from support.draft_heads import head, is_greedy, proposals, random_weights, written
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane
from support.speculators_heads import ANCHOR, TOKENS
from support.stored_heads import NEAR, REFERENCE, StoredHead, block_outputs, distance

NAME, BLOCK, RANK, DEPTH = "xpress", 8, 6, 5
BRIEF = {"xpress": {"weights": "random", "depth": 2, "passes": 2}}
COLLAPSES = {"xpress": collapses("xpress", weights="random", depth=0)}


def passes(stored: StoredHead, cls=None) -> list[torch.Tensor]:
    """Logits of the block after each pass."""
    network, drafter = stored.network, (cls or find(NAME))()
    drafter.begin_fitted(stored.weights)
    hidden, found = block_outputs(stored), []
    base, known = network.read_out(hidden, None), network.refiner_head.known(hidden)
    logits = base
    for _ in range(drafter._passes):
        guesses = network.target_ids(logits.argmax(-1)).tolist()
        before = drafter.tokens_before(TOKENS[ANCHOR - 1:ANCHOR + 1], guesses)
        logits = base + network.refiner_head.bias(known, torch.tensor(before))
        found.append(logits)
    return found


class NothingBeforeTheBlock(find("xpress")):
    """Wrong: the anchor's own row does not know the token before the anchor."""

    def tokens_before(self, text, guesses):
        return super().tokens_before([0, *text[1:]], guesses)


class OwnGuess(find("xpress")):
    """Wrong: a row reads its own guess in place of that of the row before."""

    def tokens_before(self, text, guesses):
        return guesses


@torch.no_grad()
@pytest.mark.oracle("xpress")
@pytest.mark.parametrize("name", [name for name in REFERENCE if name.startswith(NAME)])
def test_every_pass_has_the_logits_of_its_own_library(name, tmp_path):
    stored = StoredHead(name, tmp_path)
    assert stored.strategy == NAME and distance(passes(stored), stored.logits) < NEAR


@torch.no_grad()
@pytest.mark.refuses("xpress")
@pytest.mark.parametrize("wrong", [NothingBeforeTheBlock, OwnGuess])
def test_other_tokens_before_would_be_noticed(wrong, tmp_path):
    stored = StoredHead(NAME, tmp_path)
    assert distance(passes(stored, wrong), stored.logits) > 100 * NEAR


# --- a table of followers: every pass makes one more guess final ---

FOLLOWER = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))


def followers() -> dict[str, torch.Tensor]:
    """Weights whose block guesses nothing, and whose refiner names one follower of each token."""
    plain, wide = random_weights("dflash"), VOCABULARY
    zeros = {
        "down_h": (wide, 32), "down_g": (wide, 32), "mlp_gate": (2, wide), "mlp_up": (2, wide), "mlp_down": (wide, 2),
    }
    refiner = {f"{name}.weight": torch.zeros(size, dtype=torch.float64) for name, size in zeros.items()} | {
        "token_embed.weight": torch.eye(wide, dtype=torch.float64),
        "in_proj.weight": torch.eye(wide, 3 * wide, dtype=torch.float64).roll(2 * wide, 1),
        "mix_l": torch.zeros(wide, BLOCK, BLOCK, dtype=torch.float64),
        "readout.weight": 30 * torch.eye(wide, dtype=torch.float64)[FOLLOWER].T,
    }
    named = {f"refiner_head.{name}": tensor for name, tensor in refiner.items()}
    return plain | {"norm.weight": torch.zeros_like(plain["norm.weight"])} | named


def chain_after(token: int, length: int) -> set[tuple[int, ...]]:
    found = []
    for _ in range(length):
        token = int(FOLLOWER[token])
        found.append(token)
    return {tuple(found[:count]) for count in range(1, length + 1)}


def final_guesses(count: int, cls=None) -> bool:
    """Whether after so many passes the first so many guesses are followers, and no others."""
    drafter = head(NAME, followers(), cls, depth=DEPTH, passes=count)
    found = [each for each in proposals(drafter) if each.budget >= DEPTH]
    assert len(found) > 3
    return all(
        len(each.prefixes & chain_after(each.tokens[-1], DEPTH)) == count for each in found
    )


@pytest.mark.oracle("xpress")
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_each_pass_makes_one_more_guess_final(count):
    assert final_guesses(count)


@pytest.mark.refuses("xpress")
def test_own_guesses_never_become_final():
    assert not final_guesses(4, OwnGuess)


@pytest.mark.strategy("xpress")
def test_the_text_is_the_targets():
    assert is_greedy(written(head(NAME, followers(), passes=3)))


@pytest.mark.strategy("xpress")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2, passes=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
