"""Admission: which runs may use the machine now, which wait, and which are refused because too many are waiting.

Every run holds a `Ticket`. A seated ticket may run, a waiting one is in the queue, a resting one belongs to a held run:
it takes no seat and has to queue again to resume. Seats are given to the visitor who has the fewest, then in order of
arrival, so one visitor's requests cannot shut out another's.
"""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import monotonic

import gradio as gr

from playground.errors import Refusal

PATIENCE = 2.0  # seconds between two reports of an unchanged place
STOPPING = "The server is stopping: try again in a minute."
DISPLACED = "The page is busy, and your address has the most runs in its queue: try again in a minute."
PAGE, API, GAME, REPEATS, SURVEY = "page", "api", "game", "repeats", "survey"


@dataclass(frozen=True)
class Visitor:
    """Who sent a request. The client chooses the session hash, so it can only make a share smaller, never larger."""

    session: str = ""
    address: str = ""

    @classmethod
    def of(cls, request: gr.Request | None, proxies: int = 0) -> Visitor:
        """The visitor behind a request. `proxies` counts the trusted proxies, each of which appends to X-Forwarded-For.

        Without trusted proxies the header is ignored, since any client can send it.
        """
        if request is None or getattr(request, "request", None) is None:
            return cls()
        return cls(request.session_hash or "", address_of(request.request, proxies))


def address_of(request, proxies: int) -> str:
    """The client's address of a Starlette request: the peer's, or the entry that the outermost trusted proxy wrote."""
    forwarded = [part.strip() for part in request.headers.get("x-forwarded-for", "").split(",") if part.strip()]
    if proxies and forwarded:
        return forwarded[-min(proxies, len(forwarded))]
    return request.client.host if request.client else ""


@dataclass(frozen=True)
class Share:
    """Maximum number of runs that are seated, that wait, and that are open in total, including held ones."""

    seats: int
    waiting: int
    open: int


@dataclass(frozen=True)
class QueueLimits:
    """How a machine is shared. The other kinds of runs leave some seats to the playground page, and each address to
    other addresses.

    Many seats make every run slower and let its first token come within a second or two: with 20 of them, half of the
    visitors of `tools/load_page.py` waited longer than 20 s for a seat.
    """

    whole: Share = Share(40, 48, 128)
    address: Share = Share(40, 48, 128)
    session: Share = Share(40, 48, 128)
    kinds: dict[str, Share] = field(
        default_factory=lambda: {
            PAGE: Share(40, 32, 128),
            API: Share(16, 16, 32),
            GAME: Share(6, 16, 32),
            REPEATS: Share(2, 8, 16),
            SURVEY: Share(1, 8, 9),
        }
    )

    @classmethod
    def for_visitors(cls) -> QueueLimits:
        """For a public page: one address, which may be a whole school, gets at most half of everything."""
        return cls(address=Share(16, 24, 64), session=Share(4, 6, 16))


class AdmissionQueue:
    """Seats for runs, shared by kind, address and session."""

    def __init__(self, capacity: QueueLimits | None = None):
        self.capacity = capacity or QueueLimits()
        self._changed = threading.Condition(threading.RLock())  # reentrant: a ticket may rest as soon as it is seated
        self._tickets: list[Ticket] = []
        self._numbers = count()
        self._closed = ""

    def join(self, kind: str, visitor: Visitor | None = None) -> Ticket:
        """Ask for a seat; raises Refusal if too many are waiting."""
        ticket = Ticket(self, kind, visitor or Visitor())
        with self._changed:
            self._check(ticket)
            self._enqueue(ticket)
        return ticket

    def close(self, sentence: str = STOPPING) -> None:
        """Refuse all waiting and all future tickets."""
        with self._changed:
            self._closed = sentence
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """How many tickets are seated, waiting and resting."""
        with self._changed:
            states = Counter(ticket.state for ticket in self._tickets)
        return {state: states[state] for state in ("seated", "waiting", "resting")}

    def sessions(self) -> set[str]:
        """The sessions with a run that is seated, waits or is held."""
        with self._changed:
            return {ticket.visitor.session for ticket in self._tickets}

    def has(self, session: str) -> bool:
        with self._changed:
            return any(ticket.visitor.session == session for ticket in self._tickets)

    def _check(self, ticket: Ticket) -> None:
        if self._closed:
            raise Refusal(self._closed, "prompt")
        for share, others, own in self._shares(ticket):
            if own and self._is_full(share, others, ticket):
                raise Refusal(_own_busy(len(others)), "prompt")
        while full := self._full_for_all(ticket):
            self._make_room(full, ticket)

    def _is_full(self, share: Share, others: list[Ticket], ticket: Ticket) -> bool:
        waiting = sum(other.state == "waiting" for other in others)
        return len(others) >= share.open or (waiting >= share.waiting and not self._has_seat(ticket))

    def _full_for_all(self, ticket: Ticket) -> list[Ticket]:
        """The other tickets in the first share of all visitors that has no room for a ticket; none if all have."""
        shares = ((share, others) for share, others, own in self._shares(ticket) if not own)
        return next((others for share, others in shares if self._is_full(share, others, ticket)), [])

    def _make_room(self, others: list[Ticket], ticket: Ticket) -> None:
        """End the newest waiting ticket of the address with the most, if it then still has more than the new ticket's.
        Raises Refusal if none has.
        """
        counts = Counter(other.visitor.address for other in others)
        waiting = [other for other in others if other.state == "waiting" and other.go_on is None]
        last = max(waiting, key=lambda other: (counts[other.visitor.address], other.number), default=None)
        if last is None or counts[last.visitor.address] <= counts[ticket.visitor.address] + 1:
            raise Refusal(_busy(sum(other.state == "waiting" for other in others)), "prompt")
        last.state = "displaced"
        self._tickets.remove(last)
        self._changed.notify_all()

    def _shares(self, ticket: Ticket) -> Iterator[tuple[Share, list[Ticket], bool]]:
        """Every share that a ticket counts towards, the other tickets in it, and whether it is the visitor's own."""
        others, visitor = [other for other in self._tickets if other is not ticket], ticket.visitor
        yield self.capacity.whole, others, False
        yield self.capacity.kinds[ticket.kind], [other for other in others if other.kind == ticket.kind], False
        yield self.capacity.address, [other for other in others if other.visitor.address == visitor.address], True
        if visitor.session:
            yield self.capacity.session, [other for other in others if other.visitor.session == visitor.session], True

    def _has_seat(self, ticket: Ticket) -> bool:
        return all(
            sum(other.state == "seated" for other in others) < share.seats for share, others, _ in self._shares(ticket)
        )

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.state, ticket.number = "waiting", next(self._numbers)
        if ticket not in self._tickets:
            self._tickets.append(ticket)
        self._seat()

    def _order(self) -> list[Ticket]:
        """The waiting tickets, in the order in which they get seats."""
        seated = [ticket.visitor for ticket in self._tickets if ticket.state == "seated"]
        addresses, sessions = Counter(who.address for who in seated), Counter(who.session for who in seated)
        waiting = [ticket for ticket in self._tickets if ticket.state == "waiting"]
        return sorted(
            waiting,
            key=lambda ticket: (addresses[ticket.visitor.address], sessions[ticket.visitor.session], ticket.number),
        )

    def _seat(self) -> None:
        """Give free seats to waiting tickets; called with the lock held."""
        while ticket := next((ticket for ticket in self._order() if self._has_seat(ticket)), None):
            ticket.state, ticket.since = "seated", monotonic()
            go_on, ticket.go_on = ticket.go_on, None
            if go_on:
                go_on()
        self._changed.notify_all()


class Ticket:
    """One run's claim on a seat. Used by the thread that streams the run, the worker and the visitor's handlers."""

    def __init__(self, queue: AdmissionQueue, kind: str, visitor: Visitor):
        self.queue, self.kind, self.visitor = queue, kind, visitor
        self.state, self.number, self.since = "waiting", 0, monotonic()  # since: when it entered this state
        self.go_on: Callable[[], None] | None = None

    def wait(self) -> Iterator[int]:
        """Yield the place in the queue (1 is next) at once, on every change, and every PATIENCE seconds until seated.

        Raises Refusal when the queue closes, or the place goes to an address that has fewer.
        """
        changed = self.queue._changed
        while True:
            with changed:
                if self.state == "displaced":
                    raise Refusal(DISPLACED, "prompt")
                if self.state != "waiting":
                    return
                if self.queue._closed:
                    raise Refusal(self.queue._closed, "prompt")
                place = self.place
            yield place
            with changed:
                changed.wait_for(partial(self._has_moved, place), PATIENCE)

    def _has_moved(self, place: int) -> bool:
        return self.state != "waiting" or self.place != place or bool(self.queue._closed)

    @property
    def place(self) -> int:
        """Place in the queue (1 is next); 0 if the ticket is not waiting."""
        with self.queue._changed:
            order = self.queue._order()
            return order.index(self) + 1 if self in order else 0

    @property
    def waited(self) -> float:
        """Seconds that a waiting ticket has been in the queue."""
        return monotonic() - self.since

    def rest(self) -> None:
        """Give up the seat for as long as the run is held."""
        with self.queue._changed:
            if self.state in ("seated", "waiting"):
                self.state, self.go_on, self.since = "resting", None, monotonic()
                self.queue._seat()

    def ask_again(self, go_on: Callable[[], None]) -> None:
        """Queue for a seat again and call `go_on` once seated: at once if the ticket has a seat or one is free."""
        with self.queue._changed:
            if self.state == "seated":
                return go_on()
            if self.state == "resting" and not self.queue._closed:
                self.go_on, self.since = go_on, monotonic()
                self.queue._enqueue(self)
            elif self.state == "waiting":
                self.go_on = go_on

    def leave(self) -> None:
        """Release the ticket and its seat; calling it again does nothing."""
        with self.queue._changed:
            if self in self.queue._tickets:
                self.queue._tickets.remove(self)
                self.state, self.go_on = "left", None
                self.queue._seat()


def _busy(waiting: int) -> str:
    runs = "1 run is" if waiting == 1 else f"{waiting} runs are"
    return f"The page is busy: {runs} waiting; try again in a minute."


def _own_busy(runs: int) -> str:
    return f"Your share of this page is used up: {runs} of your runs are open; stop one, or wait for one to end."
