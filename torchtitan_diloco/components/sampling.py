"""Texts that a model writes after prompts."""

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.tokenizer import Tokenizer

TEMPERATURE = 0.8
"""Default of what divides the logits."""


def encode_prompt(text: str, tokenizer: Tokenizer, sequence_length: int, source: str) -> list[int]:
    """Return the tokens of a prompt. Raise a UserError if the model cannot read all of them.

    `source`: of the text, for the error.
    """
    tokens: list[int] = tokenizer.encode(text).tolist()
    if len(tokens) > sequence_length:
        limit = f"training.sequence_length = {sequence_length:,}"
        raise UserError(f"{source} has {len(tokens):,} tokens, more than {limit}: shorten it")
    return tokens
