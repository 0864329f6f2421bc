"""A byte-level BPE tokenizer from a GGUF file, splitting text exactly as its model learnt it.

The file has vocabulary and merges but names its splitting rule only (`tokenizer.ggml.pre`). A
wrong rule is silent: text is cut into other tokens than the model was trained on. So each rule is
written out here and a name that isn't known is refused. (transformers 5.24 takes GPT-2's rule for
those it doesn't know, SmolLM's among them, and so loses that digits are split one by one.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cache_store.errors import IntegrityError, UsageError
from engine.library.gguf_config import Metadata

_CONTROL, _USER_DEFINED = 3, 4  # the file's token types

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED + r"|\p{N}" + _TAIL
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}|\p{{N}}{{1,3}}" + _TAIL
)

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2_SPLIT = {**_BYTES, "use_regex": True}
_DIGITS = [{"type": "Digits", "individual_digits": True}, _GPT2_SPLIT]


def _pattern(pattern: str) -> list[dict[str, Any]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, {**_BYTES, "use_regex": False}]


# rule: how text is split, and whether a whole piece that is a token is taken as it is
_RULES: Mapping[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([_GPT2_SPLIT], False),
    "smollm": (_DIGITS, False),
    "llama-bpe": (_pattern(_LLAMA3), True),
    "llama3": (_pattern(_LLAMA3), True),
    "llama-v3": (_pattern(_LLAMA3), True),
    "smaug-bpe": (_pattern(_LLAMA3), True),
    "qwen2": (_pattern(_QWEN2), False),
    "deepseek-r1-qwen": (_pattern(_QWEN2), False),
    "tekken": (_pattern(_TEKKEN), True),
    "gpt-4o": (_pattern(_GPT4O), False),
}
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # these put text into Unicode's composed form first

_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # unless the file says otherwise


def adds_bos(metadata: Metadata) -> bool:
    """Whether a text starts with BOS: as the file says, else as is usual for its tokenizer."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return metadata.get("tokenizer.ggml.pre") in _WITH_BOS


def tokenizer_json(metadata: Metadata, where: str) -> dict[str, Any]:
    """The `tokenizer.json` of a file whose `tokenizer.ggml.model` is gpt2.

    Raises UsageError for an unknown splitting rule, IntegrityError for a vocabulary that makes no
    sense.
    """
    rule = str(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    if rule not in _RULES:
        raise UsageError(
            f"{where}: it splits text by the rule {rule!r}, which is not known here",
            f"get the model in the Hugging Face layout instead; known are {', '.join(_RULES)}",
        )
    split, ignore_merges = _RULES[rule]
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    merges = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges") or ()]
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise IntegrityError(f"{where}: its vocabulary is incomplete or has a token twice")
    if any(len(merge) != 2 or "".join(merge) not in vocab for merge in merges):
        raise IntegrityError(f"{where}: its merges do not fit its vocabulary")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule in _NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": _bos_first(metadata, tokens),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }


def tokenizer_config(metadata: Metadata, tokens: Sequence[str], context: int) -> dict[str, Any]:
    """The `tokenizer_config.json`: the named special tokens and whether BOS is added."""
    config: dict[str, Any] = {
        "add_bos_token": adds_bos(metadata),
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        # Any other class of transformers builds a pre-tokenizer of its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is not None and 0 <= int(index) < len(tokens):
            config[name] = tokens[int(index)]
    return config


def _bos_first(metadata: Metadata, tokens: Sequence[str]) -> dict[str, Any] | None:
    index = metadata.get("tokenizer.ggml.bos_token_id")
    if index is None or not adds_bos(metadata):
        return None
    bos = {"SpecialToken": {"id": tokens[int(index)], "type_id": 0}}
    first, second = ({"Sequence": {"id": i, "type_id": n}} for i, n in (("A", 0), ("B", 1)))
    named = {"id": tokens[int(index)], "ids": [int(index)], "tokens": [tokens[int(index)]]}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {tokens[int(index)]: named},
    }


def dumped(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
