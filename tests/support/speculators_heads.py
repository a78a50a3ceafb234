"""Makes tests/speculators_reference.json: logits of tiny random draft heads by vLLM's `speculators`.

    python tests/support/speculators_heads.py

It needs speculators 0.9, which pins an older transformers version and so has an environment of its own. Weights and
hidden states are computed from their names, so that a test makes the same.
"""
from __future__ import annotations

import json
from pathlib import Path

import torch

try:  # as a script of another environment, or as a module of the tests
    from public_denoisers import _rounded, _weight, weights
except ModuleNotFoundError:
    from support.public_denoisers import _rounded, _weight, weights

OUT = Path(__file__).parents[1] / "speculators_reference.json"
WIDTH, VOCABULARY, DRAFT, STEPS = 32, 320, 40, 2
TOKENS = [7, 300, 12, 12, 45, 199, 3, 250, 88]  # a text
LAYERS = [0, 1, 2]  # of the target, whose inputs are read
SIZES = dict(
    hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=VOCABULARY, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=False,
)
EAGLE_3 = {
    "plain": {}, "normed residual": {"norm_before_residual": True}, "one norm before fc": {"norm_before_fc": True},
    "a norm for each state": {"fc_norm": True}, "normed output": {"norm_output": True}, "qwen3 layer": {},
}  # fmt: skip


def hidden_states(layers: int) -> torch.Tensor:
    """The target's states [tokens, layers * width] of every token of the text but the last."""
    return _weight(f"states {layers}", [len(TOKENS) - 1, layers * WIDTH])


def vocabulary() -> dict[str, torch.Tensor]:
    """Every eighth token is in the draft vocabulary."""
    ids, used = torch.arange(DRAFT) * 8 + 3, torch.zeros(VOCABULARY, dtype=torch.bool)
    used[ids] = True
    return {"d2t": ids - torch.arange(DRAFT), "t2d": used}


def filled(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """The weights of a head."""
    return weights(shapes) | {name: tensor for name, tensor in vocabulary().items() if name in shapes}


def reference(network: torch.nn.Module, logits) -> dict:
    """Config, names and shapes of the weights, and the logits of every step; logits(network) -> list of [n, V]."""
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    network.float().eval().load_state_dict(filled(shapes))
    with torch.no_grad():
        steps = [_rounded(step) for step in logits(network)]
    return dict(config=json.loads(network.config.to_json_string()), shapes=shapes, logits=steps)


def common(algorithm: str, drafted: int) -> dict:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    return dict(speculators_config=SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafted)],
        default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]),
    ))


def layer(kind: str, attention: str, **more):
    from transformers import LlamaConfig, Qwen3Config
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**SIZES, **more)
    config._attn_implementation = attention
    return config


def eagle_3(name: str) -> dict:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer("qwen3" if "qwen3" in name else "llama", "eager"), draft_vocab_size=DRAFT,
        eagle_aux_hidden_state_layer_ids=LAYERS, **common("eagle3", STEPS), **EAGLE_3[name],
    )
    return reference(Eagle3DraftModel(config), unrolled)


def unrolled(network: torch.nn.Module) -> list[torch.Tensor]:
    """Logits after the target's states, then after the head's own output for as many steps as there are."""
    found, following = [], torch.tensor([TOKENS[1:]])
    network.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    network(hidden_states(len(LAYERS))[None], following, torch.zeros_like(following), ttt_steps=STEPS)
    return [logits[: len(TOKENS) - 1 - step] for step, logits in enumerate(found)]


def mtp() -> dict:
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    config = MTPSpeculatorConfig(transformer_layer_config=layer("qwen3", "sdpa"), **common("mtp", STEPS))
    states = torch.cat([hidden_states(1), torch.zeros(1, WIDTH)])  # the last token has no next one, and is not read
    return reference(
        MTPDraftModel(config),
        lambda network: [logits[0] for logits in network(torch.tensor([TOKENS]), states[None])[0]],
    )


def dflash() -> dict:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer("qwen3", "eager"), draft_vocab_size=DRAFT, block_size=4, mask_token_id=5,
        aux_hidden_state_layer_ids=LAYERS[:2], **common("dflash", 3),
    )
    return reference(DFlashDraftModel(config), last_block)


def last_block(network: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of the masks of a block that begins at the anchor, which has three states before it."""
    anchor, count = 3, len(TOKENS) - 1
    chosen = torch.zeros(1, count, dtype=torch.long)
    chosen[0, anchor] = 1
    logits = network._backbone_forward(
        hidden_states(2)[None], torch.tensor([TOKENS[:-1]]), chosen, hidden_states(1)[None],
        torch.zeros(1, count, dtype=torch.long), max_anchors=1,
    )[1]
    return [logits[0, 1:4]]


if __name__ == "__main__":
    found = {f"eagle3, {name}": eagle_3(name) for name in EAGLE_3} | {"mtp": mtp(), "dflash": dflash()}
    OUT.write_text(json.dumps(found) + "\n")
