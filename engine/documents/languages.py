"""Which programming language a file is written in, by its name or its first line."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from engine.documents.names import suffix_of

_SUFFIXES = {
    "python": "py pyi pyw pyx",
    "javascript": "js mjs cjs jsx",
    "typescript": "ts mts cts tsx",
    "java": "java",
    "kotlin": "kt kts",
    "scala": "scala sc",
    "groovy": "groovy gradle",
    "c": "c h",
    "cpp": "cc cpp cxx c++ hh hpp hxx cu cuh ino",
    "csharp": "cs",
    "fsharp": "fs fsx",
    "go": "go",
    "rust": "rs",
    "swift": "swift",
    "objective-c": "m mm",
    "ruby": "rb rake gemspec",
    "php": "php phtml",
    "perl": "pl pm",
    "lua": "lua",
    "r": "r",
    "julia": "jl",
    "haskell": "hs",
    "ocaml": "ml mli",
    "elixir": "ex exs",
    "erlang": "erl hrl",
    "clojure": "clj cljs cljc edn",
    "lisp": "lisp el scm rkt",
    "dart": "dart",
    "zig": "zig",
    "nim": "nim",
    "fortran": "f f77 f90 f95 f03 f08",
    "pascal": "pas",
    "ada": "adb ads",
    "verilog": "v vh sv svh",
    "vhdl": "vhd vhdl",
    "assembly": "s asm",
    "sql": "sql",
    "shell": "sh bash zsh fish ksh",
    "powershell": "ps1 psm1",
    "batch": "bat cmd",
    "css": "css scss sass less",
    "vue": "vue",
    "svelte": "svelte",
    "xml": "xml xsd xsl xslt svg plist rss atom",
    "yaml": "yaml yml",
    "toml": "toml",
    "ini": "ini cfg conf properties",
    "hcl": "tf tfvars hcl",
    "protobuf": "proto",
    "graphql": "graphql gql",
    "cmake": "cmake",
    "make": "mk mak",
    "nix": "nix",
    "diff": "diff patch",
    "template": "erb ejs hbs j2 jinja jinja2 jsp tmpl",
}
_LANGUAGES = {
    suffix: language for language, suffixes in _SUFFIXES.items() for suffix in suffixes.split()
}
_NAMES = {
    "makefile": "make",
    "gnumakefile": "make",
    "cmakelists.txt": "cmake",
    "dockerfile": "dockerfile",
    "containerfile": "dockerfile",
    "rakefile": "ruby",
    "gemfile": "ruby",
    "vagrantfile": "ruby",
    "jenkinsfile": "groovy",
    "justfile": "make",
}
_SHEBANG = re.compile(r"#![ \t]*(?:\S*/)?([^\s/]+)(?:[ \t]+(?:-\S+[ \t]+)*([^\s/]+))?")
_INTERPRETERS = {
    "python": "python",
    "pypy": "python",
    "sh": "shell",
    "bash": "shell",
    "dash": "shell",
    "zsh": "shell",
    "ksh": "shell",
    "fish": "shell",
    "node": "javascript",
    "nodejs": "javascript",
    "deno": "typescript",
    "ruby": "ruby",
    "perl": "perl",
    "php": "php",
    "lua": "lua",
    "rscript": "r",
    "julia": "julia",
    "make": "make",
}


def language_of(name: str, text: str = "") -> str | None:
    """The language in one lower-case word; None for what is no code, as far as can be told."""
    base = PurePosixPath(name).name.lower()
    if base in _NAMES:
        return _NAMES[base]
    suffix = suffix_of(name)
    if suffix:
        return _LANGUAGES.get(suffix)
    if text.startswith("#!"):
        found = _SHEBANG.match(text[:200])
        if found:
            program, argument = found[1], found[2] or ""
            program = argument if program == "env" else program
            return _INTERPRETERS.get(re.sub(r"[\d.]+$", "", program).lower())
    return None


def named_files() -> dict[str, list[str]]:
    """By language, what its files are called: `*.py`, or a whole name, in small letters."""
    found: dict[str, list[str]] = {}
    for suffix, language in _LANGUAGES.items():
        found.setdefault(language, []).append(f"*.{suffix}")
    for name, language in _NAMES.items():
        found.setdefault(language, []).append(name)
    return found
