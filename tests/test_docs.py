"""The site builds with no warning and no network, its generated parts are current, and the README's
links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S))


def anchors(path: Path) -> set[str]:
    """What can be linked to in a page of Markdown, by GitHub's rule."""
    heads = re.findall(r"^#+ +(.+?) *$", without_code(path.read_text("utf-8")), re.MULTILINE)
    heads = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_site_builds_without_a_warning_or_the_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **OFFLINE, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    pages = {path: path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) >= 15
    for path, page in pages.items():
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"?([^\"\s>]+)", page)
        outside = [target for target in fetched if re.match(r"(https?:)?//", target)]
        assert outside == [], path.name


def test_the_reference_of_commands_is_current() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cogapp",
            "--check",
            "docs/reference/cli.md",
            "docs/reference/settings.md",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"run `make reference`: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("target", sorted(set(LINK.findall(without_code(README)))))
def test_a_link_of_the_readme_leads_somewhere(target: str) -> None:
    if re.match(r"https?://", target):
        return
    path, _, anchor = target.partition("#")
    there = ROOT / path if path else ROOT / "README.md"
    assert there.exists()
    assert not anchor or anchor in anchors(there), sorted(anchors(there))
