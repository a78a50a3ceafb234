"""REFRAG: one vector in place of each chunk of a context, against the transformers library fed with embeddings."""
from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest
import torch
from pairs import TOKENIZER, greedy_text, network, pair
from registry import Collapse
from runs import figures
from safetensors.torch import load_file
from torch import Tensor

import playground
from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.contract import find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.fitted_weights import BUNDLED_FITTED, file_name
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Event, Failed, Figure, Forward, Note
from playground.questions.world.show import items
from playground.trace import check as trace_problems
from playground.training.calibration import CalibrationTexts
from strategies.adaptive_compute.refrag import context_chunks, highest, overlaps
from strategies.adaptive_compute.refrag import refrag_training as training
from strategies.adaptive_compute.refrag.chunk_encoder import ChunkEncoder, ExpansionPolicy, stored
from support.laws import AT_ONE
from support.policy_fits import finished
from support.speculation import GREEDY
from support.wrong_variants import variants_of

pytestmark = pytest.mark.strategy("refrag")
Refrag = find("refrag")
PLAIN = {"p": 1.0, "encoder": "mean", "selector": "overlap"}
COLLAPSES = {"refrag": [Collapse(LaneConfig("refrag", knobs, added), replace(GREEDY, extras=added))
                        for knobs in ({}, PLAIN) for added in ([], [AT_ONE])]}
PASSAGES = ("The red fox listens to the old owl.", "A green bird sings in the tall tree, day and night.")
CONTEXT, QUESTION = "\n\n".join(PASSAGES), "What does the green bird do?"
WRITTEN, K = 6, 4


def fitted(seed: int = 0) -> dict[str, Tensor]:
    """Random weights, in which everything matters, by the names of the file."""
    chance = torch.Generator().manual_seed(seed)
    empty = stored(ChunkEncoder(32, K, 0.3), ExpansionPolicy(32, 0.3))
    return {name: torch.tensor(0.3) if name.endswith("scale") else torch.randn(tensor.shape, generator=chance) * 0.4
            for name, tensor in empty.items()}


def decoded(decoder, weights=None, context: str = CONTEXT, question: str = QUESTION, memory: Memory | None = None
            ) -> tuple[Lane, list[Event]]:
    target, assembly = pair("llama").target, Assembly(decoder)
    given = {"refrag": fitted() if weights is None else weights}
    ids = Prompt(question, context=context).encode(target)
    lane = Lane(ids, {"target": target}, assembly, Limits(0, WRITTEN), Recorder(target.tokens), memory=memory,
                heads=given)
    lane.passage, lane.question = context, question
    runner, events = Runner(lane, assembly), []
    while not runner.finished:
        events += runner.advance()
    return lane, events


def written(*case, **more) -> list[int]:
    lane, _ = decoded(*case, **more)
    return lane.tokens[lane.prompt_length:]


# --- by the library and by hand ---

def normed(x: Tensor, weights: dict, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"] + weights[
        f"{name}.bias"]


def linear(x: Tensor, weights: dict, name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def attention(x: Tensor, weights: dict, name: str, heads: int = 4) -> Tensor:
    both = x @ weights[f"{name}.in_proj_weight"].T + weights[f"{name}.in_proj_bias"]
    out = []
    for query, key, value in zip(*(part.chunk(heads, -1) for part in both.chunk(3, -1))):
        out.append((query @ key.T / math.sqrt(query.shape[1])).softmax(-1) @ value)
    return linear(torch.cat(out, -1), weights, f"{name}.out_proj")


def transformer(x: Tensor, weights: dict, name: str) -> Tensor:
    for layer in ("layers.0", "layers.1"):
        at = f"{name}.{layer}"
        x = x + attention(normed(x, weights, f"{at}.norm1"), weights, f"{at}.self_attn")
        inner = linear(normed(x, weights, f"{at}.norm2"), weights, f"{at}.linear1")
        x = x + linear(0.5 * inner * (1 + torch.erf(inner / math.sqrt(2))), weights, f"{at}.linear2")
    return normed(x, weights, f"{name}.norm")


def vector_by_hand(embedded: Tensor, weights: dict) -> Tensor:
    states = transformer(embedded / weights["encoder.scale"] + weights["encoder.place"], weights, "encoder.layers")
    inner = linear(states.flatten(), weights, "encoder.hidden").clamp(min=0)
    return embedded.mean(0) + linear(inner, weights, "encoder.out") * weights["encoder.scale"]


def scores_by_hand(vectors: Tensor, weights: dict) -> list[float]:
    states = transformer(linear(vectors / weights["policy.scale"], weights, "policy.down"), weights, "policy.layers")
    return linear(states, weights, "policy.score")[:, 0].tolist()


def chunks_by_hand(ids: list[int]) -> list[list[int]]:
    """Positions of each chunk, by the text before each token."""
    text, ends = TOKENIZER.decode(ids), [len(TOKENIZER.decode(ids[:count])) for count in range(len(ids) + 1)]
    found = []
    for passage in PASSAGES:
        first = text.index(passage)
        last = first + len(passage)
        inside = [at for at in range(len(ids)) if first <= ends[at] and ends[at + 1] <= last]
        found += [inside[at:at + K] for at in range(0, len(inside), K) if at + K <= len(inside)]
    return found


@torch.inference_mode()
def text_by_hand(weights: dict[str, Tensor], p: float) -> list[int]:
    """Greedy decoding by the library, which numbers the embeddings of the shorter prompt itself."""
    model, weights = network("llama"), {name: tensor.double() for name, tensor in weights.items()}
    ids = TOKENIZER(f"{CONTEXT}\n{QUESTION}")["input_ids"]
    embedded, chunks = model.get_input_embeddings()(torch.tensor(ids)), chunks_by_hand(ids)
    vectors = torch.stack([vector_by_hand(embedded[chunk], weights) for chunk in chunks])
    scores = scores_by_hand(vectors, weights)
    order = sorted(range(len(chunks)), key=scores.__getitem__, reverse=True)
    dropped = {chunk[0]: vectors[number] for number, chunk in enumerate(chunks)
               if number in order[round(p * len(chunks)):]}
    inside = {at + more for at in dropped for more in range(1, K)}
    rows = [dropped.get(at, embedded[at]) for at in range(len(ids)) if at not in inside]
    tokens = []
    for _ in range(WRITTEN):
        given = torch.stack([*rows, *(model.get_input_embeddings().weight[token] for token in tokens)])
        tokens.append(int(model(inputs_embeds=given[None], use_cache=False).logits[0, -1].argmax()))
    return tokens


def check(cls: type) -> None:
    for seed in range(2):
        for p in (0.0, 0.4):
            assert written(cls(p=p), fitted(seed)) == text_by_hand(fitted(seed), p)


class ShuffledVectors(Refrag):
    def _vectors(self, lm, chunks):
        vectors, reused = super()._vectors(lm, chunks)
        return vectors.roll(1, 0), reused


class LengthOfTheTokens(Refrag):
    """Each vector takes as many positions as its chunk has tokens."""

    def _inputs(self, prompt, chunks, vectors, expanded):
        short = super()._inputs(prompt, chunks, vectors, expanded)
        return [given for given in short for _ in range(K if isinstance(given, Tensor) else 1)]


class ChunksSpanPassages(Refrag):
    def _chunks(self, lm):
        chunks = super()._chunks(lm)
        return [range(at, at + K) for at in range(chunks[0].start, chunks[-1].stop - K + 1, K)]


class EncoderReadsTheQuestion(Refrag):
    def _encode(self, lm, embedded):
        return super()._encode(lm, embedded + lm.embed(lm.tokens[lm.prompt_length - K:lm.prompt_length]))


class ChunksReadEachOther(Refrag):
    def _encode(self, lm, embedded):
        return super()._encode(lm, embedded + embedded.mean((0, 1)))


class ExpandsTheLowest(Refrag):
    def _scores(self, lm, chunks, vectors):
        return [-score for score in (yield from super()._scores(lm, chunks, vectors))]


class DropsTheVectors(Refrag):
    def _inputs(self, prompt, chunks, vectors, expanded):
        return [given for given in super()._inputs(prompt, chunks, vectors, expanded) if not isinstance(given, Tensor)]


@pytest.mark.oracle("refrag")
def test_a_run_writes_what_the_library_writes_after_the_shorter_input():
    check(Refrag)


@pytest.mark.refuses("refrag")
@pytest.mark.parametrize("wrong", variants_of(Refrag, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_compression_is_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize("p, plain", [(1.0, True), (0.0, False)])
def test_all_chunks_expanded_is_plain_decoding(p, plain):
    ids = TOKENIZER(f"{CONTEXT}\n{QUESTION}")["input_ids"]
    assert (written(Refrag(p=p)) == greedy_text("llama", ids, WRITTEN)) == plain


def test_without_a_context_it_is_plain_decoding():
    ids = TOKENIZER(QUESTION)["input_ids"]
    assert written(Refrag(p=0.0), context="") == greedy_text("llama", ids, WRITTEN)


@pytest.mark.parametrize("context", ["a", "a b", "I\n\nam"])
def test_a_passage_shorter_than_a_chunk_stays(context):
    ids = Prompt(QUESTION, context=context).encode(pair("llama").target)
    assert written(Refrag(p=0.0), context=context) == greedy_text("llama", ids, WRITTEN)


# --- lengths, caches, other lanes ---

@pytest.mark.parametrize("p", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("knobs", [{}, {"encoder": "mean", "selector": "random"}, {"selector": "perplexity"}],
                         ids=["policy", "mean", "perplexity"])
def test_the_cache_holds_one_slot_per_vector_and_per_remaining_token(p, knobs):
    lane, events = decoded(Refrag(p=p, **knobs))
    chunks = len(chunks_by_hand(lane.tokens[:lane.prompt_length]))
    stay = round(p * chunks)
    length = chunks - stay + stay * K + lane.prompt_length - chunks * K
    forwards = [event for event in events if isinstance(event, Forward) and event.stream == "target"]
    assert sum(event.tokens for event in forwards if event.phase == "prefill") == length
    assert lane.target.store.length == length + WRITTEN - 1
    assert figures(events, "length of the prompt")[0]["values"] == [lane.prompt_length, length]


def test_a_prefill_in_several_forwards_writes_the_same(monkeypatch):
    once = written(Refrag(p=0.3))
    monkeypatch.setattr("playground.decoding.stream.forwards.CHUNK", 5)
    lane, events = decoded(Refrag(p=0.3))
    assert sum(event.phase == "prefill" for event in events if isinstance(event, Forward)) > 2
    assert lane.tokens[lane.prompt_length:] == once


def test_lanes_side_by_side_write_what_each_writes_alone():
    models = replace(pair("llama"), heads={"refrag": fitted()})
    lanes, prompt = [LaneConfig("refrag", {"p": 0.2}), GREEDY, GREEDY], Prompt(QUESTION, context=CONTEXT)

    def texts(*configs: LaneConfig) -> list[list[int]]:
        session = prepare(models, list(configs), prompt, Limits(0, WRITTEN))
        events = list(session)
        assert trace_problems(session.trace) == []
        return [[token for stamped in events if stamped.lane == lane and isinstance(stamped.event, Commit)
                 for token in stamped.event.ids] for lane in range(len(configs))]

    assert texts(*lanes) == [texts(lane)[0] for lane in lanes]


def remembered(context: str, question: str = QUESTION) -> dict:
    memory = Memory()
    decoded(Refrag(), context=context, question=question, memory=memory)
    (vectors,) = memory._things.values()
    return dict(vectors.known())


def test_a_vector_depends_on_the_tokens_of_its_chunk_alone():
    other = f"{PASSAGES[1]}\n\n{PASSAGES[0]}\n\nMore of it, and more."
    vectors, others = remembered(CONTEXT), remembered(other, "Why?")
    assert vectors.keys() < others.keys() and len(vectors) > 8
    assert all(torch.allclose(vector, others[chunk], rtol=1e-12) for chunk, vector in vectors.items())


def test_vectors_of_an_earlier_run_are_used_again_and_change_nothing():
    memory = Memory()
    first, again, anew = (decoded(Refrag(cache=cache), memory=memory) for cache in (True, True, False))
    notes = [next(event.text for event in events if isinstance(event, Note) and "vectors were known" in event.text)
             for _, events in (first, again, anew)]
    assert [" 0 vectors" in note for note in notes] == [True, False, True]
    assert first[0].tokens == again[0].tokens == anew[0].tokens


def test_only_the_newest_vectors_are_remembered(monkeypatch):
    monkeypatch.setattr(context_chunks, "MOST", 3)
    store = context_chunks.ChunkVectors()
    for number in range(5):
        store.add({(number,): torch.zeros(2)})
    assert list(store.known()) == [(2,), (3,), (4,)] and store.digest() != context_chunks.ChunkVectors().digest()


# --- where the chunks are ---

def letters(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


@pytest.mark.parametrize("text, context, question, starts", [
    ("abcdefgh?", "abcdefgh", "?", [0, 3]),
    ("x abcdefgh abc", "abcdefgh", "abc", [2, 5]),
    ("abc\nabc", "abc", "abc", [0]),  # the question is the same text
    ("abc: abc", "abc", "abc", [0]),
    ("abc\n\ndefg\n \nhi?", "abc\n\ndefg\n \nhi", "?", [0, 5]),
    ("ab\ncd\n\nef?", "ab\ncd\n\nef", "?", [0]),
])
def test_chunks_are_found_in_the_context_and_in_one_passage_each(text, context, question, starts):
    assert [chunk.start for chunk in context_chunks.chunks_of(letters(text), context, question, 3)] == starts


def test_a_token_that_reaches_out_of_its_passage_is_in_no_chunk():
    pieces = [b"", b" a", b"bc", b"d", b"e.\n\n", b"fg", b"h", b"i"]
    found = context_chunks.chunks_of(pieces, "abcde.\n\nfgh", "i", 2)
    assert found == [range(2, 4), range(5, 7)]


def test_a_context_that_the_tokens_do_not_spell_is_refused_in_a_sentence():
    with pytest.raises(Refusal, match="do not spell the context"):
        context_chunks.chunks_of(letters("abc"), "abd", "c", 2)
    _, events = decoded(Refrag(), context="A <|end|> of it, and more.")
    assert isinstance(events[-1], Failed) and "special tokens" in events[-1].message


# --- what is expanded ---

def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(Refusal, match="choose another selector"):
        assemble(LaneConfig("refrag", {"encoder": "mean"}))
    with pytest.raises(Refusal, match="does not work with a cache policy"):
        assemble(LaneConfig("refrag", {}, [("h2o", {})]))


def test_the_most_surprising_chunks_stay_by_perplexity():
    lane, events = decoded(Refrag(selector="perplexity"))
    ids = lane.tokens[:lane.prompt_length]
    with torch.no_grad():
        logp = network("llama")(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    losses = [0.0, *(-float(logp[at - 1, ids[at]]) for at in range(1, len(ids)))]
    found = figures(events, "chunks of the context, by score")[0]["values"]
    assert found == [pytest.approx(sum(losses[at] for at in chunk) / K, abs=1e-4) for chunk in chunks_by_hand(ids)]


def test_chunks_with_words_of_the_question_come_first():
    scores = overlaps(["a Bird, sings", "the fox", "bird of the sea", "?"], "What does the bird do?")
    assert scores == [1.0, 1.0, 2.0, 0.0] and highest(scores, 3) == [2, 0, 1]


def test_a_random_choice_repeats_with_the_seed():
    assert written(Refrag(selector="random")) == written(Refrag(selector="random"))


def test_a_lane_without_a_fit_says_how_to_get_one():
    session = prepare(pair("llama"), [LaneConfig("refrag")], Prompt(QUESTION, context=CONTEXT), Limits(0, 2))
    assert any("fit refrag" in stamped.event.text for stamped in session if isinstance(stamped.event, Note))


# --- the policy ---

def test_the_probabilities_of_all_ordered_picks_sum_to_one():
    scores = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chances = [float(training.log_probability(scores, picks).exp()) for picks in permutations(range(4), 2)]
    assert sum(chances) == pytest.approx(1.0)


def test_picks_differ_and_have_the_probability_that_training_assumes():
    scores, chance = torch.tensor([1.0, 0.0, -1.0, 0.5]), torch.Generator().manual_seed(0)
    drawn = [tuple(training.sample_picks(scores, 2, chance)) for _ in range(6000)]
    assert all(len(set(picks)) == 2 for picks in drawn)
    for picks in permutations(range(4), 2):
        expected = float(training.log_probability(scores, picks).exp())
        assert drawn.count(picks) / len(drawn) == pytest.approx(expected, abs=4 * math.sqrt(expected / len(drawn)))


def test_advantages_have_zero_mean_and_none_where_all_rewards_are_equal():
    found = training.advantages(torch.tensor([1.0, 2.0, 4.0, 5.0]))
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-6) and found.tolist() == sorted(found.tolist())
    assert training.advantages(torch.ones(3)).tolist() == [0.0] * 3


def test_the_policy_learns_to_pick_the_chunk_that_matters():
    torch.manual_seed(0)
    policy, chance = ExpansionPolicy(8), torch.Generator().manual_seed(0)
    optimiser, mark = torch.optim.Adam(policy.parameters(), 3e-3), torch.full((8,), 2.0)

    def context() -> tuple[Tensor, int]:
        vectors, right = torch.randn(6, 8, generator=chance), training.draw(6, chance)
        return vectors + mark * (torch.arange(6) == right)[:, None], right

    def rewards(right: int, group: list[list[int]]) -> Tensor:
        return torch.tensor([float(right in picks) for picks in group])

    for _ in range(80):
        vectors, right = context()
        optimiser.zero_grad()
        training.group_loss(policy(vectors), 1, partial(rewards, right), chance).backward()
        optimiser.step()
    tried = [context() for _ in range(40)]
    assert sum(int(policy(vectors).argmax()) == right for vectors, right in tried) >= 36


# --- the encoder ---

def frozen() -> DifferentiableLlama:
    return DifferentiableLlama(pair("llama", dtype=torch.float32).target.parts, torch.float32)


def reconstruction_loss(llama: DifferentiableLlama, encoder: ChunkEncoder, spans: Tensor) -> Tensor:
    logits = training.reconstruction_logits(llama, training.chunk_vectors(llama, encoder, spans), spans)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), spans.flatten())


def test_reconstruction_of_a_few_chunks_becomes_exact_and_needs_their_own_vectors():
    torch.manual_seed(0)
    target = playground.load(None, playground.NO_DRAFT, dtype="float32").target
    llama = DifferentiableLlama(target.parts, torch.float32)
    encoder = ChunkEncoder(llama.width, K, float(llama.embeddings.square().mean().sqrt()))
    spans = torch.tensor(target.tokens.encode(" ".join(PASSAGES))[:6 * K]).view(6, K)
    optimiser = torch.optim.Adam(encoder.parameters(), 1e-3)
    for _ in range(45):
        optimiser.zero_grad()
        reconstruction_loss(llama, encoder, spans).backward()
        optimiser.step()
    with torch.no_grad():
        vectors = training.chunk_vectors(llama, encoder, spans)
        assert training.right_tokens(llama, vectors, spans) == 1.0
        assert training.right_tokens(llama, vectors.roll(1, 0), spans) < 0.3


def test_a_loss_after_chunks_is_that_of_the_library():
    llama, chance = frozen(), torch.Generator().manual_seed(0)
    excerpts = [training.Excerpt([7], torch.randint(320, (3, K), generator=chance), [9, 4, 11]),
                training.Excerpt([5, 8, 2], torch.randint(320, (1, K), generator=chance), [6])]
    vectors = [torch.randn(len(excerpt.chunks), 32, generator=chance) for excerpt in excerpts]
    found = training.after_losses(llama, excerpts, vectors, [[1], []])
    model = network("llama").float().requires_grad_(False)
    table = model.get_input_embeddings().weight
    rows = [[table[7], vectors[0][0], *table[excerpts[0].chunks[1]], vectors[0][2], table[9], table[4]],
            [table[5], table[8], table[2], vectors[1][0]]]
    for loss, given, excerpt in zip(found, rows, excerpts):
        logits = model(inputs_embeds=torch.stack(given)[None]).logits[0, -len(excerpt.after):]
        assert float(loss) == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits, torch.tensor(excerpt.after))), abs=1e-4)


# --- what is bundled ---

def losses_of(target: Model, encoder: ChunkEncoder) -> dict[str, float]:
    """Loss after the chunks of held-out questions with their answers, by what stands in the place of the chunks."""
    llama, chance = DifferentiableLlama(target.parts, torch.float32), torch.Generator().manual_seed(5)
    prompts = [item.prompt + " " + item.answer for item in items("context_qa", 40, 5, held_out=True)]
    excerpts = [training.random_excerpt(target.tokens.encode(prompt), chance) for prompt in prompts]
    embedded = [llama.embed(excerpt.chunks) for excerpt in excerpts]
    vectors = {"trained": [encoder(each) for each in embedded], "mean": [each.mean(1) for each in embedded],
               "none": [each[:0, 0] for each in embedded], "shuffled": [encoder(each).roll(1, 0) for each in embedded]}
    nothing = [[]] * len(excerpts)
    return {name: training.mean_loss(llama, excerpts, each, nothing) for name, each in vectors.items()}


def check_bundled(target: Model, encoder: ChunkEncoder) -> None:
    found = losses_of(target, encoder)
    assert found["trained"] < found["mean"] - 0.2 and found["trained"] < found["shuffled"] - 0.2
    assert found["mean"] < found["none"]


@pytest.fixture(scope="module")
def bundled() -> tuple[Model, ChunkEncoder]:
    target = playground.load(None, playground.NO_DRAFT, dtype="float32").target
    weights = load_file(BUNDLED_FITTED / file_name("refrag", {"target": target}))
    return target, ChunkEncoder.of({name: tensor.float() for name, tensor in weights.items()})


@torch.no_grad()
def test_the_bundled_encoder_tells_more_of_held_out_contexts_than_mean_embeddings(bundled):
    check_bundled(*bundled)


@torch.no_grad()
def test_an_untrained_encoder_is_refused(bundled):
    target, encoder = bundled
    with pytest.raises(AssertionError):
        check_bundled(target, ChunkEncoder(encoder.place.shape[1], K, float(encoder.scale)))


def test_the_bundled_model_reads_a_shorter_context_at_the_defaults():
    models = playground.load(None, playground.NO_DRAFT, dtype="float32")
    session = prepare(models, [LaneConfig("refrag")], Prompt(QUESTION, context=CONTEXT, chat=True), Limits(0, 4))
    notes = [stamped.event.text for stamped in session if isinstance(stamped.event, Note)]
    assert any("chunks of 4 tokens are one vector each" in note for note in notes)


def lessons(monkeypatch, **more) -> CalibrationTexts:
    for name in ("CONTINUATION", "POLICY"):
        monkeypatch.setattr(training, name, replace(getattr(training, name), steps=4, every=2))
    monkeypatch.setattr(training, "HELD_OUT", 2)
    texts = [[(number * 7 + at * at) % 320 for at in range(30 + number)] for number in range(6)]
    return CalibrationTexts(pair("llama", dtype=torch.float32).target, texts, about=("refrag",), **more)


def test_training_changes_encoder_and_policy_only_and_says_what_it_reached(monkeypatch):
    target = pair("llama", dtype=torch.float32).target
    before = [weight.clone() for weight in target.network.parameters()]
    weights, events = finished(Refrag.calibrate(lessons(monkeypatch), 0))
    assert all(torch.equal(a, b) for a, b in zip(before, target.network.parameters()))
    notes = [event.text for event in events if isinstance(event, Note)]
    assert "Reconstruction of held-out chunks" in notes[0] and "with trained vectors" in notes[1]
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in stored(ChunkEncoder(32), ExpansionPolicy(32)).items()}
    assert len(written(Refrag(p=0.3), weights)) == WRITTEN


@pytest.mark.parametrize("stop", [1, 3])
def test_an_interrupted_training_goes_on(monkeypatch, tmp_path, stop):
    whole, _ = finished(Refrag.calibrate(lessons(monkeypatch), 0))
    place = lessons(monkeypatch, checkpoint=tmp_path / "refrag.training")
    events = Refrag.calibrate(place, 0)
    for _ in range(stop):
        next(events)
    events.close()
    again, seen = finished(Refrag.calibrate(place, 0))
    assert sum(isinstance(event, Figure) for event in seen) == 4 - stop and whole.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(Refusal, match="too short to train on"):
        finished(Refrag.calibrate(CalibrationTexts(pair("llama", dtype=torch.float32).target, [[1, 2, 3]]), 0))
