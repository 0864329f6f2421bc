"""Bytes to text: telling text from binary, and which encoding it is in."""

from __future__ import annotations

import codecs

HEAD_BYTES = 8192
_SAMPLE_BYTES = 256 * 1024
_CONTROL_SHARE = 0.1
# Bytes below 0x20 that text does hold: backspace to carriage return, and escape.
_CONTROL_BYTES = bytes(set(range(0x20)) - set(range(0x08, 0x0E)) - {0x1B}) + b"\x7f"
_BOMS = [  # UTF-32 first: its mark begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
]
_OLD_ENCODINGS = [
    *["cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258"],
    *["iso8859_2", "iso8859_5", "iso8859_15", "koi8_r", "mac_roman", "tis_620"],
    *["cp932", "euc_jp", "iso2022_jp", "gb18030", "big5", "cp949"],
]


def is_binary(raw: bytes) -> bool:
    if any(raw.startswith(bom) for bom, _ in _BOMS):
        return False  # told when decoding
    if b"\0" in raw:
        return True
    sample = raw[:_SAMPLE_BYTES]
    controls = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    return controls > _CONTROL_SHARE * len(sample)


def decode(raw: bytes) -> str | None:
    for bom, encoding in _BOMS:
        if raw.startswith(bom):
            return _decode_as(raw[len(bom) :], encoding)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        cut = error.reason == "unexpected end of data" and not raw[: error.start].isascii()
        if cut:  # UTF-8 to its end, and there the file stops inside a character
            return raw.decode(errors="replace")
    return _decode_as(raw, _guess(raw))


def _guess(raw: bytes) -> str:
    """The likeliest old encoding; empty when none fits."""
    from charset_normalizer import from_bytes

    sample = raw[:_SAMPLE_BYTES]
    if len(raw) > len(sample):  # a line's end is never inside a character
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    matches = from_bytes(sample, cp_isolation=_OLD_ENCODINGS)
    best = matches.best()
    if best is None:
        return ""
    # A few accents fit several code pages equally well; then it is the commonest one.
    rank = (best.chaos, -best.coherence)
    equal = [match for match in matches if (match.chaos, -match.coherence) == rank]
    common = any("cp1252" in match.could_be_from_charset for match in equal)
    return "cp1252" if common else best.encoding


def _decode_as(raw: bytes, encoding: str) -> str | None:
    try:
        text = raw.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return None
    return None if "\0" in text else text
