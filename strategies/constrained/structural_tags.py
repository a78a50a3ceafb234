"""Structural tags: free text, and within each tag a constraint of its own."""
import json
from collections.abc import Callable, Iterator
from typing import ClassVar

from playground.contract import Constraint, knob
from playground.errors import Refusal
from playground.events import Event, Figure
from playground.grammar.limits import check_text
from playground.grammar.schema.source import read_schema
from playground.grammar.tagged_grammar import TaggedSource, open_tag
from playground.grammar.triggered_grammar import TriggeredSource

FORMATS = ("schema", "regex", "lark", "gbnf", "choice")
EXAMPLE = json.dumps({
    "triggers": ["<"],
    "structures": [
        {"begin": "<sum>", "regex": "[0-9]+ [+] [0-9]+ = [0-9]+", "end": "</sum>"},
        {"begin": "<shop>", "schema": {"enum": ["baker", "fishmonger"]}, "end": "</shop>"},
    ],
})


class StructuralTags(Constraint):
    """The model writes freely; where it writes a trigger, one of the tags that begin with it has to follow, and the
    text inside satisfies the constraint of that tag.

    A tag has a begin, an end, and a JSON Schema, a pattern, a grammar or a choice for what is between them. The first
    trigger that is complete counts, even inside a token. Inside a tag the text ends at the first place where it is
    complete and the end follows; then the text is free again. Without triggers every begin is one. Useful for tool
    calls, sources or formulas in the middle of an answer, each in a form that a program can read. With one tag whose
    begin is the trigger it is `triggered`. The format is that of vLLM and XGrammar, where a tag has a schema. JSON is
    written with fixed white space; a special token of the model cannot be part of a begin, an end or a trigger. Dong
    et al. 2024, arXiv 2411.15100; engine: llguidance.
    """

    name, title, paper, sheet = "structural_tags", "Structural tags", "2411.15100", "constrained/grammar-engines"
    guarantee = ("constraint_sound",)

    source: str = knob(
        EXAMPLE, multiline=True, file=True, json_text=True, help="structures with begin, end and a constraint; triggers"
    )
    must: bool = knob(False, help="whether the text may end only after a tag")
    once: bool = knob(False, help="whether the text ends with the first tag")
    most: int = knob(
        0, 0, 2000, step=1, help="characters of each free part at most; then a trigger has to follow; 0: any number"
    )

    begins: ClassVar[int]  # these come with the lane
    spelling: ClassVar[Callable[[int], bytes]]
    tagged: ClassVar[TaggedSource | None] = None

    def grammar(self):
        return "tags", self._read().packed()

    def remarks(self):
        schemas = [(tag.trigger, tag.source) for tag in self._read().tags if tag.kind == "json_schema"]
        return [f"Tag {begin[:40]!r}: {each}" for begin, schema in schemas for each in read_schema(schema).remarks]

    def _read(self) -> TaggedSource:
        """The tags and triggers. Raises Refusal."""
        check_text("list of structural tags", self.source)
        try:
            given = json.loads(self.source)
        except (ValueError, RecursionError):
            raise _refusal("they are not valid JSON") from None
        given = {"structures": given} if isinstance(given, list) else given
        structures = given.get("structures") if isinstance(given, dict) else None
        if not isinstance(structures, list):
            raise _refusal('they are no list: write {"structures": [{"begin": "<a>", "regex": "b", "end": "</a>"}]}')
        tags = tuple(map(self._tag, structures))
        triggers = given.get("triggers") or list(dict.fromkeys(tag.trigger for tag in tags))
        if not isinstance(triggers, list) or not all(isinstance(trigger, str) for trigger in triggers):
            raise _refusal("the triggers are no list of strings")
        for text in (*triggers, *(end for tag in tags for end in (tag.trigger, tag.end))):
            check_text("string of a tag", text)  # JSON spells what the source itself may not hold
        return TaggedSource(tags, tuple(dict.fromkeys(triggers)), self.must, self.once, self.most)

    def _tag(self, structure: object) -> TriggeredSource:
        given = structure if isinstance(structure, dict) else {}
        kinds = [kind for kind in FORMATS if kind in given]
        ends = [given.get("begin"), given.get("end")]
        if len(kinds) != 1 or not all(isinstance(text, str) for text in ends):
            raise _refusal(f"a structure has begin, end and one of {', '.join(FORMATS)}: {str(structure)[:60]!r}")
        kind, source = kinds[0], given[kinds[0]]
        if kind != "schema" and not isinstance(source, str):
            raise _refusal(f"the {kind} of {ends[0][:40]!r} is no string")
        source = json.dumps(source) if kind == "schema" else source
        return TriggeredSource("json_schema" if kind == "schema" else kind, source, ends[0], ends[1])

    def check_target(self, model):
        tagged = self._read()
        for text in (*tagged.triggers, *(end for tag in tagged.tags for end in (tag.trigger, tag.end))):
            model.tokens.check_is_text(text, "source")

    def begin(self, start, spelling):
        self.begins, self.spelling, self.tagged = start, spelling, None

    def explain(self, history, token) -> Iterator[Event]:
        self.tagged = self.tagged or self._read()
        text = b"".join(map(self.spelling, history[self.begins:])).decode("utf-8", "replace")
        if (tag := open_tag(self.tagged, text)) is not None:
            place = len(history) - self.begins
            span = [place, place + 1, self.tagged.tags[tag].trigger, tag]
            yield Figure("spans", "tokens inside tags", {"spans": [span]})


def _refusal(reason: str) -> Refusal:
    return Refusal(f"The structural tags cannot be used: {reason}.", "source")
