"""The licences of what an installation brings with it, read from the packages themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "cacheblend"
EXTRAS = ("embed", "eval", "obstore", "plot", "redis")  # those the page on licences lists
# Classifiers and licence files are written in many ways; this is how they are listed.
_CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(.+)")
_SHORT = {
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "BSD License": "BSD",
    "BSD": "BSD",
    "MIT License": "MIT",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


def needed(extras: tuple[str, ...] = ()) -> Iterator[metadata.Distribution]:
    """What is installed because this project, with `extras`, asks for it, by name; vLLM's own
    hundred packages are not followed."""
    waiting = [(PROJECT, frozenset(extras))]
    seen: dict[str, metadata.Distribution] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform, or left out
            continue
        if name != PROJECT:
            seen[canonicalize_name(name)] = found
        for line in found.requires or ():
            asked = Requirement(line)
            places = [default_environment() | {"extra": extra} for extra in ("", *wanted)]
            if asked.marker is None or any(asked.marker.evaluate(place) for place in places):
                waiting.append((asked.name, frozenset(asked.extras)))
    for name in sorted(seen):
        yield seen[name]


def licence_of(package: metadata.Distribution) -> str:
    """Its licence in a few words; empty where the package doesn't say."""
    facts = package.metadata
    if expression := facts.get("License-Expression"):
        return str(expression)
    classified = [m[1] for c in facts.get_all("Classifier") or () if (m := _CLASSIFIER.match(c))]
    words = classified or [(facts.get("License") or "").strip().split("\n")[0]]
    return " or ".join(sorted({_SHORT.get(word, word) for word in words}))[:80]


def table(extras: tuple[str, ...] = ()) -> str:
    """A Markdown table of `needed`."""
    rows = [f"| {p.metadata['Name']} | {licence_of(p)} |" for p in needed(extras)]
    return "\n".join(["| package | licence |", "|---|---|", *rows])
