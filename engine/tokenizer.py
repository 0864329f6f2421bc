"""Text to token ids and back, with the guarantee that plain text never becomes control ids.

Two `tokenizers` objects are made from one `tokenizer.json`. The *template* one is the file as it
is and recognises control tokens. The *plain* one has every control token renamed, in the added
tokens and in the model's own vocabulary, to a name with a random part that no text can hold, and
the merges that would build it removed: whatever the normalizer, pre-tokenizer or model does,
there is nothing left for text such as `<|im_start|>` to match.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from cache_store.errors import IntegrityError, NotFoundError
from engine.detokenizer import Pieces, StreamDecoder

if TYPE_CHECKING:
    import tokenizers

# Part of the fingerprint: raise it when these rules give other ids for the same tokenizer.json.
ENCODING_VERSION = 1

# Added tokens that are not marked special but steer a model: <think>, <tool_call>, [INST], ...
# Taking one too many for control text is harmless: it is then spelt out like any other text.
_CONTROL_LOOKING = re.compile(r"[<＜\[].*\w.*[>＞\]]", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A model's tokenizer. Make one with `Tokenizer.load`; safe to share between threads.

    Attributes
    ----------
    fingerprint: 64 hex digits over everything that changes how text is encoded.
    vocab_size: number of tokens, added ones included (a model may have padding rows beyond it).
    special_ids: every control token's id; `encode` never returns one.
    bos_id: id of the beginning-of-sequence token, if the model has one.
    adds_bos: whether a prompt of this model starts with `bos_id`.
    prepends_space: whether every encoded text gets a space in front.
    named: text of the named special tokens (`bos_token`, ...), as chat templates expect them.
    """

    def __init__(
        self,
        plain: tokenizers.Tokenizer,
        template: tokenizers.Tokenizer,
        *,
        fingerprint: str,
        special_ids: frozenset[int],
        bos_id: int | None,
        adds_bos: bool,
        named: Mapping[str, str],
        pieces: Pieces,
    ) -> None:
        self._plain = plain
        self._template = template
        self._pieces = pieces
        self.fingerprint = fingerprint
        self.special_ids = special_ids
        self.bos_id = bos_id
        self.adds_bos = adds_bos
        self.named = dict(named)
        self.vocab_size = template.get_vocab_size(with_added_tokens=True)
        first = [template.id_to_token(token) for token in self.encode("a")[:1]]
        self.prepends_space = any((text or "").startswith(("▁", "Ġ")) for text in first)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least its length over this of them."""
        return max(map(len, self._template.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read `tokenizer.json` and, where present, the special tokens' names beside it.

        Raises
        ------
        NotFoundError: there is no `tokenizer.json`.
        IntegrityError: one of the files is not what it should be.
        """
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise NotFoundError(
                f"no tokenizer.json in {model_dir}",
                "get the model again with `cacheblend models pull`, or save its fast tokenizer",
            )
        spec = read_json_object(path)
        config = read_json_object(path.with_name("tokenizer_config.json"), missing_ok=True)
        names_map = read_json_object(path.with_name("special_tokens_map.json"), missing_ok=True)
        named = _named_tokens(names_map) | _named_tokens(config)
        # Cutting text short and padding it would be silent; dropout would be random.
        spec["truncation"] = spec["padding"] = None
        model = spec.get("model")
        if not isinstance(model, dict):
            raise IntegrityError(f"{path} holds no tokenizer model", "get the model again")
        if "dropout" in model:
            model["dropout"] = None

        canonical = json.dumps(spec, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        template = _build(canonical, path)
        control = _control_tokens(template, model, config, named)
        _hide(spec, control)
        plain = _build(json.dumps(spec, ensure_ascii=False, separators=(",", ":")), path)
        plain.encode_special_tokens = True
        if plain.get_vocab_size() != template.get_vocab_size():
            raise IntegrityError(
                f"{path} gives one token two ids", "the tokenizer file is inconsistent"
            )

        bos_id, adds_bos = _bos(template, config, named, control)
        if bos_id is not None:
            named["bos_token"] = control.get(bos_id, "")
        digest = blake3(canonical.encode("utf-8", "replace"))
        extra = [ENCODING_VERSION, sorted(control), bos_id if adds_bos else None]
        digest.update(json.dumps(extra).encode())
        return cls(
            plain,
            template,
            fingerprint=digest.hexdigest(),
            special_ids=frozenset(control),
            bos_id=bos_id,
            adds_bos=adds_bos,
            named=named,
            pieces=Pieces.of(template, spec.get("decoder")),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no control ids, no BOS.

        Characters the vocabulary cannot spell give no id at all (the unknown token is a control
        token); lone surrogates count as U+FFFD.
        """
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        clean = [replace_surrogates(text) for text in texts]
        encodings = self._plain.encode_batch_fast(clean, add_special_tokens=False)
        return [self._without_control(encoding.ids) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        """`encode` with each id's `[start, end)` in characters of `text`: (id, start, end).

        Ids that share one character each carry that character's whole span.
        """
        encoding = self._plain.encode(replace_surrogates(text), add_special_tokens=False)
        return [
            (token, start, end)
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token not in self.special_ids
        ]

    def encode_template(self, text: str) -> list[int]:
        """Ids of a chat template's own text, control tokens recognised; no BOS is added."""
        return list(self._template.encode(replace_surrogates(text), add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; equal to what `stream` shows for them. Ids beyond the vocabulary show
        nothing, bytes that are not UTF-8 show as U+FFFD."""
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def token_spans(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the shown text, control tokens by name; together `decode` of all.

        A character made of several ids is given to the one that completes it.
        """
        stream = self.stream(skip_special=False)
        spans = [stream.push(token) for token in ids]
        if spans:
            spans[-1] += stream.finish()
        return spans

    def pieces(self, ids: Sequence[int], *, whole: bool = False) -> list[bytes]:
        """The bytes each id stands for, maybe a part of a character, control tokens by name.

        The space that a sentencepiece text begins with is left out, unless `whole`.
        """
        found: list[bytes] = []
        previous: int | None = None
        for token in ids:
            if token in self.special_ids:
                found.append((self._template.id_to_token(token) or "").encode("utf-8", "replace"))
            else:
                found.append(self._pieces.piece(token, previous))
            previous = token
        if self._pieces.strip_first_space and not whole:
            first = next((index for index, piece in enumerate(found) if piece), None)
            if first is not None:
                found[first] = found[first].removeprefix(b" ")
        return found

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A new decoder for ids that arrive one by one."""
        return StreamDecoder(self._pieces, self.special_ids if skip_special else frozenset())

    def _without_control(self, ids: list[int]) -> list[int]:
        # Only the unknown token can still turn up here, for characters that cannot be spelt.
        if self.special_ids.isdisjoint(ids):
            return ids
        return [token for token in ids if token not in self.special_ids]


def replace_surrogates(text: str) -> str:
    """`text` with lone surrogates (undecodable bytes of a terminal or file name) as U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def read_json_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; `{}` for a missing file when that is allowed.

    Raises IntegrityError when the file is not a JSON object, NotFoundError when it is missing.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise NotFoundError(f"no {path.name} in {path.parent}") from None
    except OSError as error:
        raise IntegrityError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is not valid JSON: {error}", "get the model again") from error
    if not isinstance(data, dict):
        raise IntegrityError(f"{path} is not a JSON object", "get the model again")
    return data


def _build(text: str, path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception; nothing else can be caught
        raise IntegrityError(
            f"{path} is not a tokenizer that can be read: {error}", "get the model again"
        ) from error


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which are written as text or as an object with `content`."""
    found = {}
    for name in _NAMED:
        content = _content(config.get(name))
        if content:
            found[name] = content
    return found


def _content(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _control_tokens(
    template: tokenizers.Tokenizer,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    named: Mapping[str, str],
) -> dict[int, str]:
    """Id and text of every token that steers the model instead of standing for text."""
    control = {
        token: added.content
        for token, added in template.get_added_tokens_decoder().items()
        if added.special or _CONTROL_LOOKING.fullmatch(added.content)
    }
    texts: list[object] = [*named.values(), model.get("unk_token")]
    more = config.get("additional_special_tokens")
    texts += more if isinstance(more, list) else []
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        texts += [v for v in declared.values() if isinstance(v, dict) and v.get("special")]
    for text in map(_content, texts):
        token = template.token_to_id(text) if text else None
        if text and token is not None:
            control[token] = text
    unknown = model.get("unk_id")  # Unigram names it by place
    if isinstance(unknown, int):
        text = template.id_to_token(unknown)
        if text is not None:
            control[unknown] = text
    return control


def _hide(spec: dict[str, Any], control: Mapping[int, str]) -> None:
    """Rename the control tokens in `spec`, in place, to names that no text can hold."""
    nonce = secrets.token_hex(16)
    renamed = {text: f"\x00control-{token}-{nonce}" for token, text in control.items()}
    for added in spec.get("added_tokens") or []:
        if added["content"] in renamed:
            added["content"] = renamed[added["content"]]
            added["special"] = True
            added["normalized"] = False
    model = spec["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(text, text): token for text, token in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[renamed.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = _merges_without(
            model["merges"], renamed, model.get("continuing_subword_prefix") or ""
        )


def _merges_without(merges: list[Any], hidden: Mapping[str, str], prefix: str) -> list[Any]:
    kept = []
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        made = left + right.removeprefix(prefix)
        if not (left in hidden or right in hidden or made in hidden):
            kept.append(merge)
    return kept


def _bos(
    template: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    named: Mapping[str, str],
    control: Mapping[int, str],
) -> tuple[int | None, bool]:
    """The BOS id and whether prompts begin with it: as the configuration says, else as the
    post-processor does."""
    bos_id = template.token_to_id(named["bos_token"]) if "bos_token" in named else None
    ids = template.encode("a", add_special_tokens=True).ids
    first = ids[0] if ids and ids[0] in control else None
    if bos_id is None:
        bos_id = first
    adds_bos = config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = first is not None and first == bos_id
    return bos_id, adds_bos and bos_id is not None
