"""How answers are sampled, shown and served; and what else a command is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cbcli import values
from cbcli.declaration import SAMPLING, setting


@dataclass(frozen=True)
class AnswerSettings:
    live: bool = setting(
        False, values.flag, "Show on stderr how ask and ingest go on, by layer and by chunk"
    )
    progress: str = setting(
        "auto",
        values.choice("auto", "plain", "none"),
        "Progress on stderr: auto (a bar on a terminal), plain (lines, in a log too) or none",
    )
    pager: bool | str = setting(
        True,
        values.pager,
        "Show long lists through a pager; or its command",
        risk="runs a command",
        harmless=(True, False),
    )
    max_tokens: int = setting(
        256, values.whole(1), "Most tokens of an answer", short="-n", group=SAMPLING
    )
    temperature: float = setting(
        0, values.number(0, 100), "0 decodes greedily, more samples", group=SAMPLING
    )
    top_p: float = setting(
        1,
        values.number(0, 1, above=True),
        "Sample from the likeliest tokens up to this share",
        group=SAMPLING,
    )
    sample_top_k: int = setting(
        0,
        values.whole(0),
        "Sample from so many likeliest tokens; 0: from all",
        group=SAMPLING,
    )
    seed: int = setting(
        0,
        values.whole(0, 2**63 - 1),
        "Seed of sampling, of shuffling and of policy random",
        group=SAMPLING,
    )
    stop: tuple[str, ...] = setting(
        (), values.texts, "Texts that end an answer", repeat=True, group=SAMPLING
    )
    host: str = setting(
        "127.0.0.1", values.some_text, "Address that serve listens on; 0.0.0.0: all of them"
    )
    port: int = setting(8000, values.whole(0, 65535), "Port that serve listens on; 0: any")
    limit: int | None = setting(
        None,
        values.size,
        "Size of a store when it is made, such as 20GB; unset: a tenth of the free disk, at most "
        "20GB",
        example='"20GB"',
    )
    trust: tuple[Path, ...] = setting(
        (),
        values.folders,
        "Folders whose cacheblend.toml may run code and name a remote store; not to be set in "
        "cacheblend.toml itself",
    )
    profile: str | None = setting(
        None,
        values.profile_name,
        "Profile: its keys in the settings files count above the others there",
        metavar="NAME",
        example='"fast"',
    )
