"""What each command of `python -m playground.pocket` does, on the folders of its options."""
import json

import torch
from transformers import LlamaForCausalLM

from playground.pocket import card, corpus, data
from playground.pocket import distill as distilling
from playground.pocket import evaluate as measuring
from playground.pocket import model as models
from playground.pocket import tokenizer as tokens
from playground.pocket.train import Plan, Trainer, read_state, target_loss


def make_tokenizer(options):
    """Train the tokenizer and save it in --out."""
    tokens.train(data.tokenizer_texts(options.corpus, options.seed)).save_pretrained(options.out / "tokenizer")


def make_data(options):
    """Write training and validation windows to --out."""
    folders, tokenizer = (options.corpus, options.out / "data"), tokens.load(options.out / "tokenizer")
    data.build(folders, tokenizer, int(options.tokens), options.seed)


def train(options):
    """Train the target."""
    _train(options, "target", target_loss)


def distill(options):
    """Train the draft on the target's distributions."""
    target = LlamaForCausalLM.from_pretrained(options.out / "target", dtype=torch.bfloat16).to(options.device)
    _train(options, "draft", distilling.DraftLoss(models.for_training(target)))


def evaluate(options):
    """Measure the pair and write the finished models, with card, curve and measures, to --assets."""
    tokenizer = tokens.load(options.out / "tokenizer")
    pair = tuple(_finished(options, role) for role in ("target", "draft"))
    result = measuring.evaluate(pair, tokenizer, options.out / "data", options.items)
    print(card.table(result["tasks"]))
    for role, model in zip(("target", "draft"), pair):
        if model:
            _publish(options, role, (model, tokenizer), result)


def _train(options, role, loss):
    model = models.for_training(models.make(role, tokens.SIZE, options.seed).to(options.device))
    folders = (options.out / "data", options.out / role)
    trainer = Trainer(model, loss, Plan(minutes=options.minutes, seed=options.seed), folders)
    if options.resume:
        trainer.resume()
    trainer.run()
    models.save(model, options.out / role)


def _finished(options, role):
    """The trained model in float32, or None if it has not been trained yet."""
    folder = options.out / role
    if not (folder / "config.json").exists():
        return None
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _publish(options, role, pair, result):
    """Everything that belongs to one model, in its folder below --assets."""
    (model, tokenizer), folder = pair, options.assets / card.NAMES[role]
    state = read_state(options.out / role)
    models.save(model, folder)
    tokenizer.save_pretrained(folder)
    facts = dict(result=result, checksums=corpus.checksums(options.corpus), seed=options.seed)
    (folder / "README.md").write_text(card.card(role, model, state, facts))
    (folder / "loss.svg").write_text(card.curve(state.losses))
    measures = result | dict(tokens_seen=state.tokens, minutes=state.seconds / 60, losses=state.losses)
    (folder / "evaluation.json").write_text(json.dumps(measures, indent=1) + "\n")


COMMANDS = dict(tokenizer=make_tokenizer, data=make_data, train=train, distill=distill, evaluate=evaluate)
