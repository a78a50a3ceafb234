"""`variant` for changes of a lane's weights: made for a model, kept on the disk, and listed."""
from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from playground.cli.lane_options import read_knobs
from playground.cli.load_models import load, show_progress
from playground.cli.remaining_time import RemainingTime
from playground.cli.training.training_texts import read_texts
from playground.contract import CalibratedChange, make
from playground.contract.weight_change import read_change, written
from playground.errors import Refusal
from playground.weight_changes import JOINT, WeightChanges, layer_changes

if TYPE_CHECKING:
    from playground.contract import WeightChange


def names_change(name: str) -> bool:
    """Whether a name given to `variant` is that of changes of a lane's weights."""
    return name.split(JOINT)[-1].partition(":")[0].strip() in layer_changes()


def change_weights(options: Namespace) -> bool:
    """Make changed weights, or find them made, and print what they cost and lose; raises Refusal. Ctrl-C leaves no
    files behind.
    """
    if options.called:
        raise Refusal("Changed weights are named in the weights of a lane and are no model of their own: leave out "
                      "--name.", "name")
    *before, last = _changes(options)
    texts = read_texts(options.texts) if options.texts else []
    last = _calibrated(last, texts)
    layers = [written(change) for change in (*before, last)]
    from playground.training.weights.change_weights import WeightMaker
    options.dtype, options.quantization, options.draft, options.draft_device = "auto", "none", None, ""
    target = load(options, draft=False).target
    card = WeightMaker(target, RemainingTime(), texts).make(layers).card
    show_progress(1.0, "")
    print(json.dumps(card) if options.json else "\n".join([*_table(card), "", *_ending(card, layers)]))
    return False


def list_changes(options: Namespace) -> bool:
    """Print all changed weights that are on the disk, the newest first."""
    from playground.training.weights.change_weights import summary
    from playground.training.weights.changed_weights import cards, folder
    found = cards()
    if options.json:
        print(json.dumps(found))
    elif not found:
        print(f"There are no changed weights in {folder()} yet: make some with `python -m playground variant rtn`.")
    else:
        for card in found:
            print(f"{card['weights']}, of {card['model']}: {summary(card)}; {card['on disk'] / 1e6:.1f} MB in "
                  f"{card['file']}")
    return False


def _changes(options: Namespace) -> list[WeightChange]:
    """The changes that were named, the last with the knobs of --set."""
    *texts, last = WeightChanges.read(options.name).layers
    change = read_change(last)
    set_ = read_knobs(type(change), options.set)
    return [*map(read_change, texts), make(change.name, **change.values() | set_)]


def _calibrated(change: WeightChange, texts: list[str]) -> WeightChange:
    """The change with the digest of a person's own texts."""
    if not texts:
        return change
    if not isinstance(change, CalibratedChange):
        raise Refusal(f"{change.name} reads no texts: leave out --texts.", "texts")
    from playground.training.weights.change_weights import digest_of_texts
    return make(change.name, **change.values() | {"calibration": digest_of_texts(texts)})


def _table(card: dict[str, Any]) -> list[str]:
    """A line for each layer that was changed."""
    changed = {name: layer for name, layer in card["layers"].items() if not layer["same"]}
    wide = max(map(len, changed), default=0)
    return [f"{name:{wide}}  error {layer['error']:.4f}  {layer['bits']:5.2f} bits  {layer['zeros']:4.0%} zeros"
            for name, layer in changed.items()]


def _ending(card: dict[str, Any], layers: list[str]) -> list[str]:
    from playground.training.weights.change_weights import summary
    lane = json.dumps({"strategy": "greedy", "weights": JOINT.join(layers)})
    return [f"{card['weights']}: {summary(card)}.",
            f"A lane runs with it as `python -m playground compare greedy '{lane}' --prompt \"Once\"`; "
            "`variant --list` shows all."]
