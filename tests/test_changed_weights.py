"""Changed weights of a lane: what is shared, kept, measured and refused, whichever change made them."""
from __future__ import annotations

import errno
import json
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from toys import byte_tokenizer, network

import playground
from playground.bench.weights.weights_report import WEIGHTS
from playground.cli import main
from playground.contract import find
from playground.contract.weight_change import check_changes
from playground.decoding import fitted_weights
from playground.decoding.lane_checks import judge
from playground.decoding.models import Models
from playground.engine.model import Model
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.training.weights import change_weights, changed_weights
from playground.training.weights.change_weights import changed_model
from playground.training.weights.weight_report import layer_errors, losses
from playground.ui.components.settings import Settings
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.site import Site
from playground.weight_changes import WeightChanges, layer_changes

PROMPT = "Once upon a time"
ROUGH = "rtn:bits=2,group=16"


def toy(architecture: str = "llama") -> Model:
    return Model(network(architecture), byte_tokenizer(), "toy", "r1")


@pytest.fixture(autouse=True)
def few_texts(monkeypatch) -> None:
    """Random tokens stand in for questions: only one test needs what they say."""
    monkeypatch.setattr(change_weights, "world_texts", lambda model, seed, each, held_out=False: random_texts(each))


def random_texts(count: int) -> list[list[int]]:
    return torch.randint(3, 320, (count, 24), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.fixture(scope="module")
def base() -> Model:
    return toy()


def counted(monkeypatch) -> list[torch.Tensor]:
    """The weights that round to nearest changes from now on."""
    seen, own = [], find("rtn").changed
    monkeypatch.setattr(find("rtn"), "changed", lambda self, weight, inputs: seen.append(weight) or own(
        self, weight, inputs))
    return seen


def places(model: Model) -> set[int]:
    """Where the memory of all weights begins."""
    return {weight.untyped_storage().data_ptr() for weight in model.network.parameters()}


def linear(model: Model) -> dict[str, torch.Tensor]:
    return {name: module.weight for name, module in model.network.named_modules() if name.endswith("_proj")}


# --- the new model ---

@pytest.mark.oracle
def test_a_lane_writes_what_the_library_writes_with_the_changed_weights(base):
    changed = changed_model(base, [ROUGH])
    by_hand = network()
    for name, module in by_hand.named_modules():
        if name.endswith("_proj"):
            module.weight.data = find("rtn")(bits=2, group=16).changed(module.weight.data, None).weight
    ids = torch.tensor([base.tokens.encode(PROMPT)])
    expected = by_hand.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, ids.shape[1]:].tolist()
    plain, own = playground.compare(["greedy", {"strategy": "greedy", "weights": ROUGH}], PROMPT,
                                    models=Models(base), max_new_tokens=12)
    assert own.token_ids == expected[:len(own.token_ids)] and plain.token_ids != own.token_ids
    assert own.header.parts[-1].kind == "weights" and own.header.parts[-1].name == ROUGH
    assert changed.fused is not None, "the fast path stays"


@pytest.mark.refuses
def test_a_model_that_kept_its_weights_would_fail_that_comparison(base):
    same, own = playground.compare(
        [{"strategy": "greedy", "weights": weights} for weights in ("rtn:bits=16", ROUGH)], PROMPT,
        models=Models(base), max_new_tokens=12)
    assert same.token_ids != own.token_ids


def test_tensors_that_no_change_touches_are_shared_and_the_loaded_model_stays_as_it_was(base):
    before = {name: weight.clone() for name, weight in base.network.named_parameters()}
    changed = changed_model(base, [ROUGH])
    assert all(torch.equal(weight, before[name]) for name, weight in base.network.named_parameters())
    new = {name for name, weight in changed.network.named_parameters()
           if weight.untyped_storage().data_ptr() not in places(base)}
    assert new == {f"{name}.weight" for name in linear(changed)}


def test_whole_precision_equals_the_original_to_the_bit_and_shares_all_of_it(base):
    changed = changed_model(base, ["rtn:bits=16"])
    assert places(changed) <= places(base) and changed.weights_card["KL"] == 0
    lanes = ["greedy", {"strategy": "greedy", "weights": "rtn:bits=16"}]
    plain, own = playground.compare(lanes, PROMPT, models=Models(base), max_new_tokens=12)
    assert plain.logprobs == own.logprobs


def test_lanes_with_the_same_weights_share_a_model_and_its_forwards(base):
    models = playground.with_weights(Models(base), [SimpleNamespace(weights=ROUGH)] * 2)
    assert list(models.quantized) == [ROUGH] and models.with_weights(ROUGH).target is models.quantized[ROUGH]
    again = playground.with_weights(models, [SimpleNamespace(weights=ROUGH)])
    assert again.quantized[ROUGH] is models.quantized[ROUGH]


def test_changes_are_made_in_their_order(base):
    first, second = (linear(changed_model(base, order)) for order in (
        ["rtn:bits=2,group=16", "rtn:bits=3,group=0"], ["rtn:bits=3,group=0", "rtn:bits=2,group=16"]))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_a_changed_run_is_no_base_for_the_changes_of_a_lane(base, monkeypatch):
    run, asked = changed_model(base, ["rtn:bits=2"]), []
    monkeypatch.setattr(playground, "load", lambda *given: asked.append(given) or Models(base))
    own = playground.in_weights(run, ROUGH, None)
    assert run.quantization == "rtn:bits=2" and asked == [("toy", "none", "cpu", "float32", "none", None)]
    expected = linear(changed_model(base, [ROUGH]))
    assert all(torch.equal(weight, expected[name]) for name, weight in linear(own).items())


# --- what is kept on the disk ---

def test_what_was_made_is_read_from_the_disk_by_its_content(base, monkeypatch):
    made = changed_model(base, [ROUGH])
    seen = counted(monkeypatch)
    again = changed_model(toy(), [ROUGH])
    assert not seen and all(torch.equal(weight, linear(made)[name]) for name, weight in linear(again).items())
    assert again.weights_card == made.weights_card
    other = Model(network(seed=1), byte_tokenizer(), "toy", "r1")
    changed_model(other, [ROUGH])
    assert len(seen) == len(linear(other)), "other weights under the same name are made anew"
    changed_model(base, ["rtn:bits=3,group=16"])
    assert len(seen) == 2 * len(linear(base)), "other knobs too"


def test_a_damaged_file_is_made_again(base):
    made = changed_model(base, [ROUGH])
    (file,) = changed_weights.folder().glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(*(next(iter(linear(model).values())) for model in (made, changed_model(base, [ROUGH]))))


def test_an_interrupted_change_leaves_nothing(base, monkeypatch):
    def interrupted(self, weight, inputs):
        raise KeyboardInterrupt

    monkeypatch.setattr(find("rtn"), "changed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        changed_model(base, [ROUGH])
    assert not changed_weights.folder().exists()


def test_a_full_disk_is_one_sentence_and_the_other_lanes_go_on(base, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(changed_weights, "save_file", full)
    plain, own = playground.compare(["greedy", {"strategy": "greedy", "weights": ROUGH}], PROMPT, models=Models(base),
                                    max_new_tokens=4)
    assert plain.text and own.reason == "failed"
    assert "No space left on device" in own.message and own.message.count(".") == 1 and "free some space" in own.message
    assert not list(changed_weights.folder().iterdir())


def test_the_files_that_were_not_read_for_longest_make_room(base, monkeypatch):
    monkeypatch.setattr(changed_weights, "MOST_KEPT", 2)
    for bits in (2, 3, 4):
        changed_model(base, [f"rtn:bits={bits},group=16"])
    assert {card["weights"] for card in changed_weights.cards()} == {"rtn:bits=3,group=16", "rtn:group=16"}


# --- what it reports ---

def logits_of(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].double()


@pytest.mark.oracle
def test_losses_are_the_sums_written_out():
    first, second, texts = network(), network(seed=1), [[3, 4, 5, 6], [9, 8, 7]]
    kl, nll = [], []
    for ids in texts:
        p, q = (logits_of(one, ids).softmax(-1) for one in (first, second))
        kl += [sum(float(a) * torch.log(a / b).item() for a, b in zip(*rows))
               for rows in zip(p, q)]
        nll += [-torch.log(q[at, ids[at + 1]]).item() for at in range(len(ids) - 1)]
    found = losses(first, second, texts)
    assert found["KL"] == pytest.approx(sum(kl) / len(kl), abs=1e-5) and found["tokens"] == 7
    assert found["perplexity"] == pytest.approx(torch.tensor(nll).mean().exp().item(), rel=1e-4)
    assert losses(first, first, texts)["KL"] == 0 and losses(first, first, texts)["same top token"] == 1


@pytest.mark.oracle
def test_the_error_of_a_layer_is_that_of_its_output_on_the_inputs_it_has_in_the_original():
    first, second, ids = network(), network(), [3, 4, 5, 6]
    layer = second.model.layers[1].mlp.down_proj
    layer.weight.data = layer.weight.data.clone().round(decimals=2)
    seen = []
    first.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, given, out: seen.append((*given, out)))
    with torch.no_grad():
        first(input_ids=torch.tensor([ids]))
    ((given, out),) = seen
    expected = float((given @ layer.weight.data.T - out).norm() / out.norm())
    errors = layer_errors(first, second, [ids])
    assert errors.pop("model.layers.1.mlp.down_proj") == pytest.approx(expected, rel=1e-4) and expected > 0
    assert not any(errors.values())


def test_bytes_are_counted_over_changed_layers_and_untouched_tensors(base):
    card = changed_model(base, [ROUGH]).weights_card
    changed = sum(weight.numel() for weight in linear(base).values())
    rest = sum(weight.numel() for weight in base.network.parameters()) - changed
    assert card["bits per weight"] == pytest.approx(2 + (16 + 2) / 16)
    assert card["bytes"] == round((changed * (2 + 18 / 16) + rest * 16) / 8)


def test_a_lane_draws_the_error_and_bits_of_each_layer(base):
    own = playground.run({"strategy": "greedy", "weights": ROUGH}, PROMPT, models=Models(base), max_new_tokens=2)
    charts = {event.name: event.data for event in (stamped.event for stamped in own.trace.events)
              if getattr(event, "shape", "") == "matrix"}
    assert charts["error per layer"]["rows"] == ["layer 0", "layer 1"]
    assert charts["error per layer"]["columns"] == ["q", "k", "v", "o", "gate", "up", "down"]
    card = changed_model(base, [ROUGH]).weights_card
    assert charts["error per layer"]["values"][1][6] == card["layers"]["model.layers.1.mlp.down_proj"]["error"]
    assert set(chain(*charts["bits per weight"]["values"])) == {3.125}
    assert own.header.parts[-1].knobs["KL"] == pytest.approx(card["KL"], rel=1e-3)


# --- its name on every surface ---

def test_weights_are_a_quantisation_then_adapters_then_changes():
    read = WeightChanges.read("adapter:/a + rtn:bits=4,group=32 + rtn")
    assert read == WeightChanges("none", ("/a",), ("rtn:bits=4,group=32", "rtn"))
    assert read.loaded == "adapter:/a" and WeightChanges.of_model("rtn:bits=4").layers == ("rtn:bits=4",)


@pytest.mark.parametrize(("weights", "says"), [
    ("rtn:bits=4 + adapter:/a", "name it before rtn:bits=4"),
    ("nf4 + rtn:bits=4", "rtn changes weights that are not quantised yet: leave out nf4"),
    ("rtn + nf4", "name the quantisation first"),
    ("rtn:bits=99", "Bits must be between 1 and 16"),
    ("rtn:bots=4", "rtn has no knob 'bots'"),
    ("rtn:", "changes of layers such as rtn:bits=4"),
    ("hyperfitting", "changes of layers such as rtn:bits=4"),
    ("rtn:bits=four", "Bits must be"),
])
def test_other_changes_are_refused_before_a_model_is_loaded(weights, says):
    with pytest.raises(Refusal, match=says):
        playground.compare([{"strategy": "greedy", "weights": weights}], PROMPT)


def test_a_link_keeps_changes_and_what_is_none_to_be_refused():
    asked = ["rtn:bits=4", "rtn:bits", "gone:bits=4"]
    lanes = [{"strategy": "greedy", "weights": weights} for weights in asked]
    settings = Settings.from_code(Settings(prompt="x", lanes=lanes).to_code())
    assert [config.weights for config in settings.configs()] == asked
    assert [verdict["about"] for verdict in judge(settings.configs())] == ["", "weights", "weights"]
    assert settings.own_weights() == ["rtn:bits=4"]


def test_a_page_changes_the_weights_of_the_model_that_it_holds_and_a_public_one_refuses():
    settings = Settings(prompt=PROMPT, lanes=[{"strategy": "greedy", "weights": "rtn:bits=3"}])
    site = Site(ModelRequest("pocket", "none", "cpu", "float32"), Rules())
    base = site.chosen.load(settings).result().target
    own = site.chosen.weight_loads(settings)["rtn:bits=3"].result().target
    assert own.weights_card["weights"] == "rtn:bits=3"
    assert own.network.get_input_embeddings().weight.data_ptr() == base.network.get_input_embeddings().weight.data_ptr()
    public = Site(ModelRequest("pocket", "none", "cpu", "float32"), Rules.for_visitors(False))
    with pytest.raises(Refusal, match="public page changes no weights"):
        public.chosen.weight_loads(settings)


# --- what is refused ---

def test_layers_that_are_not_linear_are_refused():
    with pytest.raises(Refusal, match="layers of gpt2 models are not linear"):
        changed_model(toy("gpt2"), ["rtn"])


def test_quantised_weights_are_refused(base, monkeypatch):
    monkeypatch.setattr(base.network, "is_quantized", True, raising=False)
    with pytest.raises(Refusal, match="quantised already"):
        changed_model(base, ["rtn"])


def test_a_layer_too_small_for_a_group_fails_its_lane_alone(base):
    plain, own = playground.compare(["greedy", {"strategy": "greedy", "weights": "rtn:group=512"}], PROMPT,
                                    models=Models(base), max_new_tokens=4)
    assert plain.text and "too few for groups of 512" in own.message


# --- the shell ---

@pytest.fixture
def shell(capsys, base, monkeypatch):
    monkeypatch.setattr("playground.cli.training.weight_changes.load", lambda options, draft: Models(base))

    def call(*words) -> tuple[int, str, str]:
        return main(list(map(str, words))), *capsys.readouterr()

    return call


def test_the_command_makes_and_lists_changed_weights(shell):
    code, out, _ = shell("variant", "rtn", "--set", "bits=2", "--set", "group=16")
    assert code == 0 and '"weights": "rtn:bits=2,group=16"' in out and out.count("error 0.") == 14
    card = json.loads(shell("variant", ROUGH, "--json")[1])
    (listed,) = json.loads(shell("variant", "--list", "--json")[1])
    assert card.items() <= listed.items() and listed["calibrated on"] == "nothing" and listed["on disk"] > 0
    assert f"{ROUGH}, of toy: 3.12 bits per weight" in shell("variant", "--list")[1]


@pytest.mark.parametrize(("words", "says"), [
    (["rtn", "--texts", "README.md"], "rtn reads no texts"), (["rtn", "--name", "mine"], "leave out --name"),
    (["rtn", "--set", "bits=0"], "between 1 and 16"), (["hyperfitting + rtn"], "weights of a lane"), ([], "NAME"),
])
def test_wrong_input_is_refused_in_one_line(shell, words, says):
    code, out, err = shell("variant", *words)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_the_weights_of_a_stack_are_judged_against_the_loaded_model(base):
    one, two = (changed_model(base, layers).weights_card for layers in (["rtn:group=16"], ["rtn:group=16", ROUGH]))
    assert one["KL"] < two["KL"] and two["weights"] == f"rtn:group=16 + {ROUGH}"
    assert change_weights.summary(two).startswith("3.12 bits per weight")


# --- calibration ---

def test_a_change_is_calibrated_on_inputs_from_blocks_that_are_changed_already(base, monkeypatch):
    """The inputs of the last layer are those of a network whose first block was pruned."""
    seen, own = [], find("wanda").changed
    monkeypatch.setattr(find("wanda"), "changed", lambda self, weight, inputs: seen.append(inputs) or own(
        self, weight, inputs))
    changed_model(base, ["wanda:samples=3"])
    pruned, caught = changed_model(base, ["wanda:samples=3"]).network, []
    half = network()
    half.model.layers[0].load_state_dict(pruned.model.layers[0].state_dict())
    half.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, given, out: caught.append(given[0][0]))
    for ids in random_texts(1)[:3]:
        half(input_ids=torch.tensor([ids]))
    assert torch.allclose(seen[7], torch.cat(caught), atol=1e-5) and not torch.allclose(seen[7], seen[0])


def test_own_texts_are_named_by_a_digest_and_needed_until_it_is_made(shell, tmp_path):
    (tmp_path / "own.txt").write_text("The red fox said to the owl: sing! " * 20)
    card = json.loads(shell("variant", "wanda", "--texts", tmp_path / "own.txt", "--json")[1])
    assert card["weights"].startswith("wanda:calibration=") and "your own texts" in card["calibrated on"]
    assert json.loads(shell("variant", card["weights"], "--json")[1]) == card
    code, _, err = shell("variant", f"{card['weights']},sparsity=0.3")
    assert code == 2 and "calibrated on texts that are not here" in err


@pytest.mark.parametrize(("text", "says"), [(" \n", "The texts are empty"), ("a", "fewer than two tokens")])
def test_calibration_texts_without_text_are_refused(shell, tmp_path, text, says):
    (tmp_path / "own.txt").write_text(text)
    code, _, err = shell("variant", "wanda", "--texts", tmp_path / "own.txt")
    assert code == 2 and says in err and err.count("\n") == 1


# --- the table ---

def test_the_table_begins_with_nothing_on_the_disk_and_goes_on_with_what_an_interrupted_run_has_made(
        capsys, base, monkeypatch, tmp_path):
    monkeypatch.setattr("playground.cli.bench.weights.load", lambda options, draft: Models(base))
    wanted = ["rtn:bits=16", ROUGH, "magnitude:pattern=2:4"]
    page, data = tmp_path / "weights.md", tmp_path / "weights.json"
    words = ["bench", "weights", "--only", *wanted, "--page", str(page), "--out", str(data)]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(find("magnitude"), "changed", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(words) == 130 and capsys.readouterr().err.endswith(
            "stopped; what there was until then is above; run again to resume\n")
    assert f"| `{ROUGH}` | 3.12 |" in page.read_text() and "magnitude" not in page.read_text()
    seen = counted(monkeypatch)
    assert main(words) == 0 and not seen, "the others were read from the disk"
    rows = {row["weights"]: row for row in json.loads(data.read_text())["rows"]}
    assert list(rows) == wanted and rows["rtn:bits=16"]["KL"] == 0 < rows[ROUGH]["KL"]
    assert f"| `{ROUGH}` | 3.12 |" in page.read_text()


def test_every_change_of_the_bundled_table_exists():
    for weights in WEIGHTS:
        check_changes(weights)
    assert {text.partition(":")[0] for text in WEIGHTS} <= set(layer_changes())


# --- what is fitted to a lane's weights ---

def test_what_is_fitted_to_changed_weights_replaces_nothing_that_is_fitted_to_the_model(base, monkeypatch, tmp_path):
    monkeypatch.setenv("PLAYGROUND_HOME", str(tmp_path))
    changed = changed_model(base, [ROUGH])
    places = {}
    for value, model in enumerate((base, changed), 1):
        streams = {"target": model}
        places[model] = fitted_weights.local_path("idp", streams)
        fitted_weights.save(places[model], {"x": torch.tensor([float(value)])}, streams)
    assert places[base] != places[changed]
    assert [float(fitted_weights.stored("idp", {"target": model})["x"]) for model in (base, changed)] == [1.0, 2.0]
    other = changed_model(base, ["rtn:bits=2"])
    assert fitted_weights.stored("idp", {"target": other}) is None, "fitted to other weights"


def test_the_name_of_a_file_stays_short_however_many_changes_there_are(base):
    class Long:
        name, revision = base.name, "r"
        quantization = " + ".join(["affinequant:bits=3,group=16,symmetric=True,samples=256"] * 5)

    class Other(Long):
        quantization = Long.quantization[:-1] + "5"

    names = {fitted_weights.file_name("idp", {"target": each}) for each in (Long, Other)}
    assert len(names) == 2 and max(map(len, names)) < 120
