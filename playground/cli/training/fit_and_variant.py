"""`variant` and `fit`: training before decoding."""
from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.cli.lane_options import read_knobs
from playground.cli.load_models import load, show_progress, silence_libraries
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import (
    CommandParser,
    add_base,
    add_count,
    add_models,
    add_settings,
    add_strategy,
    add_texts,
)
from playground.cli.training.training_texts import read_texts
from playground.cli.training.training_view import TrainingView
from playground.cli.training.weight_changes import change_weights, list_changes, names_change
from playground.contract import Strategy, find, make
from playground.errors import Refusal
from playground.events import Figure, Note

if TYPE_CHECKING:
    from torch import Tensor

    from playground.engine.model import Model
    from playground.training.variants import LoadedNetwork


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
                         help="a published head to use instead of training one: EAGLE, EAGLE-3 or Medusa version 2")
    command.add_argument("--to", dest="exported", metavar="FOLDER",
                         help="a new folder for the head in the format of vLLM's speculators as well")
    command.add_argument("--out", metavar="FILE",
                         help="where to store the weights; default: with the other files made on this machine")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def make_variant_options(command: CommandParser) -> None:
    command.add_argument("name", metavar="NAME", nargs="?", default="",
                         help="a variant, such as hyperfitting, or changes of a lane's weights, such as rtn:bits=4; "
                              "`list` shows them")
    command.add_argument("--list", dest="listing", action="store_true",
                         help="list the changed weights on this machine instead")
    add_texts(command)
    command.add_argument("--name", dest="called", default="", metavar="NAME",
                         help="name of the new model; default: made from the base and the method")
    add_settings(command, "the method")
    add_count(command, "seed", 0, 0)
    add_base(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def make_variant(options: Namespace) -> bool:
    """Make a model, printing measurements during training, or changed weights of a lane; raises Refusal. Ctrl-C leaves
    no files behind.
    """
    if options.listing:
        return list_changes(options)
    if not options.name:
        raise Refusal("Name what to make, NAME, or give --list: `python -m playground list` shows all variants.")
    if names_change(options.name):
        return change_weights(options)
    texts = read_texts(options.texts)
    from playground.engine.checkpoint.catalogue import BUNDLED
    from playground.training import variants as learning  # late, since it imports torch
    method, base = of_kind("variant", options), options.model or BUNDLED[0].name
    order = learning.VariantOrder(method, base, options.called, options.seed)
    card = learning.make_variant(order, _load(order.base, options), texts, _watching(options))
    print(
        json.dumps(card)
        if options.json
        else f"Made {order.title}. It is in the catalogue as {order.name}: run it with --model {order.name}, or "
        f"choose it on the page. Delete {order.folder} to remove it."
    )
    return False


def fit(options: Namespace) -> bool:
    """Fit a strategy: print knobs for a model as options to paste, or train and store weights for a pair of models.

    Raises Refusal.
    """
    cls = find(find(options.name).weights_of or options.name)
    way = _way(cls)
    for option, given in (("epochs", options.epochs), ("to", options.exported)):
        if given and way is not _train_head:
            raise Refusal(f"{cls.name} is not a draft head that is trained on texts: leave out --{option}.", option)
    return way(cls, options)


def _way(cls: type[Strategy]) -> Callable[[type[Strategy], Namespace], bool]:
    """How a strategy is fitted."""
    ways = {"calibrate": _calibrate, "learn": _train_on_canvas, "train_on_grades": _train_on_grades}
    declared = next((way for name, way in ways.items() if hasattr(cls, name)), None)
    return declared or (_train_head if cls.fitted_to_target else _train if hasattr(cls, "train") else _fit)


def _calibrate(cls: type[Strategy], options: Namespace) -> bool:
    """Measure or learn what a policy needs to know of one model, and store it where the policy finds it."""
    texts = read_texts(options.texts) if options.texts else []
    from playground.training.calibration import calibrate
    model = load(options, draft=False).target
    show, checkpoint = _watching(options), _place(cls, model, options).with_suffix(".training")
    with _resumable(checkpoint):
        weights = calibrate(cls, model, texts, options.seed, show, checkpoint, RemainingTime())
    show_progress(1.0, "")
    return _store(cls, model, weights, options)


def _train_on_grades(cls: type[Strategy], options: Namespace) -> bool:
    """Train reward models on graded answers of one model, and store them where the searches find them."""
    if options.texts:
        raise Refusal(
            f"{cls.name} is trained on questions whose answers are known, those of the small world: leave out --texts.",
            "texts",
        )
    from playground.training.reward_fitting import fit_rewards
    model = load(options, draft=False).target
    weights = fit_rewards(cls, model, options.seed, _watching(options), RemainingTime())
    show_progress(1.0, "")
    return _store(cls, model, weights, options)


def _train_head(cls: type[Strategy], options: Namespace) -> bool:
    """Train a draft head for a target alone, and store it where the strategy finds it, or in the file of --out."""
    texts = read_texts(options.texts) if options.texts else []
    from playground.training.head_fitting import fit_head
    from playground.training.speculators_export import check_folder, write_folder
    if options.exported:
        check_folder(cls.name, Path(options.exported))
    model = load(options, draft=False).target
    show = _watching(options, " Fewer --epochs would do.")
    checkpoint = _place(cls, model, options).with_suffix(".training")
    if options.published:
        weights = _published(cls, Path(options.published), model)
    else:
        with _resumable(checkpoint, kept=True):  # the texts that the target has written so far
            weights = fit_head(cls, model, texts, options.seed, checkpoint, show, RemainingTime(), options.epochs)
    show_progress(1.0, "")
    if options.exported:
        write_folder(Path(options.exported), cls.name, weights, cls().state_layers(model.depth), model)
    return _store(cls, model, weights, options)


def _train_on_canvas(cls: type[Strategy], options: Namespace) -> bool:
    """Train what a canvas decoder learns of a denoiser, the bundled one by default, and store it."""
    texts = read_texts(options.texts) if options.texts else []
    from playground.engine.checkpoint.catalogue import BUNDLED, TABLES
    from playground.training.canvas_fitting import fit_canvas
    options.model = options.model or next(entry.name for entry in BUNDLED if entry.fills and entry.name not in TABLES)
    model = load(options, draft=False).target
    show, checkpoint = _watching(options), _place(cls, model, options).with_suffix(".training")
    with _resumable(checkpoint):
        weights = fit_canvas(cls, model, texts, options.seed, checkpoint, show, RemainingTime())
    show_progress(1.0, "")
    return _store(cls, model, weights, options)


def _place(cls: type[Strategy], model: Model, options: Namespace) -> Path:
    """The file of weights that are fitted to a target alone."""
    from playground.decoding import fitted_weights as fitted
    return Path(options.out) if options.out else fitted.local_path(cls.name, {"target": model})


def _store(cls: type[Strategy], model: Model, weights: dict[str, Tensor], options: Namespace) -> bool:
    """Save weights that are fitted to a target alone."""
    from playground.decoding import fitted_weights as fitted
    place, streams = _place(cls, model, options), {"target": model}
    fitted.save(place, weights, streams)
    facts = {
        "strategy": cls.name,
        "models": {"target": model.name},
        "weights": fitted.digests(streams),
        "file": str(place),
    }
    print(json.dumps(facts) if options.json else f"{cls.name} is fitted to {model.name}: {place}")
    return False


def _train(cls: type[Strategy], options: Namespace) -> bool:
    """Train weights, printing measurements, and store them where the strategy finds them, or in the file of --out."""
    texts = read_texts(options.texts) if options.texts else []
    from playground.decoding import fitted_weights as fitted
    from playground.training import variants as learning
    models = load(options, draft=True)
    weights = learning.train(cls, models, texts, options.seed, _watching(options), RemainingTime())
    show_progress(1.0, "")
    streams = {"target": models.target, "draft": models.draft}
    place = Path(options.out) if options.out else fitted.local_path(cls.name, streams)
    fitted.save(place, weights, streams)
    facts = {
        "strategy": cls.name,
        "models": {name: model.name for name, model in streams.items()},
        "weights": fitted.digests(streams),
        "file": str(place),
    }
    print(
        json.dumps(facts)
        if options.json
        else f"{cls.name} is fitted to {models.target.name} with {models.draft.name}: {place}"
    )
    return False


def _published(cls: type[Strategy], folder: Path, model: Model) -> dict[str, Tensor]:
    """The weights of a published head; raises Refusal if it is of another kind or for another model."""
    from playground.training.public_heads import read_head
    head = read_head(folder, model)
    if head.strategy != cls.name:
        raise Refusal(f"{folder} holds a head for {head.strategy}: run `fit {head.strategy} --from {folder}`.", "from")
    return head.weights


def _fit(cls: type[Strategy], options: Namespace) -> bool:
    texts = read_texts(options.texts)
    from playground.training import variants as learning
    learning.check_fits(cls)
    model = load(options, draft=False).target
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


def of_kind(kind: str, options: Namespace) -> Strategy:
    """The strategy that the command names, with its knobs set; raises Refusal for one of another kind."""
    cls = find(options.name)
    if cls.kind != kind:
        raise Refusal(
            f"{cls.name} is a {cls.kind.replace('_', ' ')}, not a {kind}: `python -m playground list` shows every "
            f"{kind}.",
            cls.name,
        )
    return make(cls.name, **read_knobs(cls, options.set))


def _load(name: str, options: Namespace) -> LoadedNetwork:
    from playground.engine.loading import load as loading
    from playground.training.variants import LoadedNetwork
    if not options.verbose:
        silence_libraries()
    loaded = LoadedNetwork(*loading.load(name, loading.Loading(options.device, "float32"), show_progress))
    show_progress(1.0, "")
    return loaded


def _watching(options: Namespace, advice: str = "") -> Callable[[Figure | Note], None]:
    """Prints the notes and measurements of a training; nothing beside JSON, which has the result alone."""
    return (lambda event: None) if options.json else TrainingView(advice)


@contextmanager
def _resumable(checkpoint: Path, kept: bool = False) -> Iterator[None]:
    """Say on Ctrl-C whether a training goes on from its files when it is run again.

    kept: whether something is kept even before the first state is saved.
    """
    try:
        yield
    except KeyboardInterrupt:
        found = kept or any(checkpoint.parent.glob(f"{escape(checkpoint.stem)}*{checkpoint.suffix}"))
        raise KeyboardInterrupt(
            "stopped; run again to resume" if found else "stopped; nothing is kept yet: run again to begin anew"
        ) from None


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
