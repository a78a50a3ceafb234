"""Admission: the queue alone, and the pages' streams over it with sessions that only count."""
from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from chromium import PATIENCE
from counting import Counting, committed, counting_site

from playground.errors import Refusal
from playground.request_limits import Rules
from playground.ui.components.settings import Settings
from playground.ui.guard.readers import FrameReader
from playground.ui.play import run_handlers
from playground.ui.play.visit import Visit
from playground.ui.server import admission_queue
from playground.ui.server.admission_queue import (
    API,
    GAME,
    PAGE,
    REPEATS,
    STOPPING,
    SURVEY,
    AdmissionQueue,
    QueueLimits,
    Share,
    Visitor,
    address_of,
)
from playground.ui.server.worker import Worker
from support.visits import request, stream

LOUD, QUIET = Visitor("loud", "10.0.0.1"), Visitor("quiet", "10.0.0.2")


def small(seats: int, waiting: int = 48) -> AdmissionQueue:
    return AdmissionQueue(QueueLimits(whole=Share(seats, waiting, 128)))


def loud(number: int) -> Visitor:
    """One address that sends every request under another session."""
    return Visitor(f"session {number}", LOUD.address)


def fill(queue: AdmissionQueue, *visitors: Visitor, kind: str = PAGE) -> list:
    """Tickets of those who were admitted or queued."""
    tickets = []
    for visitor in visitors:
        try:
            tickets.append(queue.join(kind, visitor))
        except Refusal:
            break
    return tickets


# --- seats ---

def test_seats_are_given_in_order_of_arrival():
    queue = small(1)
    first, second, third = (queue.join(PAGE) for _ in range(3))
    assert [ticket.place for ticket in (first, second, third)] == [0, 1, 2] and next(second.wait()) == 1
    first.leave()
    assert [*second.wait()] == [] and third.place == 1


def test_a_free_seat_goes_to_a_waiting_visitor_at_once():
    queue = small(1)
    first, second = queue.join(PAGE), queue.join(PAGE)
    waiting = threading.Thread(target=lambda: list(second.wait()), daemon=True)
    waiting.start()
    first.leave()
    waiting.join(PATIENCE)
    assert not waiting.is_alive() and second.state == "seated"


def test_one_address_cannot_take_all_seats_with_many_sessions():
    queue = AdmissionQueue(QueueLimits.for_visitors())
    taken = fill(queue, *map(loud, range(80)))
    assert sum(ticket.state == "seated" for ticket in taken) == 16
    assert queue.join(PAGE, QUIET).state == "seated"


def test_a_visitor_with_no_run_comes_before_one_with_many():
    queue = AdmissionQueue(QueueLimits(whole=Share(2, 48, 128)))
    early, _, later = fill(queue, *map(loud, range(3)))
    quiet = queue.join(PAGE, QUIET)
    assert (quiet.place, later.place) == (1, 2)
    early.leave()
    assert quiet.state == "seated" and later.state == "waiting"


def test_programs_games_and_surveys_leave_seats_to_the_page():
    queue = AdmissionQueue(QueueLimits.for_visitors())
    for kind in (API, GAME, REPEATS, SURVEY):
        fill(queue, *(Visitor(f"{kind} {number}", f"{kind} {number}") for number in range(30)), kind=kind)
    visitors = [Visitor(f"person {number}", f"person {number}") for number in range(15)]
    assert [queue.join(PAGE, visitor).state for visitor in visitors] == ["seated"] * 15


def test_a_full_queue_refuses_with_the_number_that_wait():
    queue = small(1, waiting=2)
    fill(queue, *(Visitor(address=str(number)) for number in range(3)))
    with pytest.raises(Refusal, match="The page is busy: 2 runs are waiting; try again in a minute"):
        queue.join(PAGE, QUIET)


def test_a_visitor_beyond_the_own_share_gets_a_message_and_others_are_not_refused():
    queue = AdmissionQueue(QueueLimits.for_visitors())
    fill(queue, *map(loud, range(80)))
    with pytest.raises(Refusal, match="Your share of this page is used up"):
        queue.join(PAGE, loud(81))
    assert queue.join(PAGE, QUIET).state == "seated"


# --- held runs ---

@pytest.mark.parametrize("addresses", [1, 4])
def test_a_visitor_is_not_turned_away_from_a_queue_that_another_address_has_filled(addresses):
    queue = AdmissionQueue(QueueLimits.for_visitors())
    crowd = fill(queue, *(Visitor(f"s{number}", f"6.6.6.{number % addresses}") for number in range(80)), kind=API)
    assert queue.counts() == {"seated": 16, "waiting": 16, "resting": 0}
    quiet = queue.join(API, QUIET)
    assert quiet.state == "waiting" and queue.counts()["waiting"] == 16
    displaced, = (ticket for ticket in crowd if ticket.state == "displaced")
    with pytest.raises(Refusal, match="your address has the most runs"):
        next(displaced.wait())
    with pytest.raises(Refusal, match="The page is busy: 16 runs are waiting"):
        queue.join(API, Visitor("another", "6.6.6.0"))
    crowd[0].leave()
    assert quiet.state == "seated"


def test_a_run_that_waits_to_go_on_keeps_its_place_in_a_full_queue():
    queue = small(1, waiting=2)
    held, runs = fill(queue, loud(0), loud(1))
    held.rest()
    held.ask_again(lambda: None)
    waiting = queue.join(PAGE, loud(2))
    assert queue.join(PAGE, QUIET).state == "waiting"
    assert (held.state, runs.state, waiting.state) == ("waiting", "seated", "displaced")


def test_a_held_run_needs_no_seat_and_has_to_queue_to_go_on():
    queue, went_on = small(1), []
    first, second = queue.join(PAGE), queue.join(PAGE)
    first.rest()
    assert second.state == "seated"
    first.ask_again(lambda: went_on.append("first"))
    assert first.place == 1 and not went_on
    second.leave()
    assert went_on == ["first"] and first.state == "seated"


def held_and_resumed(site, sessions: int) -> list[Visit]:
    """So many visits, of which each is begun, held and then resumed."""
    loading, visits = site.model_loader.request(site.model_request), []
    for _ in range(sessions):
        visit = Visit(Settings(prompt="one"))
        visit.ticket = site.join(PAGE)
        assert list(visit.ticket.wait()) == []
        visit.begin(site.runs.start(loading, visit.settings, visit.memory))
        visit.run.hold()
        visits.append(visit)
    for visit in visits:
        visit.resume()
    return visits


def test_holding_and_resuming_does_not_pass_the_limit_of_runs():
    site = counting_site(lambda models, settings, memory: Counting([]), seats=2)
    visits = held_and_resumed(site, 5)
    assert sum(visit.run.state == "running" for visit in visits) == 2
    visits[0].leave()
    assert sum(visit.run.state == "running" for visit in visits[1:]) == 2
    for visit in visits:
        visit.leave()
    assert site.admission.counts() == {"seated": 0, "waiting": 0, "resting": 0}


def test_a_single_step_takes_a_seat_and_gives_it_back():
    site = counting_site(lambda models, settings, memory: Counting([]), seats=1)
    visit, = held_and_resumed(site, 1)
    visit.run.hold()
    frames = visit.run.frames()
    while next(frames):  # a forward that was running when the run was held may still commit
        pass
    before = len(committed([{"events": visit.run.events}]))
    visit.step()
    next(frame for frame in frames if frame and frame["events"])
    while visit.ticket.state != "resting":
        assert next(frames) is None
    assert len(committed([{"events": visit.run.events}])) == before + 1
    visit.leave()


def test_a_client_that_sends_a_thousand_orders_leaves_one_of_each_kind():
    run = Worker().take(Counting([], forward=5))
    for _ in range(1000):
        run.step()
        run.stop(0)
    assert len(run._orders) <= 2
    run.fail("enough")


# --- streams over it ---

def said(page, changes) -> str:
    return " ".join(str(change.get(place, "")) for change in changes for place in (page.prompt_notice, page.status))


@pytest.mark.slow
def test_a_place_in_the_queue_and_the_wait_are_reported_before_the_run_begins(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(admission_queue, "monotonic", lambda: clock[0])
    site = counting_site(lambda models, settings, memory: Counting([], length=3), seats=1)
    first = site.join(PAGE)
    page, changes = stream(site)
    heard = [next(changes) for _ in range(3)]
    assert "place 1 in the queue, 0 s so far" in said(page, heard)
    clock[0] += 30
    assert "place 1 in the queue, 30 s so far" in said(page, [next(changes)])
    first.leave()
    assert any(page.live in change for change in changes)


def test_a_run_on_a_busy_page_is_refused_with_a_sentence_and_leaves_no_ticket():
    site = counting_site(lambda models, settings, memory: Counting([], length=3))
    site.admission = small(1, waiting=0)
    seat = site.join(PAGE)
    page, changes = stream(site)
    assert "The page is busy: 0 runs are waiting" in said(page, changes)
    seat.leave()
    assert site.admission.counts()["waiting"] == 0


def test_a_run_that_is_held_too_long_on_a_public_page_ends_with_a_sentence(monkeypatch):
    monkeypatch.setattr(run_handlers, "HELD_LIMIT", 0.0)
    site = counting_site(lambda models, settings, memory: Counting([]), rules=Rules.for_visitors())
    page, changes = stream(site)
    visit = next(change[page.visit] for change in changes if page.visit in change)
    next(change for change in changes if page.live in change)
    visit.run.hold()
    assert "was held for" in said(page, changes)
    assert visit.run.over and site.admission.counts()["resting"] == 0


@pytest.mark.slow
def test_a_local_run_can_be_held_indefinitely(monkeypatch):
    monkeypatch.setattr(run_handlers, "HELD_LIMIT", 0.0)
    monkeypatch.setattr("playground.ui.server.worker.HELD_PATIENCE", 0.1)
    site = counting_site(lambda models, settings, memory: Counting([]))
    page, changes = stream(site)
    visit = next(change[page.visit] for change in changes if page.visit in change)
    next(change for change in changes if page.live in change)
    visit.run.hold()
    for _ in range(3):
        next(changes)
    assert visit.run.state == "held"
    changes.close()


def test_a_held_run_whose_browser_left_ends():
    begun = []
    site = counting_site(lambda models, settings, memory: begun.append(Counting([])) or begun[-1])
    page, changes = stream(site)
    next(change for change in changes if page.live in change)
    site.runs.worker(site.model_loader.request(site.model_request).models).runs()[0].hold()
    changes.close()
    assert begun[0].stopped.wait(PATIENCE) and site.admission.counts()["resting"] == 0


def test_when_the_server_stops_every_run_ends_with_a_sentence_and_new_ones_are_refused():
    site = counting_site(lambda models, settings, memory: Counting([]))
    page, changes = stream(site)
    next(change for change in changes if page.live in change)
    site.drain()
    assert STOPPING in said(page, changes)
    other, refused = stream(site)
    assert STOPPING in said(other, refused)


# --- readers ---

def test_a_client_that_fetches_nothing_has_left(monkeypatch):
    now, backlog = [0.0], [0]
    monkeypatch.setattr("playground.ui.guard.readers.monotonic", lambda: now[0])
    reader, heard = FrameReader(lambda: backlog[0], idle=30, opening=10), []
    for second in range(1, 40):
        now[0], backlog[0] = float(second), second
        heard.append(reader.has_left())
    assert heard.index(True) == 10


def test_a_client_that_stops_fetching_gets_more_time(monkeypatch):
    now, backlog = [0.0], [0]
    monkeypatch.setattr("playground.ui.guard.readers.monotonic", lambda: now[0])
    reader, heard = FrameReader(lambda: backlog[0], idle=30, opening=10), []
    for second in range(1, 60):
        now[0], backlog[0] = float(second), max(0, second - 5)
        heard.append(reader.has_left())
    assert heard.index(True) == 35


@pytest.mark.parametrize(
    "backlogs", [[0] * 99, [5] * 99, [1, 2, 1, 2, 1, 2] * 16, [None] * 99], ids=["quick", "behind", "slow", "unknown"]
)
def test_a_client_that_fetches_messages_stays(monkeypatch, backlogs):
    now = [0.0]
    monkeypatch.setattr("playground.ui.guard.readers.monotonic", lambda: now[0])
    waiting = iter(backlogs)
    reader = FrameReader(lambda: next(waiting), idle=3, opening=3)
    for second in range(len(backlogs)):
        now[0] = float(second)
        assert not reader.has_left()


# --- who a visitor is ---

@pytest.mark.parametrize("proxies, forwarded, address", [
    (0, "1.2.3.4", "10.1.1.1"),
    (1, "", "10.1.1.1"),
    (1, "6.6.6.6, 1.2.3.4", "1.2.3.4"),
    (2, "6.6.6.6, 1.2.3.4, 10.0.0.9", "1.2.3.4"),
])
def test_only_what_trusted_proxies_wrote_determines_an_address(proxies, forwarded, address):
    assert address_of(request(forwarded), proxies) == address


def test_shares_of_a_public_page_leave_half_to_other_addresses():
    capacity = QueueLimits.for_visitors()
    assert capacity.address.seats * 2 <= capacity.whole.seats and capacity.address.waiting * 2 <= capacity.whole.waiting
    others = sum(share.seats for kind, share in capacity.kinds.items() if kind != PAGE)
    assert others < capacity.whole.seats and replace(capacity) == capacity
