"""The Python API of the decoding playground: load models, run a strategy, compare several, score a text.

    import playground

    models = playground.load("Qwen/Qwen3-0.6B")     # without a name: the bundled models
    result = playground.run("sample", "Once upon a time", models=models, knobs={"temperature": 0.7},
                            extras=["repetition_penalty"])
    print(result.text, result.metrics["tokens_per_second"])

A notebook shows a result as the player of the page. What is refused raises Refusal before a model is loaded, if that
can be known without one. All functions may be called in several threads, also with the same models: runs wait for each
other. `stop_after` ends them early, `figure` draws results.

torch is imported only when something is loaded or run, so that traces can be read without it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from playground.errors import Refusal
from playground.loading_bar import reporting
from playground.named_arguments import refuses_unknown_arguments
from playground.player.playable_result import PlayableResult as Result
from playground.player.result_figures import figure
from playground.stopping import limit_reached, stop_after

if TYPE_CHECKING:
    import torch

    from playground.decoding.models import Models
    from playground.decoding.session import Session
    from playground.decoding.visitor_memory import Memory
    from playground.engine.loading.load import Loading, Shelf
    from playground.engine.model import Model
    from playground.lane_fields import LaneConfig
    from playground.remote.remote_server import RemoteServer

__all__ = ["Refusal", "Result", "compare", "figure", "load", "run", "score", "stop_after"]

__version__ = "0.1.0"
NO_DRAFT = "none"
_ONE_RUN = RLock()  # two runs at once would share the cores, which slows each other down many times
Extras = Iterable[str | tuple[str, Mapping[str, Any]]]
Message = Mapping[str, str]  # {"role": "system", "user" or "assistant", "content": text}
Turns = Iterable[tuple[str, str]] | Iterable[Message]
Lane = Any  # the name of a strategy, (name, knobs), a LaneConfig, or its fields as a dict


@refuses_unknown_arguments
def load(
    model: str | Path | None = None,
    draft: str | Path | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantization: str = "none",
    progress: bool | Callable[[float, str], None] | None = None,
    shelf: Shelf | None = None,
    draft_device: str | torch.device = "",
) -> Models:
    """Load a target and its draft model. Raises Refusal with a message that says what to do.

    model: a name from the catalogue, a folder or a hub id; None is the bundled model. A Path is always a folder. A LoRA
        adapter means the adapter on its base model, and "MODEL + ADAPTER" on another one. The
        oracle is a table in float64 on the CPU, whatever device and dtype are given.
    draft: None is the draft that the catalogue lists for the model, if any, and "none" is no draft. "nf4", "fp4" or
        "int8" is the target itself, quantised. A published draft head (EAGLE, Medusa, DFlash, or one of `speculators`)
        is recognised by its config and used by the drafter it is for. Lanes that cannot translate the tokens of a draft
        with another vocabulary raise Refusal.
    draft_device: the device of the draft; empty is the device of the target.
    quantization: of both models, "int8", "nf4" or "fp4"; or weights of the target as a lane has them, such as
        "adapter:FOLDER" or "gptq:bits=4".
    progress: False shows nothing; called, if it can be, with the fraction done, 0 to 1, and a short text. Otherwise one
        bar is shown in a terminal or notebook. The libraries' own bars are not.
    shelf: a cache of loaded models; calls with the same shelf share them.
    """
    with reporting(progress) as report:
        from playground.decoding import program_input as given
        from playground.decoding.models import Models
        from playground.engine.checkpoint import catalogue
        from playground.engine.loading.load import Loading
        from playground.weight_changes import WeightChanges
        changes = WeightChanges.of_model(quantization)
        if changes.layers:
            models = load(model, draft, device, dtype, changes.loaded or "none", report, shelf, draft_device)
            return replace(models, target=_changed(models.target, changes.layers, report))
        name, quantization = changes.named(given.read_name(model or catalogue.BUNDLED[0].name)), changes.quantization
        draft = given.read_name(draft, "draft") if draft else draft
        if name in catalogue.TABLES:
            return _table(name, draft or NO_DRAFT)
        partner = catalogue.partner(name) if draft is None else "" if draft == NO_DRAFT else draft
        options = Loading(given.read_device(device), given.read_dtype(dtype), quantization)
        quantised_target = partner in catalogue.PACKED
        draft_name = name if quantised_target else partner
        draft_options = replace(
            options,
            device=given.read_device(draft_device) or options.device,
            quantization=partner if quantised_target else quantization,
        )
        restricted, shelf = shelf is not None, shelf or _new_shelf()  # a caller's model cache may restrict the lookup
        if partner and not quantised_target:
            from playground.training.public_heads import names_head
            shelf.check_folder(partner)
            if names_head(partner):
                return _with_head(shelf.get(name, options, report), partner)
        if not restricted:
            _check_found(draft_name, draft_options)
        if not partner:
            return Models(shelf.get(name, options, report))
        target = shelf.get(name, options, lambda done, text: report(done / 2, text))
        return Models(target, shelf.get(draft_name, draft_options, lambda done, text: report((1 + done) / 2, text)))


def _with_head(target: Model, name: str) -> Models:
    """The target with a published draft head. Raises Refusal if the head is for another target."""
    from playground.decoding.models import Models
    from playground.training.public_heads import load_head
    head = load_head(name, target)
    return Models(target, heads={head.strategy: head.weights})


def with_weights(
    models: Models, lanes: Iterable[LaneConfig], progress: Callable[[float, str], None] | None = None
) -> Models:
    """The models with the target in all weights that lanes ask for, loaded where they are not there yet.

    Weights that cannot be loaded fail their lanes alone.
    """
    wanted = {lane.weights for lane in lanes} - {"", models.target.quantization, *models.quantized}
    loaded, refused = dict(models.quantized), dict(models.refused)
    for weights in sorted(wanted):
        try:
            loaded[weights] = in_weights(models.target, weights, progress)
        except Refusal as refusal:
            refused[weights] = refusal
    return replace(models, quantized=loaded, refused=refused)


def in_weights(target: Model, weights: str, progress: Callable[[float, str], None] | None) -> Model:
    """A target in other weights, which shares with it what only changes of layers leave alone. Raises Refusal."""
    from playground.weight_changes import WeightChanges
    changes, own = WeightChanges.read(weights), target
    if changes.loaded or target.quantization != "none":
        dtype, loaded = str(target.dtype).removeprefix("torch."), changes.loaded or "none"
        own = load(target.name, NO_DRAFT, str(target.device), dtype, loaded, progress).target
        if not f"{own.revision}+".startswith(f"{target.revision}+"):  # an adapter's comes after a plus
            raise Refusal(f"The files of {target.name} have changed since it was loaded: load it again.", "weights")
    return _changed(own, changes.layers, progress) if changes.layers else own


def _changed(target: Model, layers: tuple[str, ...], progress: Callable[[float, str], None] | None) -> Model:
    from playground.training.weights.change_weights import changed_model
    return changed_model(target, layers, progress or (lambda share, text: None))


def _new_shelf() -> Shelf:
    from playground.engine.loading.load import Shelf
    from playground.engine.loading.loaded_model import loaded_model
    return Shelf(
        lambda network, tokenizer, facts: loaded_model(
            network, tokenizer, facts.name, facts.revision, facts.quantization
        )
    )


def _check_found(name: str, options: Loading) -> None:
    """Raise Refusal for a model or a device that is not there, without loading anything; no name is no model."""
    from playground.engine.checkpoint.hub_files import find_source
    options.resolve()
    if name:
        find_source(name)


def _table(name: str, draft: str) -> Models:
    from playground.decoding.models import Models
    from playground.engine.canvas.table_denoiser import OracleDenoiser
    if draft != NO_DRAFT:
        raise Refusal("The oracle takes no draft model: choose none.", "draft")
    return Models(OracleDenoiser.bundled(name))


@refuses_unknown_arguments
def run(
    strategy: Lane,
    prompt: str | Iterable[Message],
    *,
    models: Models | None = None,
    knobs: Mapping[str, Any] | None = None,
    extras: Extras = (),
    chat: bool = False,
    system: str = "",
    context: str = "",
    seed: int = 0,
    max_new_tokens: int = 64,
    stop: str | Iterable[str] | None = None,
    memory: Memory | None = None,
    before: Turns = (),
    form: str = "",
    tools: str | Iterable[Mapping[str, Any]] = "",
) -> Result:
    """Continue a prompt with one strategy, or with a lane in any form that `compare` takes: (name, knobs), a dict.

    `prompt` is a text, or a chat as messages {"role", "content"} that end with one of the user. `extras` add toggles
    and fill slots, by name or as (name, knobs); a JSON Schema is a text or a dict. `context` is a passage before the
    prompt, `before` are the earlier turns of a chat, as (user, assistant) or as messages. `form` says how passage and
    prompt become one text, such as "Text: {context} Question: {prompt}". `tools`, as for a chat API or as its JSON, are
    described by the model's chat template. Strategies that learn across runs store what they learn in `memory`, a
    playground.decoding.visitor_memory.Memory. Without `models` every call loads the bundled pair: load once and pass it
    in. Raises Refusal if the run cannot start. A run that fails later returns with the reason "failed", a message and
    the text so far.
    """
    from playground.decoding import program_input as given
    lane = given.read_lane(strategy)
    knobs, extras = lane.knobs | given.read_knobs(knobs), [*lane.extras, *given.read_extras(extras)]
    return compare(
        [replace(lane, knobs=knobs, extras=extras)],
        prompt,
        models=models,
        chat=chat,
        system=system,
        context=context,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=stop,
        memory=memory,
        before=before,
        form=form,
        tools=tools,
    )[0]


@refuses_unknown_arguments
def compare(
    lanes: Iterable[Lane],
    prompt: str | Iterable[Message],
    *,
    models: Models | None = None,
    knobs: Mapping[str, Any] | None = None,
    extras: Extras = (),
    chat: bool = False,
    system: str = "",
    context: str = "",
    seed: int = 0,
    max_new_tokens: int = 64,
    stop: str | Iterable[str] | None = None,
    memory: Memory | None = None,
    before: Turns = (),
    form: str = "",
    tools: str | Iterable[Mapping[str, Any]] = "",
    remote: RemoteServer | None = None,
) -> list[Result]:
    """Continue one prompt with several strategies side by side. The results are in the order of `lanes`.

    A lane is the name of a strategy, (name, knobs), a playground.contract.lane_config.LaneConfig, or its fields as a
    dict: {"strategy": "sample", "extras": ["top_p"], "seed": 3}. One with "weights", such as "int8" or
    "gptq:bits=4", runs the target in these weights, which are loaded or made for it. The other arguments are those of
    `run`: `knobs` apply to the lanes that have them, drafters and verifiers among `extras` to those with a slot, other
    extras to all. A lane that cannot start or fails has the reason "failed" and a message, and the others continue.
    Raises Refusal if no lane can start. `playground.trace.diff(a.trace, b.trace)` finds the first token in which two
    texts differ. `remote` adds a last lane, generated by a server: `RemoteServer.given("http://127.0.0.1:8000",
    "model")` of playground.remote.remote_server; with it, `lanes` may be empty.
    """
    from playground.contract.lane_config import check_startable, share
    from playground.decoding import program_input as given
    from playground.decoding.limits import Limits
    from playground.decoding.prompt import Prompt
    from playground.decoding.session import Session, prepare
    configs = share(given.read_lanes(lanes), given.read_knobs(knobs), given.read_extras(extras))
    asked = given.read_request(
        prompt,
        configs,
        chat=chat,
        system=system,
        context=context,
        before=before,
        form=form,
        tools=tools,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=stop,
    )
    given.check_models(models)
    text, limits = Prompt.of(asked), Limits.of(asked)
    if configs or remote is None:
        check_startable(configs, asked.context)
        models = with_weights(models or load(), configs)
    with _ONE_RUN:
        session = prepare(models, configs, text, limits, memory=memory) if configs else Session([], [])
        if remote is not None:
            from playground.remote.remote_lane import add_lane
            add_lane(session, remote, text, limits)
        results = _results(session)
    if not any(result.begun for result in results):
        raise Refusal(results[0].message, results[0].strategy)
    return results


@refuses_unknown_arguments
def score(
    text: str | Iterable[Message],
    *,
    models: Models | None = None,
    chat: bool = False,
    system: str = "",
    context: str = "",
) -> list[Result]:
    """Score a given text: one result for the target, and one for the draft model if there is one.

    The first token serves as the prompt, and the `logprobs` of a result belong to the tokens after it. With `chat` the
    text is the user's message in the model's chat template, and messages are a chat as in `run`. Raises Refusal for a
    text of a single token.
    """
    from playground.decoding import program_input as given
    from playground.decoding.prompt import Prompt
    from playground.decoding.scoring import score as read
    asked = given.read_request(text, chat=chat, system=system, context=context)
    given.check_models(models)
    models = models or load()
    with _ONE_RUN:
        return _results(read(models, Prompt.of(asked)))


def _results(session: Session) -> list[Result]:
    """The results at the end of the session, or when the caller's limit is reached."""
    while not session.finished:
        if limit_reached():
            session.stop()
        else:
            session.advance()
    return [Result(session.trace.lane(header.lane)) for header in session.headers]
