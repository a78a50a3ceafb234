"""Grammars within tags: free text, and wherever a trigger comes, one of the tags that begin with it, each with a
constraint of its own and an end string.

The result is one grammar for llguidance. The text up to a trigger is one terminal: it ends where the first trigger is
complete, so no text of the terminal begins with another one. What follows the trigger of a tag's beginning, its
constraint and its end string are as in `triggered_grammar`.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.kinds import KINDS
from playground.grammar.template_grammar import literal
from playground.grammar.triggered_grammar import HEADER, TriggeredSource, body_rules


@dataclass(frozen=True)
class TaggedSource:
    """Tags, each a constraint with its beginning as the trigger, and the triggers, each the start of a beginning.

    Where `required` is false a text without tags is valid. `once` ends the text with the first tag. `most` bounds the
    characters of each free part; 0 does not.
    """

    tags: tuple[TriggeredSource, ...]
    triggers: tuple[str, ...]
    required: bool = False
    once: bool = False
    most: int = 0

    def packed(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, packed: str) -> TaggedSource:
        read = json.loads(packed)
        tags = tuple(TriggeredSource(**tag) for tag in read["tags"])
        return cls(**{**read, "tags": tags, "triggers": tuple(read["triggers"])})

    def check(self) -> None:
        """Raise Refusal for tags that cannot be distinguished, that nothing triggers, or that have no end."""
        if not 1 <= len(self.tags) <= limits.TAGS:
            raise _refusal(f"there are {len(self.tags)} tags, and 1 to {limits.TAGS} are accepted")
        for tag in self.tags:
            self._check_tag(tag)
        for trigger in self.triggers:
            self._check_trigger(trigger)

    def _check_tag(self, tag: TriggeredSource) -> None:
        named = repr(tag.trigger[:40])
        if not tag.trigger or not tag.end:
            raise _refusal(f"the tag {named} has no {'end' if tag.trigger else 'begin'}: every tag has both")
        try:
            tag.check()
        except Refusal as refused:
            raise Refusal(f"The tag {named}: {refused}", "source") from None
        if not any(tag.trigger.startswith(trigger) for trigger in self.triggers):
            raise _refusal(f"no trigger begins the tag {named}")
        begun = [other for other in self.tags if other.trigger.startswith(tag.trigger)]
        if len(begun) > 1:
            raise _refusal(f"{named} begins more than one tag, so nothing says which of them is meant")

    def _check_trigger(self, trigger: str) -> None:
        named = repr(trigger[:40])
        if not trigger or not any(tag.trigger.startswith(trigger) for tag in self.tags):
            raise _refusal(f"no tag begins with the trigger {named}")
        starts = (trigger[:end] for end in range(1, len(trigger)))
        if earlier := next((other for start in starts for other in self.triggers if start.endswith(other)), None):
            raise _refusal(f"the trigger {named} is never complete before {earlier[:40]!r}, which it contains")


def lark_of_tags(source: TaggedSource, compiled: list[str]) -> str:
    """The whole grammar in the Lark dialect; `compiled` are the constraints of the tags, as llguidance reads them."""
    heads = range(len(source.triggers))
    return "\n".join([
        HEADER.rstrip(),
        f"start: tagged{'' if source.once else ' rest'}{'' if source.required else ' | FREE'}",
        *([] if source.once else ["rest: tagged rest | FREE"]),
        f"tagged: {' | '.join(f'head_{head} ({_tags_of(source, head)})' for head in heads)}",
        "ANYTHING: /(?s:.*)/",
        "SOMETHING: /(?s:.+)/",
        f"TRIGGER: {' | '.join(map(literal, source.triggers))}",
        "TRIGGERED: ANYTHING TRIGGER ANYTHING",
        f"BOUNDED: /(?s:.{f'{{0,{source.most}}}' if source.most else '*'})/",
        *([] if source.once and source.required else ["FREE: BOUNDED & ~TRIGGERED"]),
        "EARLIER: ANYTHING TRIGGER SOMETHING",
        *(f"UP_TO_{head}: BOUNDED {literal(source.triggers[head])}" for head in heads),
        *(f"FIRST_{head}: UP_TO_{head} & ~EARLIER" for head in heads),
        # lazy, because after a greedy lexeme llguidance does not stop at the first byte of a lazy one
        *(f"head_{head}[lazy]: FIRST_{head}" for head in heads),
        *(
            f"begin_{head}_{place}[lazy]: {literal(more)}"
            for head in heads
            for place, more in _begun(source, head)
            if more
        ),
        *(line for place, tag in enumerate(source.tags) for line in body_rules(tag, compiled[place], f"tag_{place}")),
    ])


def _tags_of(source: TaggedSource, head: int) -> str:
    """The tags that begin with a trigger: what is missing of the beginning, and the constraint."""
    return " | ".join(
        f"begin_{head}_{place} tag_{place}" if more else f"tag_{place}" for place, more in _begun(source, head)
    )


def _begun(source: TaggedSource, head: int) -> list[tuple[int, str]]:
    """The tags that begin with a trigger, and what is missing of their beginning."""
    trigger = source.triggers[head]
    return [
        (place, tag.trigger.removeprefix(trigger))
        for place, tag in enumerate(source.tags)
        if tag.trigger.startswith(trigger)
    ]


def open_tag(source: TaggedSource, text: str) -> int | None:
    """The tag that the end of a text is in, by its place; None in free text. For display: a constraint whose text is
    JSON is read as such, of any other the first end string is its end.
    """
    place = None
    for place, text in _passages(source, text):  # noqa: B007, B020
        pass
    return place


def _passages(source: TaggedSource, text: str) -> Iterator[tuple[int | None, str]]:
    """Every tag in a text as it begins, and None as it ends, with the text after that."""
    while begun := _first_tag(source, text):
        place, text = begun
        yield place, text
        tag = source.tags[place]
        ends = [at for at in range(len(text)) if text.startswith(tag.end, at) and _complete(tag, text[:at])]
        if not ends:
            return
        text = text[ends[0] + len(tag.end):]
        yield None, text


def _first_tag(source: TaggedSource, text: str) -> tuple[int, str] | None:
    found = [(text.find(tag.trigger), place) for place, tag in enumerate(source.tags) if tag.trigger in text]
    if not found:
        return None
    at, place = min(found)
    return place, text[at + len(source.tags[place].trigger):]


def _complete(tag: TriggeredSource, content: str) -> bool:
    if tag.kind != "json_schema":
        return True
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _refusal(reason: str) -> Refusal:
    return Refusal(f"The {KINDS['tags']} cannot be used: {reason}.", "source")
