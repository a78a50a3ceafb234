"""The address of a server with the OpenAI completions interface, checked before anything is sent to it."""
from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from playground.errors import Refusal
from playground.request_limits import check_text, in_range, is_public, quoted

KEY = "PLAYGROUND_REMOTE_KEY"  # environment variable
LONGEST = 400  # characters of an address, a model name or a key
SENDABLE = re.compile(r"[!-~]*")  # a key is one line of a header
HOST = re.compile(r"[A-Za-z0-9._:-]+")
VERSION = re.compile(r"/v\d+$")
ABOUT = "remote"


@dataclass(frozen=True)
class RemoteServer:
    """A server and one of its models. The key is sent to this server and never written or shown."""

    address: str  # "http://127.0.0.1:8000"; "/v1" is added unless the address ends in a version
    model: str
    key: str = field(default="", repr=False)
    temperature: float = 0.0

    @classmethod
    def given(cls, address: str, model: str, key: str = "", temperature: float = 0.0) -> RemoteServer:
        """A checked server; without a key, the one of the environment. Raises Refusal."""
        server = cls(address.strip(), model.strip(), key.strip() or os.environ.get(KEY, "").strip(), temperature)
        server.check()
        return server

    def check(self) -> None:
        """Raise Refusal for a public page, since a visitor's address may be on the network behind it, and for an
        address, a model, a key or a temperature that cannot be sent.
        """
        if is_public():
            raise Refusal("This public page does not connect to other servers: run the playground yourself.", ABOUT)
        for name in ("address", "model", "key"):
            if not isinstance(getattr(self, name), str) or len(getattr(self, name)) > LONGEST:
                raise Refusal(f"The {name} of the server must be text of at most {LONGEST} characters.", ABOUT)
        self._check_address(self._parts())
        check_text(self.model, "model of the server", about=ABOUT)
        if not self.model:
            raise Refusal("The remote lane has no model: name one that the server lists under /v1/models.", ABOUT)
        if not SENDABLE.fullmatch(self.key):
            raise Refusal("The key of the server contains spaces or special characters: copy it again.", ABOUT)
        if not in_range(self.temperature, 0, 2):
            raise Refusal("The temperature of the remote lane must be a number from 0 to 2.", ABOUT)

    def _check_address(self, parts: SplitResult) -> None:
        known = parts.scheme in ("http", "https") and HOST.fullmatch(parts.hostname or "")
        if not known or not SENDABLE.fullmatch(self.address):
            raise Refusal(
                f"{quoted(self.address)} is not the address of a server: write it as http://127.0.0.1:8000.", ABOUT
            )
        if parts.username or parts.password or parts.query or parts.fragment:
            raise Refusal(
                "The address of the server contains a user name, a password or a query, which would be shown: write "
                f"only host and port, and set the key with {KEY}.", ABOUT
            )

    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.address)
            _ = parts.port  # raises ValueError if it is no port
        except ValueError:
            return SplitResult("", "", "", "", "")
        return parts

    @property
    def place(self) -> str:
        """Host and port, for the screen and the trace."""
        return self._parts().netloc

    def url(self, path: str) -> str:
        """The URL of an endpoint such as "completions"."""
        base = self.address.rstrip("/")
        return f"{base if VERSION.search(base) else f'{base}/v1'}/{path}"
