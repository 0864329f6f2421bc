"""What counts as a word: the terms of texts and of questions."""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

TERMS_VERSION = 1
"""Raised whenever `terms` gives others for the same text: indexes are then made anew."""


def question_terms(question: str) -> list[str]:
    """Return the terms to search for: each once, in order, without words that say nothing.

    Those are the ones of the language that the question has most of them from, English where
    that isn't clear. A question made of nothing else ("Who are The Who?") keeps them all.
    """
    every = dict.fromkeys(terms(question))
    _, silent = max(_STOP_TERMS.items(), key=lambda one: len(every.keys() & one[1]))
    return [term for term in every if term not in silent] or list(every)


def terms(text: str) -> list[str]:
    """Return the terms of a text, as often as they occur, in no promised order.

    - Words are compared NFKC-normalised, case-folded, without accents, and without English plural
      or possessive endings.
    - What is joined by - or _ gives its parts and all of it in one ("TB-40": tb, 40, tb40), and so
      does a nameLikeThis; numbers with points or commas inside are kept ("v2.1", "3.14"), those
      with thousands set apart are joined, and C++, C# and the like are words.
    - Scripts that put no spaces between words (and Korean, whose particles stick to theirs) give
      every two neighbouring characters, and each ideograph also alone.
    """
    found: list[str] = []
    if text.isascii():
        pattern = _TOKEN
    else:
        text = unicodedata.normalize("NFKC", text)
        runs = _UNSPACED.findall(text)
        if runs:
            text = _UNSPACED.sub(" ", text)
            for run in runs:
                found += _character_terms(run)
        pattern = _token_pattern(text)
    for token in pattern.findall(text):
        found += _token_terms(token) if len(token) <= _CACHED else _terms_of(token)
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

_CACHED = 40  # characters of a token whose terms are remembered
_JOINED = 64  # characters of a token that is also a term in one


def _pattern_with(marks: str) -> re.Pattern[str]:
    word = rf"[^\W_](?:[^\W_]|[{re.escape(marks)}])*" if marks else r"[^\W_]+"
    return re.compile(rf"{word}(?:[-_.,'’]{word})*(?:\+\+|#)?")


_TOKEN = _pattern_with("")
_POSSESSIVE = re.compile(r"(?<=[^\W_])['’]s(?![^\W_])")
_INSIDE = re.compile("[-_.,'’]")
_THOUSANDS = re.compile(r"[0-9]{1,3}([,.'’])[0-9]{3}(?:\1[0-9]{3})*")
_DOTTED = re.compile(r"[^\W_]*[0-9][^\W_]*(?:[.,][^\W_]+)+|[^\W_]+(?:[.,][0-9]+)+")
_HUMP = re.compile("[a-z][A-Z]|[A-Z][A-Z][a-z]")
_HUMPS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ACCENTED = re.compile("([a-z\u00e0-\u024f\u0370-\u03ff])[\u0300-\u036f]+")
_POINTS = re.compile("[\u0591-\u05c7\u0640\u064b-\u065f\u0670]")  # of Hebrew and Arabic: optional
# Letters that differ from a plain one in more than an accent.
_PLAIN = str.maketrans(
    {"ł": "l", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i", "ё": "е"}
)


def _token_pattern(text: str) -> re.Pattern[str]:
    """Of tokens in a text that isn't ASCII: runs of letters, digits and the marks that belong to
    them, joined by what may stand inside.

    Python's `\\w` leaves out combining marks, which would cut Hindi or Tamil words at every
    vowel sign, so the marks this text uses are added to the pattern.
    """
    marks = "".join(sorted(c for c in set(text) if unicodedata.category(c).startswith("M")))
    return _pattern_with(marks) if marks else _TOKEN


def _character_terms(run: str) -> Iterator[str]:
    if len(run) == 1:
        yield run
        return
    yield from (run[at : at + 2] for at in range(len(run) - 1))
    yield from _IDEOGRAPH.findall(run)


def _terms_of(token: str) -> tuple[str, ...]:
    """The terms of a run of letters, digits and what joins them."""
    if token.isascii() and token.isalpha() and (token.islower() or token[1:].islower()):
        return (_singular(token.lower()),)
    bare = token.rstrip("+#")
    parts = _INSIDE.split(_POSSESSIVE.sub("", bare))
    found = [_singular(_folded(part)) for part in parts]
    if len(bare) < len(token) and len(bare) <= 2:  # C++, F#
        found.append(_folded(token))
    if len(token) > _JOINED:
        return tuple(found)
    if len(parts) > 1:
        found += _in_one(bare, parts)
    for part in parts:
        humps = [hump for hump in _HUMPS.findall(part) if len(hump) > 1]
        if len(humps) > 1 and _HUMP.search(part):
            found += [_singular(hump.lower()) for hump in humps]
    return tuple(found)


_token_terms = lru_cache(maxsize=2**16)(_terms_of)


def _in_one(token: str, parts: list[str]) -> list[str]:
    """The terms that a token with several parts is as a whole."""
    joints = set(_INSIDE.findall(token))
    if joints <= {"-", "_"}:
        return [_singular(_folded("".join(parts)))]
    found = []
    if _DOTTED.fullmatch(token):
        found.append(_folded(token))
    if _THOUSANDS.fullmatch(token):
        found.append("".join(parts))
    return found


def _folded(word: str) -> str:
    """A word without case and accents."""
    word = word.casefold()
    if word.isascii():
        return word
    word = unicodedata.normalize("NFD", word)
    word = _POINTS.sub("", _ACCENTED.sub(r"\1", word))
    return unicodedata.normalize("NFKC", word).translate(_PLAIN)


def _singular(word: str) -> str:
    """Fold a plural's ending away: enough for "buoys" to find "buoy", rarely enough to mislead."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "su":
        return word
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-1]


# Words of a question that say nothing, by language; the first is the one for want of a better.
_STOP_TERMS = {
    language: frozenset(terms(words))
    for language, words in {
        "en": """
    a about an and any are as at be been but by can could did do does for from had has have how
    i if in into is it its may me must my of on or our shall should so than that the their them
    then there these they this those to us was we were what when where which who whom whose why
    will with would you your
    """,
        "de": """
    aber als am an auf aus bei bis da das dass dem den der des die durch ein eine einem einen
    einer eines er es für hat haben hatte ich ihr im in ist kann man mit nach nicht oder sich sie
    sind so über um und uns unter von vom vor war waren wann warum was welche welchem welchen
    welcher welches wem wen wer werden wessen wie wir wird wo woher wohin zu zum zur
    """,
        "fr": """
    a à au aux avec ce ces cette comment combien dans de des du elle en est et étaient était être
    il ils je l d la le les leur lui mais ne nous ont ou où par pas pour pourquoi qu quand que quel
    quelle quelles quels qui quoi sa se ses son sont sur un une vous y
    """,
        "es": """
    a al como cómo con cuál cuáles cuándo cuánto cuántos de del dónde el ella en entre era es está
    están fue ha han la las lo los más no o para pero por qué que quién quiénes se ser sin sobre
    son su sus un una unos y
    """,
        "it": """
    a al alla che chi ci come con cosa da dal dalla dei del della delle di dove e è era gli ha
    hanno i il in l la le lo ma nel nella non o per perché quale quali quando quanto quanti se si
    sono su sul sulla un una uno
    """,
        "pt": """
    a ao aos as às com como da das de do dos e é em era está foi há mais mas na nas no nos não o
    onde os ou para pelo pela por porque qual quais quando quanto quantos que quem se são seu sua
    um uma
    """,
        "nl": """
    aan als bij dan dat de deze die dit door een en er had heeft het hij hoe hun ik in is je kan
    met naar niet of om onder ook op over te tot uit van voor waar waarom wanneer was wat we welk
    welke werd wie wordt ze zijn zo zou
    """,
        "ru": """
    а без был была были было быть в во где для до его ее есть же за и из или их к как какая какие
    какой какое когда кто ли мы на не о об он она они от по почему при с сколько со так то у чего
    чей что чтобы это я
    """,
    }.items()
}
