"""Chinchilla-style decoder of torchtitan_diloco, for transformers.

Parameters have the names and shapes of training, and `lm_head` is tied to the embedding. Attention
is always `torch.nn.functional.scaled_dot_product_attention`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

Rotary = tuple[Tensor, Tensor]

DEFAULTS = {
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "num_attention_heads": 3,
    "head_dim": 32,
    "intermediate_size": 384,
    "norm": "rmsnorm",
    "qk_norm": True,
    "positions": "rotary",
    "rotary_base": 10_000.0,
    "activation": "gelu",
    "use_cache": True,
}


class ChinchillaConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is not type-checked
    model_type = "chinchilla"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_key_value_heads": "num_attention_heads"}

    def __init__(self, **kwargs: Any) -> None:
        for key, default in DEFAULTS.items():
            setattr(self, key, kwargs.pop(key, default))
        super().__init__(**{"tie_word_embeddings": True, **kwargs})


def build_norm(kind: str, width: int) -> nn.Module:
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=1e-6)
    return nn.LayerNorm(width, eps=1e-6, bias=False)


def rotary_angles(position_ids: Tensor, head_dim: int, base: float) -> Rotary:
    """Return cosine and sine of each position's angles, fp32 [batch, 1, length, head_dim]."""
    dims = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    angles = position_ids[:, None, :, None].float() * base ** (-dims / head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair (i, i + head_dim/2) of x [batch, heads, length, head_dim]."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def build_mask(
    attention_mask: Tensor | None, past: int, length: int, device: torch.device
) -> Tensor | None:
    """Return the keys that each query attends to, [batch or 1, 1, length, past + length].

    Returns None where plain causal attention or attention to everything is the same.
    """
    padded = attention_mask is not None and not bool(attention_mask.all())
    if not padded and (past == 0 or length == 1):
        return None
    keys = torch.arange(past + length, device=device)
    queries = keys[past:, None]
    mask = (keys <= queries)[None, None]
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, :].bool()
    # Padding attends to itself: some kernels return NaN for a row without any key.
    return mask | (keys == queries)


class Attention(nn.Module):
    def __init__(self, config: ChinchillaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.head_dim = layer, config.num_attention_heads, config.head_dim
        inner = self.heads * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = build_norm(config.norm, self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = build_norm(config.norm, self.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: Any) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, length, head_dim]
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        causal = mask is None and k.shape[2] == length
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """GELU, or SwiGLU if there is a gate."""

    def __init__(self, config: ChinchillaConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    def __init__(self, config: ChinchillaConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config.norm, config.hidden_size)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = build_norm(config.norm, config.hidden_size)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, mask, cache)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class ChinchillaForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    config_class = ChinchillaConfig
    # Newer versions of transformers read the pair, older ones only the key.
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _supports_cache_class = True

    def __init__(self, config: ChinchillaConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, config.num_hidden_layers
        self.embedding = nn.Embedding(config.vocab_size, width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, width) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(layers))
        self.norm = build_norm(config.norm, width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """`attention_mask` is [batch, past + length], with 0 for padding on either side."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        length = x.shape[1]
        if position_ids is None:
            position_ids = self._position_ids(attention_mask, past, length, x.device)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(position_ids)
        else:
            rotary = rotary_angles(position_ids, self.config.head_dim, self.config.rotary_base)
        mask = build_mask(attention_mask, past, length, x.device)

        hidden_states = [x]
        for block in self.blocks:
            x = block(x, rotary, mask, past_key_values)
            hidden_states.append(x)
        hidden_states[-1] = x = self.norm(x)  # in transformers the last one is what the head reads
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output

    @staticmethod
    def _position_ids(
        attention_mask: Tensor | None, past: int, length: int, device: torch.device
    ) -> Tensor:
        """Count positions without padding: the first real token is at position 0."""
        if attention_mask is None:
            return torch.arange(past, past + length, device=device)[None]
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
