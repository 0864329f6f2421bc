"""`--cite` in ask and run: chunks are numbered, and nothing is cited that isn't in the answer."""

import json
from pathlib import Path

from cache_store.catalog import ChunkInfo, Place
from cbcli.citations import Citations, where
from cbcli.output import Output
from tests.cbcli.terminal import Terminal
from tests.cbcli.world import World

QUESTION = "Who keeps the log of every boat?"


def chunk(number: int, source: str, place: Place | None = None) -> ChunkInfo:
    return ChunkInfo(f"{number:064x}", "text", 3, source, number, 0, 4, place, ("Head",))


def test_mentions_are_checked_against_what_was_given() -> None:
    given = [
        (1, chunk(1, "report.pdf", Place("page", 3, 3))),
        (2, chunk(2, "notes.md")),
        (3, chunk(3, "")),
    ]
    cited = Citations.of("Six [3, 1]. Or [9] and [1], see [12].", given)
    found = cited.to_json()
    assert [c["cited"] for c in found["citations"]] == [True, False, True]
    assert found["citations"][0] == {
        "number": 1,
        "chunk_id": f"{1:064x}",
        "source": "report.pdf",
        "place": {"unit": "page", "first": 3, "last": 3},
        "headings": ["Head"],
        "cited": True,
        "spans": [[4, 10], [23, 26]],
    }
    assert found["unknown_citations"] == [
        {"number": 9, "spans": [[15, 18]]},
        {"number": 12, "spans": [[32, 36]]},
    ]
    stdout, stderr = Terminal(), Terminal()
    cited.print(Output(stdout=stdout, stderr=stderr, env={"NO_COLOR": "1"}))
    assert stdout.getvalue() == f"\n[1] report.pdf, page 3\n[3] {'0' * 12}\n"
    assert "[9], and no document" in stderr.getvalue()
    assert "[12], and no document" in stderr.getvalue()


def test_nothing_is_cited_that_the_model_did_not_write() -> None:
    stdout, stderr = Terminal(), Terminal()
    cited = Citations.of("Six.", [(1, chunk(1, "notes.md"))])
    cited.print(Output(stdout=stdout, stderr=stderr, env={}))
    assert stdout.getvalue() == ""
    assert "cites none" in stderr.getvalue()
    assert not cited.to_json()["citations"][0]["cited"]


def test_names_of_files_never_drive_the_terminal(tmp_path: Path) -> None:
    stdout = Terminal()
    cited = Citations.of("[1]", [(1, chunk(1, "a\x1b[31mb.md"))])
    cited.print(Output(stdout=stdout, stderr=Terminal(), env={}))
    assert "\x1b" not in stdout.getvalue()
    assert where(chunk(1, str(Path.cwd() / "x.md"))) == "x.md"


def test_ask_numbers_chunks_without_changing_their_tokens(world: World) -> None:
    plain = world.json("ask", QUESTION, "--top-k", "2")
    result = world.json("ask", QUESTION, "--top-k", "2", "--cite")
    assert "citations" not in plain

    def chunks(found) -> list[list[int]]:
        ids = found["prompt"]["token_ids"]
        segments = found["prompt"]["segments"]
        return [ids[s["start"] : s["end"]] for s in segments if s["kind"] == "chunk"]

    assert chunks(result) == chunks(plain)
    kinds = [s["kind"] for s in result["prompt"]["segments"]]
    assert kinds == ["prefix", *["separator", "chunk"] * 2, "suffix"]
    # Its own number stands between it and the prefix, so none is exact; all are there.
    statuses = [s["status"] for s in result["prompt"]["segments"] if s["kind"] == "chunk"]
    assert statuses == ["hit"] * 2
    given = [s["chunk_id"] for s in result["prompt"]["segments"] if s["kind"] == "chunk"]
    assert [(c["number"], c["chunk_id"]) for c in result["citations"]] == list(enumerate(given, 1))
    assert not any(c["cited"] for c in result["citations"]) or "[" in result["answer"]


def test_run_cites_for_all_lines_or_for_one(world: World) -> None:
    lines = [{"question": QUESTION}, {"question": QUESTION, "cite": False}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    result = world("run", "-", "--cite", "-q", input=text)
    assert result.exit_code == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert [c["number"] for c in first["citations"]] == [1, 2]
    assert first["unknown_citations"] == []
    assert "citations" not in second
