"""Uploaded files: a folder of the page's own, and how many files and bytes an address and all may have in it.

A file is read and deleted right after it was uploaded. What is not read is deleted after AGE, or earlier when a newer
one needs the place: of the same address, or of the address with the most. Gradio also stores files that it never
mentions again, of other fields of a form; such a form is refused.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from playground.ui.guard.request_shares import CLIENT, Denied, Most

PLACE = "/gradio_api/upload"
AGE = 600.0  # seconds
PREFIX = "playground-"  # of the folder's name
PARTS = 4  # files of one request
FILES, BYTES = Most(16, 64), Most(20_000_000, 64_000_000)
FIELD = re.compile(rb'\s*content-disposition: form-data; name="files"; filename="[^"\r\n]*"(?:\r\n|\Z)', re.IGNORECASE)


def own_folder() -> None:
    """Let Gradio store files in a new folder that only this process uses; its own is shared by all programs."""
    try:
        os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix=PREFIX, dir=os.environ.get("GRADIO_TEMP_DIR"))
    except OSError:  # no folder can be written to: the page works, and an upload is refused
        pass


@dataclass(frozen=True)
class Upload:
    path: Path
    address: str
    size: int


class Uploads:
    """The stored files that have not been read, the oldest first."""

    def __init__(self, files: Most = FILES, size: Most = BYTES):
        self.files, self.size = files, size
        self._known: list[Upload] = []
        self._lock = threading.Lock()

    def add(self, address: str, paths: list[Path]) -> None:
        """Count files that have been stored; older ones make room."""
        with self._lock:
            self._known += [Upload(path, address, path.stat().st_size) for path in paths if path.exists()]
            self._forget_read()
            while mine := self._too_many(address):
                self._delete(mine)

    def _forget_read(self) -> None:
        self._known = [upload for upload in self._known if upload.path.exists()]

    def _too_many(self, address: str) -> Upload | None:
        """The file to delete next, if the address or all have too much."""
        mine = [upload for upload in self._known if upload.address == address]
        if len(mine) > self.files.address or sum(upload.size for upload in mine) > self.size.address:
            return mine[0]
        if len(self._known) > self.files.whole or sum(upload.size for upload in self._known) > self.size.whole:
            greediest = Counter(upload.address for upload in self._known).most_common(1)[0][0]
            return next(upload for upload in self._known if upload.address == greediest)
        return None

    def _delete(self, upload: Upload) -> None:
        delete(upload.path)
        self._known.remove(upload)


def delete(path: Path) -> None:
    """Delete a file and the folder that it was alone in."""
    path.unlink(missing_ok=True)
    with suppress(OSError):  # another file is in it
        path.parent.rmdir()


class StoredFiles:
    """What lies in a folder of this process. Its age counts from the sweep that saw it first, unchanged since: times of
    files follow the wall clock, which may be set.
    """

    def __init__(self, folder: Path, age: float = AGE):
        self.folder, self.age = folder, age
        self._since: dict[tuple[Path, int], float] = {}  # by path and change

    def sweep(self) -> None:
        """Delete files that are older than `age` seconds, and folders that are empty since then."""
        if not self.folder.name.startswith(PREFIX):
            return
        now, known = monotonic(), self._since
        self._since = {one: known.get(one, now) for one in _changes(self.folder)}
        for (path, _), since in self._since.items():
            if now - since > self.age:
                _remove_unused(path)


def _changes(folder: Path) -> Iterator[tuple[Path, int]]:
    """Each path below a folder and when it was changed, files before the folders they are in. What is deleted meanwhile
    is passed over, folders too, as `Path.rglob` does not.
    """
    for parent, folders, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in (*files, *folders)):
            with suppress(OSError):
                yield path, path.stat().st_ctime_ns


def remove(folder: Path) -> None:
    """Delete a folder of this process."""
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(path: Path) -> None:
    with suppress(OSError):  # a folder that is not empty, or deleted meanwhile
        path.rmdir() if path.is_dir() else delete(path)


class UploadGuard:
    """ASGI middleware, inside the request guard, which has read the body: checks forms, and counts stored files."""

    def __init__(self, app: ASGIApp, uploads: Uploads):
        self.app, self.uploads = app, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_upload = scope["type"] == "http" and scope["method"] == "POST"
        if not is_upload or scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")).rstrip("/") != PLACE:
            await self.app(scope, receive, send)
            return
        whole = await receive()
        check_form(Headers(scope=scope).get("content-type", ""), whole.get("body", b""))
        messages: list[Message] = [whole]
        answer = bytearray()

        async def read() -> Message:
            return messages.pop() if messages else await receive()

        async def count(message: Message) -> None:
            answer.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.uploads.add(CLIENT.get(), _paths(bytes(answer)))
            await send(message)

        await self.app(scope, read, count)


def check_form(content_type: str, body: bytes) -> None:
    """Raise Denied unless a form has only files of the field `files`, at most PARTS."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise Denied(400, "An upload must be a form (multipart/form-data).")
    parts = body.split(b"--" + boundary)[1:-1]
    if len(parts) > PARTS:
        raise Denied(413, f"A request may upload at most {PARTS} files: send fewer.")
    for part in parts:
        head = part.partition(b"\r\n\r\n")[0]
        if not FIELD.match(head) or head.lower().count(b"content-disposition") != 1:
            raise Denied(400, 'The form of an upload may have only the field "files".')


def _paths(answer: bytes) -> list[Path]:
    """The stored files that Gradio's answer names; none if it is an error."""
    try:
        named = json.loads(answer)
    except ValueError:
        return []
    return [Path(path) for path in named if isinstance(path, str)] if isinstance(named, list) else []
