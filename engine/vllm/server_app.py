"""In front of vLLM's routes: requests are laid out before vLLM reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from cache_store.errors import CacheblendError, NotFoundError, StoreBusy, UsageError
from engine.vllm.server_requests import Body, RequestLayout

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_KINDS: tuple[tuple[type[CacheblendError], int, str], ...] = (
    (UsageError, 400, "BadRequestError"),
    (NotFoundError, 404, "NotFoundError"),
    (StoreBusy, 503, "ServiceUnavailableError"),
    (CacheblendError, 500, "InternalServerError"),
)


class Documents:
    """ASGI middleware; within authentication, so that nobody else is answered."""

    def __init__(self, app: App, layout: RequestLayout) -> None:
        self._app = app
        self._routes: dict[str, Callable[[Body], Body]] = {
            "/v1/chat/completions": layout.chat,
            "/v1/completions": layout.completion,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lay_out = self._route(scope)
        if lay_out is None:
            await self._app(scope, receive, send)
            return
        raw = await _body(receive)
        if raw is None:  # the client has gone
            return
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None  # vLLM says what is wrong with it
        if isinstance(body, dict):
            try:  # in a thread: encoding a long text takes a while, and others are being answered
                changed = await asyncio.to_thread(lay_out, body)
            except CacheblendError as error:
                await _refuse(send, error)
                return
            if changed != body:
                raw = json.dumps(changed).encode()
        await self._app(_sized(scope, len(raw)), _again(raw, receive), send)

    def _route(self, scope: Scope) -> Callable[[Body], Body] | None:
        if scope["type"] != "http" or scope.get("method") != "POST":
            return None
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0]
        if kind.strip().lower() != b"application/json":
            return None
        return self._routes.get(path)


async def _body(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(raw: bytes, receive: Receive) -> Receive:
    """Gives a body that was read once more, and then what comes after it."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return next_message


def _sized(scope: Scope, size: int) -> Scope:
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(size).encode())]}


async def _refuse(send: Send, error: CacheblendError) -> None:
    """An answer as vLLM's own errors are, which OpenAI's clients understand."""
    code, kind = next((code, name) for cls, code, name in _KINDS if isinstance(error, cls))
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    answer = {"error": {"message": text, "type": kind, "param": None, "code": code}}
    raw = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
