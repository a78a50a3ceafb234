"""`variant`: a model or a lane's weights made before decoding."""
from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from playground.cli.lane_options import read_knobs
from playground.cli.load_models import show_progress, silence_libraries
from playground.cli.shared_options import CommandParser, add_base, add_count, add_settings, add_texts
from playground.cli.training.training_texts import read_texts
from playground.cli.training.training_view import watching
from playground.cli.training.weight_changes import change_weights, list_changes, names_change
from playground.contract import Strategy, find, make
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.training.variants import LoadedNetwork


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
        with _whole_or_nothing():
            return change_weights(options)
    texts = read_texts(options.texts)
    from playground.engine.checkpoint.catalogue import BUNDLED
    from playground.training import variants as learning  # late, since it imports torch
    method, base = of_kind("variant", options), options.model or BUNDLED[0].name
    order = learning.VariantOrder(method, base, options.called, options.seed)
    with _whole_or_nothing():
        card = learning.make_variant(order, _load(order.base, options), texts, watching(options))
    print(
        json.dumps(card)
        if options.json
        else f"Made {order.title}. It is in the catalogue as {order.name}: run it with --model {order.name}, or "
        f"choose it on the page. Delete {order.folder} to remove it."
    )
    return False


@contextmanager
def _whole_or_nothing() -> Iterator[None]:
    """Say on Ctrl-C that what was made until then is lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; nothing is kept: run again to begin anew") from None


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
