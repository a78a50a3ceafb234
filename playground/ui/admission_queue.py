"""Admission: which runs may use the machine now, which wait, and which are refused because too many wait already.

Every run holds a `Ticket`. A seated ticket may run, a waiting one is in the queue, a resting one belongs to a held run:
it takes no seat and has to queue again to go on. Seats are given to the visitor who has fewest of them, then to who
came first, so nobody is shut out by somebody who sends more requests.
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

PATIENCE = 2.0  # seconds between two reports to somebody whose place has not changed
STOPPING = "The server is stopping: try again in a minute."
PAGE, API, GAME, REPEATS, SURVEY = "page", "api", "game", "repeats", "survey"


@dataclass(frozen=True)
class Visitor:
    """Who sent a request. The session hash is chosen by the client, so it can only make a share smaller, never larger.
    """

    session: str = ""
    address: str = ""

    @classmethod
    def of(cls, request: gr.Request | None, proxies: int = 0) -> Visitor:
        """The visitor behind a request that came through so many trusted proxies, each of which appends to X-Forwarded-
        For.

        Without trusted proxies the header is ignored: anybody can send it.
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
    """Most runs that are seated, that wait, and that are open in all, held ones included."""

    seats: int
    waiting: int
    open: int


@dataclass(frozen=True)
class Capacity:
    """How a machine is shared. The kinds beside the page's own runs together leave it some seats; so does an address to
    the others.
    """

    whole: Share = Share(16, 48, 128)
    address: Share = Share(16, 48, 128)
    session: Share = Share(16, 48, 128)
    kinds: dict[str, Share] = field(
        default_factory=lambda: {
            PAGE: Share(16, 32, 128),
            API: Share(6, 16, 32),
            GAME: Share(4, 16, 32),
            REPEATS: Share(2, 8, 16),
            SURVEY: Share(1, 8, 9),
        }
    )

    @classmethod
    def for_visitors(cls) -> Capacity:
        """Of a public page: one address, perhaps a whole school, gets at most half of everything, one session a quarter
        of that.
        """
        return cls(address=Share(8, 24, 64), session=Share(4, 6, 16))


class AdmissionQueue:
    """Seats for runs, shared by kind, address and session."""

    def __init__(self, capacity: Capacity | None = None):
        self.capacity = capacity or Capacity()
        self._changed = threading.Condition(threading.RLock())  # reentrant: a granted ticket may rest at once
        self._tickets: list[Ticket] = []
        self._numbers = count()
        self._closed = ""

    def join(self, kind: str, visitor: Visitor | None = None) -> Ticket:
        """Ask for a seat; raises Refusal where too many wait already."""
        ticket = Ticket(self, kind, visitor or Visitor())
        with self._changed:
            self._check(ticket)
            self._enqueue(ticket)
        return ticket

    def close(self, sentence: str = STOPPING) -> None:
        """Refuse whoever waits or comes from now on."""
        with self._changed:
            self._closed = sentence
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """How many tickets are seated, waiting and resting."""
        with self._changed:
            states = Counter(ticket.state for ticket in self._tickets)
        return {state: states[state] for state in ("seated", "waiting", "resting")}

    def _check(self, ticket: Ticket) -> None:
        if self._closed:
            raise Refusal(self._closed, "prompt")
        for share, mates, own in self._shares(ticket):
            waiting = sum(mate.state == "waiting" for mate in mates)
            if len(mates) >= share.open or (waiting >= share.waiting and not self._has_seat(ticket)):
                raise Refusal(_own_busy(len(mates)) if own else _busy(waiting), "prompt")

    def _shares(self, ticket: Ticket) -> Iterator[tuple[Share, list[Ticket], bool]]:
        """Every share that a ticket counts towards, with the other tickets in it, and whether it is the visitor's own.
        """
        others, visitor = [other for other in self._tickets if other is not ticket], ticket.visitor
        yield self.capacity.whole, others, False
        yield self.capacity.kinds[ticket.kind], [other for other in others if other.kind == ticket.kind], False
        yield self.capacity.address, [other for other in others if other.visitor.address == visitor.address], True
        if visitor.session:
            yield self.capacity.session, [other for other in others if other.visitor.session == visitor.session], True

    def _has_seat(self, ticket: Ticket) -> bool:
        return all(
            sum(mate.state == "seated" for mate in mates) < share.seats for share, mates, _ in self._shares(ticket)
        )

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.state, ticket.number = "waiting", next(self._numbers)
        if ticket not in self._tickets:
            self._tickets.append(ticket)
        self._seat()

    def _order(self) -> list[Ticket]:
        """Who waits, in the order in which seats are given."""
        seated = [ticket.visitor for ticket in self._tickets if ticket.state == "seated"]
        addresses, sessions = Counter(who.address for who in seated), Counter(who.session for who in seated)
        waiting = [ticket for ticket in self._tickets if ticket.state == "waiting"]
        return sorted(
            waiting,
            key=lambda ticket: (addresses[ticket.visitor.address], sessions[ticket.visitor.session], ticket.number),
        )

    def _seat(self) -> None:
        """Give free seats away; called with the lock held."""
        while ticket := next((ticket for ticket in self._order() if self._has_seat(ticket)), None):
            ticket.state, ticket.since = "seated", monotonic()
            go_on, ticket.go_on = ticket.go_on, None
            if go_on:
                go_on()
        self._changed.notify_all()


class Ticket:
    """One run's claim on a seat. Used by the thread that streams the run, the worker and the acts of its visitor."""

    def __init__(self, queue: AdmissionQueue, kind: str, visitor: Visitor):
        self.queue, self.kind, self.visitor = queue, kind, visitor
        self.state, self.number, self.since = "waiting", 0, monotonic()  # since: when it was seated or began to rest
        self.go_on: Callable[[], None] | None = None

    def wait(self) -> Iterator[int]:
        """The place in the queue, 1 for the next: at once, whenever it changes, and every PATIENCE seconds until the
        ticket is seated.

        Raises Refusal where the queue closes.
        """
        changed = self.queue._changed
        while True:
            with changed:
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
        """Place in the queue, 1 for the next; 0 where the ticket does not wait."""
        with self.queue._changed:
            order = self.queue._order()
            return order.index(self) + 1 if self in order else 0

    def rest(self) -> None:
        """Give the seat to somebody else for as long as the run is held."""
        with self.queue._changed:
            if self.state in ("seated", "waiting"):
                self.state, self.go_on, self.since = "resting", None, monotonic()
                self.queue._seat()

    def ask_again(self, go_on: Callable[[], None]) -> None:
        """Queue for a seat again, and call `go_on` with it: at once where the ticket has one or one is free."""
        with self.queue._changed:
            if self.state == "seated":
                return go_on()
            if self.state == "resting" and not self.queue._closed:
                self.go_on = go_on
                self.queue._enqueue(self)
            elif self.state == "waiting":
                self.go_on = go_on

    def leave(self) -> None:
        """Give back all that the ticket stands for; a second time does nothing."""
        with self.queue._changed:
            if self in self.queue._tickets:
                self.queue._tickets.remove(self)
                self.state, self.go_on = "left", None
                self.queue._seat()


def _busy(waiting: int) -> str:
    return f"The page is busy: {waiting} run{'' if waiting == 1 else 's'} {'is' if waiting == 1 else 'are'} waiting; try again in a minute."


def _own_busy(runs: int) -> str:
    return f"Your share of this page is used up: {runs} of your runs are open; let one end, or stop one, and try again."
