"""Where commands put the traces of their runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import platformdirs

from cache_store.errors import CacheblendError, UsageError
from cbcli.settings import Settings, data_root

if TYPE_CHECKING:
    from engine.trace.record import Level, Trace


def traces_root(env: Mapping[str, str] = os.environ) -> Path:
    """Where the last traces are kept: in CACHEBLEND_HOME, or in the user's state."""
    home = env.get("CACHEBLEND_HOME")
    root = data_root(env) if home else platformdirs.user_state_path("cacheblend")
    return root / "traces"


Say = Callable[[str], None]


def level(settings: Settings) -> Level:
    """What a trace is to hold."""
    return cast("Level", settings.trace_level)


class Tracing:
    """What becomes of the trace of one answer: written to `file`, where there is one, and kept
    among the last ones. Raises UsageError for a file that cannot be written."""

    def __init__(self, settings: Settings, file: Path | None) -> None:
        self.settings, self.file = settings, file
        if file is not None and (file.is_dir() or (file.exists() and not file.is_file())):
            raise UsageError(f"--trace: {file} is no file", "name a file for the trace")
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"--trace: there is no folder {file.parent}", "make it first")

    @property
    def level(self) -> Level | None:
        """What is to be recorded; None: nothing."""
        wanted = self.file is not None or self.settings.traces > 0
        return level(self.settings) if wanted else None

    def check_model(self, layers: int) -> None:
        """Raises UsageError for a layer to measure that the model does not have."""
        if self.level == "full":
            from engine.trace.measure import measured_layers

            measured_layers(layers, self.settings.trace_layers)

    def save(self, trace: Trace, say: Say) -> None:
        """Writes it; what goes wrong is said, and the answer stands."""
        if self.file is not None:
            save_in(trace, self.file, say)
        if self.settings.traces > 0:
            from engine.trace.kept import keep

            folder = traces_root()
            _try(
                lambda: keep(trace, folder, self.settings.traces),
                f"in {folder} (the setting traces = 0 keeps none)",
                say,
            )


def save_in(trace: Trace, path: Path, say: Say) -> None:
    """Writes a trace to a file; what goes wrong is said."""
    from engine.trace.file import write

    _try(lambda: write(trace, path), f"to {path}", say)


def check_folder(folder: Path) -> None:
    """Makes a folder for traces. Raises UsageError where it cannot be one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--trace-dir: {folder} cannot be made: {error.strerror}", "name another folder"
        ) from error


def _try(action: Callable[[], object], where: str, say: Say) -> None:
    try:
        action()
    except CacheblendError as error:
        say(f"the trace was not written {where}: {error.message}")
    except OSError as error:
        say(f"the trace was not written {where}: {error.strerror or error}")
