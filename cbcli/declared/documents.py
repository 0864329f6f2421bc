"""Which documents are read, how they are cut, and which chunks are retrieved."""

from __future__ import annotations

from dataclasses import dataclass

from cbcli import values
from cbcli.declaration import CHUNKING, FILES, RETRIEVAL, setting


@dataclass(frozen=True)
class DocumentSettings:
    globs: tuple[str, ...] = setting(
        (),
        values.globs,
        "Read files in folders that match this; with ! in front, leave them out",
        flag="--glob",
        short="-g",
        repeat=True,
        metavar="GLOB",
        group=FILES,
    )
    types: tuple[str, ...] = setting(
        (),
        values.names,
        "Read files of this type: md, pdf, py, code; see --type-list",
        flag="--type",
        repeat=True,
        metavar="NAME",
        group=FILES,
    )
    not_types: tuple[str, ...] = setting(
        (),
        values.names,
        "Leave out files of this type",
        flag="--type-not",
        repeat=True,
        metavar="NAME",
        group=FILES,
    )
    unrestricted: int = setting(
        0,
        values.whole(0, 3),
        "Read what ignore files leave out; -uu: hidden files too, -uuu: binary ones too",
        short="-u",
        count=True,
        group=FILES,
    )
    follow: bool = setting(False, values.flag, "Follow symbolic links in folders", group=FILES)
    max_size: int | None = setting(
        None,
        values.size,
        "Leave out files in folders that are larger, such as 5MB",
        example='"5MB"',
        group=FILES,
    )
    jobs: int | None = setting(
        None,
        values.whole(1, 64),
        "Files to convert at the same time; unset: one a core, at most 8",
        example="4",
        group=FILES,
    )
    chunk_tokens: int = setting(
        512, values.whole(8, 1_000_000), "Most tokens of a chunk", group=CHUNKING
    )
    overlap: int = setting(
        0, values.whole(0, 1_000_000), "Tokens two chunks have in common", group=CHUNKING
    )
    collections: tuple[str, ...] = setting(
        (),
        values.collections,
        "Collections: what ingest puts documents into, and the chunks of a question come from; "
        "none: all documents",
        flag="--collection",
        repeat=True,
        metavar="NAME",
        group=RETRIEVAL,
    )
    headings: bool = setting(
        False,
        values.flag,
        "Begin each chunk's text with the headings it stands under",
        group=CHUNKING,
    )
    top_k: int = setting(
        6,
        values.whole(1, 10_000),
        "Chunks to retrieve for a question",
        short="-k",
        group=RETRIEVAL,
    )
    retriever: str = setting(
        "bm25",
        values.retriever,
        "What finds chunks: bm25 (words), embed (meaning), hybrid (both), or your own: "
        "module:function or file.py:function",
        group=RETRIEVAL,
        risk="runs code",
        harmless=values.RETRIEVERS,
    )
    embed_model: str = setting(
        "minishlab/potion-retrieval-32M",
        values.model,
        "Embedding model of embed and hybrid, for model2vec: a folder, or a repository of the "
        "Hugging Face Hub",
        group=RETRIEVAL,
    )
    min_score: float | None = setting(
        None,
        values.number(-(10**6), 10**6),
        "Least score of a chunk that is retrieved, as `search` shows it",
        group=RETRIEVAL,
        example="0.3",
    )
    with_neighbours: int = setting(
        0,
        values.whole(0, 1000),
        "Chunks to take before and after each retrieved one in its document",
        metavar="N",
        group=RETRIEVAL,
    )
    order: str = setting(
        "given",
        values.choice("given", "score", "source", "shuffle"),
        "Order of the chunks: given, score, source or shuffle",
        group=RETRIEVAL,
    )
