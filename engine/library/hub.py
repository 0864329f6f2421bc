"""Get a model's files from the Hugging Face Hub; an interrupted download goes on where it was."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError, UsageError
from engine.config import load_config
from engine.library.layout import is_kept, require
from engine.library.manifest import FileRecord, Progress

_REPO = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]{1,200}))?"
)
_TRIES = 5  # of a download that gets nowhere
_BLOCK = 1 << 20
_DAMAGED = "it was damaged on its way; nothing was installed, run the command again"


@dataclass(frozen=True)
class HubModel:
    """A repository at one commit. `hashes`: SHA-256 of the files for which the Hub states it."""

    repo: str
    revision: str
    licence: str
    sizes: dict[str, int]
    hashes: dict[str, str]


def split_id(source: str) -> tuple[str, str | None] | None:
    """`owner/name` and the revision of `owner/name` or `owner/name@revision`; None for others."""
    found = _REPO.fullmatch(source)
    return (found["repo"], found["revision"]) if found and ".." not in source else None


def look_up(repo: str, revision: str | None) -> HubModel:
    """What the Hub says about a repository. Raises UsageError where it isn't a whole model,
    NotFoundError or CacheblendError where it can't be had."""
    from huggingface_hub import HfApi

    with plain_errors(repo):
        info = HfApi(endpoint=_endpoint()).model_info(
            repo, revision=revision, files_metadata=True, timeout=30
        )
    siblings = [s for s in info.siblings or () if is_kept(s.rfilename)]
    require({s.rfilename for s in info.siblings or ()}, repo)
    names = {s.rfilename for s in siblings}
    if "model.safetensors" in names:  # a copy in one file, beside others, is all there is to get
        siblings = [
            s
            for s in siblings
            if s.rfilename == "model.safetensors" or not s.rfilename.endswith(".safetensors")
        ]
    licence = next((t[8:] for t in info.tags or () if t.startswith("license:")), "")
    return HubModel(
        repo=repo,
        revision=info.sha or revision or "main",
        licence=licence,
        sizes={s.rfilename: s.size or 0 for s in siblings},
        hashes={s.rfilename: s.lfs.sha256 for s in siblings if s.lfs is not None},
    )


def download(model: HubModel, into: Path, parts: Path, progress: Progress) -> None:
    """Download the model's files into the folder `into`, by way of the folder `parts`.

    What either holds from an interrupted download is not downloaded again. The configuration
    comes first, so that a model which can't be computed here is refused before its weights are
    downloaded (UsageError). (The Hub's own library resumes whole files only.)
    """
    names = sorted(model.sizes, key=lambda name: (name != "config.json", name))
    total, before = sum(model.sizes.values()), 0
    with plain_errors(model.repo):
        for name in names:
            start = before

            def step(done: int, start: int = start) -> None:
                progress("downloading", start + done, total)

            if not (into / name).is_file():
                _get(model, name, parts / f"{name}.part", step)
                (parts / f"{name}.part").replace(into / name)
            before += model.sizes[name]
            if name == "config.json":
                load_config(into)


def _get(model: HubModel, name: str, part: Path, step: Callable[[int], None]) -> None:
    """Complete the file `part`, trying again where the connection breaks but bytes do arrive."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    tries = _TRIES
    while True:
        before = part.stat().st_size if part.exists() else 0
        if before and before == model.sizes[name]:
            return
        try:
            _get_once(model, name, part, step)
            return
        except HTTPError as error:
            # The Hub's refusals are errors of its own with an answer; only lost connections count.
            if getattr(error, "response", None) is not None:
                raise
            came = part.exists() and part.stat().st_size > before
            tries = _TRIES if came else tries - 1
            if tries == 0:
                raise
            time.sleep(0 if came else 1)


def _get_once(model: HubModel, name: str, part: Path, step: Callable[[int], None]) -> None:
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    url = hf_hub_url(model.repo, name, revision=model.revision, endpoint=_endpoint())
    with part.open("ab") as file:
        # Compressed on its way, a file couldn't be resumed by its own bytes.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if file.tell():
            headers["Range"] = f"bytes={file.tell()}-"
        with get_session().stream("GET", url, headers=headers, timeout=60) as response:
            if response.status_code == 416 or (file.tell() and response.status_code == 200):
                file.truncate(0)  # the range isn't had, so all of it comes, now or the next time
            hf_raise_for_status(response)
            for block in response.iter_bytes(_BLOCK):
                file.write(block)
                step(file.tell())


def expect_hashes(model: HubModel, files: dict[str, FileRecord]) -> None:
    """Raise IntegrityError unless the downloaded `files` are those the Hub has."""
    for name in model.sizes:
        if name not in files:
            raise IntegrityError(f"{model.repo}: {name} did not arrive", "run the command again")
        if files[name].bytes != model.sizes[name]:
            raise IntegrityError(
                f"{model.repo}: {name} has {files[name].bytes} bytes instead of "
                f"{model.sizes[name]}",
                _DAMAGED,
            )
        if model.hashes.get(name, files[name].sha256) != files[name].sha256:
            raise IntegrityError(
                f"{model.repo}: {name} has SHA-256 {files[name].sha256} instead of "
                f"{model.hashes[name]}",
                _DAMAGED,
            )


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def plain_errors(repo: str) -> Iterator[None]:
    """Turn the many errors of the Hub's library into ours, of one line each."""
    from huggingface_hub import errors

    # The transport library's base class, whichever one this version of the Hub's library uses.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    page = f"https://huggingface.co/{repo}"
    try:
        yield
    except errors.GatedRepoError:
        raise CacheblendError(
            f"{repo} is gated: its owner asks for consent first",
            f"accept its terms at {page}, then log in with `hf auth login` or set HF_TOKEN",
        ) from None
    except errors.RepositoryNotFoundError:
        raise NotFoundError(
            f"no model {repo} on the Hugging Face Hub",
            "check the spelling; for a private one, log in with `hf auth login` or set HF_TOKEN",
        ) from None
    except errors.RevisionNotFoundError:
        raise NotFoundError(
            f"{repo} has no such revision", f"see the branches and tags at {page}/tree/main"
        ) from None
    except errors.HFValidationError as error:
        raise UsageError(f"{repo} is not a repository id ({error})", "use owner/name") from None
    except errors.OfflineModeIsEnabled:
        raise CacheblendError(
            f"{repo} can't be downloaded: HF_HUB_OFFLINE is set", "unset it and run again"
        ) from None
    except errors.HfHubHTTPError as error:
        raise CacheblendError(
            f"{repo}: the Hugging Face Hub answered {str(error).splitlines()[0]}",
            "run the command again later: it goes on where it stopped",
        ) from None
    except (HTTPError, errors.LocalEntryNotFoundError, ConnectionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CacheblendError(
            f"{repo}: no connection to the Hugging Face Hub ({reason})",
            "check the network and run the command again: it goes on where it stopped",
        ) from None
