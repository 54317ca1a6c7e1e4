"""The configuration of a Chinchilla-style decoder that torchtitan_diloco trained, for transformers."""

from typing import Any

from transformers import PretrainedConfig


class ChinchillaConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is not type-checked
    model_type = "chinchilla"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 320,
        max_position_embeddings: int = 2048,
        num_hidden_layers: int = 4,
        hidden_size: int = 96,
        num_attention_heads: int = 3,
        head_dim: int = 32,
        intermediate_size: int = 384,
        norm: str = "rmsnorm",
        qk_norm: bool = True,
        positions: str = "rotary",
        rotary_base: float = 10_000.0,
        activation: str = "gelu",
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.num_hidden_layers = num_hidden_layers
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.norm = norm
        self.qk_norm = qk_norm
        self.positions = positions
        self.rotary_base = rotary_base
        self.activation = activation
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        known = {
            "norm": ("rmsnorm", "layernorm"),
            "positions": ("rotary", "learned"),
            "activation": ("gelu", "swiglu"),
            "tie_word_embeddings": (True,),
        }
        for key, values in known.items():
            if getattr(self, key) not in values:
                raise ValueError(
                    f"{key} = {getattr(self, key)!r} is not one of {', '.join(map(repr, values))}"
                )
