"""Features of an autoencoder that are as active on some texts as given ones: switching them off takes away as much."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from playground.algorithms.overlays.layer_input import LayerInput
from playground.algorithms.overlays.sparse_autoencoder import SparseAutoencoder
from playground.engine.model import Model
from playground.training.calibration import CalibrationTexts


def mean_activity(model: Model, weights: Mapping[str, Tensor], texts: Iterable[list[int]]) -> Tensor:
    """The mean norm of what each feature adds to the state, over all tokens of some texts, [features]."""
    sae, rows = SparseAutoencoder.of(weights), []
    for ids in texts:
        reading = LayerInput(int(weights["layer"]))
        CalibrationTexts(model, [ids]).read(ids, reading)
        rows.append(reading.rows)
    return sae.encode(torch.cat(rows)).mean(0) * sae.decoder.norm(dim=1)


def as_active(activity: Tensor, given: Iterable[int]) -> tuple[int, ...]:
    """For each given feature another one of the nearest activity, each taken once, the most active first; sorted."""
    sizes = activity.tolist()
    named = sorted(given, key=lambda feature: -sizes[feature])
    free, found = [feature for feature in range(len(sizes)) if feature not in named], []
    for feature in named:
        found.append(min(free, key=lambda other: abs(sizes[other] - sizes[feature])))
        free.remove(found[-1])
    return tuple(sorted(found))
