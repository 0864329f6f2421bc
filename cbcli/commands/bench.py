"""`cacheblend bench`: how fast this machine is, with this model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.errors import UsageError
from cbcli import bench_report, flags
from cbcli.bench_options import (
    check_files,
    check_peers,
    listed,
    parse_bandwidth,
    read_text,
    wholes,
)
from cbcli.command import Group, Json, Quiet, Verbose, app_options, examples
from cbcli.eval_options import split_policies
from cbcli.output import Output
from cbcli.session import check_engine, load_engine, open_blueprint
from cbcli.settings import Settings, load_settings

if TYPE_CHECKING:
    from engine.api import Engine
    from engine.base import BaseEngine
    from engine.bench.peers import Peer
    from engine.bench.report import Report

app = typer.Typer(cls=Group, help="Measure how fast this machine is with a model.", **app_options())

BUSY = 0.15  # cores others may use before we say that figures will be too low

Pairs = Annotated[int, typer.Option("--pairs", min=1, max=1000, help="Rounds measured.")]
Text = Annotated[
    Path | None, typer.Option("--text", help="Make prompts of this file; else of pseudo-text.")
]
Csv = Annotated[
    str | None, typer.Option("--csv", metavar="FILE", help="Write rows as CSV; - prints them.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME[=PYTHON]",
        help="Also transformers, vllm or llamacpp, of this or another Python; repeatable.",
    ),
]
Gguf = Annotated[
    Path | None, typer.Option("--gguf", help="The same model's weights for --peer llamacpp.")
]
Tokens = Annotated[str, typer.Option("--tokens", help="Lengths of the prompts.")]


@dataclass(frozen=True)
class Bench:
    """What every bench has at hand: a loaded model without a store, loaded peers, a text."""

    out: Output
    engine: BaseEngine
    peers: tuple[Peer, ...]
    text: str | None

    @property
    def torch(self) -> Engine:
        """The engine, where it is the one that computes with torch."""
        from engine.api import Engine

        assert isinstance(self.engine, Engine)
        return self.engine

    def say(self, text: str) -> None:
        """What is measured next: a line, for what moves a bar takes its share of the cores."""
        self.out.note(text)

    def report(self, name: str, pairs: int, measure: Callable[[], Sequence[object]]) -> Report:
        """Looks at the machine, then measures."""
        from engine.bench.conditions import look_around
        from engine.bench.report import Report
        from engine.bench.ttft import TtftRow, fit_costs

        conditions = look_around(self.engine.model.device)
        busy = [("something else", conditions.busy_cores)]
        busy += [(peer.name, peer.facts.idle_cores) for peer in self.peers]
        for who, cores in busy:
            if cores is not None and cores > BUSY:
                self.out.warn(f"{who} keeps {cores:.1f} cores busy: figures will be worse for it")
        rows = tuple(measure())
        fits = fit_costs([row for row in rows if isinstance(row, TtftRow)])
        facts = tuple(peer.facts for peer in self.peers)
        return Report(
            name, conditions, self.engine.info, pairs, facts, rows, tuple(fits), self.engine.name
        )


@app.command(
    epilog=examples(
        "cacheblend bench ttft",
        "cacheblend bench ttft --tokens 4096 --ratios 0.05,0.16 --policies value,random",
        "cacheblend bench ttft --peer transformers --peer vllm=~/vllm/bin/python --plot ttft.svg",
    )
)
@flags.with_settings(flags.MODEL, flags.ENGINE, "progress")
def ttft(
    tokens: Tokens = "1024,4096",
    ratios: Annotated[
        str, typer.Option("--ratios", help="Shares of cached tokens to recompute.")
    ] = "0.05,0.16,0.3",
    policies: Annotated[
        str, typer.Option("--policies", help="What selects tokens; explicit scores nothing.")
    ] = "question,value,explicit",
    loaders: Annotated[
        str, typer.Option("--loaders", help="When stored KV is read.")
    ] = "pipelined",
    check_layer: Annotated[
        int, typer.Option("--check-layer", help="Layer at which tokens are selected.")
    ] = 1,
    pairs: Pairs = 5,
    peer: Peers = None,
    gguf: Gguf = None,
    text: Text = None,
    csv: Csv = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures: a .svg or .png file.")
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Time to first token, and how near it is to its bound.

    A prompt has a prefix of 32 tokens, 8 equal chunks and a suffix of 24. Full
    prefill, reuse and every blend take turns and are paired round by round. The bound is the
    speedup that fewer operations allow at equal rates. Peers prefill the same token ids in full.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    check_files(out, csv, plot)
    settings = load_settings(options)
    check_engine(settings)
    from engine.bench.ttft import TtftSweep, measure_ttft
    from engine.options import parse_ratio

    sweep = TtftSweep(
        tokens=wholes("--tokens", tokens),
        ratios=tuple(parse_ratio(item) for item in listed("--ratios", ratios)),
        policies=split_policies([policies]),
        loaders=listed("--loaders", loaders),
        check_layer=check_layer,
        pairs=pairs,
    )
    with _bench(out, settings, peer, gguf, text, sweep.check, max(sweep.tokens)) as bench:
        report = bench.report(
            "ttft",
            pairs,
            lambda: measure_ttft(bench.engine, sweep, bench.peers, bench.text, bench.say),
        )
    bench_report.show(out, report, csv)
    if plot is not None:
        from cbcli.bench_plot import draw

        draw(report, plot)
        out.note(f"drew {plot}")


@app.command(
    epilog=examples("cacheblend bench ingest", "cacheblend bench ingest --lengths 128,512 --json")
)
@flags.with_settings(flags.MODEL, "progress")
def ingest(
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of a chunk.")] = "128,512,2048",
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens of all chunks together.")
    ] = 16384,
    pairs: Pairs = 3,
    text: Text = None,
    csv: Csv = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Tokens computed and stored a second.

    Beside it the rate at which the model prefills prompts as long as a chunk.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    check_files(out, csv)
    settings = load_settings({**options, "engine": "torch"})
    from engine.bench.ingest import check_lengths, measure_ingest

    wanted = wholes("--lengths", lengths)
    with _bench(
        out, settings, None, None, text, lambda _, context: check_lengths(wanted, context)
    ) as bench:
        report = bench.report(
            "ingest",
            pairs,
            lambda: measure_ingest(bench.torch, wanted, tokens, pairs, bench.text, bench.say),
        )
    bench_report.show(out, report, csv)


@app.command(
    epilog=examples(
        "cacheblend bench load",
        "cacheblend bench load --loaders sync,pipelined --bandwidth 500MB/s --bandwidth unlimited",
    )
)
@flags.with_settings(flags.MODEL, "progress")
def load(
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the prompt.")] = 4096,
    loaders: Annotated[
        str, typer.Option("--loaders", help="When stored KV is read.")
    ] = "sync,pipelined,async,prefetch",
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            "--bandwidth",
            metavar="RATE",
            help="Hold reading to 500MB/s; unlimited; or balanced, where it takes as long as "
            "computing; repeatable.  [default: unlimited and balanced]",
        ),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="What selects tokens.")] = "value",
    ratio: Annotated[
        str, typer.Option("--ratio", "-r", help="Share of cached tokens to recompute.")
    ] = "0.16",
    pairs: Pairs = 5,
    text: Text = None,
    csv: Csv = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """How long stored KV is read and waited for, by loader.

    The disk is this one, or as slow as --bandwidth says.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    check_files(out, csv)
    settings = load_settings({**options, "engine": "torch"})
    from engine.bench.load import LoadSweep, measure_load
    from engine.options import parse_ratio

    sweep = LoadSweep(
        tokens=tokens,
        loaders=listed("--loaders", loaders),
        bandwidths=tuple(parse_bandwidth(item) for item in bandwidth or ["unlimited", "balanced"]),
        policy=policy,
        ratio=parse_ratio(ratio),
        pairs=pairs,
    )
    with _bench(out, settings, None, None, text, sweep.check) as bench:
        report = bench.report(
            "load", pairs, lambda: measure_load(bench.torch, sweep, bench.text, bench.say)
        )
    bench_report.show(out, report, csv)


@app.command(
    epilog=examples("cacheblend bench decode", "cacheblend bench decode --peer transformers")
)
@flags.with_settings(flags.MODEL, "progress", without=("kv_dtype",))
def decode(
    tokens: Tokens = "1024,4096",
    output: Annotated[
        int, typer.Option("--output", min=1, help="Tokens to decode after the first.")
    ] = 64,
    pairs: Pairs = 5,
    peer: Peers = None,
    text: Text = None,
    csv: Csv = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Output tokens a second, over a cache of some length.

    --peer transformers measures its generate on the same token ids.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    check_files(out, csv)
    settings = load_settings({**options, "engine": "torch"})
    from engine.bench.decode import check_room, measure_decode

    lengths = wholes("--tokens", tokens)
    if any(item.partition("=")[0] != "transformers" for item in peer or []):
        raise UsageError(
            "decoding is measured against transformers only", "use --peer transformers"
        )
    with _bench(
        out,
        settings,
        peer,
        None,
        text,
        lambda _, context: check_room(lengths, output, context),
        max(lengths) + output,
    ) as bench:
        report = bench.report(
            "decode",
            pairs,
            lambda: measure_decode(
                bench.torch, lengths, output, pairs, bench.peers, bench.text, bench.say
            ),
        )
    bench_report.show(out, report, csv)


@contextmanager
def _bench(
    out: Output,
    settings: Settings,
    peers: Sequence[str] | None,
    gguf: Path | None,
    text: Path | None,
    check: Callable[[int, int], None],
    longest: int = 0,
) -> Iterator[Bench]:
    """Loads the model and the peers; `check` gets its layers and context before any of it."""
    from engine.bench.peers import PeerSpec

    specs = [PeerSpec.of(item) for item in peers or []]
    check_peers([spec.name for spec in specs], gguf)
    words = None if text is None else read_text(text)
    blueprint = open_blueprint(settings, out)
    check(blueprint.config.layers, blueprint.config.context)
    from engine.bench.peers import Peer, setup_for

    with ExitStack() as stack:
        engine = stack.enter_context(
            load_engine(settings, blueprint, None, longest=longest + 1, out=out)
        )
        started = []
        for spec in specs:
            out.note(f"starting {spec.name}, which may take a minute")
            started.append(stack.enter_context(Peer(spec, setup_for(engine, longest, gguf))))
        yield Bench(out, engine, tuple(started), words)
