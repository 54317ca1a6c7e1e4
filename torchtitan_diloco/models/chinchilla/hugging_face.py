"""The decoder for transformers, which does not know it: folders have its source beside them."""

from typing import Any

import torch

from torchtitan_diloco.models.chinchilla import modeling_chinchilla as remote_code
from torchtitan_diloco.models.chinchilla.model import Decoder


def convert(model: Decoder) -> Any:
    shape, config = model.shape, model.config
    remote_config = remote_code.ChinchillaConfig(
        vocab_size=model.vocab_size,
        max_position_embeddings=model.sequence_length,
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.feed_forward,
        norm=config.norm,
        qk_norm=config.qk_norm,
        positions=config.positions,
        rotary_base=model.rotary_base,
        activation=config.activation,
    )
    with torch.device("meta"):
        converted = remote_code.ChinchillaForCausalLM(remote_config)
    # The parameters have the same names there. Only lm_head, which is tied, is not among ours.
    converted.load_state_dict(model.state_dict(), strict=False, assign=True)
    converted.tie_weights()
    # `save_pretrained` then copies the source of the model.
    remote_code.ChinchillaConfig.register_for_auto_class()
    remote_code.ChinchillaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return converted
