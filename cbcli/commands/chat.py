"""`cacheblend chat`: a conversation over the stored chunks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cache_store.errors import UsageError
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.output import Output
from cbcli.session import blend_options, check_engine
from cbcli.settings import Settings, load_settings

app = typer.Typer(**app_options())


@app.command(
    epilog=examples(
        "cacheblend chat",
        "cacheblend chat --cite --collection handbook",
        "printf 'Who signs off?\\nAnd when?\\n' | cacheblend chat --json | jq -r .answer",
        "cacheblend chat --resume talk.json",
    )
)
@flags.with_settings(
    flags.RETRIEVAL,
    flags.BLEND,
    flags.TRACE,
    "cite",
    flags.PROMPT,
    flags.SAMPLING,
    flags.STORE,
    flags.MODEL,
    flags.ENGINE,
    without=("audit",),
)
def chat(
    chunk: Annotated[
        list[str] | None,
        flags.chunks_option("Talk about this chunk; repeat, in order."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on from a file of /save.")
    ] = None,
    compare: flags.Compare = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Talk over the stored chunks: what was said stays in the KV cache.

    Each question brings the chunks that fit it and aren't in the conversation yet; only they and
    the question are computed, the chunks by blending. /help lists what else can be done; Ctrl-C
    stops an answer, Alt-Enter begins a new line, Ctrl-D leaves. Without a terminal, or with
    --json, each line of standard input is a question, or a command.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    _check(settings)
    from cbcli.chat.talk import Talk

    talks = not json and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    with Talk(settings, out, names=chunk or (), compare=compare) as talk:
        talk.open()
        if resume is not None:
            _resume(talk, resume, out)
        if talks:
            from cbcli.chat.terminal import Conversing

            Conversing(talk, out)()
            return
        if sys.stdin is None:
            raise UsageError("there is nothing to read questions from", "pipe them in, one a line")
        from cbcli.chat.lines import Lines

        lines = Lines(talk, out)
        lines(sys.stdin.buffer)
    if lines.failure is not None:
        raise typer.Exit(lines.failure.code)


def _check(settings: Settings) -> None:
    """Raises UsageError for what a conversation cannot have, before anything takes long."""
    if settings.engine == "vllm":
        raise UsageError(
            "chat is not there for --engine vllm: it keeps a conversation's KV in engine torch",
            "leave out --engine, or talk to `cacheblend serve`",
        )
    check_engine(settings)
    if settings.policy == "explicit":
        raise UsageError("policy explicit takes the positions of one prompt", "use it with `ask`")
    from cbcli.calibrated import without_auto

    blend_options(without_auto(settings))


def _resume(talk: object, path: Path, out: Output) -> None:
    from cbcli.chat.talk import Talk
    from cbcli.chat.transcript import load

    assert isinstance(talk, Talk)
    found = load(path, talk.engine)
    talk.begin_anew(found.turns, found.chunks)
    out.note(f"going on after {len(found.turns)} turns of {path}")
