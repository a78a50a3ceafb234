"""The model card and the loss curve: what a reader should know about a bundled model, written from the measures.

Nothing is typed in by hand that the run knows: sizes, tokens, minutes, losses and scores come from the checkpoint and
from `evaluate.py`.
"""
from playground.pocket.data import SHARES, STAGES
from playground.pocket.evaluate import GUESSES

MIDDLE = GUESSES[len(GUESSES) // 2]
NAMES = dict(target="pocket", draft="pocket-draft")
ROLES = dict(target="The target of the bundled pair", draft="The draft of the bundled pair, distilled from the target")
COMMANDS = dict(target="train", draft="distill")
TAUGHT = dict(target="", draft=", first on the data, then on the target's full distributions")
SOURCES = {
    "tales.jsonl.gz": "fairy tales, fables and myths from public-domain books",
    "gsm8k_train.jsonl.gz": "GSM8K training problems, Cobbe and others 2021, MIT licence",
}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
language: en
tags: [tiny, speculative-decoding, synthetic]
---
# {name}

{role}: a language model of {millions:.2f} million parameters ({layers} layers of width {width}, Llama architecture,
{vocabulary} byte-level BPE tokens, context {context}). It was made for one purpose: to show how decoding strategies
act on a real model, on a machine with neither network nor GPU. It knows a small invented world with checkable answers
and little else. Prompt form: `<|user|> question<|assistant|>`; the answer ends in `<|end|>`. Without the role tokens it
continues text.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")
```

## Training
One run of `python -m playground.pocket {command}` on one CPU core: {minutes:.0f} minutes, {steps} steps,
{seen:.1f} million tokens{taught}. Muon on the matrices, AdamW on the embeddings and norms; warm-up, stable, decay;
context {stages} of the time; bfloat16 products, float32 weights; seed {seed}.
Last training loss (mean over 25 steps, questions weighted a tenth): {loss:.2f}.

![loss curve](loss.svg)

Shares of the training tokens, in per cent: {shares}.
All but the natural texts comes from the generator in `playground/pocket/world`; no token attends to another text of its
window. Held-out questions are split off by a hash of what they ask, whatever the words; those about facts by two wordings of
each form that training only met in passages, never as a question to memory.
Natural text:
{sources}
- Python's standard library (PSF licence), as found on the training machine: code.

## Evaluation
{count} held-out items a row, greedy, so a score near one half is uncertain by about {spread:.2f} (one standard error).
Half of them are put in words that training never showed: *taught* and *kept words* are the scores of both halves.
*Score* is the task's own measure, *right* the share of full marks. *Accepted*: guesses of the bundled draft that the
target takes, out of those tested, with {middle} guesses a round; *tokens per forward*: of the target, with {guesses}
guesses a round, the bonus token counted and prefill left out.

{table}

Validation loss in nats per token (for tasks: of the answer): {losses}.

Agreement of early layers with the last, through the last norm and the output head (of the target; layer 0 is the
embedding; mean over the sources): {exits}.

Repetition of greedy text (share of repeated 4-grams, target): tales {tales:.2f}, stories {stories:.2f}.

## Limits
It is tiny and was trained for minutes, not weeks. Its tales are fragments, and greedy ones fall into loops; it knows
nothing of the real world; its arithmetic is no better than the table shows; beyond {longest} tokens it was never
trained. It speaks English only and knows only the forms of question it was taught. Do not use it for anything but
looking at decoding. All numbers above are from one seed.
"""


def card(role, model, state, facts):
    """The text of README.md. facts: `result` of the evaluation, `checksums` of the sources, `seed`."""
    result = facts["result"]
    return CARD.format(
        name=NAMES[role], role=ROLES[role], command=COMMANDS[role], taught=TAUGHT[role], seed=facts["seed"],
        **_shape(model), **_run(state), **_data(facts["checksums"]), longest=max(STAGES), **_guesses(),
        count=result["items"], spread=0.5 / result["items"] ** 0.5, table=table(result["tasks"]),
        losses=_listed(result["loss" if role == "target" else "draft_loss"]),
        exits=_listed(dict(enumerate(result["exits"]["mean"]))),
        tales=result["tales"]["repetition"], stories=result["stories"]["repetition"],
    )


def _shape(model):
    config = model.config
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return dict(
        millions=millions, layers=config.num_hidden_layers, width=config.hidden_size,
        vocabulary=config.vocab_size, context=config.max_position_embeddings,
    )


def _run(state):
    return dict(minutes=state.seconds / 60, steps=state.step, seen=state.tokens / 1e6, loss=state.losses[-1][1])


def _data(checksums):
    stages = ", then ".join(f"{width} tokens for {share:.0%}" for width, share in STAGES.items())
    shares = ", ".join(f"{name} {100 * share:g}" for name, share in SHARES.items())
    sources = "\n".join(f"- `{name}`: {SOURCES[name]} (sha256 `{digest}`)." for name, digest in checksums.items())
    return dict(stages=stages, shares=shares, sources=sources)


def _listed(values):
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def _guesses():
    return dict(middle=MIDDLE, guesses=", ".join(map(str, GUESSES[:-1])) + f" and {GUESSES[-1]}")


def table(tasks):
    """The evaluation as a Markdown table."""
    heads = ["task", "target score", "right", "taught / kept words", "answer tokens", "accepted", "tokens per forward"]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, row in tasks.items():
        cells = [name, f"{row['score']:.2f}", f"{row['right']:.0%}", _words(row["words"]), f"{row['tokens']:.0f}"]
        rows.append("| " + " | ".join(cells + _guessed(row.get("guessing"))) + " |")
    return "\n".join(rows)


def _words(scores):
    return " / ".join(f"{scores[side]:.2f}" if side in scores else "-" for side in ("taught", "kept"))


def _guessed(guessing):
    """Two cells: acceptance at the middle number of guesses, and tokens per forward at all of them."""
    if not guessing:
        return ["-", "-"]
    each = " / ".join(f"{played['tokens_per_forward']:.1f}" for played in guessing.values())
    return [f"{guessing[str(MIDDLE)]['acceptance']:.2f}", each]


def curve(losses, size=(640, 240)):
    """The loss over the tokens seen, as a small SVG picture. losses: (tokens, nats) pairs."""
    (width, height), (most, top) = size, map(max, zip(*losses))
    right, low = width - 10, height - 25
    places = [(40 + (right - 40) * seen / most, low - (low - 15) * loss / top) for seen, loss in losses]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    seen = f"{most / 1e6:.1f} M tokens seen"
    marks = [(4, 12, f"{top:.1f} nats"), (24, low + 4, "0"), (width - 140, height - 6, seen)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M40 15V{low}H{right}" stroke="#999" fill="none"/>',
        *(f'<text x="{x}" y="{y}" fill="#555">{words}</text>' for x, y, words in marks),
        f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="1.5"/>', "</svg>", "",
    ])
