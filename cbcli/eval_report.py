"""What `eval` prints: a table and what it was measured on, JSON or CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cbcli.bench_report import csv_text, write_csv
from cbcli.output import Output
from cbcli.units import count_text

if TYPE_CHECKING:
    from engine.evaluation.report import ArmRow, Report

FORMATS = (".svg", ".png", ".pdf")  # of its picture

_SCORES = {"f1": "F1", "rouge-l": "ROUGE-L"}


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
        headers, rows = table(report)
        out.table(headers, rows, right=headers[1:])


def heading(report: Report) -> list[str]:
    """What was evaluated, on what, and what the figures are."""
    at, model, data = report.conditions, report.model, report.data
    least, most = data.passages
    passages = f"{most}" if least == most else f"{least} to {most}"
    order = "" if data.shuffle is None else f", shuffled with seed {data.shuffle}"
    scored = "" if report.metric is None else f"; answers of up to {report.max_tokens} tokens"
    return [
        f"{model.name}, {model.precision} on {at.device} ({at.cpu}), {at.threads} of {at.cores} "
        f"cores, torch {at.torch}",
        f"{count_text(data.questions, 'questions')}, {passages} passages each{order}, prompts of "
        f"{data.tokens:,.0f} tokens",
        f"KL from full prefill in nats, along its first {report.forced_tokens} tokens{scored}; in "
        "brackets 95% of resampled questions",
    ]


def way_text(row: ArmRow, apart: Sequence[str]) -> str:
    """A way as a person names it: "full prefill", "blend value 0.16", "blend key 0.3 @8".

    apart: what else rows differ in, of `differences`.
    """
    if row.mode == "full":
        return "full prefill"
    if row.mode == "blend" and row.policy is None:
        return f"blend all {row.ratio:g}"
    words = [row.mode]
    if row.policy is not None:
        words += [row.policy, f"{row.ratio:g}"]
    return " ".join([*words, *more_text(row, apart)])


def more_text(row: ArmRow, apart: Sequence[str]) -> list[str]:
    """Check layers as "@8", the context as "behind bos"; each only where rows differ in it."""
    words = []
    if "layers" in apart and row.check_layers is not None:
        words.append("@" + ",".join(map(str, row.check_layers)))
    if "context" in apart:
        words.append(f"behind {row.context}")
    return words


def differences(rows: Iterable[ArmRow]) -> list[str]:
    """Of "layers" and "context" those in which rows differ."""
    found = list(rows)
    layers, contexts = {row.check_layers for row in found} - {None}, {r.context for r in found}
    return [name for name, kinds in (("layers", layers), ("context", contexts)) if len(kinds) > 1]


def table(report: Report) -> tuple[list[str], list[list[object]]]:
    """Headers and cells; a column of scores only where answers were scored."""
    apart = differences(report.rows)
    score = [_SCORES[report.metric]] if report.metric is not None else []
    headers = ["way", "KL", "median", "recovery", "top-1", "same", "differs at"]
    headers += [*score, "first token", "speedup"]
    rows: list[list[object]] = []
    for row in report.rows:
        points = [_with(row.score, row.score_low, row.score_high, ".3f")] if score else []
        rows.append(
            [
                way_text(row, apart),
                _with(row.kl, row.kl_low, row.kl_high, ".4f"),
                f"{row.kl_median:.4f}",
                _with(row.recovery, row.recovery_low, row.recovery_high, ".2f"),
                f"{row.top1:.3f}",
                f"{row.same:.0%}",
                "" if row.differs_at is None else f"{row.differs_at:g}",
                *points,
                f"{row.ttft_s * 1000:,.0f} ms",
                f"{row.speedup:.2f}x",
            ]
        )
    return headers, rows


def _with(value: float | None, low: float | None, high: float | None, form: str) -> str:
    """A figure and its interval, unless it could be nothing else, as at the ends."""
    if value is None:
        return ""
    if low is None or high is None or low == high == value:
        return format(value, form)
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"
