"""`variant` and `fit`: what is learnt before any text is written."""
from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.cli.lane_options import read_knobs
from playground.cli.load_models import hush, load, tell
from playground.cli.training_texts import read_texts
from playground.contract import Strategy, find, make
from playground.errors import Refusal
from playground.events import Figure, Note

if TYPE_CHECKING:
    from playground.training.variants import LoadedNetwork


def make_variant(options: Namespace) -> bool:
    """Make a model, with its measurements printed as they come; raises Refusal. Ctrl-C leaves nothing behind."""
    texts = read_texts(options.texts)
    from playground.engine.catalogue import BUNDLED
    from playground.training import variants as learning  # not before: it brings torch along
    order = learning.Order(of_kind("variant", options), options.model or BUNDLED[0].name, options.called, options.seed)
    card = learning.make_variant(order, _load(order.base, options), texts, _hold if options.json else _show)
    print(
        json.dumps(card)
        if options.json
        else f"Made {order.title}. It is in the catalogue as {order.name}: run it with --model {order.name}, or "
        f"choose it on the page. Delete {order.folder} to be rid of it."
    )
    return False


def fit(options: Namespace) -> bool:
    """Print the knobs that suit a model, as options to paste, or learn the weights that suit a pair of models, and keep
    them; raises Refusal.
    """
    cls = find(options.name)
    return _train(cls, options) if hasattr(cls, "train") else _fit(cls, options)


def _train(cls: type[Strategy], options: Namespace) -> bool:
    """Learn weights, with the measurements printed as they come, and keep them where the strategy finds them, or in the
    file that was named.
    """
    texts = read_texts(options.texts) if options.texts else []
    from playground.decoding import fitted_weights as fitted
    from playground.training import variants as learning
    models = load(options, draft=True)
    weights = learning.train(cls, models, texts, options.seed, _hold if options.json else _show, tell)
    tell(1.0, "")
    streams = {"target": models.target, "draft": models.draft}
    place = Path(options.out) if options.out else fitted.own_place(cls.name, streams)
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


def _fit(cls: type[Strategy], options: Namespace) -> bool:
    texts = read_texts(options.texts)
    from playground.training import variants as learning
    learning.check_fits(cls)
    model = load(options, draft=False).target
    knobs = learning.fit(cls, model, texts, tell)
    tell(1.0, "")
    facts = {"strategy": cls.name, "model": model.name, "revision": model.revision, "texts": len(texts), "knobs": knobs}
    print(json.dumps(facts) if options.json else _pasted(cls, knobs))
    return False


def _pasted(cls: type[Strategy], knobs: dict[str, Any]) -> str:
    """Knobs as options of a run: of what the lane runs, or of something added to it."""
    told = [f"{name}={_short(value)}" for name, value in knobs.items()]
    return (
        " ".join(f"--set {knob}" for knob in told)
        if cls.kind in ("decoder", "preset")
        else f"--with {cls.name}:{','.join(told)}"
    )


def of_kind(kind: str, options: Namespace) -> Strategy:
    """The strategy a command names, with its knobs set; raises Refusal for one of another kind."""
    cls = find(options.name)
    if cls.kind != kind:
        raise Refusal(
            f"{cls.name} is a {cls.kind.replace('_', ' ')}, not a {kind}: `python -m playground list` shows every {kind} there is.",
            cls.name,
        )
    return make(cls.name, **read_knobs(cls, options.set))


def _load(name: str, options: Namespace) -> LoadedNetwork:
    from playground.engine import load as loading
    from playground.training.variants import LoadedNetwork
    if not options.verbose:
        hush()
    loaded = LoadedNetwork(*loading.load(name, loading.Loading(options.device, "float32"), tell))
    tell(1.0, "")
    return loaded


def _show(event: Figure | Note) -> None:
    """One line for each measurement: where it was taken, and what was found."""
    if isinstance(event, Note):
        print(event.text, flush=True)
    else:
        print(
            f"{event.data['x']:4}  " + "  ".join(f"{name} {value:.3f}" for name, value in event.data["series"].items()),
            flush=True,
        )


def _hold(event: Figure | Note) -> None:
    """The card tells it all in the end."""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
