"""Between text and token ids: tokenizers, chat templates, tool calls, ends."""
