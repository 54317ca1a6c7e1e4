"""A tokenizer of ours as the `tokenizer.json` that transformers reads: the same ids for every text.

Both are byte-level BPE. tiktoken merges whatever two neighbours make a token of the lowest rank; `tokenizers` wants the
list of merges, which is every way to cut a token into two tokens, in the order of the ranks.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan_diloco.data.files import write_whole
from torchtitan_diloco.data.tokenizer import END_OF_DOCUMENT, Tokenizer
from torchtitan_diloco.data.train_tokenizer import byte_characters
from torchtitan_diloco.utils import install_command

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Writes the two files that `transformers.AutoTokenizer` loads."""
    converted = convert_tokenizer(tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Training ends every document with this token, so it also stands before the first word of the next one.
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
        "pad_token": END_OF_DOCUMENT,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",  # where `generate` needs it
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        # What looks like a special token is ordinary text, as in training. To have it read as the token it names, call
        # the tokenizer with split_special_tokens=False. One difference stays: a lone surrogate, which we turn into
        # U+FFFD, is an error there.
        "split_special_tokens": True,
    }
    write_whole(folder / TOKENIZER_NAME, converted.to_str(pretty=True).encode())
    write_whole(folder / TOKENIZER_CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())


def convert_tokenizer(tokenizer: Tokenizer) -> Any:
    """The `tokenizers.Tokenizer` that gives the same ids, which is tried on text made of its own tokens."""
    try:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError as error:
        raise ValueError(
            f"exporting a tokenizer needs the package tokenizers: {install_command('export')}"
        ) from error
    characters = byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    ranks, special = tokenizer.ranks(), tokenizer.special_tokens()
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    by_id = sorted(special, key=special.__getitem__)
    if [special[token] for token in by_id] != list(
        range(len(vocabulary), len(vocabulary) + len(special))
    ):
        # Only a token of the vocabulary keeps its id where ids have gaps, as those of named encodings have.
        vocabulary |= special
    converted = FastTokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(written(left), written(right)) for left, right in merges_of(ranks)],
            ignore_merges=True,  # tiktoken too takes a piece that is a token as it is
        )
    )
    converted.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(oniguruma_pattern(tokenizer.split_pattern)), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    converted.decoder = decoders.ByteLevel()
    converted.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in by_id]
    )
    converted.encode_special_tokens = True
    check_same_ids(tokenizer, converted)
    return converted


def merges_of(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, first merges first."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            if token[:cut] in ranks and token[cut:] in ranks:
                yield token[:cut], token[cut:]


def oniguruma_pattern(pattern: str) -> str:
    """tiktoken's pattern for the other engine, which reads `{1,3}+` as a repetition of `{1,3}`, and `$` as the end of any
    line. In all patterns of tiktoken the former ends an alternative, where being possessive changes nothing."""
    possessive = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", possessive)


def check_same_ids(tokenizer: Tokenizer, converted: Any) -> None:
    """The two engines know characters by their own tables, and a rank file can hold what no training makes: better to
    find a difference here than in a published model."""
    for text in _trial_texts(tokenizer):
        ours, theirs = (
            tokenizer.encode(text).tolist(),
            converted.encode(text, add_special_tokens=False).ids,
        )
        if ours != theirs:
            raise ValueError(
                f"{tokenizer.name} cannot be exported: for {text!r} it gives the ids {ours}, its conversion {theirs}. Learn "
                "the rank file with torchtitan_diloco.data.train_tokenizer, or update the package tokenizers"
            )


def _trial_texts(tokenizer: Tokenizer) -> Iterator[str]:
    draw = random.Random(0)
    tokens = list(tokenizer.ranks())
    for _ in range(100):
        yield b"".join(draw.choices(tokens, k=40)).decode(errors="replace")
    yield from tokenizer.special_tokens()
    for _ in range(100):
        characters = [
            chr(
                draw.choice(
                    (draw.randrange(0x80), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000))
                )
            )
        ]
        yield "".join(
            draw.choices([*characters, *" \n\r\t'", "a", "S", "1", "\u00a0", "'ll", "!"], k=40)
        )
