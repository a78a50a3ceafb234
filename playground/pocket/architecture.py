"""The shapes of the pocket models: Llama as transformers has it, small, with an attention that trains fast on a CPU.

For a CPU `target` has 8 layers of width 256, `draft` 2 of width 128, and `tiny`, the draft with a tokenizer of its own,
2 of width 96; the `large` ones want a GPU. Embeddings and output share their weights, two query heads share one key-
value head, positions are rotary. `nano` is for tests.
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
BLOCKED = -30000.0                 # added to a score that must not count; fits every half-precision format


def causal_matmul(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal attention as two batched products: faster than the fused one for few, short heads on a CPU.

    query: (batch, heads, tokens, width); key, value with fewer heads. attention_mask: what `within_documents` gives, or
    None for plain causal attention. For training only: there is no cache, and padding stands at the end of a window,
    where nothing looks back at it.
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
    """What to add to the scores, large and negative for what comes later: (batch * heads, tokens, tokens)."""
    length = query.shape[1]
    future = torch.full((length, length), BLOCKED, dtype=query.dtype, device=query.device).triu(1)
    return future.expand(len(query), -1, -1)


# all layers share the mask of a batch; making it in each cost 12 % of a step at 1024 tokens
@lru_cache(maxsize=1)
def _closed(allowed, heads, dtype):
    """The same for a mask: (batch * heads, tokens, tokens)."""
    closed = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, BLOCKED)
    return closed.expand(-1, heads, -1, -1).flatten(0, 1)


def within_documents(documents):
    """Which tokens each token may look at: the earlier ones of its own document, and itself.

    documents: (rows, tokens), the number of every token's document. Returns a boolean mask (rows, 1, tokens, tokens),
    for the training attention and for sdpa. Positions need not start anew with a document: rotary ones only act by
    differences.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


AttentionInterface.register("causal_matmul", causal_matmul)


def configuration(shape, vocabulary):
    """The library's configuration of a shape with so many tokens."""
    bos, eos, pad = map(SPECIALS.index, (END_OF_TEXT, END, PAD))
    sizes = SHAPES[shape]
    return LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=sizes["num_attention_heads"] // 2, **sizes, tie_word_embeddings=True,
        max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad,
    )


def make(shape, vocabulary, seed=0):
    """A fresh model in float32, its residual outputs scaled down by depth."""
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
    """The same model with the attention that trains fastest where it is, and without a cache."""
    model.set_attn_implementation("causal_matmul" if model.device.type == "cpu" else "sdpa")
    model.config.use_cache = False
    return model.train()


def compile_layers(model):
    """Let torch compile the layers, in place: 17-24 % more tokens a second on a CPU, after some minutes for every
    context length.
    """
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def save(model, folder):
    """bfloat16 safetensors with the configuration, ready for `from_pretrained`; the model itself is left as it is."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config.use_cache = True
    copy.generation_config = model.generation_config
    copy.bfloat16().save_pretrained(folder)
    model.config.use_cache = False
