"""What a lane shows of its changed weights: what they cost and lose, and the error and bits of each layer."""
from __future__ import annotations

from typing import Any

from playground.decoding.canvas import Canvas
from playground.decoding.lane import Lane
from playground.decoding.models import AnyModel
from playground.events import Figure

SHOWN = ("bits per weight", "bytes", "KL", "perplexity", "calibrated on")
CHARTS = {"error": "error per layer", "bits": "bits per weight", "zeros": "zeros per layer"}


def shown_card(target: AnyModel) -> dict[str, Any]:
    """Of the card of changed weights, what the header of a lane says; empty for others."""
    card = getattr(target, "weights_card", {})
    return {name: _short(card[name]) for name in SHOWN if name in card}


def draw_weights(lane: Lane | Canvas, target: AnyModel) -> None:
    """Record the error, bits and zeros of each layer, a matrix of decoder layers and projections."""
    layers = getattr(target, "weights_card", {}).get("layers", {})
    rows, columns = (list(dict.fromkeys(place[part] for place in map(_place, layers))) for part in (0, 1))
    for value, title in CHARTS.items() if layers else ():
        by_place = {_place(name): layer[value] for name, layer in layers.items()}
        values = [[by_place.get((row, column), 0.0) for column in columns] for row in rows]
        if any(map(any, values)):
            lane.record(Figure("matrix", title, {"rows": rows, "columns": columns, "values": values}))


def _place(name: str) -> tuple[str, str]:
    """Decoder layer and projection of a layer such as model.layers.3.self_attn.q_proj."""
    before, _, inner = name.partition("layers.")
    number, _, rest = (inner or before).partition(".")
    return f"layer {number}", rest.removesuffix("_proj").rpartition(".")[2] if "experts" not in rest else rest


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
