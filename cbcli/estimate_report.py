"""What `store estimate` prints: what is estimated, the figures, and what they take for granted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

from cbcli.output import Output
from cbcli.settings import DECLARED, Settings, default_of
from cbcli.units import count_text, duration_text, rate_text, size_text
from cbcli.values import AUTO

if TYPE_CHECKING:
    import torch

    from cache_store.keys import DType
    from engine.blueprint import Blueprint
    from engine.config import ModelConfig
    from engine.estimate import Sizes, Times
    from engine.probe import Probe
    from engine.trial import PromptShape


@dataclass(frozen=True)
class Subject:
    """What is estimated: a model as far as it is known. Without a blueprint its tokenizer and
    template are not, and prefix and suffix are assumed."""

    name: str
    config: ModelConfig
    dtype: DType
    kv_dtype: DType
    device: torch.device
    prefix: int
    separator: int
    suffix: int
    blueprint: Blueprint | None


@dataclass(frozen=True)
class Material:
    """Chunks by their lengths in tokens. origin: paths, tokens, store, or "" for none."""

    origin: str
    documents: int
    chunks: tuple[int, ...]


def _ratios(settings: Settings) -> tuple[Decimal, ...]:
    """Those to estimate: for `auto`, which a calibration decides, the usual one."""
    if settings.ratio != AUTO:
        return settings.ratio
    return cast("tuple[Decimal, ...]", default_of(DECLARED["ratio"]))


@dataclass(frozen=True)
class Figures:
    """All there is to print. nbytes: of the material, on disk; limit: the store's, or what it
    would get; times and probe: None without one."""

    subject: Subject
    material: Material
    shape: PromptShape
    sizes: Sizes
    nbytes: int
    limit: int
    times: Times | None
    probe: Probe | None
    assumed: list[str]

    @classmethod
    def of(
        cls,
        settings: Settings,
        subject: Subject,
        material: Material,
        shape: PromptShape,
        probe: Probe | None,
        limit: int,
    ) -> Figures:
        from engine import estimate as estimates

        config, prefix = subject.config, subject.prefix
        spec = estimates.shape_spec(config, subject.kv_dtype)
        times = None
        if probe is not None:
            times = estimates.times(
                config,
                probe,
                shape,
                material.chunks,
                ratios=_ratios(settings),
                check_layer=min(settings.check_layers[0], config.layers - 1),
                policy=settings.policy,
            )
        return cls(
            subject,
            material,
            shape,
            estimates.kv_sizes(spec, settings.chunk_tokens, prefix),
            estimates.stored_bytes(spec, material.chunks, prefix),
            limit,
            times,
            probe,
            _assumed(settings, subject, material, shape, probe),
        )

    @property
    def prompt_bytes(self) -> int:
        """KV of a prompt's stored tokens."""
        return (self.shape.prefix + self.shape.cached) * self.sizes.token

    def to_json(self) -> dict[str, Any]:
        """Raw numbers: bytes, seconds, tokens a second."""
        subject, material, times = self.subject, self.material, self.times
        return {
            "model": {
                "name": subject.name,
                "dtype": subject.dtype,
                "kv_dtype": subject.kv_dtype,
                "device": str(subject.device),
            },
            "kv": {
                "token_bytes": self.sizes.token,
                "chunk_tokens": self.sizes.chunk_tokens,
                "chunk_bytes": self.sizes.chunk,
                "entry_bytes": self.sizes.entry,
            },
            "material": {
                "origin": material.origin,
                "documents": material.documents,
                "chunks": len(material.chunks),
                "tokens": sum(material.chunks),
                "bytes": self.nbytes,
                "limit": self.limit,
                "ingest_s": times.ingest_s if times else None,
            },
            "prompt": {
                **asdict(self.shape),
                "tokens": self.shape.tokens,
                "kv_bytes": self.prompt_bytes,
                "load_warm_s": times.load_warm_s if times else None,
                "load_cold_s": times.load_cold_s if times else None,
                "decode_tokens_s": times.decode_tokens_s if times else None,
            },
            "first_token": [
                {
                    "way": way.name,
                    "ratio": way.ratio,
                    "ttft_s": way.time.ttft_s,
                    "ttft_cold_s": way.time.ttft_cold_s,
                    "speedup": way.speedup,
                    **asdict(way.time),
                }
                for way in (times.ways if times else ())
            ],
            "assumed": self.assumed,
            "probe": self.probe.to_json() if self.probe else None,
        }


def show(out: Output, figures: Figures) -> None:
    if figures.material.chunks and figures.nbytes > figures.limit:
        out.warn(
            f"{size_text(figures.nbytes)} do not fit the store's limit of "
            f"{size_text(figures.limit)}",
            "ingest will name the limit it needs, for `cacheblend store limit`",
        )
    if out.json:
        out.data(figures.to_json())
        return
    out.pairs(_facts(figures))
    if figures.times is not None:
        out.line()
        headers = ["way", "first token", "from the disk", "speedup"]
        rows = [
            (
                way.name,
                duration_text(way.time.ttft_s),
                "" if way.ratio is None else _seconds(way.time.ttft_cold_s),
                f"{way.speedup:.1f}x",
            )
            for way in figures.times.ways
        ]
        out.table(headers, rows, right=headers[1:])
    out.line()
    out.line(f"assumed: {'; '.join(figures.assumed)}")


def _facts(figures: Figures) -> list[tuple[str, object]]:
    subject, material, sizes = figures.subject, figures.material, figures.sizes
    pairs: list[tuple[str, object]] = [
        ("model", f"{subject.name}, {subject.dtype} on {subject.device}"),
        ("a token", size_text(sizes.token)),
        (
            "a chunk",
            f"{count_text(sizes.chunk_tokens, 'tokens')}, {size_text(sizes.chunk)}, on disk "
            f"{size_text(sizes.entry)}",
        ),
    ]
    total = sum(material.chunks)
    if material.chunks:
        counts = [count_text(material.documents, "documents")] if material.documents else []
        counts += [count_text(len(material.chunks), "chunks"), count_text(total, "tokens")]
        pairs.append(
            (
                "the store" if material.origin == "store" else "all of it",
                f"{', '.join(counts)}, {size_text(figures.nbytes)} on disk of "
                f"{size_text(figures.limit)} allowed",
            )
        )
    times = figures.times
    if times is not None and material.chunks:
        rate = rate_text(total / times.ingest_s, "tokens")
        pairs.append(("ingest", f"{duration_text(times.ingest_s)} ({rate})"))
    shape = figures.shape
    pairs.append(
        (
            "a prompt",
            f"{count_text(shape.chunks, 'chunks')} of {count_text(shape.chunk_tokens, 'tokens')}, "
            f"{count_text(shape.tokens, 'tokens')} in all, {size_text(figures.prompt_bytes)} of KV",
        )
    )
    if times is not None:
        pairs += [
            (
                "loading it",
                f"{_seconds(times.load_cold_s)} from the disk, "
                f"{duration_text(times.load_warm_s)} from the page cache",
            ),
            ("its answer", rate_text(times.decode_tokens_s, "tokens")),
        ]
    return pairs


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration_text(seconds)


def _assumed(
    settings: Settings,
    subject: Subject,
    material: Material,
    shape: PromptShape,
    probe: Probe | None,
) -> list[str]:
    """What the figures take for granted, in words."""
    why = "" if subject.blueprint else ", for want of its tokenizer and template"
    said = [
        f"KV in {subject.kv_dtype}, computed behind a prefix of {subject.prefix} tokens",
        f"a question of {subject.suffix} tokens with its template{why}",
    ]
    if shape.chunks < min(settings.top_k, len(material.chunks) or settings.top_k):
        said.append(
            f"{count_text(shape.chunks, 'chunks')} in a prompt, for no more fit the context of "
            f"{count_text(subject.config.context, 'tokens')}"
        )
    if shape.cached < settings.min_tokens:
        said.append(
            f"blending though {count_text(shape.cached, 'cached tokens')} are fewer than the "
            f"setting min_tokens ({settings.min_tokens:,})"
        )
    if probe is None:
        return said
    said += [
        "in a prompt every chunk stored, the first one exact",
        f"the model loaded, {count_text(probe.threads, 'threads')}, nothing else running",
        "ingest of everything, nothing of it stored yet",
    ]
    said.append(f"policy {settings.policy}")
    if settings.ratio == AUTO:
        said.append("ratio auto is what the calibration says; estimated with the usual one")
    return [*said, *probe.notes]
