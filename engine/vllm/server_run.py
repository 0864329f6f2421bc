"""Starts vLLM's engine and its API in this process, and keeps them until they are told to end."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import (
    build_async_engine_client_from_engine_args,
)
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction
from vllm.entrypoints.launchers.launcher import serve_http, validate_api_server_args
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.system_utils import set_ulimit
from vllm.version import __version__ as vllm_version

from cache_store.errors import UsageError
from engine.vllm.checks import check_config
from engine.vllm.server import Ready, ServerPlan
from engine.vllm.server_app import Documents
from engine.vllm.server_state import ServerState

POLL_SECONDS = 0.05


async def run(
    plan: ServerPlan, args: Any, sock: socket.socket, on_ready: Callable[[Ready], None]
) -> None:
    """As vLLM's own `run_server`, over a socket that is bound already."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        validate_api_server_args(args)
    except KeyError as error:
        raise UsageError(f"vLLM: {error.args[0]}") from None
    set_ulimit()
    engine_args = _CheckedArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    async with build_async_engine_client_from_engine_args(engine_args) as engine:
        if plan.quiet:
            _say_no_shutdown()  # not before: vLLM sets up its logging anew while it starts
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        state = ServerState(plan, engine, args, vllm_version)
        # After all others, and so within them: whoever isn't let in is not answered here either.
        app.user_middleware.append(Middleware(Documents, layout=state.layout))
        app.middleware_stack = app.build_middleware_stack()
        app.add_api_route("/v1/cacheblend", state.described, methods=["GET"])
        watch = asyncio.create_task(_tell(app, state, on_ready))
        shut_down = await serve_http(app, sock=sock, **_http_settings(plan, args))
        watch.cancel()
    try:
        await shut_down
    finally:
        sock.close()


class _CheckedArgs(AsyncEngineArgs):
    """Refuses what can't be blended with in this process: the engine's would show where it was
    raised, at length."""

    def create_engine_config(self, *args: Any, **named: Any) -> Any:
        config = super().create_engine_config(*args, **named)
        check_config(config, vllm_version)
        return config


async def _tell(app: FastAPI, state: ServerState, on_ready: Callable[[Ready], None]) -> None:
    """Waits until requests are taken, and says so."""
    while not getattr(getattr(app.state, "server", None), "started", False):
        await asyncio.sleep(POLL_SECONDS)
    on_ready(await state.ready())


def _say_no_shutdown() -> None:
    """vLLM warns of each of its processes that it ends, which is what Ctrl-C is for."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(lambda record: not record.getMessage().startswith("[shutdown]"))


def _http_settings(plan: ServerPlan, args: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    with suppress(AttributeError):
        config = get_uvicorn_log_config(args)
        if config is not None:
            settings["log_config"] = config
    return {
        **settings,
        "enable_ssl_refresh": args.enable_ssl_refresh,
        "host": args.host,
        "port": args.port,
        "log_level": "warning" if plan.quiet else args.uvicorn_log_level,
        "access_log": not (plan.quiet or args.disable_uvicorn_access_log),
        "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_certfile": args.ssl_certfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
        "ssl_ciphers": args.ssl_ciphers,
        "h11_max_incomplete_event_size": args.h11_max_incomplete_event_size,
        "h11_max_header_count": args.h11_max_header_count,
    }
