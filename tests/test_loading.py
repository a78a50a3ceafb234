"""Loading a network by name: lookup, settings, and refusals that say what to do."""
from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from threading import Barrier, Lock, Thread
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import get_local_safetensors_metadata
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from toys import byte_tokenizer, network, save, sentencepiece_tokenizer
from transformers import BertConfig, BertForMaskedLM, T5Config

import playground
from playground.engine import device_memory as memory
from playground.engine.checkpoint import hub_files as sources
from playground.engine.checkpoint.catalogue import BUNDLED, SUGGESTED, entries, local_folder, partner
from playground.engine.loading import load as loading
from playground.engine.loading.load import Loading, Shelf, check_draft, estimate, load, pick_device
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

CPU = Loading("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the folder that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def hub(saved, monkeypatch):
    """A hub that holds only the toy model, as "someone/toy"; `fetched` lists the requested files."""
    fetched = []

    def model_info(self, name, **settings):
        siblings = [SimpleNamespace(rfilename=path.name, size=path.stat().st_size) for path in saved.iterdir()]
        return SimpleNamespace(sha="0123456789abcdef", siblings=siblings)

    def download(name, file, **settings):
        fetched.append(file)
        return str(saved / file)

    monkeypatch.setattr(
        sources, "snapshot_download", lambda name, **settings: _raise(LocalEntryNotFoundError("not cached"))
    )
    monkeypatch.setattr(sources.HfApi, "model_info", model_info)
    monkeypatch.setattr(sources, "hf_hub_download", download)
    monkeypatch.setattr(sources, "get_safetensors_metadata", lambda name: get_local_safetensors_metadata(saved))
    return fetched


def _raise(error):
    raise error


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_a_folder_loads_with_the_same_logits_as_before_it_was_saved(tmp_path, architecture):
    save(tmp_path, architecture)
    ids, before = torch.arange(9)[None], network(architecture)
    loaded, tokenizer, facts = load(str(tmp_path), CPU)
    assert torch.equal(loaded(ids).logits, before(ids).logits)
    assert not loaded.training and loaded.dtype == torch.float32
    assert tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    assert facts.parameters == before.num_parameters()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_dtype_is_used_for_all_weights(saved, dtype):
    loaded, _, facts = load(str(saved), Loading("cpu", dtype))
    assert {p.dtype for p in loaded.parameters()} == {getattr(torch, dtype)}
    assert facts.dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "nf4", "fp4"])
def test_quantised_weights_run_on_the_cpu_and_take_what_was_estimated(saved, quantization):
    request = Loading("cpu", "float32", quantization)
    loaded, _, facts = load(str(saved), request)
    ids, exact = torch.arange(9)[None], network()
    error = (loaded(ids).logits - exact(ids).logits).abs().max() / exact(ids).logits.abs().max()
    assert 0 < error < (0.1 if quantization == "int8" else 0.5)
    assert facts.bytes < exact.get_memory_footprint()
    assert estimate(str(saved), request).bytes == pytest.approx(facts.bytes, rel=0.05)


def test_an_estimate_is_exact_without_quantisation(saved):
    exact = network()
    guess = estimate(str(saved), Loading("cpu", "bfloat16"))
    assert guess.parameters == exact.num_parameters()
    assert guess.bytes == 2 * guess.parameters
    assert guess.free_bytes > 0 and guess.fits


def test_progress_is_monotonic_and_ends_at_one(saved):
    shares = []
    load(str(saved), CPU, lambda share, text: shares.append(share))
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(saved, monkeypatch):
    monkeypatch.setattr(loading, "free_bytes", lambda device: 200_000)
    monkeypatch.setattr(loading, "read_network", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(
        Refusal, match="takes about .* in float32, and 0 MB are free on cpu: choose nf4 weights or a smaller model"
    ):
        load(str(saved), CPU)


def test_a_container_s_limit_counts_as_the_end_of_memory(tmp_path):
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.container_free(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.container_free(tmp_path) is None
    assert memory.container_free(tmp_path / "nowhere") is None


def remove(*patterns):
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def cut_short(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:50])


def shorten(file):
    file.write_bytes(file.read_bytes()[:-9])


def cut_shard(folder):
    load(str(folder), CPU)[0].save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    shorten(max(folder.glob("model-*.safetensors")))


def masked_language_model(folder):
    config = BertConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(folder)


def encoder_alone(folder):
    T5Config(architectures=["T5EncoderModel"]).save_pretrained(folder)


def slow_tokenizer(folder):
    remove("tokenizer*")(folder)
    (folder / "vocab.json").write_text("{}")


def own_code(folder):
    (folder / "code.py").write_text("raise SystemExit('this code was run')")
    edit_config(folder, model_type="zork", auto_map={"AutoConfig": "code.Zork", "AutoModelForCausalLM": "code.Zork"})


BROKEN = {
    "no config": (remove("config.json"), "has no config.json"),
    "no weights": (remove("*.safetensors"), "has no weights"),
    "pickled weights": (pickle_only, "only pickled weights.*save it as safetensors"),
    "a shard is missing": (lost_shard, "lacks model-00002-of-00002.safetensors"),
    "a header cut short": (cut_short, "are damaged"),
    "weights cut short": (lambda folder: shorten(folder / "model.safetensors"), "weight files of .* are damaged: f"),
    "a shard cut short": (cut_shard, "weight files of .* are damaged: fetch or save them again"),
    "no tokenizer": (remove("tokenizer*"), "has no tokenizer"),
    "an unreadable tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "tokenizer of .* cannot be read",
    ),
    "a tokenizer that cannot be converted": (slow_tokenizer, "tokenizer of .* cannot be read.*save a tokenizer.json"),
    "config is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
    "an unknown kind": (lambda folder: edit_config(folder, model_type="zork"), "does not recognize"),
    "code of its own": (own_code, "code of its own, which is never run"),
    "a masked language model": (masked_language_model, "does not continue text"),
    "an encoder alone": (encoder_alone, "does not continue text"),
    "weights of another shape": (lambda folder: edit_config(folder, intermediate_size=96), "do not belong"),
    "weights of fewer layers": (lambda folder: edit_config(folder, num_hidden_layers=3), "do not belong"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_folder_is_refused_with_one_line(copy, broken):
    breaks, says = BROKEN[broken]
    breaks(copy)
    with pytest.raises(Refusal, match=says) as refused:
        load(str(copy), CPU)
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


def test_quantised_weights_are_not_quantised_again(copy):
    edit_config(copy, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(Refusal, match="quantised already: choose no quantization"):
        load(str(copy), Loading("cpu", quantization="nf4"))


def test_a_missing_folder_is_not_taken_for_a_hub_id():
    with pytest.raises(Refusal, match="There is no folder ./nowhere"):
        load("./nowhere", CPU)
    with pytest.raises(Refusal, match="There is no folder /xxx"):
        load("/" + "x" * 5000, CPU)


def test_a_hub_model_is_checked_and_fetched_before_it_is_read(hub):
    seen = []
    loaded, _, facts = load("someone/toy", CPU, lambda share, text: seen.append((share, text)))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub)
    assert hub[0] == "config.json"
    assert any(text.startswith("Fetching model.safetensors") for _, text in seen)
    assert [share for share, _ in seen] == sorted(share for share, _ in seen)
    assert facts.revision == "0123456789ab"


def test_a_hub_model_that_does_not_fit_is_not_fetched(hub, monkeypatch):
    monkeypatch.setattr(loading, "free_bytes", lambda device: 1000)
    with pytest.raises(Refusal, match="smaller model"):
        load("someone/toy", CPU)
    assert hub == ["config.json"]


def test_cached_hub_models_load_offline(hub, saved, monkeypatch):
    monkeypatch.setattr(sources, "snapshot_download", lambda name, **settings: str(saved))
    monkeypatch.setattr(sources.HfApi, "model_info", lambda *args, **settings: pytest.fail("the hub was asked"))
    load("someone/toy", CPU)
    assert hub == []


def _unresolved() -> ConnectionError:
    """As an HTTP library reports a name that cannot be resolved."""
    error = ConnectionError("[Errno -2] Name or service not known")
    error.__cause__ = socket.gaierror(-2, "Name or service not known")
    return error


def hub_error(kind):
    return kind("said the hub", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    "error, says",
    [
        (hub_error(GatedRepoError), "is gated: accept its licence at https://huggingface.co/someone/toy"),
        (hub_error(RepositoryNotFoundError), "The hub has no model 'someone/toy'"),
        (_unresolved(), "the hub cannot be reached \\(its name cannot be resolved\\): connect to the network"),
        (
            ConnectionError("no route"),
            "the hub cannot be reached \\(no route\\): connect to the network, or choose a bundled model",
        ),
    ],
)
def test_refusals_of_the_hub_are_reported_with_advice(hub, monkeypatch, error, says):
    monkeypatch.setattr(sources.HfApi, "model_info", lambda *args, **settings: _raise(error))
    with pytest.raises(Refusal, match=says):
        load("someone/toy", CPU)


def test_an_invalid_hub_name_is_refused():
    with pytest.raises(Refusal, match="neither a folder nor a hub id"):
        load("not a name", CPU)


@pytest.mark.parametrize("settings, about", [
    ({"device": "tpu"}, "device"),
    ({"dtype": "int3"}, "dtype"),
    ({"quantization": "int2"}, "quantization"),
    ({"dtype": "float64", "quantization": "nf4"}, "dtype"),
])
def test_settings_that_do_not_exist_or_do_not_go_together_are_refused(settings, about):
    with pytest.raises(Refusal) as refused:
        Loading(**settings)
    assert refused.value.about == about


@pytest.mark.parametrize("cuda, mps, device", [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_the_fastest_available_device_is_chosen(monkeypatch, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert pick_device("auto") == device
    assert pick_device("cpu") == "cpu"


def test_the_first_gpu_is_one_device_however_it_is_written(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    first, named, second = (Loading(device, "float32").resolve() for device in ("cuda", "cuda:0", "cuda:1"))
    assert first == named != second


def test_a_missing_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refusal, match="There is no cuda:1 device"):
        Loading("cuda:1").resolve()


def test_a_draft_may_have_its_own_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = []

    class Shelf:
        def check_folder(self, name):
            pass

        def get(self, name, how, progress):
            asked.append((name, how.resolve().device))
            return SimpleNamespace(name=name)

    playground.load(device="cpu", draft_device="cpu", shelf=Shelf())
    assert asked == [("pocket", "cpu"), ("pocket-draft", "cpu")]
    with pytest.raises(Refusal, match="There is no cuda:1 device"):
        playground.load(device="cpu", draft_device="cuda:1", shelf=Shelf())
    assert asked[2:] == [("pocket", "cpu")]


def test_auto_means_full_precision_on_a_cpu():
    assert Loading("cpu").resolve() == Loading("cpu", "float32", "none")


def test_a_draft_may_have_more_rows_but_not_other_tokens():
    tokenizer = byte_tokenizer()
    check_draft(Tokens(tokenizer, 320), Tokens(byte_tokenizer(), 384))
    with pytest.raises(Refusal, match="another vocabulary .* choose a draft of the same model family"):
        check_draft(Tokens(tokenizer, 320), Tokens(sentencepiece_tokenizer(), 320))
    with pytest.raises(Refusal, match="1 tokens differ; id 319 is nothing for the target"):
        longer = byte_tokenizer()
        longer.add_tokens(["<|more|>"])
        check_draft(Tokens(tokenizer, 320), Tokens(longer, 320))


class Meeting:
    """A lock that is granted only after all lanes wait for it."""

    def __init__(self, lanes):
        self.all_there, self.lock = Barrier(lanes), Lock()

    def __enter__(self):
        self.all_there.wait()
        self.lock.acquire()

    def __exit__(self, *reason):
        self.lock.release()


def test_concurrent_loads_share_one_model(saved, monkeypatch):
    loads, got = [], []
    monkeypatch.setattr(loading, "load", lambda name, request, progress: (loads.append(name), None, None))
    shelf = Shelf(lambda network, tokenizer, facts: object())
    shelf._loading = Meeting(4)
    lanes = [Thread(target=lambda: got.append(shelf.get(str(saved), CPU))) for _ in range(4)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    assert loads == [str(saved)] and len(got) == 4 and len(set(map(id, got))) == 1


@pytest.mark.slow
def test_the_model_cache_holds_one_model_per_setting_until_it_is_dropped(saved):
    shelf = Shelf(lambda network, tokenizer, facts: (network, facts))
    model, facts = shelf.get(str(saved), Loading("cpu"))
    assert shelf.get(str(saved), Loading("cpu", "float32"))[0] is model
    assert shelf.get(str(saved), Loading("cpu", "bfloat16"))[0] is not model
    assert len(shelf.held()) == 2 and facts.device == "cpu"
    shelf.drop(str(saved))
    assert shelf.held() == []
    assert shelf.get(str(saved), Loading("cpu"))[0] is not model


def test_a_failed_load_leaves_nothing_in_the_model_cache(copy):
    shelf = Shelf(lambda network, tokenizer, facts: network)
    config = (copy / "config.json").rename(copy / "away.json")
    with pytest.raises(Refusal):
        shelf.get(str(copy), CPU)
    config.rename(copy / "config.json")
    assert shelf.get(str(copy), CPU) is not None


def test_a_public_model_cache_opens_no_folders_and_no_large_models(saved, hub):
    shelf = Shelf(lambda network, tokenizer, facts: network, folders=False, most_bytes=1000)
    with pytest.raises(Refusal, match="Folders cannot be opened here"):
        shelf.get(str(saved), CPU)
    with pytest.raises(Refusal, match="this page allows 0 MB"):
        shelf.get("someone/toy", CPU)


def test_every_draft_in_the_catalogue_is_in_the_catalogue_itself():
    names = [entry.name for entry in BUNDLED + SUGGESTED]
    assert len(names) == len(set(names))
    assert {entry.draft for entry in BUNDLED + SUGGESTED} - {""} <= set(names)
    assert partner("pocket") == "pocket-draft" and partner("someone/toy") == ""


def test_bundled_models_are_offered_only_where_their_files_are(tmp_path):
    assert [entry.name for entry in entries(tmp_path)] == [entry.name for entry in SUGGESTED]
    with pytest.raises(Refusal, match="bundled model pocket is missing"):
        local_folder("pocket", tmp_path)
    (tmp_path / "pocket").mkdir()
    assert entries(tmp_path)[0].name == "pocket"
    assert local_folder("pocket", tmp_path) == tmp_path / "pocket"
