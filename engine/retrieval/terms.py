"""What counts as a word: the terms of texts and of questions."""

import re
import unicodedata
from collections.abc import Iterator


def question_terms(question: str) -> list[str]:
    """Return the terms to search for: each once, in order, without words that say nothing.

    A question made of nothing else ("Who are The Who?") keeps them all.
    """
    every = dict.fromkeys(terms(question))
    return [term for term in every if term not in _STOP_TERMS] or list(every)


def terms(text: str) -> list[str]:
    """Return the terms of a text, as often as they occur, in no promised order.

    Words are compared NFKC-normalised, case-folded and without English plural or possessive
    endings. Scripts that put no spaces between words (and Korean, whose particles stick to
    theirs) give every two neighbouring characters, and each ideograph also alone.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    found: list[str] = []
    if not folded.isascii():
        folded = folded.replace("’", "'")
        runs = _UNSPACED.findall(folded)
        if runs:
            folded = _UNSPACED.sub(" ", folded)
            for run in runs:
                found += _character_terms(run)
    found += [_singular(word) for word in _words(_POSSESSIVE.sub("", folded))]
    return found


# Scripts written without spaces between words, as ranges of a regular expression's class.
_IDEOGRAPHS = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNSPACED = re.compile(
    f"[{_IDEOGRAPHS}"
    "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # kana
    "\u3105-\u312f\u31a0-\u31bf"  # bopomofo
    "\uac00-\ud7a3"  # Hangul syllables
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0eda"  # Thai, Lao
    "\u0f40-\u0fbc\u1000-\u103f\u1050-\u109d\u1780-\u17d3]+"  # Tibetan, Burmese, Khmer
)
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
_POSSESSIVE = re.compile(r"(?<=[^\W_])'s\b")
_WORD = re.compile(r"[^\W_]+")


def _character_terms(run: str) -> Iterator[str]:
    if len(run) == 1:
        yield run
        return
    yield from (run[at : at + 2] for at in range(len(run) - 1))
    yield from _IDEOGRAPH.findall(run)


def _words(text: str) -> list[str]:
    """Runs of letters, digits and the marks that belong to them; `_` separates.

    Python's `\\w` leaves out combining marks, which would cut Hindi or Tamil words at every
    vowel sign, so the marks this text uses are added to the pattern.
    """
    if text.isascii():
        return _WORD.findall(text)
    marks = "".join(sorted(c for c in set(text) if unicodedata.category(c).startswith("M")))
    if not marks:
        return _WORD.findall(text)
    return re.findall(rf"[^\W_](?:[^\W_]|[{re.escape(marks)}])*", text)


def _singular(word: str) -> str:
    """Fold a plural's ending away: enough for "buoys" to find "buoy", rarely enough to mislead."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "su":
        return word
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-1]


_STOP_TERMS = frozenset(
    terms("""
    a about an and any are as at be been but by can could did do does for from had has have how
    i if in into is it its may me must my of on or our shall should so than that the their them
    then there these they this those to us was we were what when where which who whom whose why
    will with would you your
    """)
)
