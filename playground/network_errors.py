"""Why a connection failed, in words: HTTP libraries pass on the text of the operating system, or only the name of an
error.
"""
from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator

UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


def connection_error(reason: BaseException) -> str:
    """What went wrong at the other end, as part of a sentence; empty for an error that is none of a connection."""
    causes = list(_causes(reason))
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "its name cannot be resolved"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return "it refuses the connection"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "no secure connection can be made"
    if any(isinstance(cause, OSError) and cause.errno in UNREACHABLE for cause in causes):
        return "there is no route to it"
    return ""


def _causes(reason: BaseException | None) -> Iterator[BaseException]:
    """The error, those it comes from, and those of a group: a host may have several addresses."""
    while reason is not None:
        yield reason
        for one in getattr(reason, "exceptions", ()):
            yield from _causes(one)
        reason = reason.__cause__ or reason.__context__
