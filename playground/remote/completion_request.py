"""The body of a request: the completions interface for a text, the chat completions interface for a chat."""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.remote.remote_server import RemoteServer

TOP = 5  # candidates asked for each token; OpenAI's completions interface allows no more


@dataclass(frozen=True)
class CompletionRequest:
    """One prompt for one server. The server applies the chat template of its own model."""

    server: RemoteServer
    prompt: Prompt
    limits: Limits

    @property
    def path(self) -> str:
        return "chat/completions" if self.prompt.chat else "completions"

    def body(self, logprobs: bool = True) -> dict[str, Any]:
        """The request as JSON. Without `logprobs` it has only the fields that every server knows."""
        body = {
            "model": self.server.model,
            "max_tokens": self.limits.max_new_tokens,
            "temperature": self.server.temperature,
            "seed": self.limits.seed,
            "stream": True,
            **self._text(),
        }
        if self.limits.stop:
            body["stop"] = list(self.limits.stop)
        return {**body, **self._extras()} if logprobs else body

    def _text(self) -> dict[str, Any]:
        if not self.prompt.chat:
            return {"prompt": self.prompt.whole()}
        tools = {"tools": json.loads(self.prompt.tools)} if self.prompt.tools else {}
        return {"messages": self._messages(), **tools}

    def _extras(self) -> dict[str, Any]:
        usage = {"stream_options": {"include_usage": True}}
        return usage | ({"logprobs": True, "top_logprobs": TOP} if self.prompt.chat else {"logprobs": TOP})

    def _messages(self) -> list[dict[str, str]]:
        prompt = self.prompt
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for asked, answered in prompt.before:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": prompt.whole()}]
