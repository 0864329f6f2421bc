"""Lists of records: a table, JSON, a line of JSON each, or ids alone; of all fields or of some.

A command that lists something declares its fields once, and prints with `Output.list`:

    SIZE = Field("bytes", "size", size_text, right=True)
    MODELS = Listing("models", "name", (Field("name"), SIZE))

    out = Output(json=json, quiet=quiet, verbose=verbose, form=ListForm(jsonl, fields))
    out.list(MODELS, records)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache_store.errors import UsageError

if TYPE_CHECKING:
    from cbcli.output import Output

Jsonl = Annotated[bool, typer.Option("--jsonl", help="Print a line of JSON for each.")]
Fields = Annotated[
    str | None,
    typer.Option("--fields", help="Only these fields, in this order.", metavar="NAME,…"),
]
QuietIds = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids alone, whole ones.")]

Record = Mapping[str, Any]


def shown(value: object) -> str:
    """Any value, in a table: nothing for None, words for true and false, lists joined."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


@dataclass(frozen=True)
class Field:
    """A field of a list's records. key: its name in JSON and for --fields; title: of its column,
    the key where it is empty; show: a value of it in the table. right: aligned so; once: see
    `Output.table`. column: in the table when nobody chooses fields; raw: in JSON then."""

    key: str
    title: str = ""
    show: Callable[[Any], str] = shown
    right: bool = False
    once: bool = False
    column: bool = True
    raw: bool = True

    @property
    def header(self) -> str:
        return self.title or self.key.replace("_", " ")


@dataclass(frozen=True)
class Listing:
    """A kind of list. name: of the list in JSON; id: the field that is a record's id."""

    name: str
    id: str
    fields: tuple[Field, ...]

    def chosen(self, names: str | None) -> list[Field]:
        """The fields that --fields names by key or by title; none: an empty list.

        Raises UsageError for an unknown one, naming the nearest.
        """
        known = {item.header: item for item in self.fields} | {i.key: i for i in self.fields}
        found = []
        for name in [part.strip() for part in (names or "").split(",")] if names else ():
            if name not in known:
                near = get_close_matches(name, list(known), n=1, cutoff=0.5)
                there = ", ".join(item.key for item in self.fields)
                hint = f"did you mean {near[0]}? " if near else ""
                raise UsageError(f"--fields: no field {name!r}", f"{hint}there are {there}")
            found.append(known[name])
        return found


@dataclass(frozen=True)
class ListForm:
    """How a list is wanted: a record a line, and which fields."""

    jsonl: bool = False
    fields: str | None = None


def print_list(
    out: Output,
    listing: Listing,
    records: Iterable[Record],
    *,
    rows: Callable[[Record], Iterable[Record]] | None = None,
    around: Callable[[list[Any]], Record] | None = None,
) -> int:
    """Prints a list in the form that `out` is asked for; how many records it has.

    rows: a record's lines in the table, with the fields that are not `raw`, where that is not just
    itself. around: the JSON document that has the list in it; without, that is its one key.
    """
    form = out.form
    chosen = listing.chosen(form.fields)
    counted = _Counted(records)
    if any(not item.raw for item in chosen) and rows is not None:
        flat: Iterable[Record] = (row for record in counted for row in rows(record))
    else:
        flat = counted
    raw = [item.key for item in chosen or listing.fields if chosen or item.raw]
    if form.jsonl:
        for record in flat:
            out.data({key: record[key] for key in raw if key in record})
    elif out.json:
        whole = [{key: record[key] for key in raw if key in record} for record in flat]
        out.data(around(whole) if around else {listing.name: whole})
    elif out.quiet:
        if chosen:
            raise UsageError("-q prints ids alone", "leave out -q, or --fields")
        seen = set()
        for record in counted:
            name = str(record[listing.id])
            if name not in seen:
                seen.add(name)
                out.line(name)
    else:
        columns = chosen or [item for item in listing.fields if item.column]
        lines = (row for record in counted for row in (rows(record) if rows else (record,)))
        out.table(
            [item.header for item in columns],
            ([item.show(row.get(item.key)) for item in columns] for row in lines),
            right=[item.header for item in columns if item.right],
            once=[item.header for item in columns if item.once],
        )
    return counted.count


@dataclass
class _Counted:
    """Records, counted on their way."""

    records: Iterable[Record]
    count: int = field(default=0)

    def __iter__(self) -> Iterator[Record]:
        for record in self.records:
            self.count += 1
            yield record
