"""Small tokenizers of every kind, written as model directories; nothing is downloaded."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = [
    "The night watch writes every reading of the boiler into the blue book.",
    "Keys are kept at the gate; the second key lies in the office on the first floor.",
    "Visitors sign in, and they sign out again before the lights go off at six.",
    "def reading(boiler):\n    return boiler.pressure, boiler.heat\n",
    "Crème brûlée, naïve café, 12 345,67 € and 50 % off: 你好，世界。こんにちは。",
    "system user assistant start end im think tool call INST <|>[/]_ " * 3,
    "the the the reading reading watch watch and and of of to to in in is is",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Added tokens that are not marked special yet steer the model, and one that is plain text.
CONTROL_LOOKING = ["<think>", "</think>", "<tool_call>", "[INST]", "[/INST]"]
PLAIN_ADDED = "boilerhouse"

KINDS = (
    "byte_level",
    "byte_level_nfkc",
    "sentencepiece",
    "metaspace",
    "unigram",
    "whole_words",
    "word_level",
)


def write_tokenizer(
    model_dir: Path,
    kind: str = "byte_level",
    *,
    chat_template: str | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` of one of KINDS; returns `model_dir`."""
    model_dir.mkdir(parents=True, exist_ok=True)
    text, named = _build(kind)
    (model_dir / "tokenizer.json").write_text(text, encoding="utf-8")
    settings: dict[str, Any] = {**named, **(config or {})}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return model_dir


@functools.cache
def _build(kind: str) -> tuple[str, dict[str, Any]]:
    chatml = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    llama = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    if kind == "byte_level":
        return _byte_level().to_str(), chatml
    if kind == "byte_level_nfkc":
        tokenizer = _byte_level()
        tokenizer.normalizer = normalizers.NFKC()
        return tokenizer.to_str(), chatml
    if kind in ("sentencepiece", "metaspace"):
        return _sentencepiece(metaspace=kind == "metaspace"), {**llama, "add_bos_token": True}
    if kind == "unigram":
        return _unigram().to_str(), llama
    if kind == "whole_words":
        return _whole_words(), llama
    if kind == "word_level":
        return _word_level().to_str(), llama
    raise ValueError(kind)


def _added(tokenizer: Tokenizer) -> None:
    """Control tokens of the kinds that slip through: not special, stripping, normalized."""
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_special_tokens([AddedToken("<|strip|>", lstrip=True, rstrip=True, special=True)])
    tokenizer.add_special_tokens([AddedToken("<|norm|>", normalized=True, special=True)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CONTROL_LOOKING])
    tokenizer.add_tokens([AddedToken("<|loose|>", lstrip=True, rstrip=True, normalized=True)])
    tokenizer.add_tokens([AddedToken(PLAIN_ADDED, normalized=False)])


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    _added(tokenizer)
    return tokenizer


def _sentencepiece(metaspace: bool) -> str:
    """Llama's kind: byte fallback, BOS by post-processor, a space in front of every text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    trained.train_from_iterator(SENTENCES, trainer)
    learnt = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=learnt["vocab"],
            merges=[tuple(merge) for merge in learnt["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    _added(tokenizer)
    return tokenizer.to_str()


def _unigram() -> Tokenizer:
    """Control tokens are pieces of the model itself here: a plain match would find them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        unk_token="<unk>",
        special_tokens=["<unk>", "<s>", "</s>", *CONTROL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    _added(tokenizer)
    return tokenizer


def _whole_words() -> str:
    """BPE that takes a whole word from the vocabulary before any merge, and has merges that
    lead to a control token."""
    vocab = ["<unk>", "<s>", "</s>", *CONTROL]
    vocab += sorted({char for text in SENTENCES for char in text if not char.isspace()})
    vocab += ["</", "s>"]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {text: token for token, text in enumerate(vocab)},
        "merges": [["<", "/"], ["s", ">"], ["</", "s>"]],
    }
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    spec = json.loads(tokenizer.to_str()) | {"model": model}
    built = Tokenizer.from_str(json.dumps(spec))
    built.add_special_tokens(["<unk>", "<s>", "</s>", *CONTROL])
    return built.to_str()


def _word_level() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *CONTROL, *CONTROL_LOOKING, "the", "watch", "boiler"]
    tokenizer = Tokenizer(
        models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", *CONTROL])
    tokenizer.add_tokens(CONTROL_LOOKING)
    return tokenizer
