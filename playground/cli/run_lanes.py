"""`run` and `compare`: one or several lanes on one prompt."""
from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from playground import with_weights
from playground.cli.input_files import check_place, read_text
from playground.cli.lane_options import read_recipe, read_recipes
from playground.cli.load_models import load, show_progress
from playground.cli.terminal_view import CONTROL, Screen, costs, report
from playground.contract.lane_config import LaneConfig, check_startable
from playground.errors import Refusal
from playground.questions.questions import judging, known, turns
from playground.remote.remote_server import RemoteServer
from playground.trace.comparison import baseline_of, compared
from playground.trace.result import Result

if TYPE_CHECKING:
    from playground.decoding.session import Session


def run(options: Namespace) -> bool:
    """Run one lane. Raises Refusal if it cannot start; if it fails later, its text is shown first."""
    if options.name is None and options.remote is None:
        raise Refusal("There is no strategy to run: name one, such as greedy, or a server with --remote.", "name")
    recipes = [] if options.name is None else [read_recipe(options.name, options.set, options.extras)]
    session, stopped = _decode(options, recipes)
    if len(session.headers) > 1:
        return _report(session, options, stopped)
    result = Result(session.trace)
    if result.begun:
        print(json.dumps(result.to_json()) if options.json else f"\n{costs([result])}")
        _save(session, options.trace)
    if result.reason == "failed":
        raise Refusal(result.message)
    return stopped


def compare(options: Namespace) -> bool:
    """Run several lanes. The report lists failed lanes; raises Refusal after it if all of them failed."""
    session, stopped = _decode(options, read_recipes(options.names, options.set, options.extras))
    return _report(session, options, stopped)


def _report(session: Session, options: Namespace, stopped: bool) -> bool:
    """Print the results of several lanes and save the trace; raises Refusal after it if all of them failed."""
    results = [Result(session.trace.lane(header.lane)) for header in session.headers]
    print(json.dumps(compared(results, baseline_of(results))) if options.json else f"\n{report(results)}")
    _save(session, options.trace)
    if all(result.reason == "failed" for result in results):
        raise Refusal(results[0].message)
    return stopped


def _decode(options: Namespace, recipes: list[LaneConfig]) -> tuple[Session, bool]:
    """Run the lanes to their end; the second value is True if Ctrl-C stopped them. Input is checked before a model is
    loaded.
    """
    needs, prompt = check_startable(recipes, options.context) if recipes else set(), _prompt(options)
    server, tools = _server(options), read_text(options.tools) if options.tools else ""
    check_place(options.trace)
    from playground.decoding.lane_checks import remarks
    from playground.decoding.limits import Limits  # late, since it imports torch
    from playground.decoding.prompt import Prompt
    from playground.decoding.session import Session, prepare
    limits = Limits(options.seed, options.max_new_tokens, tuple(options.stop))
    asked = Prompt(prompt, options.chat, options.system, options.context, turns(options.before), options.form, tools)
    limits.check()
    asked.check()
    judge = judging(known(prompt, asked.before, options.context) if options.chat else None)
    if recipes:
        models = with_weights(load(options, draft="draft" in needs), recipes, show_progress)
        session = prepare(models, recipes, asked, limits, judge=judge)
        for remark in [*remarks(recipes), *session.headers[0].remarks]:
            print(CONTROL.sub("\ufffd", remark), file=sys.stderr)
        if (bounds := getattr(models.target, "bounds", "")) and not options.json:  # a canvas has none
            print(f"{models.target.name}: {bounds}.", file=sys.stderr)
    else:
        session = Session([], [], judge)
    if server:
        from playground.remote.remote_lane import add_lane
        add_lane(session, server, asked, limits)
    return session, _drive(session, shown=not options.json)


def _server(options: Namespace) -> RemoteServer | None:
    """The server of the remote lane, if one is named; raises Refusal."""
    if options.remote is None:
        if options.remote_model:
            raise Refusal("A remote model needs a server: name its address with --remote.", "remote")
        return None
    return RemoteServer.given(options.remote, options.remote_model, temperature=options.remote_temperature)


def _drive(session: Session, shown: bool) -> bool:
    watch = Screen(session.headers).show if shown else lambda stamped: None
    try:
        for stamped in session:
            watch(stamped)
    except KeyboardInterrupt:
        for stamped in session.stop():
            watch(stamped)
        return True
    return False


def _prompt(options: Namespace) -> str:
    text = read_text(options.prompt_file) if options.prompt_file is not None else options.prompt
    if not text.strip():
        raise Refusal("The prompt is empty: write a few words for the model to continue.", "prompt")
    if options.system and not options.chat:
        raise Refusal("A system message needs a chat: add --chat, or omit --system.", "system")
    if options.before and not options.chat:
        raise Refusal("Earlier turns need a chat: add --chat, or omit --before.", "before")
    return text


def _save(session: Session, path: str | None) -> None:
    if path is not None:
        session.trace.save(path)
