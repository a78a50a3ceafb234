"""Batched generation, for the evaluation and for the training texts of the drafts."""
import torch

from playground.pocket import tokenizer as tokens

END, PAD = (tokens.SPECIALS.index(name) for name in (tokens.END, tokens.PAD))


@torch.inference_mode()
def continuations(model, prompts, room, temperature=0.0, rows=32):
    """Continuations of all prompts, at most `room` tokens each, with the end token: lists of token ids.

    prompts: lists of token ids. Temperature 0 is greedy; otherwise torch's global generator is used. Prompts of similar
    length share a batch, so that there is little padding.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found = {}
    for batch in (order[at:at + rows] for at in range(0, len(order), rows)):
        written = _continued(model, [prompts[i] for i in batch], room, temperature)
        found |= {i: ids[:ids.index(END) + 1] if END in ids else ids for i, ids in zip(batch, written)}
    return [found[i] for i in range(len(prompts))]


def _continued(model, prompts, room, temperature):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts], device=model.device)
    sampling = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    return model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=room, **sampling)[:, width:].tolist()
