"""Defaults of `bench caches`. Imports neither torch nor transformers, so that options are parsed at once."""
from __future__ import annotations

PARTS = ("score", "memory", "step")
TASKS = ("needle", "chat")
GRADE = 4  # of the questions: passages of about 270 tokens, chats of up to 350
BUDGETS = (32, 64, 128, 256)  # tokens
ANSWER = 64  # maximum tokens of an answer

SHAPES = {
    "100m-short": {
        "vocab_size": 140000,
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "100m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "vocab_size": 6400,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""Networks of random weights: 100 million parameters, most of them in the embedding table ("100m-short") or most of
them in the layers ("100m"), and a minimal one for tests.
"""

# shapes for memory and for steps: memory needs long prompts, which few layers prefill fast; steps need many layers
WEIGHED, PACED = "100m-short", "100m"

NEAR = 0.15  # share of the memory a policy promises to free that may be missing
SLOWER = 1.3  # maximum time of a step under a policy, relative to a plain step
