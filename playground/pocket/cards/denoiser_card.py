"""Model card of the masked denoiser, filled in from the checkpoint and from the results of `canvas_scores.py`."""
from playground.pocket.cards.canvas_scores import table
from playground.pocket.training import block_loss, canvas_windows, masked_loss
from playground.pocket.training.precision import in_words
from playground.pocket.training.train import NOTED

CARD = """---
pipeline_tag: text-generation
language: en
tags: [tiny, masked-diffusion, synthetic]
---
# {published}

{title}: a network of {millions:.2f} million parameters ({layers} layers of width {width}, Llama architecture without a
causal mask, {vocabulary} byte-level BPE tokens, context {context}). It fills masked positions of a canvas and does not
continue text. {attention}

It was made to show how decoders of masked diffusion models behave, on a machine with neither network nor GPU. It knows
some tasks of a small synthetic world and nothing else.

The playground reads it by the entry `masked_diffusion` of config.json: the id of the mask token, and that the logits
of a position predict the next one, as in the autoregressive model from which it was adapted. The transformers library
would load the weights as a causal Llama{unless}.

```sh
python -m playground run masked_diffusion --model {published} --chat --prompt "Sort these: 41, 7, 19"
```

## Training
`python -m playground.pocket train --role {name} --begin FOLDER` on {place}: {time}, {step} steps of {batch} tokens,
{seen:.2f} million tokens in total. It started from published weights that had seen {earlier:.1f} million tokens, those
of `pocket` among them. {loss_text}
Answers are followed by end tokens up to a multiple of {canvas} positions, which count too. Muon on the matrices
(learning rate {matrix_lr}), AdamW on the embeddings and norms (learning rate {other_lr}); warm-up over {warm_up} steps,
constant, decay over the last {decay:.0%}; {precision}; seed {seed}. Last training loss (mean over
{noted} steps, in nats per position of the canvas): {loss:.2f}.

![loss curve](loss.svg)

Shares of the training tokens, in per cent: {shares}. Grades as in `playground/pocket/training/canvas_windows.py`.

## Evaluation
{items} held-out items per row, one position per forward (`{strategy}`, {knobs}). *Score* is the metric of the task,
*right* the share of items with full score; the standard error of a share near one half is {spread:.2f}. *Tokens* are
those of the text, up to its end token.

{table}

## Limits
The training ended after the time above while its loss was still falling, and the table is to be read as it is. It was
trained neither on stories nor on natural text nor on conversations, and fills a canvas with nonsense for them. Canvases
beyond {longest} positions did not occur, except where an answer is longer. All numbers are from one seed.
"""

FULL_ATTENTION = "Every position sees every other one."
BLOCK_ATTENTION = (
    "A position sees its own block in both directions, and all earlier blocks, so the states of finished blocks can be "
    "kept. It was trained with blocks of {lengths} positions; config.json says {length}, and blocks of one position "
    "decode as an autoregressive model does."
)
MASKED_LOSS = (
    "Loss: a bound of the negative log-likelihood of the answer, for which a uniformly drawn number of its tokens is "
    "masked (LLaDA, arXiv 2502.09992); {whole:.0%} of the texts are masked as a whole, and in {blockwise:.0%} one "
    "block is masked in part and everything after it completely, as block-wise decoders meet it."
)
BLOCK_LOSS = (
    "Loss: cross-entropy of the masked tokens of every block of the answer, given the clean text before it, in two "
    "copies with complementary masks (Fast-dLLM v2, arXiv 2509.26328); the first token of a block is predicted from "
    "the clean text."
)


def card(role, model, training, result):
    """Text of README.md. training: (state, plan) of the run; result: what `evaluate` stored."""
    state, plan = training
    config, rows = model.config, result["rows"]
    items = next(iter(rows.values()))["items"]
    shares = ", ".join(f"{name} {100 * share:g}" for name, share in canvas_windows.SHARES.items())
    return CARD.format(
        published=role.published, title=role.title, name=role.name, layers=config.num_hidden_layers,
        millions=sum(p.numel() for p in model.parameters()) / 1e6, width=config.hidden_size,
        vocabulary=config.vocab_size, context=config.max_position_embeddings, place=state.place,
        precision=in_words(state.place), time=_duration(state.seconds), step=state.step, batch=plan.tokens,
        seen=state.tokens / 1e6,
        earlier=state.earlier.get("tokens", 0) / 1e6, **_kind(role), canvas=canvas_windows.CANVAS,
        matrix_lr=plan.matrix_lr, other_lr=plan.other_lr, warm_up=plan.warm_up, decay=plan.decay, seed=plan.seed,
        noted=NOTED, loss=state.losses[-1][1], shares=shares, items=items, strategy=result["strategy"],
        knobs=_words(result["knobs"]), spread=0.5 / items ** 0.5, table=table(rows), longest=canvas_windows.LONGEST,
    )


def _kind(role):
    """What depends on the attention: the attention and the loss in words, and what the weights would be as a Llama."""
    if not role.block_length:
        loss = MASKED_LOSS.format(whole=masked_loss.WHOLE, blockwise=masked_loss.BLOCKWISE)
        return dict(attention=FULL_ATTENTION, loss_text=loss, unless=", which they are not")
    lengths = ", ".join(map(str, sorted(set(block_loss.BLOCKS))))
    attention = BLOCK_ATTENTION.format(lengths=lengths, length=role.block_length)
    return dict(attention=attention, loss_text=BLOCK_LOSS, unless=", which they are with blocks of one position")


def _duration(seconds):
    """Seconds of a training in words; short ones in seconds, as on a GPU."""
    return f"{seconds:.0f} seconds" if seconds < 600 else f"{seconds / 60:.0f} minutes"


def _words(knobs):
    return ", ".join(f"{name} {value}" for name, value in knobs.items()) or "defaults"
