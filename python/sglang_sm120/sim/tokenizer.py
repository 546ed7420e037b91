"""A tokenizer with one token per byte, saved in Hugging Face's format so that SGLang loads it offline."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# Ids 0..255 are the bytes themselves.
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# A multiple of 64, as SGLang pads vocabularies to.
VOCAB_SIZE = 320


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE files, by byte value.

    Printable Latin-1 bytes stand for themselves, the rest for code points from 256 on (GPT-2's published table).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 256
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into an existing folder."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS, PAD)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes, no begin mark."""
    return list(text.encode())


def decode(ids: list[int]) -> str:
    """Text of token ids; special tokens are left out, broken UTF-8 becomes U+FFFD."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")
