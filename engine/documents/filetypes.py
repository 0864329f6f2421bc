"""Kinds of file by name, for --type and --type-not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from cache_store.errors import UsageError

_CODE: Mapping[str, str] = {
    "c": "*.c *.h",
    "cpp": "*.cc *.cpp *.cxx *.hh *.hpp *.hxx *.inl",
    "csharp": "*.cs",
    "css": "*.css *.scss *.sass *.less",
    "go": "*.go",
    "haskell": "*.hs *.lhs",
    "java": "*.java",
    "js": "*.js *.mjs *.cjs *.jsx",
    "julia": "*.jl",
    "kotlin": "*.kt *.kts",
    "lua": "*.lua",
    "make": "makefile gnumakefile *.mk *.mak",
    "perl": "*.pl *.pm",
    "php": "*.php",
    "py": "*.py *.pyi",
    "r": "*.r",
    "ruby": "*.rb gemfile rakefile",
    "rust": "*.rs",
    "scala": "*.scala",
    "sh": "*.sh *.bash *.zsh *.fish",
    "sql": "*.sql",
    "swift": "*.swift",
    "ts": "*.ts *.tsx *.mts *.cts",
}
_TEXTS: Mapping[str, str] = {
    "asciidoc": "*.adoc *.asciidoc *.asc",
    "csv": "*.csv *.tsv",
    "docx": "*.docx",
    "epub": "*.epub",
    "html": "*.html *.htm *.xhtml",
    "ini": "*.ini *.cfg *.conf",
    "json": "*.json",
    "jsonl": "*.jsonl *.ndjson",
    "log": "*.log",
    "md": "*.md *.markdown *.mdown *.mkd *.mdx",
    "notebook": "*.ipynb",
    "org": "*.org",
    "pdf": "*.pdf",
    "rst": "*.rst",
    "tex": "*.tex *.ltx *.bib",
    "toml": "*.toml",
    "txt": "*.txt *.text",
    "xml": "*.xml",
    "yaml": "*.yaml *.yml",
}
_NAMES = {name: tuple(names.split()) for name, names in {**_TEXTS, **_CODE}.items()}
_ALL_CODE = tuple(sorted({one for name in _CODE for one in _NAMES[name]}))
TYPES: Mapping[str, tuple[str, ...]] = dict(sorted({**_NAMES, "code": _ALL_CODE}.items()))
"""What files of each type are called: `*.md`, or a whole name; in small letters. The type `code`
is all programming languages together."""

_OTHER_NAMES = {
    "markdown": "md",
    "python": "py",
    "javascript": "js",
    "typescript": "ts",
    "text": "txt",
    "ipynb": "notebook",
    "jupyter": "notebook",
    "htm": "html",
    "tsv": "csv",
    "yml": "yaml",
    "bash": "sh",
}


class TypeChoice:
    """Files of some types, and not of others. Raises UsageError for a type there is not."""

    def __init__(self, types: Iterable[str], not_types: Iterable[str]) -> None:
        self._wanted = _Names(types)
        self._refused = _Names(not_types)

    @property
    def all(self) -> bool:
        return not (self._wanted or self._refused)

    def takes(self, name: str) -> bool:
        name = name.lower()
        if self._refused and name in self._refused:
            return False
        return not self._wanted or name in self._wanted


class _Names:
    """All names that some types' files have."""

    def __init__(self, types: Iterable[str]) -> None:
        patterns = {pattern for name in types for pattern in TYPES[known_type(name)]}
        self._ends = tuple(p[1:] for p in patterns if p.startswith("*"))
        self._whole = patterns - {"*" + end for end in self._ends}

    def __bool__(self) -> bool:
        return bool(self._ends or self._whole)

    def __contains__(self, name: str) -> bool:
        return name.endswith(self._ends) or name in self._whole


def known_type(name: str) -> str:
    """The type of this name, or of this other name. Raises UsageError."""
    plain = name.strip().lower().removeprefix(".")
    plain = _OTHER_NAMES.get(plain, plain)
    if plain not in TYPES:
        near = get_close_matches(plain, TYPES, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"no file type {name!r}", f"{advice}`cacheblend ingest --type-list` shows all of them"
        )
    return plain
