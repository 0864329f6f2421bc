"""Pulls from a Hugging Face Hub, here one of our own that speaks just enough of its protocol."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError, UsageError
from engine import library
from tests.engine.tiny_gguf import write_gguf

COMMIT = "c0ffee" + "0" * 34
REPO = "someone/Tiny-Model"


class Hub(ThreadingHTTPServer):
    """Serves `files` of `REPO`. `refused` is (status, X-Error-Code) for all requests; `cut` makes
    the weights' next download break off after half of them; `ranges` is whether a part can be had.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self.refused: tuple[int, str] | None = None
        self.cut = False
        self.ranges = True
        self.commit = COMMIT
        self.requests: list[tuple[str, str, str | None]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of these tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.refused:
            self.send_response(hub.refused[0])
            self.send_header("X-Error-Code", hub.refused[1])
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif path.startswith(f"/api/models/{REPO}"):
            info = {"id": REPO, "sha": hub.commit, "tags": ["license:mit"]}
            self._json({**info, "siblings": self._siblings()})
        elif path.startswith(f"/{REPO}/resolve/{hub.commit}/"):
            self._file(path.rpartition("/")[2])
        else:
            self.send_error(404)

    def _siblings(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, data in self.server.files.items():
            found.append({"rfilename": name, "size": len(data)})
            if name.endswith(".safetensors"):
                sha256 = self.server.hashes[name]
                found[-1]["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 1}
        return found

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, name: str) -> None:
        data = self.server.files[name]
        span = self.headers.get("Range") if self.server.ranges else None
        start = int((span or "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{self.server.hashes[name]}"')
        self.send_header("X-Repo-Commit", self.server.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cut and name.endswith(".safetensors"):
            self.wfile.write(data[start : max(start, len(data) // 2)])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(data[start:])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    write_gguf(tmp_path / "tiny.gguf")
    made = library.pull(str(tmp_path / "tiny.gguf"), tmp_path / "made")
    files = {p.name: p.read_bytes() for p in made.iterdir() if p.name != "cacheblend-model.json"}
    files |= {"pytorch_model.bin": b"a pickle", "onnx/model.json": b"{}", "README.md": b"Tiny"}
    server = Hub(files)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_a_repository_becomes_a_model(hub: Hub, models: Path) -> None:
    path = library.pull(REPO, models)
    assert path == models / "tiny-model"
    info = library.show(REPO, models)  # found by where it came from too
    assert info.manifest is not None
    assert (info.manifest.origin, info.manifest.revision) == (REPO, COMMIT)
    assert info.manifest.licence == "mit"
    assert {p.name for p in path.iterdir()} == {
        *(n for n in hub.files if "/" not in n and not n.endswith(".bin")),
        "cacheblend-model.json",
    }
    assert library.check("tiny-model", models).files == len(list(path.iterdir())) - 1
    assert not [p for p in (models / ".work").iterdir() if p.suffix != ".lock"]


def test_an_interrupted_download_goes_on_where_it_stopped(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.library.hub._BLOCK", 1000)
    monkeypatch.setattr("engine.library.hub.time.sleep", lambda seconds: None)
    hub.cut = True
    with pytest.raises(CacheblendError) as caught:
        library.pull(REPO, models)
    assert "goes on where it stopped" in caught.value.hint
    assert library.ls(models) == []
    hub.cut = False
    hub.requests.clear()
    library.pull(REPO, models)
    assert library.check("tiny-model", models)
    got = [(path, span) for command, path, span in hub.requests if command == "GET"]
    half = len(hub.files["model.safetensors"]) // 2
    assert [span for path, span in got if path.endswith("model.safetensors")] == [
        f"bytes={half // 1000 * 1000}-"
    ]
    assert not [path for path, _ in got if path.endswith("/config.json")]  # it was there


def test_a_server_that_ignores_ranges_gives_the_whole_file(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.library.hub._BLOCK", 1000)
    monkeypatch.setattr("engine.library.hub.time.sleep", lambda seconds: None)
    hub.cut = True
    with pytest.raises(CacheblendError):
        library.pull(REPO, models)
    hub.cut, hub.ranges = False, False
    library.pull(REPO, models)
    assert library.check("tiny-model", models)


def test_another_commit_is_not_mixed_with_what_was_there(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.library.hub.time.sleep", lambda seconds: None)
    hub.cut = True
    with pytest.raises(CacheblendError):
        library.pull(REPO, models)
    hub.cut, hub.commit = False, "1" * 40
    hub.files["README.md"] = b"Tiny, second edition"
    hub.requests.clear()
    path = library.pull(REPO, models)
    assert (path / "README.md").read_bytes() == b"Tiny, second edition"
    assert not [span for _, _, span in hub.requests if span]


def test_other_bytes_than_the_hub_states_are_not_installed(hub: Hub, models: Path) -> None:
    data = bytearray(hub.files["model.safetensors"])
    data[-1] ^= 1
    hub.files["model.safetensors"] = bytes(data)
    with pytest.raises(IntegrityError, match=r"model\.safetensors has SHA-256"):
        library.pull(REPO, models)
    assert library.ls(models) == []
    assert not [p for p in (models / ".work").iterdir() if p.suffix != ".lock"]


def test_an_unsupported_model_is_refused_before_its_weights(hub: Hub, models: Path) -> None:
    config = {**json.loads(hub.files["config.json"]), "architectures": ["MambaForCausalLM"]}
    hub.files["config.json"] = json.dumps(config).encode()
    hub.hashes["config.json"] = hashlib.sha256(hub.files["config.json"]).hexdigest()
    with pytest.raises(UsageError, match="MambaForCausalLM"):
        library.pull(REPO, models)
    assert not [path for _, path, _ in hub.requests if path.endswith(".safetensors")]


def test_a_repository_of_pickles_is_refused(hub: Hub, models: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(UsageError, match=r"no safetensors weights, only pytorch_model\.bin"):
        library.pull(REPO, models)


@pytest.mark.parametrize(
    ("status", "code", "kind", "said", "hint"),
    [
        (403, "GatedRepo", CacheblendError, "is gated", "hf auth login"),
        (401, "RepoNotFound", NotFoundError, "no model someone/Tiny-Model", "spelling"),
        (404, "RevisionNotFound", NotFoundError, "no such revision", "branches"),
        (400, "", CacheblendError, "answered", "later"),
    ],
)
def test_refusals_are_one_line_with_advice(
    status: int,
    code: str,
    kind: type[CacheblendError],
    said: str,
    hint: str,
    hub: Hub,
    models: Path,
) -> None:
    hub.refused = (status, code)
    with pytest.raises(kind, match=said) as caught:
        library.pull(f"{REPO}@v1", models)
    assert type(caught.value) is kind
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


def test_no_connection_is_told(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CacheblendError, match="no connection to the Hugging Face Hub"):
        library.pull(REPO, models)


def test_the_hubs_own_offline_switch_is_honoured(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CacheblendError, match="HF_HUB_OFFLINE"):
        library.pull(REPO, models)
