"""The architectures of the pocket models: small Llama models with an attention that trains fast on a CPU.

For a CPU, `target` has 8 layers of width 256, `draft` 2 of width 128, and `tiny`, the draft with its own tokenizer, 2
of width 96; the `large` shapes need a GPU. Embeddings and lm_head are tied, two query heads share one key-value head,
and positions are rotary. `nano` is for tests.
"""
from functools import lru_cache

import torch
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM

from playground.pocket.tokenizer import END, END_OF_TEXT, PAD, SPECIALS

SHAPES = dict(
    target=dict(hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4),
    draft=dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4),
    tiny=dict(hidden_size=96, intermediate_size=288, num_hidden_layers=2, num_attention_heads=4),
    large=dict(hidden_size=384, intermediate_size=1152, num_hidden_layers=12, num_attention_heads=6),
    large_draft=dict(hidden_size=192, intermediate_size=576, num_hidden_layers=4, num_attention_heads=4),
    large_tiny=dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4),
    nano=dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
)
CONTEXT = 1024
BLOCKED = -30000.0                 # added to masked attention scores; representable in every half-precision format


def causal_matmul(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal attention as two batched matmuls: faster on a CPU than the fused kernel for few, short heads.

    query: (batch, heads, tokens, width); key, value with fewer heads. attention_mask: from `within_documents`, or None
    for plain causal attention. For training only: there is no KV cache, and padding is at the end of a window, where no
    token attends to it.
    """
    batch, heads, length, width = query.shape
    shared = heads // key.shape[1]
    query = query.flatten(0, 1)
    key, value = (x.repeat_interleave(shared, 1).flatten(0, 1) for x in (key, value))
    closed = _future(query) if attention_mask is None else _closed(attention_mask, heads, query.dtype)
    scores = torch.baddbmm(closed, query, key.transpose(1, 2), alpha=scaling)
    mixed = torch.bmm(scores.softmax(-1, dtype=scores.dtype), value).view(batch, heads, length, width)
    return mixed.transpose(1, 2), None      # (batch, tokens, heads, width)


def _future(query):
    """Additive causal mask, large and negative for later tokens: (batch * heads, tokens, tokens)."""
    length = query.shape[1]
    future = torch.full((length, length), BLOCKED, dtype=query.dtype, device=query.device).triu(1)
    return future.expand(len(query), -1, -1)


# all layers share the mask of a batch; building it in each layer cost 12 % of a step at 1024 tokens
@lru_cache(maxsize=1)
def _closed(allowed, heads, dtype):
    """Additive mask of a boolean one: (batch * heads, tokens, tokens)."""
    closed = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, BLOCKED)
    return closed.expand(-1, heads, -1, -1).flatten(0, 1)


def within_documents(documents):
    """Block-diagonal causal mask: each token attends to itself and to earlier tokens of its own document.

    documents: (rows, tokens), the document number of every token. Returns a boolean mask (rows, 1, tokens, tokens) for
    `causal_matmul` and sdpa. Positions need not restart with a document, since rotary embeddings are relative.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


AttentionInterface.register("causal_matmul", causal_matmul)


def configuration(shape, vocabulary):
    """LlamaConfig of a shape, for a vocabulary size."""
    bos, eos, pad = map(SPECIALS.index, (END_OF_TEXT, END, PAD))
    sizes = SHAPES[shape]
    return LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=sizes["num_attention_heads"] // 2, **sizes, tie_word_embeddings=True,
        max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad,
    )


def make(shape, vocabulary, seed=0):
    """A newly initialised model in float32, with residual projections scaled down by depth."""
    torch.manual_seed(seed)
    config = configuration(shape, vocabulary)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_((2 * config.num_hidden_layers) ** -0.5)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(max_new_tokens=256, **ids)
    return model


def for_training(model):
    """Switch the model to the fastest attention for training on its device, without a KV cache; returns it."""
    model.set_attn_implementation("causal_matmul" if model.device.type == "cpu" else "sdpa")
    model.config.use_cache = False
    return model.train()


def compile_layers(model):
    """Compile the layers in place: 17-24 % more tokens per second on a CPU, after minutes of compiling per context."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def save(model, folder):
    """Save as bfloat16 safetensors with its configuration, for `from_pretrained`. The model's weights are unchanged."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config.use_cache = True
    copy.generation_config = model.generation_config
    copy.bfloat16().save_pretrained(folder)
    model.config.use_cache = False
