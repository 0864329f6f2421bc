"""An evaluation's results in a file, where a later run goes on from."""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cache_store.errors import UsageError
from engine.evaluation.runner import ArmResult, QuestionResult
from engine.numbers import is_number

_HEAD = b'{"evaluation": 1, '  # how a file of ours begins


class StateFile:
    """JSON lines: first the settings that the results depend on, then a line a question.

    Each line is one write at the end of the file, which is locked meanwhile; half a line at its
    end, of a run that was killed, is cut off. A context manager.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """`results` are those of an earlier run with the same settings.

        Raises UsageError for a file of other settings, naming the first that differs, for what is
        no such file, and for one that another run is writing; OSError where it cannot be written.
        """
        self.path = path
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file", "name a file to keep the results in")
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+b", 0)
        try:
            self._lock()
            self.results = self._read(json.loads(json.dumps(dict(settings))))
        except BaseException:
            self._file.close()
            raise

    def append(self, result: QuestionResult) -> None:
        """Adds a question's result; all of its line or nothing of it."""
        self._write(json.dumps(asdict(result)).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path} is being written by another run", "wait for it, or name another file"
            ) from None

    def _read(self, settings: dict[str, Any]) -> tuple[QuestionResult, ...]:
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if not data.startswith(_HEAD[: len(data)]):
            raise UsageError(
                f"{self.path} holds something else than the results of an evaluation",
                "name another file",
            )
        if not whole:
            self._file.truncate(0)
            self._write(_HEAD + json.dumps({"settings": settings}).encode()[1:] + b"\n")
            return ()
        first, *lines = whole.splitlines()
        self._compare(self._object(first, 1).get("settings"), settings)
        results = tuple(self._result(line, n) for n, line in enumerate(lines))
        self._file.truncate(len(whole))
        return results

    def _compare(self, earlier: Any, settings: dict[str, Any]) -> None:
        if not isinstance(earlier, dict):
            raise self._damaged(1)
        for name in dict.fromkeys([*settings, *earlier]):
            was, now = earlier.get(name), settings.get(name)
            if was != now:
                raise UsageError(
                    f"{self.path} was made with {name} {_shown(was)}, now it is {_shown(now)}",
                    "use the same settings to go on from it, or name another file",
                )

    def _result(self, line: bytes, number: int) -> QuestionResult:
        value = self._object(line, number + 2)
        try:
            arms = tuple(ArmResult(**arm) for arm in value.pop("arms"))
            result = QuestionResult(**value, arms=arms)
        except (KeyError, TypeError):
            raise self._damaged(number + 2) from None
        if set(value) != {f.name for f in fields(QuestionResult)} - {"arms"} or (
            result.number != number or not _sound(result)
        ):
            raise self._damaged(number + 2)
        return result

    def _object(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self._damaged(number)
        return value

    def _damaged(self, number: int) -> UsageError:
        return UsageError(
            f"{self.path}: line {number} is not what an evaluation writes", "name another file"
        )

    def _write(self, data: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except BaseException:  # no space left, or interrupted: no half line stays
            self._file.truncate(before)
            raise


def _sound(result: QuestionResult) -> bool:
    """Whether its values are of the types, and the numbers finite, as an evaluation makes them."""
    return (
        isinstance(result.name, str)
        and all(map(is_number, (result.tokens, result.forced, result.full_ttft_s)))
        and all(
            all(map(is_number, (a.ttft_s, a.kl, a.kl_first, a.top1, a.recomputed, a.cached)))
            and all(x is None or is_number(x) for x in (a.differs_at, a.score))
            and isinstance(a.answer, str | None)
            for a in result.arms
        )
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)
