"""The application: runs, views, and what all views share."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer, Input

from cache_store.errors import CacheblendError
from cbcli.errors import describe
from cbcli.inspect.chunks import ChunksView
from cbcli.inspect.compare import CompareView
from cbcli.inspect.export import ExportScreen, exported, free_name, write_new
from cbcli.inspect.help import HelpScreen, help_text
from cbcli.inspect.knobs import KnobsView
from cbcli.inspect.layers import LayersView
from cbcli.inspect.palette import DARK, LIGHT
from cbcli.inspect.reuse import known_runs
from cbcli.inspect.run import Run
from cbcli.inspect.runner import CONTEXTS, Cancelled, StoredChunk, Wish
from cbcli.inspect.session import Session
from cbcli.inspect.tabs import Headline, TabBar
from cbcli.inspect.theme import Look
from cbcli.inspect.time import TimeView
from cbcli.inspect.tokens import TokensView
from cbcli.inspect.view import View
from cbcli.inspect.wishes import wish_of
from engine.trace.record import Trace

TABS = (
    ("tokens", "Tokens"),
    ("layers", "Layers"),
    ("time", "Time"),
    ("compare", "Compare"),
    ("knobs", "Knobs"),
    ("chunks", "Chunks"),
)
NARROW = 110  # columns; below them what stands beside goes below


class InspectApp(App[None]):
    """Shows runs. traces: at least one; at: the token to begin at, the first recomputed one where
    it isn't said."""

    TITLE = "cacheblend inspect"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "save_picture", "SVG", id="app.picture", tooltip="Save the screen as SVG"),
        Binding("e", "export", "Export", id="app.export", tooltip="Save as JSON, CSV or HTML"),
        Binding(
            "question_mark",
            "help",
            "Help",
            key_display="?",
            id="app.help",
            tooltip="What this view shows, and its keys",
        ),
        Binding("q", "quit", "Quit", id="app.quit", tooltip="Leave"),
        *(  # at once, before the keys behind them go anywhere: they are the other view's
            Binding(
                str(number),
                f"show_view('{name}')",
                title,
                show=False,
                priority=True,
                id=f"app.{name}",
            )
            for number, (name, title) in enumerate(TABS, 1)
        ),
        Binding("r", "run(1)", "Next run", show=False, id="app.next_run"),
        Binding("R", "run(-1)", "Run before", show=False, id="app.previous_run"),
        Binding("t", "light", "Light or dark", show=False, id="app.theme"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (NARROW, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-high")]  # noqa: RUF012
    CSS = """
    Screen { background: $background; color: $foreground; }
    ModalScreen { background: $background 60%; }
    ContentSwitcher { height: 1fr; }
    Footer { background: $panel; }
    Footer FooterKey.-command-palette { border-left: none; }
    .-narrow View { layout: vertical; }
    .-narrow #panel { width: 100%; height: 7; border-left: none; }
    .-short #panel { height: 3; }
    .-narrow #map { height: 3fr; min-height: 8; }
    .-narrow #layer-table { width: 100%; height: 2fr; }
    .-short #layer-table { display: none; }
    .-narrow #history { width: 100%; height: 6; }
    .-narrow #chunk-text { width: 100%; height: 7; }
    .-ascii Canvas { scrollbar-size: 0 0; }
    .-ascii #panel { border-left: none; scrollbar-size: 0 0; }
    """

    current = reactive(0)
    shown = reactive("tokens")
    wish: reactive[Wish] = reactive(Wish(""))

    def __init__(
        self,
        traces: Sequence[Trace],
        *,
        view: str = "tokens",
        at: int | None = None,
        dark: bool = True,
        ascii: bool = False,
        folder: Path | None = None,
        session: Session | None = None,
        wish: Wish | None = None,
    ) -> None:
        # Without colours none at all, not greys in their place.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.set_class(ascii, "-ascii")
        self.runs = [Run(trace, self._known) for trace in traces]
        self.ascii = ascii
        self.folder = folder or Path.cwd()
        self.token = 0
        self._presented: dict[str, Run] = {}
        self.session, self._asked = session, wish
        self.running = self._looked = False
        self.stored: Sequence[StoredChunk] = ()
        self.stored_said = "looking into the store"
        self.tabs = TABS if session is not None else TABS[:4]
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name if dark else LIGHT.name
        self.set_reactive(InspectApp.shown, view if self.runs else "knobs")
        if wish is not None or self.runs:
            context = session.context if session is not None else CONTEXTS[0]
            self.set_reactive(InspectApp.wish, wish or wish_of(self.runs[0], context))
        if self.runs:
            selected = self.runs[0].trace.selected
            self.token = int(selected[0]) if len(selected) else 0
            if at is not None:
                self.token = min(at, self.runs[0].count - 1)

    @property
    def look(self) -> Look:
        return Look(self.current_theme.dark, not self.no_color, self.ascii)

    @property
    def shown_run(self) -> Run:
        return self.runs[self.current]

    def compose(self) -> ComposeResult:
        yield TabBar()
        yield Headline()
        with ContentSwitcher(initial=f"view-{self.shown}"):
            yield from self.views()
        yield Footer(compact=True)

    def views(self) -> Iterable[View]:
        yield TokensView(id="view-tokens")
        yield LayersView(id="view-layers")
        yield TimeView(id="view-time")
        yield CompareView()
        if self.session is not None:
            yield KnobsView(id="view-knobs")
            yield ChunksView(id="view-chunks")

    @property
    def current_view(self) -> View:
        return self.query_one(f"#view-{self.shown}", View)

    def on_mount(self) -> None:
        self.theme_changed_signal.subscribe(self, lambda _: self._recolour())
        self.call_after_refresh(self._present)
        self.call_after_refresh(self._collect)
        if self._asked is not None:
            self.call_after_refresh(self.action_start_run)

    def _present(self) -> None:
        """Gives the view that is looked at the run, and the focus."""
        view = self.current_view
        if self.runs:
            if self._presented.get(self.shown) is not self.shown_run or self.shown != "tokens":
                view.present(self.shown_run)
                self._presented[self.shown] = self.shown_run
            elif isinstance(view, TokensView):
                view.page.go(self.token)
        elif self.shown in ("knobs", "chunks"):
            view.repaint()
        if self.shown in ("knobs", "chunks"):
            self._look_into_store()
        view.take_focus()

    def _known(self) -> Iterable[Trace]:
        return known_runs([run.trace for run in self.runs])

    def _collect(self) -> None:
        """Collects garbage again, where the command put that off; what is there by now stays."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()

    def _recolour(self) -> None:
        for view in self.query(View):
            view.repaint()
        self.query_one(TabBar).refresh()
        self.query_one(Headline).refresh()

    def watch_shown(self) -> None:
        if not self.is_running:
            return
        self.query_one(ContentSwitcher).current = f"view-{self.shown}"
        self.query_one(TabBar).refresh()
        self.current_view.take_focus()
        self.call_after_refresh(self._present)

    def watch_current(self) -> None:
        if not self.is_running or not self.runs:
            return
        self.token = min(self.token, self.shown_run.count - 1)
        self.query_one(Headline).refresh()
        self._present()

    # Actions

    def show_view(self, name: str) -> None:
        if name in dict(self.tabs) and (self.runs or name in ("knobs", "chunks")):
            self.shown = name

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Digits are text in a field, and nothing in a dialog."""
        elsewhere = len(self.screen_stack) > 1 or isinstance(self.focused, Input)
        return not (action == "show_view" and elsewhere)

    def action_show_view(self, name: str) -> None:
        self.show_view(name)

    def look_at(self, token: int) -> None:
        """Shows a token in the Tokens view."""
        self.token = token
        self.show_view("tokens")

    def action_run(self, step: int) -> None:
        if len(self.runs) > 1:
            self.current = (self.current + step) % len(self.runs)
        else:
            self.notify("this is the only run", severity="warning")

    def action_light(self) -> None:
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name

    # Running

    def watch_wish(self) -> None:
        if self.is_running and self.session is not None:
            for kind in (KnobsView, ChunksView):
                for view in self.query(kind):
                    view.repaint()

    def chunk_names(self) -> dict[str, str]:
        """What is known of chunks' names, by id."""
        runs = {s.chunk_id: s.name for run in self.runs for s in run.chunks if s.chunk_id}
        stored = {c.chunk_id: f"{Path(c.source).name} {c.ordinal + 1}" for c in self.stored}
        return runs | stored

    def _look_into_store(self) -> None:
        if self.session is not None and not self._looked:
            self._looked = True
            self.run_worker(self._fetch_stored(self.session), group="store")

    async def _fetch_stored(self, session: Session) -> None:
        try:
            self.stored = await asyncio.wrap_future(session.chunks())
            self.stored_said = (
                "no chunk has this text" if self.stored else "the store has no chunks"
            )
        except (CacheblendError, OSError) as error:
            self.stored_said = describe(error).message
        self.watch_wish()

    def action_start_run(self) -> None:
        """Runs what Knobs says, in the runner's thread."""
        if self.session is None or self.running:
            return
        if not self.wish.question:
            self.notify("write a question first: Enter", severity="warning")
            return
        self.running = True
        self.shown = "knobs"
        self.run_worker(self._await_run(self.session, self.session.run(self.wish)), group="run")

    async def _await_run(self, session: Session, future: Future[Trace]) -> None:
        """Says what goes on until the run has ended, then shows it."""
        began = monotonic()
        view = self.query_one(KnobsView)
        try:
            while not future.done():
                if not self.running:
                    return  # cancelled: its end is nobody's concern
                view.tell(f"{monotonic() - began:.0f} s (x cancels): {session.said}", "key")
                await asyncio.sleep(0.1)
            trace = future.result()
        except Cancelled:
            return
        except Exception as error:  # whatever a run fails with, the view goes on
            failure = describe(error)
            self.running = False
            view.tell(f"failed: {failure.message}", "bad")
            self.notify(failure.hint or failure.message, severity="error", markup=False)
            return
        self.running = False
        run = Run(trace, self._known)
        self.runs.append(run)
        view.tell(f"run {len(self.runs)} done after {monotonic() - began:.1f} s", "good")
        if self.current == len(self.runs) - 1:
            self.watch_current()
        self.current = len(self.runs) - 1

    def action_cancel_run(self) -> None:
        if self.session is None or not self.running:
            return
        self.session.cancel()
        self.running = False
        self.query_one(KnobsView).tell("cancelled")

    def on_unmount(self) -> None:
        if self.session is not None:
            self.session.close()

    def action_help(self) -> None:
        view = self.current_view
        nodes = [node for node in (view, self.focused) if node is not None]
        own = [b for node in nodes for b in type(node).BINDINGS if isinstance(b, Binding)]
        title = dict(self.tabs)[self.shown]
        general = [b for b in self.BINDINGS if isinstance(b, Binding)]
        text = help_text(title, view.help_text, [("Here", own), ("Everywhere", general)])
        self.push_screen(HelpScreen(text, ascii=self.ascii))

    def action_save_picture(self) -> None:
        """Saves the screen beside where the command was started."""
        svg = self.export_screenshot(title=self.TITLE)
        self._write(free_name(self.folder, self._stem(), ".svg"), svg)

    def action_export(self) -> None:
        if not self.runs:
            return

        def chosen(kind: str | None) -> None:
            if kind is not None:
                self.run_worker(self._export(kind), group="export")

        self.push_screen(ExportScreen(ascii=self.ascii), chosen)

    async def _export(self, kind: str) -> None:
        """In a thread: of a long prompt it takes longer than a key may."""
        run, runs, view, stem = self.shown_run, list(self.runs), self.shown, self._stem()
        text = await asyncio.to_thread(exported, kind, run, runs, view)
        self._write(free_name(self.folder, stem, f".{kind}"), text)

    def _stem(self) -> str:
        name = self.shown_run.trace.id if self.runs else "none"
        kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:60]
        return f"cacheblend-{kept}-{self.shown}"

    def _write(self, path: Path, text: str) -> None:
        try:
            write_new(path, text)
        except OSError as error:
            said = f"{path}: {error.strerror or error}"
            self.notify(said, severity="error", markup=False)
        else:
            self.notify(f"saved {path.name}", markup=False)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for name, title in self.tabs:
            yield SystemCommand(
                f"View: {title}", f"Show {title}", lambda name=name: self.show_view(name)
            )
        yield SystemCommand("Light or dark", "Change between light and dark", self.action_light)
        yield SystemCommand("Export", "Save as JSON, CSV or HTML", self.action_export)
        yield SystemCommand("Next run", "Show the next run", lambda: self.action_run(1))
