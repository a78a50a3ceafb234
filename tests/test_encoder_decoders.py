"""Models with an encoder and a decoder write what the transformers library writes, under every decoder that runs."""
from __future__ import annotations

import json
from collections import deque

import pytest
import torch
from pairs import TOKENIZER
from transformers import AutoModelForSeq2SeqLM, T5EncoderModel

from playground.bench.models.tiny_networks import tiny_config
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.engine.attention.library_cache import LibraryLayer
from playground.engine.encoder_decoder.model import EncoderDecoder
from playground.engine.encoder_decoder.source_reading import SelfAttentionLayer, SourceReading
from playground.engine.forward_input import ForwardInput
from playground.engine.loading.load import Loading, load
from playground.engine.loading.loaded_model import loaded_model
from playground.errors import Refusal
from playground.events import Cache, Failed
from support.encoder_decoder_pairs import FORCED, KINDS, encoder_decoders, network

TEXT, LENGTH = "The green bird sings, and the fox reads.", 14
RUN = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "longt5", "m2m_100", "marian", "mbart",
       "mt5", "mvp", "pegasus", "pegasus_x", "plbart", "seamless_m4t", "seamless_m4t_v2", "t5", "t5gemma", "t5gemma2",
       "umt5")
REFUSED = ("encoder-decoder", "fsmt", "nllb-moe", "prophetnet", "switch_transformers")
every_kind = pytest.mark.parametrize("kind", KINDS)
LANES = {
    "greedy": LaneConfig("greedy"),
    "sampled": LaneConfig("greedy", {}, [("temperature", {"t": 0.7})], seed=5),
    "beams": LaneConfig("beam_search", {"beams": 3}),
    "draft": LaneConfig("speculative", {}, [("draft_model", {}), ("greedy_match", {})]),
    "tree": LaneConfig("speculative", {}, [("dyspec", {}), ("greedy_match", {})]),
    "source": LaneConfig("speculative", {}, [("prompt_lookup", {}), ("greedy_match", {})]),
}


def run(kind: str, *configs: LaneConfig, text: str = TEXT, length: int = LENGTH) -> Session:
    session = prepare(encoder_decoders(kind), list(configs), Prompt(text), Limits(0, length))
    deque(session, maxlen=0)
    return session


def written(session: Session, lane: int = 0) -> list[int]:
    own = session._runners[lane].lane
    return own.tokens[len(own.tokens) - own.generated:]


def failures(session: Session) -> list[str]:
    return [stamped.event.message for stamped in session.trace.events if isinstance(stamped.event, Failed)]


def by_library(kind: str, text: str = TEXT, **how) -> list[int]:
    """What `generate` writes after the start token and the forced one."""
    model = encoder_decoders(kind).target
    source = torch.tensor([TOKENIZER(text)["input_ids"]])
    begin = 1 + (kind == "bart")
    found = model.network.generate(source, max_new_tokens=LENGTH + begin - 1, do_sample=False, **how)[0]
    return found[begin:].tolist()


@every_kind
def test_greedy_writes_what_the_library_writes(kind):
    assert written(run(kind, LANES["greedy"])) == by_library(kind)


@every_kind
def test_beams_are_those_of_the_library(kind):
    assert written(run(kind, LANES["beams"])) == by_library(kind, num_beams=3, length_penalty=1.0)


@pytest.mark.parametrize("lane", ["draft", "tree", "source"])
@every_kind
def test_drafts_from_a_smaller_model_in_trees_and_from_the_source_change_nothing(kind, lane):
    session = run(kind, LANES[lane])
    assert not failures(session) and written(session) == by_library(kind)


@every_kind
def test_lanes_side_by_side_share_the_prompt_and_write_what_each_writes_alone(kind):
    together = run(kind, LANES["greedy"], LANES["sampled"], LANES["tree"])
    for lane, name in enumerate(("greedy", "sampled", "tree")):
        assert written(together, lane) == written(run(kind, LANES[name]))


@every_kind
def test_rows_are_the_librarys_whichever_way_the_tokens_come(kind):
    model = encoder_decoders(kind).target
    tokens = [*model.tokens.encode(TEXT), 9, 12, 40, 41]
    source, rest = torch.tensor(tokens).tensor_split([tokens.index(model.tokens.mark)])
    whole = model.network(input_ids=source[None], decoder_input_ids=model.reading.started(rest)[None]).logits[0]
    store, start = model.new_store(), len(tokens) - 3

    def read(part: list[int]) -> torch.Tensor:
        (rows,), _ = model.forward([ForwardInput(store, part, list(range(-1, len(part) - 1)))])
        return rows

    first = read(tokens[:start])
    store.commit(start - 1)
    assert first[:len(source)].isnan()[:, :-1].all()
    torch.testing.assert_close(first[len(source):, :-1], whole[:-3])
    torch.testing.assert_close(read(tokens[start:])[:, :-1], whole[-3:])
    store.roll_back(1)  # the scratch goes, and a token of the decoder
    torch.testing.assert_close(read(tokens[start - 1:])[:, :-1], whole[-4:])
    store.roll_back(store.length - len(source) + 1)  # a source cannot be cut: it is read again
    assert not store.length
    torch.testing.assert_close(read(tokens)[len(source):, :-1], whole)


class StaleSource(SourceReading):
    """Wrong: the source of the first text is never replaced."""

    def encode(self, source):
        kept = self.__dict__.setdefault("kept", super().encode(source))
        return kept[:, :len(source)]


class CausalMark(SourceReading):
    """Wrong: the mark is not the start token, but the last token of the source once more."""

    def started(self, ids):
        return ids.masked_fill(ids == self.mark, 5)


@pytest.mark.parametrize("wrong", [StaleSource, CausalMark])
def test_wrong_readings_do_not_write_what_the_library_writes(wrong, monkeypatch):
    model = encoder_decoders("t5").target
    right = model.reading
    monkeypatch.setattr(model, "reading", wrong(right.network, right.mark, right.start))
    run("t5", LANES["greedy"], text="Another text of the same length, or so.")
    assert written(run("t5", LANES["greedy"])) != by_library("t5")


def test_a_reading_that_counts_positions_from_the_source_on_is_refused_when_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(SelfAttentionLayer, "get_seq_length", LibraryLayer.get_seq_length)
    with pytest.raises(Refusal, match="bart models cannot be run here"):
        EncoderDecoder(network("bart"), TOKENIZER, "bart")


def test_the_encoder_reads_a_prompt_once_and_its_slots_stay(monkeypatch):
    model, read = encoder_decoders("t5").target, []
    encode = SourceReading.encode
    monkeypatch.setattr(SourceReading, "encode", lambda self, source: read.append(len(source)) or encode(self, source))
    session = run("t5", LANES["draft"])
    source = len(TOKENIZER(TEXT)["input_ids"])
    assert read == [source, source]  # the target's, and the draft's
    lengths = [stamped.event.length for stamped in session.trace.events
               if isinstance(stamped.event, Cache) and stamped.event.stream == "target"]
    assert lengths[0] >= source + 1 and lengths[-1] > lengths[0]
    store = session._runners[0].lane.target.store
    assert store.source == source and store.keys[0].heads == model.network.config.num_heads


def test_a_forced_first_token_belongs_to_the_prompt():
    model = encoder_decoders("bart").target
    assert model.tokens.encode(TEXT)[-2:] == [model.tokens.mark, FORCED]


def test_the_mark_is_a_special_token_that_is_never_written():
    session = run("t5", LaneConfig("greedy", {}, [("temperature", {"t": 2.0})]))
    tokens = encoder_decoders("t5").target.tokens
    assert tokens.mark not in written(session) and tokens.is_special(tokens.mark) and tokens.bytes(tokens.mark) == b""
    assert tokens.piece(tokens.mark) == "<decoder starts>"
    assert not tokens.has_text(tokens.encode("some words")) and tokens.has_text([*tokens.encode("a"), 70])


def test_a_schema_holds_for_the_decoders_text():
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                         "additionalProperties": False})
    session = run("t5", LaneConfig("greedy", {}, [("json_schema", {"source": schema})]), length=40)
    assert not failures(session) and json.loads(session._runners[0].lane.main.text)["a"] in (1, 2)


@pytest.mark.parametrize("extra", ["dola", "kivi", "markov_view"])
def test_what_reads_between_the_layers_is_refused_in_one_sentence(extra):
    (said,) = failures(run("t5", LaneConfig("greedy", {}, [(extra, {})])))
    assert said.startswith("t5 has an encoder and a decoder") and ". " not in said and "choose a causal model" in said


def test_a_saved_folder_loads_and_says_what_it_is(tmp_path):
    for kind in KINDS:
        network(kind, ends=True).float().save_pretrained(tmp_path / kind)
        TOKENIZER.save_pretrained(tmp_path / kind)
        read = load(str(tmp_path / kind), Loading("cpu", "float32"))
        model = loaded_model(read[0], read[1], kind, "", "none")
        assert isinstance(model, EncoderDecoder) and model.vocabulary == 321


def test_an_encoder_alone_is_refused(tmp_path):
    T5EncoderModel(network("t5").config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(Refusal, match="does not continue text"):
        load(str(tmp_path), Loading("cpu", "float32"))


@pytest.mark.parametrize("kind", [*RUN, *REFUSED])
def test_types_of_the_library_run_as_it_runs_them_or_are_refused(kind):
    config = tiny_config(kind)
    # some have none, some one beyond a tiny vocabulary, and some do not count a padding token as a position
    config.decoder_start_token_id = 3 if config.pad_token_id != 3 else 4
    torch.manual_seed(0)
    made = AutoModelForSeq2SeqLM.from_config(config).double().eval()
    if kind in RUN:
        assert EncoderDecoder(made, TOKENIZER, kind).depth
    else:
        with pytest.raises(Refusal, match="models cannot be run here.*choose another model"):
            EncoderDecoder(made, TOKENIZER, kind)
