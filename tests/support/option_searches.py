"""Searches among a few options that a grammar allows."""
from __future__ import annotations

from tables import TableModel, write
from toys import byte_tokenizer

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.search_runs import logp

LETTERS = byte_tokenizer(merges=0)  # a token is a byte, so that a text has one tokenisation only
END, START = LETTERS.eos_token_id, 100
OPTIONS = ["ab", "acdef", "acdeg", "bcd", "bce", "c"]


def answer(decoder: str, constraint: tuple[str, dict], model, prompt: list[int], length: int = 40, **knobs):
    assembly = assemble(LaneConfig(decoder, knobs, [constraint] if constraint else []))
    return write(assembly, {"target": model}, prompt, Limits(max_new_tokens=length), Draws(0)).main


def lopsided(seed: int) -> TableModel:
    return TableModel(tokenizer=LETTERS, seed=seed, spread=3.0)


def chance(model: TableModel, option: str) -> float:
    """Log-probability of an option and the end."""
    return logp(model, [START], (*LETTERS.convert_tokens_to_ids(list(option)), END))
