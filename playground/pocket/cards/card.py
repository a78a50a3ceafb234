"""Model card and loss curve of a bundled model.

Sizes, tokens, minutes, losses and scores are filled in from the checkpoint and from the results of `evaluate.py`.
"""
import math
from dataclasses import asdict

from playground.pocket.cards.draft_acceptance import GUESSES
from playground.pocket.cards.evaluate import GUESSED
from playground.pocket.data import SHARES, STAGES
from playground.pocket.training.precision import in_words
from playground.pocket.training.train import NOTED

MIDDLE = GUESSES[len(GUESSES) // 2]
SOURCES = {
    "tales.jsonl.gz": "fairy tales, fables and myths from public-domain books",
    "gsm8k_train.jsonl.gz": "GSM8K training problems, Cobbe et al. 2021, MIT licence",
}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
language: en
tags: [tiny, speculative-decoding, synthetic]
---
# {published}

{title}: a language model of {millions:.2f} million parameters ({layers} layers of width {width}, Llama architecture,
{vocabulary} byte-level BPE tokens, context {context}). It was made for one purpose: to show how decoding strategies
behave on a real model, on a machine with neither network nor GPU. It knows a small synthetic world with verifiable
answers and little else. Prompt format: `<|user|> question<|assistant|>`; the answer ends in `<|end|>`. Without the role
tokens it continues text.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("{tokenizer_in}"), AutoModelForCausalLM.from_pretrained("{published}")
```

## Training
One run of `python -m playground.pocket train --role {name}` on {place}: {minutes:.0f} minutes, {step} steps of {batch}
tokens, {seen:.1f} million tokens in total, {taught}. {begun} Muon on the matrices (learning rate {matrix_lr}), AdamW on
the embeddings and norms (learning rate {other_lr}); warm-up over {warm_up} steps, constant, decay over the last
{decay:.0%}; context {lengths} of the time; {precision}; seed {seed}. Last training loss (mean
over {noted} steps, questions weighted 0.1): {loss:.2f}.

![loss curve](loss.svg)

Shares of the training tokens, in per cent: {shares}.
Everything except the natural text comes from the generator in `playground/questions/world`; no token attends to another
text of its window. Held-out questions are selected by a hash of their content, independent of the wording. For
questions about facts, two wordings of each form are held out, which in training occur only with a passage.
Natural text:
{sources}
- Python's standard library (PSF licence), as found on the training machine: code.

{report}

## Limits
The model is tiny and was trained for minutes, not weeks. Its tales are fragments, and greedy ones degenerate into
loops. It knows nothing about the real world, its arithmetic is no better than the table shows, and it was not trained
beyond {longest} tokens. It knows English only, and only the forms of question in its training data. Use it only to
study decoding. All numbers above are from one seed.
"""


REPORT = """## Evaluation
{items} held-out items per row, greedy decoding; the standard error of a score near 0.5 is about {spread:.2f}. Half of
the items use wordings that never occur in training: *seen* and *unseen* are the scores of the two halves. *Score* is
the metric of the task, *right* the share of items with full score. *Accepted*: share of the tested draft tokens of the
bundled draft that the target accepts, at {middle} draft tokens per round. *Tokens per forward*: of the target, at
{guesses} draft tokens per round, with the bonus token and without the prefill, measured with the playground's own lanes
on at most {guessed} items. *Other draft*: tokens per forward with the draft that has its own tokenizer and drafts in
text.

{table}

Validation loss in nats per token (for tasks: of the answer): {losses}.

Top-1 agreement of each layer with the last, through the final norm and lm_head (of the target; layer 0 is the
embedding; mean over the sources): {exits}.

Greedy text (target, means over several prompts):

| text | repeated 4-grams | distinct 2-grams | longest repeat, tokens | accepted | tokens per forward | other draft |
|---|---|---|---|---|---|---|
{texts}
"""


def card(role, model, state, facts):
    """Text of README.md. facts: `result` of the evaluation, `checksums` of the sources, `plan` of the training."""
    return CARD.format(
        **vars(role), **_shape(model), **_run(state, facts["plan"]), **_data(facts["checksums"]), longest=max(STAGES),
        tokenizer_in=role.tokenizer_in, report=report(facts["result"], role.name).strip(),
    )


def report(result, role):
    """Evaluation section of the card, with the losses of one role."""
    return REPORT.format(
        items=result["items"], spread=0.5 / result["items"] ** 0.5, **_guesses(), table=table(result["tasks"]),
        losses=_listed(result["loss"][role]), exits=_listed(dict(enumerate(result["exits"]["mean"]))),
        texts="\n".join(_text(name, result[name]) for name in ("tales", "stories")),
    )


def _text(name, measures):
    figures = [f"{measures[key]:.2f}" for key in ("repetition", "distinct_2")] + [f"{measures['longest_repeat']:.0f}"]
    return _row([name, *figures, *_guessed(measures)])


def _row(cells):
    return f"| {' | '.join(cells)} |"


def _shape(model):
    config = model.config
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return dict(
        millions=millions, layers=config.num_hidden_layers, width=config.hidden_size,
        vocabulary=config.vocab_size, context=config.max_position_embeddings,
    )


def _run(state, plan):
    run = dict(
        minutes=state.seconds / 60,
        step=state.step,
        seen=state.tokens / 1e6,
        loss=state.losses[-1][1],
        place=state.place,
        precision=in_words(state.place),
        begun=_begun(state.earlier),
    )
    return asdict(plan) | run | dict(batch=plan.tokens, noted=NOTED)


def _begun(earlier):
    """A sentence on the initial weights of the run."""
    if not earlier:
        return "It started from random weights."
    seen, minutes = earlier["tokens"] / 1e6, earlier["minutes"]
    return f"It started from the weights of the previous version ({seen:.1f} million tokens, {minutes:.0f} minutes)."


def _data(checksums):
    lengths = ", then ".join(f"{width} tokens for {share:.0%}" for width, share in STAGES.items())
    shares = ", ".join(f"{name} {100 * share:g}" for name, share in SHARES.items())
    sources = "\n".join(f"- `{name}`: {SOURCES[name]} (sha256 `{digest}`)." for name, digest in checksums.items())
    return dict(lengths=lengths, shares=shares, sources=sources)


def _listed(values):
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def _guesses():
    return dict(middle=MIDDLE, guessed=GUESSED, guesses=", ".join(map(str, GUESSES[:-1])) + f" and {GUESSES[-1]}")


def table(tasks):
    """The scores as a Markdown table."""
    heads = [
        "task",
        "target score",
        "right",
        "seen / unseen wordings",
        "answer tokens",
        "accepted",
        "tokens per forward",
        "other draft",
    ]
    rows = [_row(heads), "|---" * len(heads) + "|"]
    for name, row in tasks.items():
        figures = [f"{row['score']:.2f}", f"{row['right']:.0%}", _words(row["words"]), f"{row['tokens']:.0f}"]
        rows.append(_row([name, *figures, *_guessed(row)]))
    return "\n".join(rows)


def _words(scores):
    return " / ".join(f"{scores[side]:.2f}" if side in scores else "-" for side in ("taught", "kept"))


def _guessed(row):
    """Three cells: acceptance at the middle draft length, tokens per forward at every length, and with the other."""
    measured, other = row.get("guessing"), row.get("guessing_in_text")
    each = " / ".join(f"{at['tokens_per_forward']:.1f}" for at in measured.values()) if measured else "-"
    accepted = f"{measured[str(MIDDLE)]['acceptance']:.2f}" if measured else "-"
    return [accepted, each, f"{other['tokens_per_forward']:.1f}" if other else "-"]


def curve(losses, size=(640, 240)):
    """SVG chart of the loss over the tokens seen, on a logarithmic scale. losses: (tokens, nats) pairs."""
    (width, height), (most, top) = size, map(max, zip(*losses))
    bottom = 2.0 ** (math.ceil(math.log2(min(loss for _, loss in losses))) - 1)
    right, low = width - 10, height - 25

    def level(loss):
        return low - (low - 15) * math.log2(loss / bottom) / math.log2(top / bottom)

    points = " ".join(f"{40 + (right - 40) * seen / most:.1f},{level(loss):.1f}" for seen, loss in losses)
    ticks = [bottom * 2 ** k for k in range(math.ceil(math.log2(top / bottom)))]
    marks = [(12, level(nats) + 4, f"{nats:g}") for nats in ticks]
    marks += [(width - 150, height - 6, f"{most / 1e6:.1f} M tokens seen"), (46, 12, "nats per token, training")]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(f'<path d="M40 {level(nats):.1f}H{right}" stroke="#ddd"/>' for nats in ticks),
        f'<path d="M40 15V{low}H{right}" stroke="#999" fill="none"/>',
        *(f'<text x="{x}" y="{y:.1f}" fill="#555">{words}</text>' for x, y, words in marks),
        f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="1.5"/>', "</svg>", "",
    ])
