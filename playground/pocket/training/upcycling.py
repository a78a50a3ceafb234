"""Turns a finished dense model into a mixture of experts, whose experts are parts of its feed-forward networks.

The channels of a feed-forward network are divided into groups of similar gate weights, one for each expert. The few
channels with the largest weights are in every expert. A token runs the two experts with the largest router logits; the
gates of both add up to 1, so at equal gates the channels that all experts have add what they added before. The other
output weights are doubled for the same reason. What is missing at first, the groups that do not run, is learnt in a
training that follows. Source: Komatsuzaki et al., sparse upcycling, arXiv 2212.05055, whose experts are whole copies;
groups of channels as experts: Zhang et al., MoEfication, arXiv 2110.01786.
"""
import torch
from torch.nn.functional import normalize
from transformers import MixtralConfig, MixtralForCausalLM

from playground.algorithms.adaptive_compute.channel_groups import clustered

EXPERTS, ACTIVE = 8, 2
SHARED = 32                 # channels of every expert
SHARPNESS = 4.0             # of the first routers


def configuration(dense):
    """MixtralConfig for the experts of a dense configuration."""
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id",
            "eos_token_id", "pad_token_id")
    return MixtralConfig(
        **{name: getattr(dense, name) for name in same}, intermediate_size=width(dense.intermediate_size),
        num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE,
    )


def width(channels):
    """Channels of an expert: those that all have, and its share of the others. Raises ValueError if none is left."""
    shared = min(SHARED, channels // 4)
    if channels - shared < EXPERTS:
        raise ValueError(f"{channels} channels are too few for {EXPERTS} experts")
    return shared + (channels - shared) // EXPERTS


@torch.no_grad()
def upcycled(dense, seed=0):
    """A mixture of experts made of a dense Llama model, in float32; attention, norms and embeddings are copies."""
    sparse = MixtralForCausalLM(configuration(dense.config))
    sparse.generation_config = dense.generation_config
    kept = {name: weight for name, weight in dense.state_dict().items() if ".mlp." not in name}
    sparse.load_state_dict(kept, strict=False)
    chance = torch.Generator().manual_seed(seed)
    for old, new in zip(dense.model.layers, sparse.model.layers):
        _fill(new.mlp, old.mlp, chance)
    sparse.set_experts_implementation("eager")
    return sparse


def _fill(block, mlp, chance):
    """Copy the channels of a feed-forward network into the experts, and point the router at their gate weights."""
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    common, groups = divided(gate, up, down, block.experts.num_experts, chance)
    for expert, own in enumerate(groups):
        channels = torch.cat([common, own])
        block.experts.gate_up_proj[expert] = torch.cat([gate[channels], up[channels]])
        block.experts.down_proj[expert] = torch.cat([down[:, common], 2 * down[:, own]], 1)
        block.gate.weight[expert] = SHARPNESS * normalize(normalize(gate[own], dim=-1).mean(0), dim=0)


def divided(gate, up, down, experts, chance):
    """The channels that all experts have, and those of each: tensors of channel numbers. Left-over ones are in none."""
    size = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    shared = min(SHARED, len(size) // 4)
    order = size.argsort(descending=True)
    common, others = order[:shared], order[shared:shared + (len(size) - shared) // experts * experts]
    return common, [others[members] for members in clustered(normalize(gate[others], dim=-1), experts, chance)]
