"""The decoding playground from Python: load models, run a strategy, compare several, score a text, read what they did.

    import playground

    models = playground.load("Qwen/Qwen3-0.6B")     # nothing named: the models that come with the project
    result = playground.run("sample", "Once upon a time", models=models, knobs={"temperature": 0.7},
    extras=["repetition_penalty"])
    print(result.text, result.metrics["tokens_per_second"])

Importing this takes no torch: that waits until something is loaded or run, so traces can be read anywhere.
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
    """A target and its draft, ready to run; raises Refusal with what to do.

    A model is named by the catalogue, a folder or a hub id; None is the bundled one. A draft of None is the catalogue's
    partner of the model, if it has one; "none" is no draft; "nf4", "fp4" or "int8" is the model itself, its weights
    quantised so, and goes to `draft_device`, beside the target where that is empty. One with tokens of its own is
    refused by the lanes that cannot translate them. `progress` is called with the share done, 0 to 1, and a few words.
    Loads that are given one `shelf` share what is on it. The oracle is a table in float64 on the CPU, however it is
    asked for.
    """
    from playground.decoding.session import Models
    from playground.engine import catalogue
    from playground.engine import load as loading
    from playground.engine.model import Model
    name = model or catalogue.BUNDLED[0].name
    if name == catalogue.ORACLE:
        return _oracle(draft or NO_DRAFT)
    partner = catalogue.partner(name) if draft is None else "" if draft == NO_DRAFT else draft
    how, tell = loading.Loading(device, dtype, quantization), progress or (lambda share, text: None)
    shelf = shelf or loading.Shelf(
        lambda network, tokenizer, facts: Model(network, tokenizer, facts.name, facts.revision, facts.quantization)
    )
    share = 0.5 if partner else 1.0
    target = shelf.get(name, how, lambda done, text: tell(done * share, text))
    if not partner:
        return Models(target)
    packed = partner in catalogue.PACKED
    own = replace(how, device=draft_device or device, quantization=partner if packed else quantization)
    second = shelf.get(name if packed else partner, own,
                       lambda done, text: tell(share + done * (1 - share), text))
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
    """Let one strategy continue a prompt.

    `extras` add toggles and fill slots, by name or as (name, knobs). `context` is a passage read before the prompt,
    `before` are the earlier (user, assistant) turns of a chat. What a strategy learns for later runs stays in `memory`,
    a playground.decoding.visitor_memory.Memory of yours. Without `models` the bundled pair is loaded, each time: load
    once and pass it on. Raises Refusal for what cannot begin; a run that fails on its way comes back with the reason
    "failed", a message and the text so far.
    """
    from playground.contract.lane_config import LaneConfig, assemble
    recipe = LaneConfig(strategy, dict(knobs or {}), [_extra(extra) for extra in extras])
    assemble(recipe)  # what is wrong with it is said before a model is loaded
    result = compare(
        [recipe],
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
    """Let several strategies, names or recipes, continue one prompt side by side; the results are in their order.

    A lane that cannot begin or fails has the reason "failed" and a message, and the others go on. Raises Refusal where
    no lane can run. `playground.trace.diff(a.trace, b.trace)` says where two texts part.
    """
    from playground.contract.lane_config import LaneConfig
    from playground.decoding.session import Limits, Prompt, prepare
    recipes = [LaneConfig(lane) if isinstance(lane, str) else lane for lane in lanes]
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    asked = Prompt(prompt, chat, system, context, tuple(before))
    session = prepare(models or load(), recipes, asked, Limits(seed, max_new_tokens, stops), memory=memory)
    return _results(session)


def score(
    text: str, *, models: Models | None = None, chat: bool = False, system: str = "", context: str = ""
) -> list[Result]:
    """How the models read a text that nobody is asked to write: the target, then the draft where there is one.

    The first token takes the place of the prompt; `logprobs` of a result belong to the tokens after it. In a chat the
    text is the user's message, in the model's own form. Raises Refusal for a text of a single token.
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
