"""vLLM's own OpenAI-compatible server, with the connector, the worker and the store set."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from cache_store.errors import CacheblendError, UsageError
from engine.vllm.names import WORKER, transfer_config

if TYPE_CHECKING:
    from engine.blueprint import Blueprint

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# vLLM's flags that say what `serve` itself says, and why each is not taken.
OURS = {
    "--kv-transfer-config": "cacheblend is the KV connector here",
    "--worker-cls": "cacheblend's worker is needed",
    "--model": "name the model first: cacheblend serve MODEL",
    "--headless": "a server without an API has no documents to take",
    "--grpc": "documents come over HTTP",
    "--api-server-count": "one process takes the requests",
}


@dataclass(frozen=True)
class ServerPlan:
    """What is served, and how.

    connector: vLLM's `kv_connector_extra_config`, see `ConnectorSettings`. separator: between two
    chunks of a prompt that is laid out, and template_date: as the blueprint was opened with. extra:
    vLLM's own flags, as given. log: the least of what vLLM tells, as it calls it.
    """

    blueprint: Blueprint
    host: str
    port: int
    connector: Mapping[str, Any]
    separator: str
    template_date: str
    extra: tuple[str, ...] = ()
    log: str = "WARNING"

    @property
    def quiet(self) -> bool:
        return self.log != "INFO"


@dataclass(frozen=True)
class Ready:
    """A server that answers. port: the one it got, where it was asked to take any. off: why it
    doesn't blend, None where it does."""

    host: str
    port: int
    name: str
    vllm: str
    off: str | None


def check_extra(extra: tuple[str, ...]) -> None:
    """Raises UsageError for a flag of vLLM's that `serve` sets itself."""
    for flag in extra:
        name = "--" + flag.partition("=")[0].removeprefix("--").replace("_", "-")
        if flag.startswith("--") and name.partition(".")[0] in OURS:
            name = name.partition(".")[0]
            raise UsageError(f"{name} cannot be given to vLLM here", OURS[name])


def arguments(plan: ServerPlan) -> list[str]:
    """The command line of vLLM's server; what the user gave comes last, and so counts."""
    return [
        *("--model", str(plan.blueprint.path.absolute())),
        *("--served-model-name", plan.blueprint.name),
        *("--host", plan.host),
        *("--port", str(plan.port)),
        *("--dtype", _DTYPES[plan.blueprint.dtype]),
        *("--worker-cls", WORKER),
        *("--kv-transfer-config", json.dumps(transfer_config(plan.connector))),
        "--no-use-tqdm-on-load",
        *plan.extra,
    ]


def bind(host: str, port: int) -> socket.socket:
    """The socket that is listened to later, taken first of all: loading a model in vain takes long.

    Raises CacheblendError where the port is in use or may not be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"host {host!r}: {reason}", "give a name or an address of here") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Only who listens keeps others from it; connections wait until the server takes them.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        raise CacheblendError(f"port {port} of {host}: {reason}", "give another --port") from None
    return sock


def serve(plan: ServerPlan, sock: socket.socket, on_ready: Callable[[Ready], None]) -> None:
    """Serves until Ctrl-C or SIGTERM, which ends it in good order. on_ready: told once it answers.

    KeyboardInterrupt, or SystemExit for SIGTERM, comes out of it before it is ready. Raises
    UsageError for flags vLLM doesn't take, CacheblendError where it cannot start.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", plan.log)
    if plan.quiet:
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # those of the processes it starts
        warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    atexit.register(_end_quietly)  # before what vLLM registers, and so after it
    with _interrupting():
        args = _parsed(plan)
        import uvloop

        from engine.vllm.server_run import run

        args.host, args.port = plan.host, sock.getsockname()[1]
        try:
            uvloop.run(run(plan, args, sock, on_ready))
        except (KeyboardInterrupt, CacheblendError):
            raise
        except (ValueError, RuntimeError, OSError) as error:
            raise CacheblendError(
                f"vLLM could not start: {_reason(error)}",
                "what it said above tells more; -v shows all",
            ) from error


def _reason(error: Exception) -> str:
    """In a line. Of settings that pydantic refused, what is wrong with the first."""
    found = error.errors() if hasattr(error, "errors") else []
    text = str(found[0].get("msg", "") if found else error).removeprefix("Value error, ")
    return text.strip().partition("\n")[0] or type(error).__name__


def _parsed(plan: ServerPlan) -> Any:
    """vLLM's own namespace of the plan's flags. Raises UsageError."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            hint = "cacheblend serve --help shows our flags, cacheblend serve -- --help=all vLLM's"
            raise UsageError(f"vLLM: {message}", hint)

    cli_env_setup()
    args = make_arg_parser(Parser(prog="cacheblend serve MODEL --")).parse_args(arguments(plan))
    if getattr(args, "model_tag", None):
        raise UsageError(f"{args.model_tag!r} is not a flag", "the model comes first, then flags")
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"vLLM: {error}") from None
    return args


@contextlib.contextmanager
def _interrupting() -> Iterator[None]:
    """Ctrl-C ends what goes on at once: an event loop that is busy starting would not look."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_quietly() -> None:
    """Some libraries of vLLM's tell of themselves when the interpreter is taken down, at length."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
