"""The training of cache policies: it repeats, and goes on after an interruption as if there had been none."""
from __future__ import annotations

from dataclasses import replace

import torch
from pairs import network, pair

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.events import Figure
from playground.training.checkpoint import Checkpoint

PLAN = Descent("distance", steps=12, rate=0.1, every=3)


class Texts:
    """Where a training keeps its state."""

    def __init__(self, file: Checkpoint):
        self.resumed, self.save = file.read, file.write


def start() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(3), "b": torch.ones(2)}


def trained(file: Checkpoint, most: int = 99) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights, and the losses, after at most so many measurements."""
    weights = start()

    def loss(step: int) -> torch.Tensor:
        aim = torch.randn(3, generator=torch.Generator().manual_seed(step)) + 2
        return (weights["a"] - aim).square().sum() + weights["b"].square().sum()

    found = []
    for number, figure in enumerate(descend(weights, loss, PLAN, Texts(file)), 1):
        found += [figure.data["series"]["loss"]] if isinstance(figure, Figure) else []  # and a note where it resumes
        if number == most:
            break
    return weights, found


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path):
    whole, losses = trained(Checkpoint(tmp_path / "whole", (1,)))
    assert len(losses) == 4 and losses[-1] < losses[0]
    trained(Checkpoint(tmp_path / "cut", (1,)), most=2)
    resumed, rest = trained(Checkpoint(tmp_path / "cut", (1,)))
    assert rest == losses[2:]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def last_norm(plan: Descent, tmp_path) -> float:
    """The norm of all gradients of the last step."""
    weights = start()
    list(descend(weights, lambda step: 100 * sum(each.sum() for each in weights.values()), plan,
                 Texts(Checkpoint(tmp_path / str(plan.clip), (1,)))))
    return float(torch.cat([each.grad for each in weights.values()]).norm())


def test_gradients_are_clipped_by_their_common_norm(tmp_path):
    assert last_norm(PLAN, tmp_path) > 200
    assert abs(last_norm(replace(PLAN, clip=0.5), tmp_path) - 0.5) < 1e-4


def test_the_checkpoint_of_another_training_is_not_resumed(tmp_path):
    trained(Checkpoint(tmp_path / "file", (1,)), most=2)
    assert len(trained(Checkpoint(tmp_path / "file", (2,)))[1]) == 4


def test_the_network_with_gradients_computes_the_librarys_logits():
    for architecture in ("llama", "qwen3"):
        ids = torch.tensor([5, 9, 2, 7, 7, 1, 30])
        llama = DifferentiableLlama(pair(architecture).target.parts)
        hidden = llama(llama.embed(ids), torch.arange(7), llama.attend_causally)
        with torch.inference_mode():
            expected = network(architecture)(input_ids=ids[None], use_cache=False).logits[0]
        assert (llama.logits(hidden) - expected).abs().max() < 1e-5  # the library computes its norms in float32
        assert not llama.embeddings.requires_grad
