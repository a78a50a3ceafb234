"""What the config of an encoder-decoder network says: whether it is one, and how its decoder starts."""
from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from playground.engine.loading.text_parts import sees_more
from playground.errors import Refusal


def is_encoder_decoder(config: PretrainedConfig) -> bool:
    """Whether the library has a class that reads a text with an encoder and writes one with a decoder."""
    known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    named = config.architectures or list(known.values())
    return (config.is_encoder_decoder and config.model_type in known and not sees_more(config)
            and any(name in known.values() for name in named))


def decoder_layers(config: PretrainedConfig) -> int:
    """Number of the decoder's layers; encoder and decoder may have unequally many."""
    named = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
    return next((count for count in named if count), config.get_text_config(decoder=True).num_hidden_layers)


def start_ids(network: PreTrainedModel) -> tuple[int, list[int]]:
    """The token that starts the decoder, and those that are forced after it; raises Refusal if no start is named."""
    settings, text = network.generation_config, network.config.get_text_config(decoder=True)
    named = [getattr(source, name, None) for name in ("decoder_start_token_id", "bos_token_id")
             for source in (settings, network.config, text)]
    start = next((id for id in named if isinstance(id, int)), None)
    if start is None:
        raise Refusal(
            "The config of this encoder-decoder model does not say which token its decoder starts with: add "
            "decoder_start_token_id to it.",
            "model",
        )
    forced = settings.forced_bos_token_id
    return start, [forced] if isinstance(forced, int) else []
