"""The routes of a class, and the guard that keeps the page itself to the presenter.

Followers have a page without Gradio: the live view fed by server-sent events. Everything else of the site is refused to
them, so that nobody on the network can run anything on the presenter's machine.
"""
from __future__ import annotations

import io
import json
import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import segno
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from playground.asset_files import ASSETS
from playground.errors import Refusal
from playground.page_scripts import joined
from playground.player.live_view_assets import script, styles
from playground.request_limits import LOCAL
from playground.ui.classroom.classroom import STREAMS, Classroom
from playground.ui.play.kept_runs import unpacked
from playground.ui.server.frame_log import EventStream

PLACE = "/classroom"
PRESENTER, FOLLOWER = "classroom-presenter", "classroom-follower"  # cookies
OPEN = ("/health", "/gradio_api/startup-events")  # the second is requested by Gradio itself at launch
COOKIE = {"httponly": True, "samesite": "strict", "path": "/"}
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'"
)
BLANK = re.compile(r"\{\{(\w+)\}\}")
Answer = Callable[[Request], Awaitable[Response]]


class ClassroomGuard:
    """ASGI middleware: requests beyond PLACE need the presenter's cookie, or that of the follower with the controls."""

    def __init__(self, app: ASGIApp, classroom: Classroom):
        self.app, self.classroom = app, classroom

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self.app(scope, receive, send)
            return
        await self._rejection(scope)(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN or path == PLACE or path.startswith(f"{PLACE}/"):
            return True
        cookies = Request({**scope, "type": "http"}).cookies
        return self.classroom.may_run(cookies.get(PRESENTER, ""), cookies.get(FOLLOWER, ""))

    def _rejection(self, scope: Scope) -> Response:
        if scope.get("method") in ("GET", "HEAD") and scope["path"] == "/":
            return RedirectResponse(PLACE, 303)
        return JSONResponse({"detail": "Only the presenter of this class can use this page."}, 403)


def guard_of(classroom: Classroom) -> Middleware:
    return Middleware(ClassroomGuard, classroom=classroom)


def routes_of(classroom: Classroom) -> list[Route]:
    """All routes of a class."""
    answers = ClassroomAnswers(classroom)
    return [
        Route(PLACE, answers.page),
        Route(f"{PLACE}/present", answers.present),
        Route(f"{PLACE}/join", answers.join, methods=["POST"]),
        Route(f"{PLACE}/stream", answers.stream),
        Route(f"{PLACE}/vote", answers.vote, methods=["POST"]),
        Route(f"{PLACE}/state", answers.state),
        Route(f"{PLACE}/trace", answers.trace, methods=["POST"]),
        Route(f"{PLACE}/qr", answers.qr),
        Route(f"{PLACE}/question", answers.question, methods=["POST"]),
        Route(f"{PLACE}/answer", answers.answer, methods=["POST"]),
        Route(f"{PLACE}/control", answers.control, methods=["POST"]),
    ]


class ClassroomAnswers:
    def __init__(self, classroom: Classroom):
        self.classroom = classroom

    async def page(self, request: Request) -> Response:
        """The followers' page; it asks for the code if this browser has not joined."""
        page = _page().replace("{{joined}}", json.dumps(self._token(request) in self.classroom.followers))
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-store"})

    async def present(self, request: Request) -> Response:
        """Make this browser the presenter's, if the link has the key."""
        key = request.query_params.get("key", "")
        if not self.classroom.is_presenter(key):
            return _refused("This link is not the presenter's: copy the whole link from the terminal.", 403)
        answer = RedirectResponse("/#join", 303)  # the page opens the slide that shows the class how to join
        answer.set_cookie(PRESENTER, key, **COOKIE)
        return answer

    async def qr(self, request: Request) -> Response:
        """The QR code of the class's link, which brings the code along: as an SVG image, for the presenter's slide."""
        if not self._is_presenter(request):
            return _refused("Only the presenter sees the class.", 403)
        image = io.BytesIO()
        link = f"{self.classroom.link}#{self.classroom.code}"
        segno.make_qr(link).save(image, kind="svg", omitsize=True, xmldecl=False, dark="#000", light="#fff")
        return Response(image.getvalue(), media_type="image/svg+xml", headers={"Cache-Control": "no-store"})

    async def join(self, request: Request) -> Response:
        given = await _fields(request)
        address = request.client.host if request.client else ""
        try:
            await self.classroom.attempts.turn(address)
            token = self.classroom.join(str(given.get("code", "")), str(given.get("name", "")), address)
        except Refusal as refusal:
            return _refused(str(refusal), 429 if "too many" in str(refusal) else 403)
        answer = JSONResponse({})
        answer.set_cookie(FOLLOWER, token, **COOKIE)
        return answer

    async def stream(self, request: Request) -> Response:
        follower = self.classroom.followers.get(self._token(request))
        if follower is None:
            return _refused("Join the class first.", 403)
        if follower.streams >= STREAMS:
            return _refused(f"This class is open in {STREAMS} tabs already: close one.", 429)
        return EventStream(self.classroom.stream(self._token(request)))

    async def vote(self, request: Request) -> Response:
        if self._token(request) not in self.classroom.followers:
            return _refused("Join the class first.", 403)
        given = await _fields(request)
        return _done(lambda: self.classroom.vote(self._token(request), str(given.get("id", "")), given.get("value")))

    async def state(self, request: Request) -> Response:
        """For the presenter the whole class; for the follower with the controls only that it has them."""
        if self._is_presenter(request):
            return JSONResponse(self.classroom.state())
        if self.classroom.may_run("", self._token(request)):
            return JSONResponse({"controls": True})
        return _refused("Only the presenter sees the class.", 403)

    async def trace(self, request: Request) -> Response:
        """Show the class a trace file that was opened on the page; allowed for everyone who may run lanes."""
        if not self.classroom.may_run(request.cookies.get(PRESENTER, ""), self._token(request)):
            return _refused("Only the presenter shows the class a trace.", 403)
        packed = str((await _fields(request)).get("kept", ""))

        def show() -> None:
            self.classroom.show_trace(unpacked(packed, LOCAL.kept_bytes))
        return await run_in_threadpool(_done, show)

    async def question(self, request: Request) -> Response:
        """Ask the question of a lesson's step; allowed for everyone who may run lanes."""
        if not self.classroom.may_run(request.cookies.get(PRESENTER, ""), self._token(request)):
            return _refused("Only the presenter asks the class.", 403)
        given = await _fields(request)
        return _done(lambda: self.classroom.ask(str(given.get("lesson", "")), given.get("step")))

    async def answer(self, request: Request) -> Response:
        """Tell the class what the run answers to the question; allowed for everyone who may run lanes."""
        if not self.classroom.may_run(request.cookies.get(PRESENTER, ""), self._token(request)):
            return _refused("Only the presenter tells the class what the run answers.", 403)
        given = await _fields(request)
        asked, said = str(given.get("id", "")), str(given.get("said", ""))
        return _done(lambda: self.classroom.reveal(asked, given.get("choice"), given.get("value"), said))

    async def control(self, request: Request) -> Response:
        """Hand the controls to a follower by number, or with null take them back."""
        if not self._is_presenter(request):
            return _refused("Only the presenter hands over the controls.", 403)
        number = (await _fields(request)).get("follower")
        return _done(lambda: self.classroom.hand_over(number if type(number) is int else None))

    def _is_presenter(self, request: Request) -> bool:
        return self.classroom.is_presenter(request.cookies.get(PRESENTER, ""))

    def _token(self, request: Request) -> str:
        return request.cookies.get(FOLLOWER, "")


async def _fields(request: Request) -> dict[str, Any]:
    """The JSON object in a body; empty for anything else. The request guard has limited its size."""
    try:
        given = json.loads(await request.body())
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _done(act: Callable[[], None]) -> Response:
    try:
        act()
    except Refusal as refusal:
        return _refused(str(refusal), 400)
    return JSONResponse({})


def _refused(sentence: str, status: int) -> JSONResponse:
    return JSONResponse({"detail": sentence}, status)


@cache
def _page() -> str:
    source = json.dumps(script(), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "frame": _read("palette.css") + _read("live/standalone.css") + _read("classroom/follow.css"),
        "styles": styles(),
        "source": source,
        "script": joined("classroom/follow.js"),
        "mark": _read("mark.svg"),
        "joined": "{{joined}}",
    }
    return BLANK.sub(lambda blank: parts[blank[1]], _read("classroom/follow.html"))


def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
