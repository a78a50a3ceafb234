"""Two denoisers of a hundred thousand parameters, trained in minutes on made-up stories of four dozen words. No bundled
model is of their kinds: one is as WeDLM, which fills masks, one as DiffusionGemma, which turns noise into text.

A story follows from its first sentence but for a few choices, so that a text can be right or wrong:

    Mia has a red box . | she walks to the river and meets a fox . the fox wants the red box of Mia . then the fox runs
    home .
"""
from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NAMES = {"Mia": "she", "Ada": "she", "Eva": "she", "Tom": "he", "Ben": "he", "Leo": "he"}
COLOURS, THINGS = ("red", "blue", "green", "white", "black"), ("box", "hat", "bag", "ball", "cup", "drum")
WALKS, PLACES = ("walks", "rides", "hurries"), ("river", "wood", "town", "mill")
ANIMALS = {"fox": "runs", "hare": "runs", "bird": "flies", "fish": "swims", "frog": "jumps"}
WANTS = ("wants", "likes", "takes")
PAD, MASK, END = range(3)
SPECIALS = ("<pad>", "<mask>", "<end>")
BATCH, RATE = 32, 3e-3  # stories in a step; cosine decay to nothing
SPREAD = 0.1  # of the first weights; with the libraries' 0.02 networks as narrow as these hardly learn to copy
WINDOW = 16  # positions that WeDLM learns to fill together
BLOCK = 13  # positions that turn from noise into text together, half of a story
GEMMA = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, global_head_dim=16, max_position_embeddings=128, sliding_window=64, num_experts=1, top_k_experts=1,
    moe_intermediate_size=32, pad_token_id=PAD, bos_token_id=END, eos_token_id=END,
    layer_types=["sliding_attention", "full_attention"],
)
VISION = dict(
    model_type="gemma4_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8,
)  # a part of the library's network, which no text reaches
Loss = Callable[[Tensor, Tensor], Tensor]
"""The loss for the first sentences and the rest of stories, ids [stories, tokens] each."""


# --- stories ---

def story(chance: Random) -> tuple[str, str]:
    """A first sentence, and what follows it."""
    name, colour, thing = chance.choice([*NAMES]), chance.choice(COLOURS), chance.choice(THINGS)
    walks, place, animal = chance.choice(WALKS), chance.choice(PLACES), chance.choice([*ANIMALS])
    return f"{name} has a {colour} {thing} .", (
        f" {NAMES[name]} {walks} to the {place} and meets a {animal} . the {animal} {chance.choice(WANTS)} the "
        f"{colour} {thing} of {name} . then the {animal} {ANIMALS[animal]} home ."
    )


def words() -> list[str]:
    """The words of all stories, sorted."""
    chosen = [*NAMES, *NAMES.values(), *COLOURS, *THINGS, *WALKS, *PLACES, *ANIMALS, *ANIMALS.values(), *WANTS]
    return sorted({*chosen, *"has a . to the and meets of then home".split()})


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word with the space before it."""
    vocabulary = {name: number for number, name in enumerate([*SPECIALS, *(f"Ġ{word}" for word in words())])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS[PAD]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIALS[PAD], mask_token=SPECIALS[MASK], eos_token=SPECIALS[END]
    )


def stories(chance: Random, tokens: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """A batch of stories: ids of the first sentences, and of what follows with the end token."""
    first, rest = zip(*(story(chance) for _ in range(BATCH)))
    ids = [tokens(list(texts), add_special_tokens=False)["input_ids"] for texts in (first, rest)]
    return torch.tensor(ids[0]), torch.tensor([[*text, END] for text in ids[1]])


# --- networks and what they learn ---

def trained(network: PreTrainedModel, loss: Loss, steps: int, seed: int = 0) -> None:
    """Train a network in place."""
    tokens, chance = tokenizer(), Random(seed)
    optimizer = torch.optim.AdamW([part for part in network.parameters() if part.requires_grad], RATE, (0.9, 0.98))
    torch.manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        loss(*stories(chance, tokens)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    network.eval()


def known_first(steps: int) -> PreTrainedModel:
    """A network that reads known tokens before masks, as WeDLM: Liu et al. 2025, arXiv 2512.22737."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(SPECIALS) + len(words()), hidden_size=64, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=SPREAD, pad_token_id=PAD, bos_token_id=END, eos_token_id=END,
        masked_diffusion=dict(mask_token_id=MASK, known_first=True),
    ))
    trained(network, lambda first, rest: known_first_loss(network, first, rest), steps)
    return network


def known_first_loss(network: PreTrainedModel, first: Tensor, rest: Tensor) -> Tensor:
    """The mean of two losses: of the masks in a window, and of the next token of the text before it.

    The window begins anywhere in the rest of the stories; its known tokens come before its masks. A masked token counts
    the less the more are masked beside it.
    """
    start = int(torch.randint(rest.shape[1], ()))
    window, before = rest[:, start:start + WINDOW], torch.cat([first, rest[:, :start]], 1)
    size = window.shape[1]
    counts = (torch.rand(len(window)) * size).ceil().clamp(1, size)
    masked = torch.rand(window.shape).argsort(1).argsort(1) < counts[:, None]
    order = (torch.arange(size) + size * masked).argsort(1)
    read = torch.cat([before, window.masked_fill(masked, MASK).gather(1, order)], 1)
    places = torch.cat([torch.arange(before.shape[1]).expand(len(before), -1), before.shape[1] + order], 1)
    causal = torch.ones(1, 1, read.shape[1], read.shape[1]).tril().bool()
    logits = network(input_ids=read, position_ids=places, attention_mask=causal, use_cache=False).logits
    weights = masked.gather(1, order) / counts[:, None]
    nats = cross_entropy(logits[:, before.shape[1]:].transpose(1, 2), window.gather(1, order), reduction="none")
    following = cross_entropy(logits[:, :before.shape[1] - 1].transpose(1, 2), before[:, 1:])
    return ((nats * weights).sum() / weights.sum() + following) / 2


def noise_to_text(steps: int) -> PreTrainedModel:
    """A network that turns blocks of noise into text, as DiffusionGemma."""
    torch.manual_seed(0)
    size = len(SPECIALS) + len(words())
    network = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(
        text_config=GEMMA | dict(vocab_size=size + 3), vision_config=VISION, canvas_length=BLOCK,
        initializer_range=SPREAD, image_token_id=size, boi_token_id=size + 1, eoi_token_id=size + 2,
    )).float()
    network.tie_weights()
    for name, weights in network.named_parameters():
        weights.requires_grad_("vision" not in name)
    trained(network, lambda first, rest: noise_loss(network, first, rest), steps)
    return network


def noise_loss(network: PreTrainedModel, first: Tensor, rest: Tensor) -> Tensor:
    """The mean negative log-likelihood of a block of which a random share is noise; in half of the cases it is read
    with the logits of a first forward.
    """
    start = BLOCK * int(torch.randint(rest.shape[1] // BLOCK, ()))
    block, before = rest[:, start:start + BLOCK], torch.cat([first, rest[:, :start]], 1)
    noise = torch.randint(network.config.text_config.vocab_size, block.shape)
    read = torch.where(torch.rand(block.shape) < torch.rand(len(block), 1), noise, block)
    given = dict(input_ids=before, decoder_input_ids=read)
    if torch.rand(()) < 0.5:
        with torch.no_grad():
            given["self_conditioning_logits"] = network(**given).logits
    return cross_entropy(network(**given).logits.transpose(1, 2), block)
