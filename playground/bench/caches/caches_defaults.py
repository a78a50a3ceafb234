"""What `bench caches` measures where nothing else is said. Imports neither torch nor transformers, so that options are
read at once.
"""
from __future__ import annotations

PARTS = ("score", "memory", "step")
TASKS = ("needle", "chat")
GRADE = 4  # of the questions: passages of about 270 tokens, chats of up to 350
BUDGETS = (32, 64, 128, 256)  # tokens
ANSWER = 64  # most tokens of an answer

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
"""Networks of random weights: 100 million parameters, most of them in the table of tokens or most of them in the
layers, and as few as do for a test.
"""

# memory goes by what is held, so long prompts go through few layers; a step is slowed by every layer
WEIGHED, PACED = "100m-short", "100m"

NEAR = 0.15  # of the memory that a policy promises to free: what may be missing
SLOWER = 1.3  # times a plain step: what a step under a policy may take
