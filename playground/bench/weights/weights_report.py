"""The table of changed weights, as data and as a page. Imports neither torch nor gradio."""
from __future__ import annotations

from statistics import fmean
from typing import Any

from playground.bench.report_text import Rows, facts_table, markdown_page, number, section

FORMAT, VERSION = "decoding-playground-weights", 1
UNCHANGED = "rtn:bits=16"  # the collapse of every quantisation: equal to the loaded model to the bit
WEIGHTS = (
    UNCHANGED,
    *(f"{method}{bits}" for bits in ("", ":bits=3") for method in ("rtn", "awq", "gptq")),
    *(f"affinequant{bits}" for bits in ("", ":bits=3")),
    "lq_lora",
    *(f"{method}{pattern}" for pattern in ("", ":pattern=2:4") for method in ("magnitude", "wanda", "sparsegpt")),
    "armor",
    "maskllm",
    "cast",
    "rd_prune",
    "dsee",
    "dsee:score=weight",
    "dsee:ratio=0.5,tuned_ratio=0.5",
)
OF_EXPERTS = (  # of a mixture
    UNCHANGED, "rtn", "rtn:bits=3", "gptq:bits=3", "rtn:bits=2",
    "mc_moe", "mc_moe:alpha=0,beta=0", "mc_moe:budget=2.5", "mc_moe:budget=2.5,lowest=1", "wanda",
)
COMMAND = "python -m playground bench weights --page docs/weights.md"
COMMAND_FOR_EXPERTS = "python -m playground bench weights --model pocket-moe --page docs/weights-experts.md"
INTRODUCTION = (
    "# Weights side by side",
    "What a model loses when it is squeezed: each row is a text for the weights of a lane, as in "
    "`python -m playground compare greedy '{\"strategy\": \"greedy\", \"weights\": \"gptq:bits=3\"}' --prompt "
    "\"Once\"`. Written by `"
    + COMMAND + "`, and [that of a mixture of experts](weights-experts.md) by `" + COMMAND_FOR_EXPERTS + "`, in some "
    "ten minutes on two cores if nothing is on the disk yet; an interrupted run goes on with "
    "what it has made. With `--speed` on an otherwise idle machine the table has tokens/s as well. What learnt prompts "
    "give back is [a page of its own](weights-repair.md).",
)
NOTES = (
    "*Bits*: of a weight of a linear layer as it could be stored, with scales, zero points and indices; where a row "
    "makes several changes, those of the last. *MB*: of all parameters, embeddings in 16 bits. Here all weights are "
    "computed with in the dtype of the loaded model, so none of these changes makes decoding faster or the process "
    "smaller. *KL*: from the loaded model, in nats, of the distribution of the next token; mean and 95th percentile "
    "over the tokens of held-out questions and answers of the small world, in wordings that no change is calibrated "
    "on. *Perplexity* over the same tokens. *Same token*: how often the most probable token is the same. *Error*: of a "
    "layer's outputs, ‖Wx − W'x‖ / ‖Wx‖ on the inputs that it has in the loaded model, mean over layers. A "
    "quantisation that names no bits has 4, in groups of 64, asymmetric; a pruner that names no pattern prunes half. "
    "`armor`, `maskllm` and `cast` keep 2 of every 4. The last two are trained by the whole model, on 256 questions in "
    "place of the 32 of the others. `dsee` fine-tunes on the same 256 and prunes a fifth, of query and value "
    "projections by the size of their change or, in the row `score=weight`, by their own.",
    "A weight that is kept has to say where it stands: half the weights take 9 bits for each weight of the matrix, "
    "more than twice what rounding to 4 bits takes. None of this measures what a model still knows; the protocol of "
    "LLM-KICK, scores by task over bits and sparsity, is not part of this table.",
)


def table(cards: list[dict[str, Any]], speeds: dict[str, float]) -> Rows:
    """A row for each card, header first. speeds: tokens/s by weights, if they were measured."""
    head = ["weights", "bits", "MB", "KL", "KL 95 %", "perplexity", "same token", "error", "calibrated on"]
    return [head + (["tokens/s"] if speeds else []), *(_row(card, speeds) for card in cards)]


def document(facts: dict[str, Any], cards: list[dict[str, Any]], speeds: dict[str, float]) -> dict[str, Any]:
    rows = [{name: value for name, value in card.items() if name != "layers"} for card in cards]
    return {"format": FORMAT, "version": VERSION, **facts, "tokens_per_second": speeds, "rows": rows}


def page(facts: dict[str, Any], cards: list[dict[str, Any]], speeds: dict[str, float]) -> str:
    return markdown_page(*INTRODUCTION, section("Quality and size", table(cards, speeds), *NOTES), facts_table(facts))


def _row(card: dict[str, Any], speeds: dict[str, float]) -> list[str]:
    errors = [layer["error"] for layer in card["layers"].values()]
    cells = [f"`{card['weights']}`", number(card["bits per weight"], 2), number(card["bytes"] / 1e6, 2),
             number(card["KL"], 4), number(card["KL 95 %"], 3), number(card["perplexity"], 3),
             f"{card['same top token']:.1%}", number(fmean(errors), 3), card["calibrated on"]]
    return cells + ([number(speeds.get(card["weights"]), 1)] if speeds else [])
