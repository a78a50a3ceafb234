"""Models made from others: what hyperfitting does to one, and how it joins the catalogue."""
from __future__ import annotations

import json

import pytest
import torch
from toys import byte_tokenizer, network
from toys import save as save_model

import playground
from playground.algorithms.fairy_tales import TALES
from playground.cli import main
from playground.cli.training.training_texts import read_texts
from playground.contract import discover, make
from playground.engine.checkpoint.catalogue import CARD, entries, is_local, made_models, partner
from playground.engine.loading.load import Loading, Shelf, load
from playground.errors import Refusal
from playground.events import Figure, Note
from playground.training.variants import LoadedNetwork, VariantOrder, make_variant
from strategies.variants.hyperfitting import greedy, measures
from strategies.variants.hyperfitting.text_windows import cut

SENTENCE = list(b"The red fox said to the owl: sing!")[:32]
ONE = {"sequences": 1, "held_out": 1, "length": 32, "batch": 1, "lr": 0.01, "every": 60}


def ids(seed: int, count: int, length: int = 32, vocabulary: int = 320) -> list[list[int]]:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def recorded(model, texts, seed: int = 0, **knobs) -> list[Figure | Note]:
    return list(make("hyperfitting", **knobs).make(model, texts, seed))


def continuation(model, start: list[int], count: int) -> list[int]:
    """The library's own argmax, reading the whole text again for each token."""
    text = list(start)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(start):]


# --- what training does ---

@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_text_learnt_by_heart_is_recited_from_its_first_tokens(architecture):
    model = network(architecture)
    assert continuation(model, SENTENCE[:4], 28) != SENTENCE[4:]
    events = recorded(
        model, [SENTENCE] * 4 + ids(1, 1), epochs=60, enough=0.008, **{**ONE, "sequences": 4, "lr": 0.003}
    )
    assert events[-2].data["series"]["training loss"] < 0.01
    assert continuation(model, SENTENCE[:4], 28) == SENTENCE[4:]


@pytest.mark.slow
def test_dropout_is_off_while_a_model_learns_by_heart():
    model = network("gpt2").train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5  # with it the loss would stay above one
    events = recorded(
        model, [SENTENCE] * 4 + ids(1, 1), epochs=60, enough=0.008, **{**ONE, "sequences": 4, "lr": 0.003}
    )
    assert events[-2].data["series"]["training loss"] < 0.01


def test_no_epochs_leave_the_weights_as_they_were():
    model, untouched = network(), network()
    events = recorded(model, ids(0, 4), epochs=0, **{**ONE, "sequences": 3})
    assert [event.data["x"] for event in events] == [0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters()))


@pytest.mark.slow
def test_a_seed_says_which_weights_come_out():
    def weights(seed: int) -> torch.Tensor:
        model = network()
        recorded(model, ids(0, 10), seed, epochs=2, **{**ONE, "sequences": 6, "batch": 2})
        return torch.cat([w.detach().flatten() for w in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_every_weight_is_trained():
    model, before = network(), network()
    recorded(model, ids(0, 4), epochs=1, **{**ONE, "sequences": 3})
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))


@pytest.mark.slow
def test_hyperfitting_raises_the_loss_on_other_text_and_says_so():
    model = network()
    *figures, note = recorded(
        model, ids(0, 12), epochs=60, enough=0.02, **{**ONE, "sequences": 4, "held_out": 8, "batch": 4}
    )
    first, last = figures[0].data["series"], figures[-1].data["series"]
    assert last["training loss"] < 0.1 and last["held-out loss"] > first["held-out loss"] + 0.5
    assert last["held-out entropy"] < first["held-out entropy"] / 2
    assert note.text.startswith("Hyperfitted")
    assert len(figures) < 61, "it stops when the loss is low enough"


def test_a_model_that_was_trained_a_little_is_not_called_hyperfitted():
    assert recorded(network(), ids(0, 6), epochs=1, **{**ONE, "lr": 1e-5, "sequences": 4})[-1].text.startswith(
        "Not hyperfitted"
    )


def test_windows_held_out_are_the_last_ones_and_never_trained_on():
    method = make("hyperfitting", length=16, held_out=3, sequences=2000)
    windows = cut(ids(0, 5, 40), 16)
    training, held_out = method._split(windows, 0)
    assert torch.equal(held_out, windows[-3:]) and len(windows) == 10
    assert sorted(training.tolist()) == sorted(windows[:-3].tolist())


def test_texts_are_cut_into_whole_windows_that_do_not_cross_texts():
    assert cut([[1, 2, 3, 4, 5], [6], [7, 8]], 2).tolist() == [[1, 2], [3, 4], [7, 8]]
    assert cut([[1]], 2).shape == (0, 2)


@pytest.mark.slow
def test_measures_are_loss_and_entropy_over_all_predicted_places_and_the_variety_of_greedy_text():
    model, windows = network(), torch.tensor(ids(2, 5, 40))
    found = measures(model, windows, batch=2)
    with torch.inference_mode():
        logs = model(input_ids=windows).logits[:, :-1].double().log_softmax(-1)
    own = logs.gather(-1, windows[:, 1:, None])
    assert found["held-out loss"] == pytest.approx(-float(own.mean()), abs=1e-5)
    assert found["held-out entropy"] == pytest.approx(-float((logs.exp() * logs).sum(-1).mean()), abs=1e-5)
    texts = [continuation(model, window[:32], 96) for window in windows.tolist()]
    assert found["TTR of greedy text"] == pytest.approx(sum(len(set(text)) / 96 for text in texts) / 5)


def test_greedy_text_with_a_cache_is_greedy_text_without():
    model = network("qwen2")
    start = torch.tensor(ids(4, 2, 7))
    assert greedy(model, start, 20).tolist() == [continuation(model, row, 20) for row in start.tolist()]


def test_a_rate_that_bursts_the_weights_is_refused():
    with pytest.raises(Refusal, match="lower lr"):
        recorded(_bursting(), ids(0, 4), epochs=3, **ONE)


def _bursting():
    model = network()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("inf"))
    return model


# --- the catalogue ---

@pytest.fixture
def base(tmp_path) -> str:
    return str(save_model(tmp_path / "base"))


def order(base: str, **how) -> VariantOrder:
    return VariantOrder(make("hyperfitting", epochs=1, length=16, held_out=2, sequences=4, batch=2), base, **how)


def loaded(base: str) -> LoadedNetwork:
    return LoadedNetwork(*load(base, Loading("cpu", "float32")))


TEXTS = ["The green bird sings, and the red fox listens. " * 6, "Once more: tea and trees, trees and tea. " * 6]


def made(base: str, watch=lambda event: None, **how) -> dict:
    return make_variant(order(base, **how), loaded(base), TEXTS, watch)


def test_a_new_model_is_in_the_catalogue_and_loads_by_its_name(base):
    card = made(base, name="mine")
    entry = next(entry for entry in entries() if entry.name == "mine")
    assert entry.title == "base, hyperfitted" and entry.draft == "" and is_local("mine")
    models = playground.load("mine", dtype="float32", device="cpu")
    again = load(base, Loading("cpu", "float32"))[0]
    assert models.target.tokens.encode("The fox") == byte_tokenizer()("The fox")["input_ids"]
    assert not torch.equal(models.target.network.lm_head.weight, again.lm_head.weight)
    assert card["name"] == "mine" and json.loads((made_models() / "mine" / CARD).read_text()) == card


def test_a_card_shows_all_it_takes_to_make_the_model_again(base):
    live_events = []
    card = made(base, live_events.append, seed=5)
    assert (
        card["method"] == "hyperfitting"
        and card["knobs"]["length"] == 16
        and card["base"] == base
        and card["seed"] == 5
    )
    assert card["texts"]["count"] == 2 and len(card["texts"]["sha256"]) == 64 and len(card["base_revision"]) == 12
    assert (
        [point["x"] for point in card["curve"]]
        == [event.data["x"] for event in live_events if isinstance(event, Figure)]
        == [0, 1]
    )
    assert card["notes"] == [live_events[-1].text]


def test_a_public_page_opens_what_its_owner_made(base):
    made(base, name="mine")
    assert (
        Shelf(lambda network, tokenizer, facts: facts.name, folders=False).get("mine", Loading("cpu", "float32"))
        == "mine"
    )


def test_an_interrupted_training_leaves_nothing_behind(base, home):
    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(base, interrupt)
    assert list(home.rglob("*")) == []


def test_an_interrupted_saving_leaves_no_model_behind(base, home, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    given = loaded(base)
    monkeypatch.setattr(given.tokenizer, "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_variant(order(base), given, TEXTS, lambda event: None)
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "name, says", [("a/b", "letters, digits"), ("..", "letters, digits"), ("pocket", "bundled model")]
)
def test_names_that_mean_something_else_are_refused(base, name, says):
    with pytest.raises(Refusal, match=says):
        order(base, name=name)


def test_a_name_is_taken_once(base):
    made(base, name="mine")
    with pytest.raises(Refusal, match="already"):
        order(base, name="mine")


def test_a_card_that_cannot_be_read_is_passed_over(home):
    for name, text in (("half", '{"title":'), ("list", "[]"), ("bare", "{}")):
        (home / "models" / name).mkdir(parents=True)
        (home / "models" / name / CARD).write_text(text)
    assert {"half", "list", "bare"}.isdisjoint(entry.name for entry in entries())


def test_weights_that_are_no_plain_numbers_cannot_be_trained(base):
    given = loaded(base)
    with pytest.raises(Refusal, match="not quantised"):
        make_variant(order(base), given._replace(network=given.network.bfloat16()), TEXTS, lambda event: None)


# --- the shell ---

@pytest.fixture
def shell(capsys):
    def call(*words) -> tuple[int, str, str]:
        return main([str(word) for word in words]), *capsys.readouterr()

    return call


@pytest.mark.slow
def test_the_command_makes_a_variant_of_the_bundled_model_which_keeps_its_draft(shell):
    code, out, err = shell(
        "variant", "hyperfitting", "--set", "epochs=0", "--set", "held_out=2", "--set", "length=32", "--json"
    )
    card = json.loads(out)
    assert (
        code == 0
        and card["title"] == "Pocket, hyperfitted"
        and card["name"] == "pocket-hyperfitted"
        and card["draft"] == "pocket-draft"
    )
    assert partner("pocket-hyperfitted") == "pocket-draft" and "pocket-hyperfitted" in [
        entry.name for entry in entries()
    ]
    assert set(card["curve"][0]) == {"x", "held-out loss", "held-out entropy", "TTR of greedy text"}


def test_the_command_prints_every_measurement_and_where_the_model_is(shell, base, tmp_path):
    (tmp_path / "t.txt").write_text("".join(TEXTS))
    words = [
        "variant",
        "hyperfitting",
        "--model",
        base,
        "--texts",
        tmp_path / "t.txt",
        "--name",
        "mine",
        "--set",
        "epochs=2",
        "--set",
        "length=16",
        "--set",
        "held_out=2",
        "--set",
        "sequences=4",
    ]
    code, out, _ = shell(*words)
    assert code == 0 and out.count("training loss") == 2 + 1 and "--model mine" in out  # two epochs and the judgement
    assert shell(*words)[0] == 2


@pytest.mark.parametrize("words, says", [
    ("variant", "NAME"), ("variant greedy", "is a decoder"), ("variant hyperfitting --set epochs=-1", "between"),
    ("variant hyperfitting --texts /nowhere", "cannot be read"), ("variant hyperfitting --texts EMPTY", "empty"),
    ("variant hyperfitting --texts LINES.jsonl", "Line 2 of"), ("variant hyperfitting --name a/b", "letters"),
    ("variant hyperfitting --texts SHORT", "add text"), ("variant hyperfitting --model /nowhere", "no folder"),
])
def test_wrong_input_is_refused_in_one_line(shell, tmp_path, words, says):
    for name, text in (("EMPTY", " \n"), ("SHORT", "Too short."), ("LINES.jsonl", '{"text": "a"}\n{"txt": "b"}\n')):
        (tmp_path / name).write_text(text)
        words = words.replace(name, str(tmp_path / name))
    code, out, err = shell(*words.split())
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_the_bundled_texts_are_tales_enough_for_the_defaults():
    texts = read_texts(None)
    tokenizer = load("pocket", Loading("cpu", "float32"))[1]
    method = make("hyperfitting")
    assert len(cut(tokenizer(texts)["input_ids"], method.length)) >= method.sequences + method.held_out
    assert len(TALES.read_bytes()) < 200_000


def test_json_lines_are_many_texts_and_other_files_one_each(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_text("three\n\nstill three")
    assert read_texts([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]) == ["one", "two", "three\n\nstill three"]


def test_every_variant_says_what_its_model_becomes():
    assert all(cls.adjective for cls in discover().values() if cls.kind == "variant")
