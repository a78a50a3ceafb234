"""The prompt of a run: what people write, and the token ids that a model reads."""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from playground.decoding.models import AnyModel
from playground.decoding.prompt_remarks import remarks_on
from playground.errors import Refusal
from playground.prompt_form import CHAT_FORM, TEXT_FORM, filled
from playground.request_limits import without_mark
from playground.run_request import RunRequest


@dataclass(frozen=True)
class Prompt:
    """The input to continue: plain text, or a user message with an optional system message and earlier turns."""

    text: str
    chat: bool = False
    system: str = ""
    context: str = ""  # a passage before the prompt that the answer should be based on
    before: tuple[tuple[str, str], ...] = ()  # earlier turns of the chat: (user, assistant)
    form: str = ""  # how passage and prompt become one text, with {context} and {prompt}; empty for the default
    tools: str = ""  # what the chat template describes, a list in JSON
    taken_back: int = 0  # tokens at its end that are not read, because a sampler has them written again

    def __post_init__(self) -> None:
        for name in ("text", "system", "context", "form", "tools"):  # pasted from a file, perhaps with its mark
            object.__setattr__(self, name, without_mark(getattr(self, name)))
        turns = tuple(tuple(map(without_mark, turn)) for turn in self.before)
        object.__setattr__(self, "before", turns)

    @classmethod
    def of(cls, request: RunRequest) -> Prompt:
        """The prompt of a checked request. A context of spaces is none, so that no lane reads it."""
        context = request.context if request.context.strip() else ""
        return cls(
            request.prompt, request.chat, request.system, context, request.turns(), request.form, request.tools.strip()
        )

    def instructed(self, instruction: str) -> Prompt:
        """The prompt with an instruction before the text, since not every chat template supports a system message."""
        divider = " " if self.chat else "\n"
        return replace(self, text=f"{instruction.strip()}{divider}{self.text}") if instruction.strip() else self

    def without_context(self) -> Prompt:
        """The prompt without its passage."""
        return replace(self, context="")

    def whole(self) -> str:
        """Passage and prompt as one text."""
        passage = self.context.strip()
        if not passage:
            return self.text
        return filled(self.form or (CHAT_FORM if self.chat else TEXT_FORM), passage, self.text)

    def check(self) -> None:
        """Raise Refusal for what is no text or has lone surrogates, an empty prompt, and what requires a chat."""
        request = RunRequest(
            self.text, "chat" if self.chat else "raw", self.system, self.context, form=self.form, tools=self.tools
        )
        request.before = [[*turn] for turn in self.before]
        request.check_prompt()

    def encode(self, model: AnyModel) -> list[int]:
        """Token ids as of `tokens`. Raises Refusal for what it refuses, and for a prompt that is too long."""
        ids = self.tokens(model)
        if len(ids) >= model.context:
            raise Refusal(
                f"The prompt has {len(ids)} tokens, but {model.name} reads at most {model.context}: shorten it.",
                "prompt",
            )
        return ids

    def tokens(self, model: AnyModel) -> list[int]:
        """Token ids, at least one, of any number, without those that are taken back. Raises Refusal for what `check`
        refuses, and for a prompt without tokens, or with one that the model does not know.
        """
        self.check()
        ids = (
            model.tokens.encode_chat(self.whole(), self.system, self.before, self.tools)
            if self.chat
            else model.tokens.encode(self.whole())
        )
        if not ids:
            raise Refusal(
                f"The tokenizer of {model.name} makes no token of this prompt: write something else.", "prompt"
            )
        return ids[:max(1, len(ids) - self.taken_back)]

    def remarks(self, model: AnyModel, ids: list[int]) -> list[str]:
        """What is to know about the prompt, which the model reads as these ids."""
        written = (self.whole(), self.system, *chain.from_iterable(self.before))
        return remarks_on(model, written, ids, self.chat)
