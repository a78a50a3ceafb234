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
    "two layers": {}, "two qwen3 layers": {}, "own embeddings": {"embed_requires_grad": True},
}  # fmt: skip
MASK, BLOCK, WINDOW, ANCHOR = 5, 4, 2, 3  # the mask's token, tokens of a block, its window, and where it begins
DFLASH = {
    "": {}, ", from its anchor": {"sample_from_anchor": True}, ", causal windows": {},
    ", windows": {"sliding_window_non_causal": True},
}  # fmt: skip
DSPARK = {
    "vanilla": {}, "gated": {}, "rnn": {}, "rnn after the anchor": {"sample_from_anchor": False},
    "no token in the confidence": {"confidence_head_with_markov": False},
}  # fmt: skip
DEPTHS = 3  # of P-EAGLE


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
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**{**SIZES, **more})
    config._attn_implementation = attention
    return config


def eagle_3(name: str) -> dict:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer(
            "qwen3" if "qwen3" in name else "llama", "eager", num_hidden_layers=2 if "two" in name else 1
        ),
        draft_vocab_size=DRAFT,
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


def p_eagle() -> dict:
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer("llama", "eager", num_hidden_layers=2), draft_vocab_size=DRAFT,
        eagle_aux_hidden_state_layer_ids=LAYERS, mask_token_id=MASK, **common("peagle", DEPTHS),
    )
    return reference(PEagleDraftModel(config), one_rollout)


def one_rollout(network: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of all depths after the text: of the row that read its last token, and of the masks after it."""
    from speculators.models.peagle import core
    following = torch.tensor([TOKENS[1:]])
    count = following.shape[1]
    anchors = torch.cat([torch.arange(count), torch.full((DEPTHS - 1,), count - 1)])
    depths = torch.cat([torch.zeros(count, dtype=torch.long), torch.arange(1, DEPTHS)])
    # the tokens and states of masks are not read, so the text is padded to their positions
    padded = [torch.cat([part, part.new_zeros(1, DEPTHS - 1, *part.shape[2:])], 1)
              for part in (hidden_states(len(LAYERS))[None], following)]
    core.generate_cod_sample_indices = lambda **options: (anchors, depths)
    core.compute_metrics = lambda **given: (0, {})
    found = []
    network.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    places = torch.zeros_like(padded[1])
    network(*padded, places, verifier_last_hidden_states=torch.zeros(1, count + DEPTHS - 1, WIDTH))
    return [found[0][count - 1:]]


def block_config(algorithm: str, cls: type, **more):
    """The config of a drafter that fills blocks."""
    settings = dict(draft_vocab_size=DRAFT, block_size=BLOCK, mask_token_id=MASK, aux_hidden_state_layer_ids=LAYERS[:2])
    inner = layer("qwen3", "eager", **more.pop("layer", {}))
    return cls(transformer_layer_config=inner, **{**settings, **more}, **common(algorithm, 3))


def dflash(name: str) -> dict:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    windows = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, use_sliding_window=True,
                   num_hidden_layers=2, max_window_layers=0)
    config = block_config(
        "dflash", DFlashSpeculatorConfig, layer=windows if "windows" in name else {}, **DFLASH[name]
    )
    return reference(DFlashDraftModel(config), last_block)


def dspark(name: str) -> dict:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    config = block_config(
        "dspark", DSparkSpeculatorConfig, markov_rank=6, markov_head_type=name.split()[0] if name[0] in "vgr" else
        "vanilla", **DSPARK[name],
    )
    return reference(DSparkDraftModel(config), taught_block)


def dflash_2() -> dict:
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    config = block_config(
        "dflash2", DFlash2SpeculatorConfig, draft_vocab_size=VOCABULARY, conv_group_size=8, selector_rank=6,
        selector_top_k=5, layer={"num_hidden_layers": 2},
    )
    return reference(DFlash2DraftModel(config), selected)


def xpress(name: str) -> dict:
    from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
    config = block_config(
        "xpress", XPressSpeculatorConfig, xpress_rank=6, num_jacobi_passes=3, sample_from_anchor="anchor" in name
    )
    return reference(XPressDraftModel(config), refined)


def block_of(network: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [block, width] and logits of a block that begins at the anchor, which has as many states before it."""
    count = len(TOKENS) - 1
    chosen = torch.zeros(1, count, dtype=torch.long)
    chosen[0, ANCHOR] = 1
    hidden, logits = network._backbone_forward(
        hidden_states(2)[None], torch.tensor([TOKENS[:-1]]), chosen, hidden_states(1)[None],
        torch.zeros(1, count, dtype=torch.long), max_anchors=1,
    )[:2]
    return hidden[0], logits[0]


def last_block(network: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of all rows of the block, also of the anchor's, which not every drafter uses."""
    return [block_of(network)[1]]


def tokens_before(network: torch.nn.Module) -> torch.Tensor:
    """The tokens [block] before those that the rows of the block guess, as a training knows them."""
    block = TOKENS[ANCHOR:ANCHOR + BLOCK]
    return torch.tensor(block if network.config.sample_from_anchor else [block[0], *block[:-1]])


def taught_block(network: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of the block with the bias of the tokens before, and the logits of their confidence."""
    (hidden, logits), before = block_of(network), tokens_before(network)
    head, vectors = network.markov_head, network.markov_head.prev_embeddings(before)
    bias = head.block_bias(prev_token_ids=before[None], hidden_states=hidden[None], prev_emb=vectors[None])[0]
    read = torch.cat([hidden, vectors], -1) if network.config.confidence_head_with_markov else hidden
    return [logits + bias, network.confidence_head(read)[:, None]]


def selected(network: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of the block, then the candidates of its rows and their scores after the tokens before."""
    (hidden, logits), before = block_of(network), tokens_before(network)
    candidates, scores = network.candidate_selector.select(logits, hidden, before)
    return [logits, candidates.float(), scores]


def refined(network: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of the block after each pass of the refiner, which reads the tokens that the pass before it guessed."""
    hidden, base = block_of(network)
    anchor, before_it = TOKENS[ANCHOR], TOKENS[ANCHOR - 1]
    known = network.refiner_head.hidden_cache(hidden[None])
    guess, found = network._draft_to_verifier_ids(base.argmax(-1)), []
    for _ in range(network.config.num_jacobi_passes):
        if network.config.sample_from_anchor:
            before = [anchor, *guess[:-1].tolist()]
        else:
            before = [before_it, anchor, *guess[1:-1].tolist()]
        found.append(base + network.refiner_head.block_bias(torch.tensor([before]), hcache=known)[0])
        guess = network._draft_to_verifier_ids(found[-1].argmax(-1))
    return found


if __name__ == "__main__":
    found = {f"eagle3, {name}": eagle_3(name) for name in EAGLE_3} | {"mtp": mtp(), "peagle": p_eagle()}
    found |= {f"dflash{name}": dflash(name) for name in DFLASH}
    found |= {f"dspark, {name}": dspark(name) for name in DSPARK}
    found |= {"dflash2": dflash_2()} | {f"xpress{name}": xpress(name) for name in ("", ", from its anchor")}
    OUT.write_text(json.dumps(found) + "\n")
