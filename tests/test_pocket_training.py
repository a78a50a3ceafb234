"""Training the pocket models: losses, optimisers, schedules, attention, shapes, resuming; seconds, on nano models."""
import itertools

import pytest
import torch
from pocket_windows import folder, tokenizer  # noqa: F401
from transformers import LlamaForCausalLM

from playground.pocket import architecture as models
from playground.pocket import tokenizer as tokens
from playground.pocket.data import STAGES
from playground.pocket.training import precision
from playground.pocket.training import train as training
from playground.pocket.training.distill import DraftLoss, soft
from playground.pocket.training.muon import Muon, orthogonal

pytestmark = pytest.mark.bench


def trainer(folder, out, **plan):
    model = models.for_training(models.make("nano", 600, seed=5))
    plan = training.TrainingPlan(tokens=512, warm_up=1, **plan)
    return training.Trainer(model, training.target_loss, plan, (folder, out))


# training

def test_a_few_steps_lower_the_loss(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", steps=12)
    batch = run.batch()
    before = float(training.target_loss(run.model, batch, run).detach())
    run.state.taken.clear()
    for _ in range(6):
        run.step()
    assert float(training.target_loss(run.model, batch, run).detach()) < before - 0.3


def test_a_resumed_run_is_the_same_run(folder, tmp_path):
    whole, half = trainer(folder, tmp_path / "whole", steps=6), trainer(folder, tmp_path / "half", steps=6)
    whole.run()
    half.run(until=0.5)
    assert half.state.step == 3
    rest = trainer(folder, tmp_path / "half", steps=6)
    rest.resume()
    rest.run()
    assert rest.state.step == 6 and rest.state.taken == whole.state.taken
    assert same_weights(whole.model, rest.model) and not same_weights(half.model, rest.model)


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_rate_warms_up_stays_and_decays(folder, tmp_path):
    run = trainer(folder, tmp_path, steps=100)
    rates = []
    for run.state.step in range(100):
        rates.append(run.rate())
    assert rates[10] == rates[50] == 1 and rates[80] < 0.5 and rates[99] == pytest.approx(0.0222, abs=0.01)


def test_the_context_grows(folder, tmp_path):
    run = trainer(folder, tmp_path, steps=100)
    widths = []
    for run.state.step in range(100):
        widths.append(run.width())
    assert [width for width, _ in itertools.groupby(widths)] == [256, 512, 1024] and widths.count(256) == round(
        100 * STAGES[256]
    )


def test_the_training_attention_is_the_usual_attention():
    model = models.make("nano", 600, seed=1).eval()
    ids = torch.randint(7, 600, (2, 40))
    usual = model(ids).logits
    assert torch.allclose(models.for_training(model).eval()(ids).logits, usual, atol=1e-4)


@pytest.mark.parametrize("attention", ["causal_matmul", "sdpa"])
def test_no_token_sees_another_document_of_its_window(attention):
    model = models.make("nano", 600, seed=1).eval()
    model.set_attn_implementation(attention)
    ids = torch.randint(7, 600, (1, 30))
    documents = torch.tensor([[1] * 12 + [2] * 18])
    together = model(ids, attention_mask=models.within_documents(documents)).logits
    alone = model(ids[:, 12:]).logits
    assert torch.allclose(together[:, 12:], alone, atol=1e-4)
    assert not torch.allclose(model(ids).logits[:, 12:], alone, atol=1e-2)


def test_muon_makes_directions_equal():
    noise = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(noise * torch.logspace(0, -1, 48)))
    assert 0.4 < values.min() and values.max() < 1.4


def test_muon_walks_downhill():
    matrix = torch.nn.Parameter(torch.ones(8, 4))
    optimiser = Muon([matrix], lr=0.05)
    for _ in range(20):
        optimiser.zero_grad()
        (matrix ** 2).sum().backward()
        optimiser.step()
    assert matrix.detach().abs().mean() < 0.8


def test_the_loss_is_the_weighted_cross_entropy_and_so_is_its_gradient():
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids, weights = torch.randint(0, 11, (2, 5)), torch.rand(2, 5)
    loss = training.weighted(logits, ids, weights)
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    known = (each * weights).sum() / weights.sum()
    assert torch.allclose(loss, known)
    assert torch.allclose(*(torch.autograd.grad(x, logits)[0] for x in (loss, known)), atol=1e-6)


def test_distillation_uses_the_target_only_after_its_first_part(folder, tmp_path):
    target, draft = models.make("nano", 600, seed=1), models.for_training(models.make("nano", 600, seed=2))
    loss = DraftLoss(models.for_training(target), on_data=0.5)
    run = training.Trainer(draft, loss, training.TrainingPlan(steps=10, tokens=512), (folder, tmp_path))
    batch = run.batch()
    early = loss(draft, batch, run)
    run.state.step = 6
    late = loss(draft, batch, run)
    assert float(early.detach()) != float(late.detach()) and all(p.grad is None for p in target.parameters())


def test_distilled_from_itself_the_loss_is_the_entropy():
    logits = torch.randn(1, 3, 7)
    wanted = logits.softmax(-1)
    assert torch.allclose(soft(logits, wanted, torch.ones(1, 3)), -(wanted * wanted.log()).sum(-1).mean())


def test_a_saved_model_loads_in_bfloat16_and_says_the_same(tmp_path):
    model = models.for_training(models.make("nano", 600, seed=1))
    models.save(model, tmp_path)
    from transformers import AutoModelForCausalLM
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and loaded.config.use_cache
    assert loaded.generation_config.eos_token_id == tokens.SPECIALS.index(tokens.END)
    assert torch.allclose(loaded.lm_head.weight.float(), model.lm_head.weight, atol=1e-2)
    assert model.dtype == torch.float32


def test_early_exits_are_sampled_from_the_upper_half_without_the_last_layer(folder, tmp_path):
    run = trainer(folder, tmp_path, steps=400)
    drawn = [training.early_layer(8, run.rng()) for run.state.step in range(400)]
    assert set(drawn) == {4, 5, 6, 7} and min(map(drawn.count, set(drawn))) > 60


def test_an_early_exit_is_a_share_of_the_loss(folder, tmp_path):
    run = trainer(folder, tmp_path, steps=10)
    batch = run.batch()
    plain = training.data_loss(run.model, batch, run)
    for layer in run.model.model.layers[1:]:           # without later layers, the exit equals the last layer
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    last = float(training.data_loss(run.model, batch, run).detach())
    every_fourth = float(training.weighted(*exit_rows(run.model, batch)).detach())
    known = (1 - training.EXIT_WEIGHT) * last + training.EXIT_WEIGHT * every_fourth
    assert float(training.target_loss(run.model, batch, run).detach()) == pytest.approx(known, abs=2e-3)
    assert float(plain.detach()) != pytest.approx(last, abs=1e-4)


def exit_rows(model, batch):
    """Logits, ids and weights of the tokens at which an early exit is judged."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch.read).logits
    return [x[:, ::training.EXIT_EVERY] for x in (logits, *batch.predicted)]


@pytest.mark.parametrize("shape, least, most", [
    ("target", 7e6, 8e6), ("draft", 0.8e6, 1.2e6), ("tiny", 0.3e6, 0.7e6),
    ("large", 17e6, 25e6), ("large_draft", 2e6, 3e6), ("large_tiny", 0.7e6, 1.2e6),
])
def test_a_shape_has_its_stated_size(shape, least, most):
    vocabulary = tokens.OWN["size"] if shape.endswith("tiny") else tokens.SIZE
    with torch.device("meta"):
        assert (
            least
            < sum(p.numel() for p in LlamaForCausalLM(models.configuration(shape, vocabulary)).parameters())
            < most
        )


def test_the_attention_for_a_gpu_trains_to_the_same_loss(folder, tmp_path):
    """On a GPU the library's fused attention replaces ours; here both run on the CPU."""
    ours, theirs = trainer(folder, tmp_path / "ours", steps=8), trainer(folder, tmp_path / "theirs", steps=8)
    theirs.model.set_attn_implementation("sdpa")
    for run in (ours, theirs):
        run.run()
    one, other = (training.data_loss(run.model, run.batch(), run) for run in (ours, theirs))
    assert float(one.detach()) == pytest.approx(float(other.detach()), abs=0.05)


def test_training_on_the_available_device_lowers_the_loss(folder, tmp_path):
    """A GPU if the machine has one, which determines the choice of attention."""
    model = models.for_training(models.make("nano", 600, seed=5).to("cuda" if torch.cuda.is_available() else "cpu"))
    run = training.Trainer(
        model, training.target_loss, training.TrainingPlan(steps=12, tokens=4096, warm_up=1), (folder, tmp_path)
    )
    before = float(training.data_loss(model, run.batch(), run).detach())
    run.run()
    assert float(training.data_loss(model, run.batch(), run).detach()) < before - 0.3


def test_resuming_keeps_the_plan_unless_another_budget_is_given(folder, tmp_path):
    trainer(folder, tmp_path / "run", steps=6, decay=0.2).run(until=0.5)
    same, other = trainer(folder, tmp_path / "run", steps=9), trainer(folder, tmp_path / "run", steps=9)
    same.resume()
    other.resume(minutes=7)
    assert (same.plan.steps, same.plan.decay, same.plan.minutes) == (6, 0.2, 0) and other.plan.minutes == 7


@pytest.mark.parametrize("fast, kind", [(True, torch.bfloat16), (False, torch.float32)])
def test_products_are_in_bfloat16_only_where_the_processor_is_fast_at_it(fast, kind, monkeypatch):
    monkeypatch.setattr(precision, "product_type", lambda _: torch.bfloat16 if fast else torch.float32)
    with precision.mixed_precision(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == kind
