"""`fit`: training before decoding."""
from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.cli.load_models import load, show_progress
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import CommandParser, add_count, add_models, add_strategy, add_texts
from playground.cli.training.training_texts import read_texts
from playground.cli.training.training_view import watching
from playground.contract import Strategy, find
from playground.errors import Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from playground.engine.model import Model
    from playground.training.fitting import Fitting


def fit_options(command: CommandParser) -> None:
    add_strategy(
        command, "name", metavar="NAME",
        help="a strategy with fitted knobs, such as adadec, or with trained weights, such as specdec_plus_plus",
    )
    add_texts(command)
    add_models(command)
    add_count(command, "seed", 0, 0, "of the training data that is sampled for weights")
    add_count(command, "epochs", 0, 0, "passes over the texts that train a draft head; 0: as many as it needs")
    command.add_argument("--from", dest="published", metavar="FOLDER",
                         help="a published head to use instead of training one: EAGLE, EAGLE-3 or Medusa version 2; or "
                              "a sparse autoencoder of SAELens or sparsify")
    command.add_argument("--to", dest="exported", metavar="FOLDER",
                         help="a new folder for the head in the format of vLLM's speculators as well")
    command.add_argument("--out", metavar="FILE",
                         help="where to store the weights; default: with the other files made on this machine")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def fit(options: Namespace) -> bool:
    """Fit a strategy: print knobs for a model as options to paste, or train and store weights for a pair of models.

    Raises Refusal.
    """
    cls = find(find(options.name).weights_of or options.name)
    for option, given in (("epochs", options.epochs), ("to", options.exported)):
        if given and _way(cls) is not _train_head:
            raise Refusal(f"{cls.name} is not a draft head that is trained on texts: leave out --{option}.", option)
    return _way(cls)(cls, options)


def _way(cls: type[Strategy]) -> Callable[[type[Strategy], Namespace], bool]:
    """How a strategy is fitted."""
    ways = {"calibrate": _calibrate, "learn": _train_on_canvas, "train_on_grades": _train_on_grades}
    declared = next((way for name, way in ways.items() if hasattr(cls, name)), None)
    return declared or (_train_head if cls.fitted_to_target else _train if hasattr(cls, "train") else _fit)


def _calibrate(cls: type[Strategy], options: Namespace) -> bool:
    """Measure or learn what a policy needs to know of one model, and store it where the policy finds it."""
    from playground.training.calibration import calibrate
    found = _published_autoencoder(cls, options) if options.published else _trained(cls, calibrate, options)
    return _store(cls, *found, options)


def _train_on_grades(cls: type[Strategy], options: Namespace) -> bool:
    """Train reward models on graded answers of one model, and store them where the searches find them."""
    if options.texts:
        raise Refusal(
            f"{cls.name} is trained on questions whose answers are known, those of the small world: leave out --texts.",
            "texts",
        )
    from playground.training.reward_fitting import fit_rewards
    return _store(cls, *_trained(cls, fit_rewards, options, kept=True), options)


def _train_on_canvas(cls: type[Strategy], options: Namespace) -> bool:
    """Train what a canvas decoder learns of a denoiser, the bundled one by default, and store it."""
    from playground.engine.checkpoint.catalogue import BUNDLED, TABLES
    from playground.training.canvas_fitting import fit_canvas
    options.model = options.model or next(entry.name for entry in BUNDLED if entry.fills and entry.name not in TABLES)
    return _store(cls, *_trained(cls, fit_canvas, options), options)


def _train_head(cls: type[Strategy], options: Namespace) -> bool:
    """Train a draft head for a target alone, and store it where the strategy finds it, or in the file of --out."""
    from playground.training.head_fitting import fit_head
    from playground.training.speculators_export import check_folder, write_folder
    if options.exported:
        check_folder(cls.name, Path(options.exported))
    fitted_to, weights = (
        _published(cls, options) if options.published else _trained(cls, fit_head, options, kept=True)
    )
    if options.exported:
        model = fitted_to["target"]
        write_folder(Path(options.exported), cls.name, weights, cls().state_layers(model.depth), model)
    return _store(cls, fitted_to, weights, options)


def _trained(cls: type[Strategy], train: Callable[[type[Strategy], Fitting], dict[str, Tensor]], options: Namespace,
             kept: bool = False) -> tuple[dict[str, Model], dict[str, Tensor]]:
    """The models, here a target alone, and the weights that a training for them makes.

    kept: whether the training keeps what the target writes for it, even before its first state is saved.
    """
    from playground.training.fitting import Fitting
    texts = read_texts(options.texts) if options.texts else []
    model = load(options, draft=False).target
    checkpoint = _place(cls, {"target": model}, options).with_suffix(".training")
    watch = watching(options, " Fewer --epochs would do." if _way(cls) is _train_head else "")
    with _resumable(checkpoint, kept):
        weights = train(cls, Fitting(model, checkpoint, texts, options.seed, watch, RemainingTime(), options.epochs))
    show_progress(1.0, "")
    return {"target": model}, weights


def _train(cls: type[Strategy], options: Namespace) -> bool:
    """Train weights for a pair of models, and store them where the strategy finds them, or in the file of --out."""
    from playground.training import variants as learning
    from playground.training.draft_rollouts import check_pair
    from playground.training.fitting import Fitting
    texts = read_texts(options.texts) if options.texts else []
    check_pair(models := load(options, draft=True))
    fitted_to = {"target": models.target, "draft": models.draft}
    checkpoint = _place(cls, fitted_to, options).with_suffix(".training")
    with _resumable(checkpoint, kept=False):
        weights = learning.train(cls, models.draft, Fitting(models.target, checkpoint, texts, options.seed,
                                                            watching(options), RemainingTime()))
    show_progress(1.0, "")
    return _store(cls, fitted_to, weights, options)


def _place(cls: type[Strategy], fitted_to: dict[str, Model], options: Namespace) -> Path:
    """The file of weights, by the models they are fitted to."""
    from playground.decoding import fitted_weights as fitted
    return Path(options.out) if options.out else fitted.local_path(cls.name, fitted_to)


def _store(cls: type[Strategy], fitted_to: dict[str, Model], weights: dict[str, Tensor], options: Namespace) -> bool:
    """Save weights that are fitted to these models: "target", and "draft" if they belong to a pair."""
    from playground.decoding import fitted_weights as fitted
    place, names = _place(cls, fitted_to, options), {name: model.name for name, model in fitted_to.items()}
    fitted.save(place, weights, fitted_to)
    facts = {"strategy": cls.name, "models": names, "weights": fitted.digests(fitted_to), "file": str(place)}
    print(json.dumps(facts) if options.json else f"{cls.name} is fitted to {' with '.join(names.values())}: {place}")
    return False


def _published(cls: type[Strategy], options: Namespace) -> tuple[dict[str, Model], dict[str, Tensor]]:
    """The models, and the weights of a published head; raises Refusal if it is of another kind or for another model."""
    from playground.training.public_heads import read_head
    folder, model = Path(options.published), load(options, draft=False).target
    head = read_head(folder, model)
    if head.strategy != cls.name:
        raise Refusal(f"{folder} holds a head for {head.strategy}: run `fit {head.strategy} --from {folder}`.", "from")
    show_progress(1.0, "")
    return {"target": model}, head.weights


def _published_autoencoder(cls: type[Strategy], options: Namespace) -> tuple[dict[str, Model], dict[str, Tensor]]:
    """The models, and the weights of a published sparse autoencoder; raises Refusal if the strategy reads none."""
    if not hasattr(cls, "published"):
        raise Refusal(f"{cls.name} reads nothing that is published: leave out --from.", "from")
    from playground.training.public_autoencoders import read_autoencoder
    model = load(options, draft=False).target
    weights = cls.published(*read_autoencoder(Path(options.published), model))
    show_progress(1.0, "")
    return {"target": model}, weights


def _fit(cls: type[Strategy], options: Namespace) -> bool:
    texts = read_texts(options.texts)
    from playground.training import variants as learning
    learning.check_fits(cls)
    model = load(options, draft=False).target
    with _resumable(_place(cls, {"target": model}, options).with_suffix(".training"), kept=False):
        knobs = learning.fit(cls, model, texts, RemainingTime())
    show_progress(1.0, "")
    facts = {"strategy": cls.name, "model": model.name, "revision": model.revision, "texts": len(texts), "knobs": knobs}
    print(json.dumps(facts) if options.json else _pasted(cls, knobs))
    return False


def _pasted(cls: type[Strategy], knobs: dict[str, Any]) -> str:
    """Knobs as options of `run`: --set for a decoder or preset, --with for anything else."""
    settings = [f"{name}={_short(value)}" for name, value in knobs.items()]
    if cls.kind in ("decoder", "preset"):
        return " ".join(f"--set {setting}" for setting in settings)
    return f"--with {cls.name}:{','.join(settings)}"


@contextmanager
def _resumable(checkpoint: Path, kept: bool) -> Iterator[None]:
    """Say on Ctrl-C whether a training goes on from its files when it is run again."""
    try:
        yield
    except KeyboardInterrupt:
        found = kept or any(checkpoint.parent.glob(f"{escape(checkpoint.stem)}*{checkpoint.suffix}"))
        raise KeyboardInterrupt(
            "stopped; run again to resume" if found else "stopped; nothing is kept yet: run again to begin anew"
        ) from None


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
