"""The Python API of the decoding playground: load models, run a strategy, compare several, score a text.

    import playground

    models = playground.load("Qwen/Qwen3-0.6B")     # without a name: the bundled models
    result = playground.run("sample", "Once upon a time", models=models, knobs={"temperature": 0.7},
                            extras=["repetition_penalty"])
    print(result.text, result.metrics["tokens_per_second"])

torch is imported only when something is loaded or run, so that traces can be read without it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from playground.errors import Refusal
from playground.trace.result import Result

if TYPE_CHECKING:
    from playground.contract.lane_config import LaneConfig
    from playground.decoding.session import Models, Session
    from playground.decoding.visitor_memory import Memory
    from playground.engine.load import Shelf

__all__ = ["Refusal", "Result", "compare", "load", "run", "score"]

NO_DRAFT = "none"
Extras = Iterable[str | tuple[str, Mapping[str, Any]]]
Turns = Iterable[tuple[str, str]]


def load(
    model: str | None = None,
    draft: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str = "none",
    progress: Callable[[float, str], None] | None = None,
    shelf: Shelf | None = None,
    draft_device: str = "",
) -> Models:
    """Load a target and its draft model. Raises Refusal with a message that says what to do.

    model: a name from the catalogue, a folder or a hub id; None is the bundled model. The oracle is a table in float64
        on the CPU, whatever device and dtype are given.
    draft: None is the draft that the catalogue lists for the model, if any, and "none" is no draft. "nf4", "fp4" or
        "int8" is the target itself, quantised. Lanes that cannot translate the tokens of a draft with another
        vocabulary raise Refusal.
    draft_device: the device of the draft; empty is the device of the target.
    progress: called with the fraction done, 0 to 1, and a short text.
    shelf: a cache of loaded models; calls with the same shelf share them.
    """
    from playground.decoding.session import Models
    from playground.engine import catalogue
    from playground.engine import load as loading
    from playground.engine.model import Model
    name = model or catalogue.BUNDLED[0].name
    if name == catalogue.ORACLE:
        return _oracle(draft or NO_DRAFT)
    partner = catalogue.partner(name) if draft is None else "" if draft == NO_DRAFT else draft
    options, report = loading.Loading(device, dtype, quantization), progress or (lambda share, text: None)
    shelf = shelf or loading.Shelf(
        lambda network, tokenizer, facts: Model(network, tokenizer, facts.name, facts.revision, facts.quantization)
    )
    share = 0.5 if partner else 1.0
    target = shelf.get(name, options, lambda done, text: report(done * share, text))
    if not partner:
        return Models(target)
    quantised_target = partner in catalogue.PACKED
    options = replace(
        options, device=draft_device or device, quantization=partner if quantised_target else quantization
    )
    second = shelf.get(name if quantised_target else partner, options,
                       lambda done, text: report(share + done * (1 - share), text))
    return Models(target, second)


def _oracle(draft: str) -> Models:
    from playground.decoding.session import Models
    from playground.engine.table_denoiser import OracleDenoiser
    if draft != NO_DRAFT:
        raise Refusal("The oracle takes no draft model: choose none.", "draft")
    return Models(OracleDenoiser.bundled())


def run(
    strategy: str,
    prompt: str,
    *,
    models: Models | None = None,
    knobs: Mapping[str, Any] | None = None,
    extras: Extras = (),
    chat: bool = False,
    system: str = "",
    context: str = "",
    seed: int = 0,
    max_new_tokens: int = 64,
    stop: str | Iterable[str] = (),
    memory: Memory | None = None,
    before: Turns = (),
) -> Result:
    """Continue a prompt with one strategy.

    `extras` add toggles and fill slots, by name or as (name, knobs). `context` is a passage before the prompt, `before`
    are the earlier (user, assistant) turns of a chat. Strategies that learn across runs store what they learn in
    `memory`, a playground.decoding.visitor_memory.Memory. Without `models` every call loads the bundled pair: load once
    and pass it in. Raises Refusal if the run cannot start. A run that fails later returns with the reason "failed", a
    message and the text so far.
    """
    from playground.contract.lane_config import LaneConfig, assemble
    config = LaneConfig(strategy, dict(knobs or {}), [_extra(extra) for extra in extras])
    assemble(config)  # raises Refusal before a model is loaded
    result = compare(
        [config],
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
    )[0]
    if not result.begun:
        raise Refusal(result.message, strategy)
    return result


def compare(
    lanes: Iterable[str | LaneConfig],
    prompt: str,
    *,
    models: Models | None = None,
    chat: bool = False,
    system: str = "",
    context: str = "",
    seed: int = 0,
    max_new_tokens: int = 64,
    stop: str | Iterable[str] = (),
    memory: Memory | None = None,
    before: Turns = (),
) -> list[Result]:
    """Continue one prompt with several strategies side by side. The results are in the order of `lanes`.

    A lane is the name of a strategy or a LaneConfig. A lane that cannot start or fails has the reason "failed" and a
    message, and the others continue. Raises Refusal if no lane can run. `playground.trace.diff(a.trace, b.trace)`
    finds the first token in which two texts differ.
    """
    from playground.contract.lane_config import LaneConfig
    from playground.decoding.session import Limits, Prompt, prepare
    configs = [LaneConfig(lane) if isinstance(lane, str) else lane for lane in lanes]
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    full_prompt = Prompt(prompt, chat, system, context, tuple(before))
    session = prepare(models or load(), configs, full_prompt, Limits(seed, max_new_tokens, stops), memory=memory)
    return _results(session)


def score(
    text: str, *, models: Models | None = None, chat: bool = False, system: str = "", context: str = ""
) -> list[Result]:
    """Score a given text: one result for the target, and one for the draft model if there is one.

    The first token serves as the prompt, and the `logprobs` of a result belong to the tokens after it. With `chat` the
    text is the user's message in the model's chat template. Raises Refusal for a text of a single token.
    """
    from playground.decoding.scoring import score as read
    from playground.decoding.session import Prompt
    return _results(read(models or load(), Prompt(text, chat, system, context)))


def _extra(extra: str | tuple[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    name, knobs = (extra, {}) if isinstance(extra, str) else extra
    return name, dict(knobs)


def _results(session: Session) -> list[Result]:
    for _ in session:
        pass
    return [Result(session.trace.lane(header.lane)) for header in session.headers]
