"""Continuing many prompts at once, for the evaluation and for what a draft learns from."""
import torch

from playground.pocket import tokenizer as tokens

END, PAD = (tokens.SPECIALS.index(name) for name in (tokens.END, tokens.PAD))


@torch.inference_mode()
def continuations(model, prompts, room, temperature=0.0, rows=32):
    """The continuation of every prompt, at most `room` tokens, its end token included: lists of token ids.

    prompts: lists of token ids. Temperature 0 is greedy; otherwise torch's global generator draws. Prompts of like
    length share a batch, so that little of it is padding.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found = {}
    for batch in (order[at:at + rows] for at in range(0, len(order), rows)):
        said = _continued(model, [prompts[i] for i in batch], room, temperature)
        found |= {i: row[:row.index(END) + 1] if END in row else row for i, row in zip(batch, said)}
    return [found[i] for i in range(len(prompts))]


def _continued(model, prompts, room, temperature):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts], device=model.device)
    heat = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    return model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=room, **heat)[:, width:].tolist()
