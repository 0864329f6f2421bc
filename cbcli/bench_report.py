"""What `bench` prints: a table and what it was measured on, JSON or CSV."""

from __future__ import annotations

import csv as csv_module
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbcli.output import Output
from cbcli.units import rate_text, size_text

if TYPE_CHECKING:
    from engine.bench.decode import DecodeRow
    from engine.bench.ingest import IngestRow
    from engine.bench.load import LoadRow
    from engine.bench.report import Report
    from engine.bench.ttft import TtftRow


def show(out: Output, report: Report, csv: str | None) -> None:
    """Prints a report in the form asked for, and writes its rows to the file `csv` (- prints
    them instead of the table)."""
    write_csv(out, report.rows, csv)
    if out.json:
        out.data(report.to_json())
    elif csv == "-":
        out.line(csv_text(report.rows).removesuffix("\n"))
    else:
        for line in heading(report):
            out.line(line)
        headers, rows = _TABLES[report.bench](report)
        out.table(headers, rows, right=headers[_WORDS[report.bench] :])
        for line in closing(report):
            out.line(line)


def write_csv(out: Output, rows: Sequence[Any], csv: str | None) -> None:
    """Writes rows to the file `csv`, where one is named."""
    if csv not in (None, "-"):
        Path(str(csv)).write_text(csv_text(rows), "utf-8")
        out.note(f"wrote {csv}")


def csv_text(rows: Sequence[Any]) -> str:
    """Rows with a line of names first. Lists are joined by spaces, mappings as name=value."""
    flat = [{name: _cell(value) for name, value in asdict(row).items()} for row in rows]
    text = io.StringIO()
    writer = csv_module.DictWriter(text, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _cell(value: object) -> object:
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return value


def heading(report: Report) -> list[str]:
    """What was measured, on what, and how other engines were."""
    at, model = report.conditions, report.model
    where = f", store on {at.store_filesystem}" if at.store_filesystem else ""
    lines = [
        f"{model.name}, {model.precision} on {at.device} ({at.cpu}), {at.threads} of {at.cores} "
        f"cores, torch {at.torch}",
        f"medians of {report.pairs} rounds{where}, files in the page cache",
    ]
    for peer in report.peers:
        idle = "" if peer.idle_cores is None else f", {peer.idle_cores:.2f} cores busy in between"
        lines.append(f"{peer.name} {peer.version}: {peer.how}, {peer.threads} threads{idle}")
    return lines


def closing(report: Report) -> list[str]:
    """How well cost fits a line."""
    return [
        f"seconds against tokens computed x prompt tokens, {fit.policy}"
        + (f", {fit.loader}" if len({f.loader for f in report.fits}) > 1 else "")
        + f": {fit.intercept_s:.3f} + {fit.seconds_per_unit * 1e6:.3f} per million, "
        f"R2 {fit.r2:.4f} over {fit.points} points"
        for fit in report.fits
    ]


def way_text(row: TtftRow, loaders: bool) -> str:
    """A way as a person names it: "full prefill", "blend value 0.16", "vllm"."""
    if row.way == "full":
        return "full prefill"
    words = [row.way, row.policy or "", "" if row.ratio is None else f"{row.ratio:g}"]
    if loaders and row.loader is not None:
        words.append(row.loader)
    return " ".join(word for word in words if word)


def _ttft(report: Report) -> tuple[list[str], list[list[object]]]:
    rows: list[TtftRow] = list(report.rows)
    loaders = len({row.loader for row in rows if row.loader is not None}) > 1
    peers = [peer.name for peer in report.peers]
    headers = ["way", "tokens", "computed", "first token", "spread", "speedup", "bound", "share"]
    headers += [f"over {name}" for name in peers]
    table: list[list[object]] = []
    for row in rows:
        mark = row.way in ("reuse", "blend")
        table.append(
            [
                way_text(row, loaders),
                row.tokens,
                row.computed,
                _ms(row.median_s),
                f"{row.min_s * 1000:,.0f}-{_ms(row.max_s)}",
                f"{row.speedup:.2f}x",
                f"{row.bound:.2f}x" if mark and row.bound is not None else "",
                f"{row.share:.0%}" if mark and row.share is not None else "",
                *(
                    f"{row.over_peers[name]:.2f}x" if name in row.over_peers else ""
                    for name in peers
                ),
            ]
        )
    return headers, table


def _ingest(report: Report) -> tuple[list[str], list[list[object]]]:
    rows: list[IngestRow] = list(report.rows)
    headers = ["chunk tokens", "chunks", "ingest", "full prefill", "share", "written"]
    return headers, [
        [
            row.chunk_tokens,
            row.chunks,
            rate_text(row.tokens_per_s, "tokens"),
            rate_text(row.prefill_tokens_per_s, "tokens"),
            f"{row.share:.0%}",
            size_text(row.bytes_written),
        ]
        for row in rows
    ]


def _load(report: Report) -> tuple[list[str], list[list[object]]]:
    rows: list[LoadRow] = list(report.rows)
    headers = ["loader", "reader", "first token", "load", "stall", "stall/sync load", "read"]
    return headers, [
        [
            row.loader,
            "unlimited" if row.bandwidth is None else rate_text(row.bandwidth, "bytes"),
            _ms(row.median_s),
            _ms(row.load_s),
            _ms(row.stall_s),
            "" if row.stall_share is None else f"{row.stall_share:.2f}",
            size_text(row.bytes_loaded),
        ]
        for row in rows
    ]


def _decode(report: Report) -> tuple[list[str], list[list[object]]]:
    rows: list[DecodeRow] = list(report.rows)
    headers = ["way", "cache tokens", "output", "rate", "over ours"]
    return headers, [
        [
            row.way,
            row.tokens,
            row.output,
            rate_text(row.tokens_per_s, "tokens"),
            f"{row.over_ours:.2f}x",
        ]
        for row in rows
    ]


_TABLES = {"ttft": _ttft, "ingest": _ingest, "load": _load, "decode": _decode}
_WORDS = {"ttft": 1, "ingest": 0, "load": 2, "decode": 1}  # leading columns that are no numbers
