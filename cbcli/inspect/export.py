"""What is shown, as JSON, CSV, HTML or text; and the question which of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from cbcli.inspect.run import Run
from cbcli.inspect.tables import csv_text, json_text, rows_of


def exported(kind: str, run: Run, runs: Sequence[Run], view: str) -> str:
    """The text of an export. kind: "json" (the run, or the two compared, with everything), "csv"
    (the table of the view), "html" (a page of its own)."""
    if kind == "json":
        return json_text(runs if view == "compare" else [run])
    if kind == "csv":
        return csv_text(rows_of(view, run))
    from cbcli.inspect.html import page_of

    return page_of(run)


def free_name(folder: Path, stem: str, suffix: str) -> Path:
    """A name in the folder that no file has yet."""
    path, number = folder / f"{stem}{suffix}", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}{suffix}", number + 1
    return path


def write_new(path: Path, text: str) -> None:
    """Writes a file that isn't there. Raises FileExistsError and other OSErrors."""
    with path.open("x", encoding="utf-8", newline="") as file:
        file.write(text)


class ExportScreen(ModalScreen[str | None]):
    """As what to save."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close", id="export.close"),
        Binding("j", "dismiss('json')", "JSON", id="export.json"),
        Binding("c", "dismiss('csv')", "CSV", id="export.csv"),
        Binding("h", "dismiss('html')", "HTML", id="export.html"),
    ]
    DEFAULT_CSS = """
    ExportScreen { align: center middle; }
    ExportScreen Vertical { width: 58; height: auto; border: round $primary;
        background: $surface; }
    ExportScreen OptionList, ExportScreen OptionList:focus { height: auto; border: none;
        background: $surface; }
    ExportScreen.-ascii Vertical { border: ascii $primary; }
    """

    def __init__(self, *, ascii: bool = False) -> None:
        super().__init__()
        self.set_class(ascii, "-ascii")

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Export"
            yield OptionList(
                Option("j  JSON: the run, with every token and layer", id="json"),
                Option("c  CSV: the table of this view", id="csv"),
                Option("h  HTML: a page with token map and waterfall", id="html"),
                markup=False,
            )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)
