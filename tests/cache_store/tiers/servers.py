"""Real servers on loopback, and ways to come between them and us."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


def redis_binary() -> str:
    """The server's program; the test is skipped where there is none, but not in CI."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no redis-server")
        raise AssertionError
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RedisServer:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self, *words: object) -> object:
        import redis

        with redis.Redis(port=self.port, protocol=2) as client:
            return client.execute_command(*words)

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.go_on()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A server of its own on loopback, without a file on disk."""
    port = free_port()
    words = [redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    words += ["--appendonly", "no", "--dir", str(folder), "--loglevel", "warning", *options]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = RedisServer(process, port)
    try:
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, "redis-server ended"
            assert time.monotonic() < until, "redis-server doesn't answer"
            time.sleep(0.02)
        yield server
    finally:
        server.stop()


@dataclass
class Proxy:
    """Passes bytes on between us and a server, until it is told otherwise.

    cut_after: bytes of answers after which every connection is closed; delay: seconds each piece
    of an answer waits; bytes_back: bytes of answers passed on so far.
    """

    target: int
    cut_after: int | None = None
    delay: float = 0.0
    bytes_back: int = 0
    port: int = 0
    _sockets: list[socket.socket] = field(default_factory=list)
    _listener: socket.socket | None = None

    def __enter__(self) -> Proxy:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._listener is not None
        self._close(self._listener)
        for one in list(self._sockets):
            self._close(one)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if answers:
                    time.sleep(self.delay)
                    if self.cut_after is not None:
                        data = data[: max(0, self.cut_after - self.bytes_back)]
                    self.bytes_back += len(data)
                sink.sendall(data)
                if answers and self.cut_after is not None and self.bytes_back >= self.cut_after:
                    break
        self._close(source)
        self._close(sink)

    @staticmethod
    def _close(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
