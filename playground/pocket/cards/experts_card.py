"""Model card of the mixture of experts, filled in from the checkpoint and from the results of `evaluate.py`."""
from playground.pocket.training.distill import BALANCE
from playground.pocket.training.experts_windows import shares
from playground.pocket.training.precision import in_words
from playground.pocket.training.train import NOTED
from playground.pocket.training.upcycling import SHARED

CARD = """---
library_name: transformers
pipeline_tag: text-generation
language: en
tags: [tiny, mixture-of-experts, synthetic]
---
# {published}

{title}: {millions:.2f} million parameters, of which {active:.2f} million run for a token ({layers} layers of width
{width}, Mixtral architecture, {experts} experts of {channels} channels in every layer, {used} for a token, {vocabulary}
byte-level BPE tokens, context {context}). It was made to show routers and the strategies that need experts, on a
machine with neither network nor GPU. Its tokenizer and its prompt format are those of `pocket`; it knows the same small
synthetic world, less well.

```sh
python -m playground run greedy --model {published} --chat --prompt "Sort these: 41, 7, 19" --with scmoe
```

## Training
The channels of each feed-forward network of `pocket` were divided into {experts} groups of similar gate weights, one
for each expert; the {shared} channels with the largest weights are in every expert
(`playground/pocket/training/upcycling.py`, after sparse upcycling, arXiv 2212.05055). Then
`python -m playground.pocket train --role {name} --begin assets/models/pocket` on {place}, which other work
shared: {minutes:.0f} minutes, {step} steps of {batch} tokens,
{seen:.2f} million tokens in total, after {earlier:.0f} million of `pocket`. Loss: cross-entropy to the distributions of
`pocket`, questions weighted 0.1, and {balance} times the load balancing loss of Switch Transformers. Muon on the
matrices (learning rate {matrix_lr}), AdamW on experts, embeddings and norms (learning rate {other_lr}); warm-up over
{warm_up} steps, constant, decay over the last {decay:.0%}; context {lengths} of the time; {precision};
seed {seed}. Last training loss (mean over {noted} steps): {loss:.2f}.

![loss curve](loss.svg)

Shares of the training tokens, in per cent: {shares}.

## Evaluation
{items} held-out items per row, greedy decoding; the standard error of a score near one half is {spread:.2f}. *Score* is
the metric of the task, *right* the share of items with full score. `pocket` has its own table in its card.

{table}

## Limits
The training was short, on a shared core, and is far from converged: the model is weaker than the dense one it was made
of. It is too small for its experts to save time on a CPU. It knows English only, and only the forms of question in its
training data. All numbers are from one seed.
"""


def card(role, model, training, result):
    """Text of README.md. training: (state, plan) of the run; result: what `evaluate` stored."""
    state, plan = training
    config, items = model.config, result["items"]
    return CARD.format(
        published=role.published, title=role.title, name=role.name, **_sizes(model), place=state.place,
        precision=in_words(state.place), minutes=state.seconds / 60, step=state.step, batch=plan.tokens,
        seen=state.tokens / 1e6,
        earlier=state.earlier.get("tokens", 0) / 1e6, balance=BALANCE, matrix_lr=plan.matrix_lr, other_lr=plan.other_lr,
        warm_up=plan.warm_up, decay=plan.decay, seed=plan.seed, noted=NOTED, loss=state.losses[-1][1], items=items,
        lengths=", ".join(f"{length} for {share:.0%}" for length, share in plan.stages.items()),
        shares=shares(), spread=0.5 / items ** 0.5,
        table=table(result["rows"]), vocabulary=config.vocab_size, context=config.max_position_embeddings,
    )


def _sizes(model):
    """Sizes of the mixture, in the words of the card."""
    config, experts = model.config, model.model.layers[0].mlp.experts
    total = sum(weight.numel() for weight in model.parameters())
    each = sum(weight.numel() for weight in experts.parameters()) / config.num_local_experts
    idle = each * (config.num_local_experts - config.num_experts_per_tok) * config.num_hidden_layers
    return dict(
        millions=total / 1e6, active=(total - idle) / 1e6, layers=config.num_hidden_layers, width=config.hidden_size,
        experts=config.num_local_experts, used=config.num_experts_per_tok, channels=config.intermediate_size,
        shared=SHARED,
    )


def table(rows):
    """Markdown table of the scores by row of the exam."""
    lines = ["| task | score | right | tokens |", "|---|---|---|---|"]
    return "\n".join([*lines, *(
        f"| {row} | {m['score']:.2f} | {m['right']:.0%} | {m['tokens']:.0f} |" for row, m in rows.items()
    )])
