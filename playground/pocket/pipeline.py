"""The commands of `python -m playground.pocket`, each on the folders of its options.

A command does not overwrite existing results, leaves no partial output when interrupted, and raises a Refusal that
names the missing step if its input does not exist.
"""
import json
from dataclasses import asdict
from functools import partial
from itertools import islice

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from playground.engine.loading.load import pick_device
from playground.errors import Refusal
from playground.pocket import architecture as models
from playground.pocket import corpus, data
from playground.pocket import tokenizer as tokens
from playground.pocket.atomic_files import new_folder, write_text
from playground.pocket.cards import canvas_scores, card, denoiser_card, experts_card
from playground.pocket.cards import evaluate as measuring
from playground.pocket.model_roles import DENOISERS, EVERY, EXPERTS, ROLES
from playground.pocket.training import canvas_windows, experts_windows
from playground.pocket.training import distill as distilling
from playground.pocket.training import target_samples as samples
from playground.pocket.training.block_loss import block_loss
from playground.pocket.training.masked_loss import MASK, masked_loss
from playground.pocket.training.train import Trainer, TrainingPlan, data_loss, read_state, target_loss
from playground.pocket.training.upcycling import upcycled
from playground.pocket.training.warm_start import inherit, trained_before

TARGET = ROLES["target"]
TEXTS = ("samples", "texts.jsonl")          # folder and file of the texts sampled from the target
MEASURES = "evaluation.json"
# small rates that decay from early on: at larger ones the loss of a denoiser stays on a plateau until they decay
DENOISER_SCHEDULE = dict(stages=canvas_windows.STAGES, warm_up=20, matrix_lr=0.008, other_lr=0.0015, decay=0.85)


def make_tokenizer(options):
    """Train the tokenizer of a role."""
    role = ROLES[options.role]
    corpus.require(options.corpus)
    with new_folder(role.tokenizer(options.out)) as folder:
        if role.own_tokens:
            trained = tokens.train(corpus.natural(options.corpus), **tokens.OWN)
        else:
            trained = tokens.train(data.tokenizer_texts(options.corpus, options.seed))
        trained.save_pretrained(folder)


def make_data(options):
    """Write the training and validation windows of a role. Those of a draft also contain texts of the target."""
    role = EVERY[options.role]
    if role.name in DENOISERS:
        return _make_canvases(options, role)
    if role is EXPERTS:
        return _make_windows(options, role, experts_windows.build)
    corpus.require(options.corpus)
    tokenizer = _tokenizer(options, role)
    written = [] if role is TARGET else samples.load(options.out.joinpath(*TEXTS))
    with new_folder(role.data(options.out)) as folder:
        data.build((options.corpus, folder), tokenizer, int(options.tokens), options.seed)
        if written:
            samples.mix_in(folder, written, tokenizer, options.seed)


def _make_canvases(options, role):
    """Windows of a denoiser. Blocks after the end of an answer are never filled, so block-wise ones get none."""
    tight = 1.0 if role.block_length else canvas_windows.TIGHT
    _make_windows(options, role, partial(canvas_windows.build, tight=tight))


def _make_windows(options, role, build):
    """Windows of a role that needs no corpus."""
    tokenizer = _tokenizer(options, role)
    with new_folder(role.data(options.out)) as folder:
        build(folder, tokenizer, int(options.tokens), options.seed)


def train(options):
    """Train a model, or resume its training, for the whole budget or a piece of it."""
    role = EVERY[options.role]
    trainer = _trainer(options, role)
    if options.resume:
        trainer.resume(options.minutes)
    else:
        trainer.begin()
        _inherit(options, role, trainer)
    trainer.run(minutes=options.piece)
    with new_folder(role.model(options.out) / "weights", replace=True) as folder:
        models.save(trainer.model, folder)
    print(trainer.report())
    print(
        "The training is finished."
        if trainer.progress >= 1
        else f"{trainer.progress:.0%} of the budget is used: continue with --resume."
    )


def make_samples(options):
    """Sample from the target the texts that its drafts are trained on."""
    tokenizer, target = _tokenizer(options, TARGET), _trained(options, TARGET, pick_device(options.device))
    openings = samples.natural_openings(data.Windows.load(TARGET.data(options.out) / f"train_{min(data.STAGES)}.npz"))
    folder, name = TEXTS
    with new_folder(options.out / folder) as place:
        pairs = islice(samples.drawn(target.bfloat16(), tokenizer, openings, options.seed), options.texts)
        samples.write(tqdm(pairs, total=options.texts, unit=" texts", mininterval=10), place / name)


def evaluate(options):
    """Evaluate the trained models, print the table, and save the result next to the models."""
    if options.role in DENOISERS:
        return _evaluate_denoiser(options, EVERY[options.role])
    if EVERY[options.role] is EXPERTS:
        return _evaluate_experts(options)
    family = measuring.Family(*(_pair(options, role) for role in ROLES.values()))
    result = measuring.evaluate(family, {role.name: role.data(options.out) for role in ROLES.values()}, options.items)
    write_text(options.out / MEASURES, json.dumps(result, indent=1) + "\n")
    print(card.report(result, "target"))


def _evaluate_denoiser(options, role):
    """Scores at one position per forward."""
    denoiser = canvas_scores.as_denoiser(_trained(options, role), _tokenizer(options, role), role.published)
    strategy, knobs = "masked_diffusion", dict(block_length=role.block_length or 16)
    rows = canvas_scores.scores(denoiser, strategy, knobs, options.items)
    result = dict(strategy=strategy, knobs=knobs, rows=rows)
    write_text(role.model(options.out) / MEASURES, json.dumps(result, indent=1) + "\n")
    print(canvas_scores.table(rows))


def _evaluate_experts(options):
    """Greedy scores on held-out items."""
    family = measuring.Family(_pair(options, EXPERTS))
    rows = {row: measuring.grade(family, items) for row, items in measuring.exam(options.items, 4242).items()}
    result = dict(items=options.items, rows=rows)
    write_text(EXPERTS.model(options.out) / MEASURES, json.dumps(result, indent=1) + "\n")
    print(experts_card.table(rows))


def publish(options):
    """Write the finished models, with card, loss curve and metrics, to --assets."""
    if options.role in DENOISERS:
        return _publish_alone(options, EVERY[options.role], denoiser_card)
    if EVERY[options.role] is EXPERTS:
        return _publish_alone(options, EXPERTS, experts_card)
    corpus.require(options.corpus)
    measured = options.out / MEASURES
    _require(measured, "evaluate")
    result = json.loads(measured.read_text(encoding="utf-8"))
    for role in ROLES.values():
        if (pair := _pair(options, role)) and role.name in result["loss"]:
            with new_folder(options.assets / role.published, options.replace) as folder:
                _publish(options, role, (pair, result), folder)


def _publish_alone(options, role, cards):
    """Write a model that belongs to no pair, with the card of its own module."""
    measured = role.model(options.out) / MEASURES
    _require(measured, f"evaluate --role {role.name}")
    result = json.loads(measured.read_text(encoding="utf-8"))
    model, (state, plan) = _trained(options, role), read_state(role.model(options.out))
    with new_folder(options.assets / role.published, options.replace) as folder:
        models.save(model, folder)
        (folder / "README.md").write_text(cards.card(role, model, (state, plan), result), encoding="utf-8")
        (folder / "loss.svg").write_text(card.curve(state.losses), encoding="utf-8")
        measures = result | dict(
            tokens_seen=state.tokens, minutes=state.seconds / 60, earlier=state.earlier, losses=state.losses,
            plan=asdict(plan),
        )
        (folder / MEASURES).write_text(json.dumps(measures, indent=1) + "\n", encoding="utf-8")


def _publish(options, role, measured, folder):
    """Write all files of one model. measured: ((model, tokenizer), result of the evaluation)."""
    (model, tokenizer), result = measured
    state, plan = read_state(role.model(options.out))
    if not state.losses:
        raise Refusal(
            f"The training in {role.model(options.out)} has hardly begun: continue it with --resume before publishing.",
            "out",
        )
    models.save(model, folder)
    if role.tokenizer_in == role.published:
        tokenizer.save_pretrained(folder)
    facts = dict(result=result, checksums=corpus.checksums(options.corpus), plan=plan)
    (folder / "README.md").write_text(card.card(role, model, state, facts), encoding="utf-8")
    (folder / "loss.svg").write_text(card.curve(state.losses), encoding="utf-8")
    measures = result | dict(
        tokens_seen=state.tokens,
        minutes=state.seconds / 60,
        earlier=state.earlier,
        losses=state.losses,
        plan=asdict(plan),
    )
    (folder / MEASURES).write_text(json.dumps(measures, indent=1) + "\n", encoding="utf-8")


def _trainer(options, role):
    device = pick_device(options.device)
    size = options.size or ("small" if device == "cpu" else "large")
    _require(role.data(options.out), f"data --role {role.name}")
    model = models.for_training(_untrained(options, role, size).to(device))
    if role.name in DENOISERS:      # the entry as playground.engine reads it
        blocks = dict(block_length=role.block_length) if role.block_length else {}
        model.config.masked_diffusion = dict(mask_token_id=MASK, shifted=True) | blocks
    if options.compile:
        models.compile_layers(model)
    batch = options.batch or (2048 if device == "cpu" else 65536)
    plan = TrainingPlan(minutes=options.minutes or 95, tokens=batch, seed=options.seed, **_schedule(role))
    return Trainer(model, _loss(options, role, device), plan, (role.data(options.out), role.model(options.out)))


def _untrained(options, role, size):
    """The model before its training; a mixture of experts is made of the published model of --begin."""
    if role is not EXPERTS:
        return models.make(role.shapes[size], len(_tokenizer(options, role)), options.seed)
    return upcycled(_dense(options), options.seed)


def _dense(options):
    """The published model of --begin, in float32."""
    if not options.begin or not (options.begin / "config.json").exists():
        raise Refusal(
            "A mixture of experts is made of a finished model, also with --resume: give its folder, such as --begin "
            "assets/models/pocket.",
            "begin",
        )
    return AutoModelForCausalLM.from_pretrained(options.begin, dtype=torch.float32)


def _schedule(role):
    """Fields of the plan that depend on the role: some do not start from random weights."""
    experts = dict(stages=experts_windows.STAGES, warm_up=20, matrix_lr=0.006, other_lr=0.0015, decay=0.6)
    changed = dict.fromkeys(DENOISERS, DENOISER_SCHEDULE) | {EXPERTS.name: experts}
    return changed.get(role.name, {})


def _inherit(options, role, trainer):
    """Load the published weights of --begin into the model, if given."""
    if role is EXPERTS:
        trainer.state.earlier = asdict(trained_before(options.begin))
    elif options.begin:
        earlier = inherit(trainer.model, _tokenizer(options, role), options.begin)
        trainer.state.earlier = asdict(earlier)


def _loss(options, role, device):
    """Loss function of a role: distillation for the draft and the mixture, next-token loss for the other draft."""
    if role is EXPERTS:
        return distilling.ExpertsLoss(models.for_training(_dense(options).to(device)))
    if role.name == "draft":
        return distilling.DraftLoss(models.for_training(_trained(options, TARGET, device)))
    losses = {"target": target_loss, "diffusion": masked_loss, "block-diffusion": block_loss}
    return losses.get(role.name, data_loss)


def _tokenizer(options, role):
    folder = role.tokenizer(options.out)
    _require(folder, f"tokenizer --role {role.name}" if role.own_tokens else "tokenizer")
    return tokens.load(folder)


def _trained(options, role, device="cpu"):
    """The trained model in float32."""
    folder = role.model(options.out) / "weights"
    _require(folder, f"train --role {role.name}")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def _pair(options, role):
    """Model and tokenizer of a role; None if it is not trained yet, unless it is the target."""
    if role is not TARGET and not (role.model(options.out) / "weights").exists():
        return None
    return _trained(options, role), _tokenizer(options, role)


def _require(path, command):
    if not path.exists():
        raise Refusal(f"There is no {path}: run `python -m playground.pocket {command}` first.", "out")


COMMANDS = dict(
    tokenizer=make_tokenizer, data=make_data, train=train, samples=make_samples, evaluate=evaluate, publish=publish
)
