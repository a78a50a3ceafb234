"""The mixture of experts made of a dense model: its experts are channels of the dense one, and it can be trained."""
from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from pocket_windows import tokenizer  # noqa: F401
from torch.nn.functional import silu

from playground.errors import Refusal
from playground.pocket import architecture as models
from playground.pocket import pipeline as steps
from playground.pocket.__main__ import parse
from playground.pocket.data import Windows
from playground.pocket.model_roles import EVERY, EXPERTS, ROLES
from playground.pocket.training import experts_windows, train, upcycling
from playground.pocket.training.distill import ExpertsLoss
from playground.questions.world import TASKS

pytestmark = pytest.mark.bench


def dense(vocabulary: int = 300):
    model = models.make("nano", vocabulary, seed=4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.normal_()
    return model


@torch.no_grad()
def of_channels(mlp, rows: torch.Tensor, channels: list[int]) -> torch.Tensor:
    """What these channels of a feed-forward network add."""
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    return (silu(rows @ gate[channels].T) * (rows @ up[channels].T)) @ down[:, channels].T


def channels_of(experts, mlp) -> list[list[int]]:
    """The channels of each expert, found by their gate weights."""
    size = mlp.gate_proj.out_features
    table = {tuple(row): channel for channel, row in enumerate(mlp.gate_proj.weight.detach().tolist())}
    assert len(table) == size
    return [[table[tuple(row)] for row in weights[:len(weights) // 2]] for weights in experts.gate_up_proj.tolist()]


def test_every_channel_is_in_one_expert_and_the_largest_are_in_all():
    model = dense()
    sparse = upcycling.upcycled(model)
    for old, new in zip(model.model.layers, sparse.model.layers):
        groups = channels_of(new.mlp.experts, old.mlp)
        counts = Counter(channel for group in groups for channel in group)
        common = [channel for channel, count in counts.items() if count == upcycling.EXPERTS]
        size = old.mlp.gate_proj.weight.norm(dim=1) * old.mlp.up_proj.weight.norm(dim=1)
        size = size * old.mlp.down_proj.weight.norm(dim=0)
        assert set(common) == set(size.argsort(descending=True)[:len(common)].tolist()) and len(common) == 16
        assert set(counts.values()) == {1, upcycling.EXPERTS} and len(counts) == 64


def test_two_experts_at_equal_gates_add_what_their_channels_added_before():
    model, rows = dense(), torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    sparse = upcycling.upcycled(model)
    old, new = model.model.layers[1].mlp, sparse.model.layers[1].mlp
    groups = channels_of(new.experts, old)
    chosen, gates = torch.tensor([[2, 5]] * 5), torch.full((5, 2), 0.5)
    expected = of_channels(old, rows, sorted({*groups[2], *groups[5]}))
    with torch.no_grad():
        assert (new.experts(rows, chosen, gates) - expected).abs().max() < 1e-5


def test_everything_else_is_the_dense_models_own():
    model = dense()
    sparse = upcycling.upcycled(model)
    own = sparse.state_dict()
    for name, weight in model.state_dict().items():
        if ".mlp." not in name:
            assert torch.equal(own[name], weight)


def test_its_windows_hold_tasks_of_the_world_alone(tokenizer, tmp_path):  # noqa: F811
    experts_windows.build(tmp_path, tokenizer, 4000, 0)
    for width in experts_windows.STAGES:
        windows = Windows.load(tmp_path / f"train_{width}.npz")
        assert windows.ids.shape[1] == width + 1 and len(windows.ids)
        assert set(windows.weights.flatten().tolist()) <= {0, 10, 100}
    assert EXPERTS.name not in ROLES and EVERY[EXPERTS.name] is EXPERTS and set(TASKS)


@pytest.mark.parametrize("by_layer", [0.0, 1.0])
def test_training_brings_the_mixture_closer_to_the_dense_model(by_layer, tokenizer, tmp_path):  # noqa: F811
    experts_windows.build(tmp_path, tokenizer, 6000, 0)
    model = dense(len(tokenizer))
    sparse = models.for_training(upcycling.upcycled(model))
    plan = train.TrainingPlan(steps=30, tokens=512, stages={256: 1.0}, warm_up=2, matrix_lr=0.002, other_lr=0.002)
    losses = []
    loss = ExpertsLoss(models.for_training(model), by_layer)

    def noted(*given):
        value = loss(*given)
        losses.append(float(value.detach()))
        return value

    run = train.Trainer(sparse, noted, plan, (tmp_path, tmp_path / "run"))
    while run.progress < 1:
        run.step()
    assert sum(losses[-5:]) < sum(losses[:5])


def test_the_saved_mixture_loads_as_it_was(tmp_path):
    from transformers import AutoModelForCausalLM
    sparse = upcycling.upcycled(dense()).eval()
    models.save(sparse, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="eager")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert (loaded(ids).logits - sparse(ids).logits).abs().max() < 0.1
    assert loaded.config.num_local_experts == 8 and loaded.config.num_experts_per_tok == 2


def do(words: str, **options) -> None:
    """One command, as from the command line."""
    parsed = parse([*words.split(), *(str(part) for name, value in options.items() for part in (f"--{name}", value))])
    steps.COMMANDS[parsed.command](parsed)


def test_it_is_made_of_a_published_model_and_published_with_a_card(tokenizer, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(train, "NOTED", 1)
    published, out, assets = tmp_path / "dense", tmp_path / "work", tmp_path / "assets"
    models.save(dense(len(tokenizer)), published)
    (published / "evaluation.json").write_text(json.dumps(dict(tokens_seen=3_000_000, minutes=5)))
    tokenizer.save_pretrained(out / "tokenizer")
    do("data --role experts --tokens 4e3", out=out)
    with pytest.raises(Refusal, match="made of a finished model"):
        do("train --role experts", out=out)
    do("train --role experts --batch 256 --minutes 0.02", out=out, begin=published)
    measured = dict(items=1, rows={"facts": dict(score=0.5, right=0.5, tokens=3)})
    (out / "experts" / "evaluation.json").write_text(json.dumps(measured))
    do("publish --role experts", out=out, assets=assets)
    card = (assets / "pocket-moe" / "README.md").read_text(encoding="utf-8")
    assert "8 experts of 22 channels" in card and "after 3 million" in card and "| facts | 0.50 | 50% | 3 |" in card
    assert (assets / "pocket-moe" / "model.safetensors").is_file()
