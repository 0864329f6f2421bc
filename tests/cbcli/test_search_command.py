"""`cacheblend search`, and what decides which chunks a question gets. No model is needed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cache_store.catalog import ChunkText, Place
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from cbcli.chooser import Chooser
from cbcli.settings import load_settings
from tests.cbcli.terminal import run
from tests.engine.static_model import write_static_model

TIDES = (
    "The tide turns twice a day.",
    "The pilot boat leaves at six.",
    "The harbour master is called Orla.",
    "She keeps the log of every boat.",
    "The bell rings when fog comes in.",
)
LAMPS = ("The lamp of the lighthouse was lit in 1871.", "Its keeper sleeps by day.")


@dataclass(frozen=True)
class Library:
    """A store with text and without KV."""

    root: Path

    def add(self, name: str, texts: tuple[str, ...], pages: int = 0, under: str = "") -> None:
        with ChunkStore.open(self.root / "store", limit_bytes=10**8) as store:
            chunks = [
                ChunkText(
                    chunk_id(text),
                    text,
                    100 * number,
                    100 * number + len(text),
                    len(text.split()),
                    Place("page", number + 1, number + 1) if pages else None,
                    (under,) if under else (),
                )
                for number, text in enumerate(texts)
            ]
            store.catalog.replace_document(str(self.root / name), "digest", "{}", chunks)

    def __call__(self, *args: str, input: str | None = None, code: int = 0) -> Result:
        env = {"CACHEBLEND_HOME": str(self.root)}
        result = run("search", *args, input=input, env=env)
        assert result.exit_code == code, result.output
        return result

    def hits(self, *args: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self(*args, "--json").stdout)["hits"]
        return found

    def texts(self, *args: str) -> list[str]:
        return [hit["text"] for hit in self.hits(*args)]


def last_line(result: Result) -> str:
    return result.stderr.splitlines()[-1]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path))
    made = Library(tmp_path)
    made.add("tides.pdf", TIDES, pages=5, under="The harbour")
    made.add("lamps.txt", LAMPS)
    return made


def test_hits_have_rank_score_and_all_that_a_chunk_has(library: Library) -> None:
    first, *rest = library.hits("Which boat is in the log?")
    assert first["text"] == TIDES[3]
    assert (first["rank"], first["chunk_id"]) == (1, chunk_id(TIDES[3]))
    assert first["source"] == str(library.root / "tides.pdf")
    assert first["place"] == {"unit": "page", "first": 4, "last": 4}
    assert first["headings"] == ["The harbour"]
    assert (first["start"], first["tokens"]) == (300, 7)
    assert [hit["rank"] for hit in rest] == list(range(2, len(rest) + 2))
    scores = [first["score"], *(hit["score"] for hit in rest)]
    assert scores == sorted(scores, reverse=True)


def test_the_table_names_source_place_and_heading(library: Library) -> None:
    lines = library("log of the boat", "--top-k", "1").stdout.splitlines()
    assert lines[0].split() == ["rank", "score", "chunk", "source", "under", "text"]
    assert chunk_id(TIDES[3])[:12] in lines[1]
    assert "tides.pdf, page 4  The harbour  She keeps the log" in lines[1]
    assert "under" not in library("lamp").stdout


def test_jsonl_is_a_line_a_chunk_and_quiet_its_id(library: Library) -> None:
    lines = library("boat", "--jsonl").stdout.splitlines()
    assert [json.loads(line)["rank"] for line in lines] == [1, 2]
    assert [json.loads(line) for line in lines] == library.hits("boat")
    ids = library("boat", "-q").stdout.split()
    assert ids == [hit["chunk_id"] for hit in library.hits("boat")]


def test_full_prints_whole_texts_and_the_question_may_come_from_stdin(library: Library) -> None:
    printed = library("--full", "--top-k", "1", input="lighthouse\n").stdout
    assert printed.splitlines()[1:] == [LAMPS[0]]
    assert printed.startswith("1. score ")


def test_markup_and_control_sequences_of_a_document_are_shown_as_text(library: Library) -> None:
    library.add("bad.txt", ("[red]zeppelin[/red] \x1b[31mred\x1b[0m",))
    for form in ((), ("--full",)):
        printed = library("zeppelin", *form).stdout
        assert "\x1b" not in printed
        assert "[red]zeppelin[/red]" in printed
    library.add("two\nlines.txt", ("a submarine",))
    assert len(library("submarine", "--full").stdout.splitlines()) == 2


def test_neighbours_stand_around_their_hit_once_and_have_no_score(library: Library) -> None:
    around = library.hits("log", "--with-neighbours", "1")
    assert [hit["text"] for hit in around] == list(TIDES[2:5])
    assert [hit["rank"] for hit in around] == [None, 1, None]
    assert [hit["score"] is None for hit in around] == [True, False, True]
    # Top-k counts hits; two hits beside each other share neighbours; documents have ends.
    both = library.texts("boat", "--with-neighbours", "9", "--top-k", "1")
    assert both == list(TIDES)
    apart = library.hits("tide fog", "--with-neighbours", "1", "--top-k", "2")
    assert [hit["text"] for hit in apart] == [*TIDES[:2], *TIDES[3:]]
    assert {hit["rank"] for hit in apart} == {1, 2, None}
    # The better hit comes second in the text; what is between them is there once.
    near = library.hits("rings fog bell she harbour master", "--with-neighbours", "1", "-k", "2")
    assert [(hit["text"], hit["rank"]) for hit in near] == [
        *((TIDES[1], None), (TIDES[2], 2), (TIDES[3], None), (TIDES[4], 1))
    ]


def test_a_neighbour_that_another_document_has_too_stays_beside_its_hit(library: Library) -> None:
    library.add("same.txt", ("A zeppelin is moored.", TIDES[1]))
    around = library.hits("zeppelin boat", "--with-neighbours", "1")
    assert [(h["text"], h["rank"], Path(h["source"]).name) for h in around[:2]] == [
        ("A zeppelin is moored.", 1, "same.txt"),
        (TIDES[1], 2, "same.txt"),
    ]
    texts = [hit["text"] for hit in around]
    assert len(texts) == len(set(texts))
    assert set(texts) == {"A zeppelin is moored.", *TIDES}


def test_neighbours_follow_the_order_that_is_set(library: Library) -> None:
    def chosen(**settings: object) -> list[str]:
        wanted = load_settings({"store": str(library.root / "store"), **settings})
        with ChunkStore.open(wanted.store, read_only=True) as store:
            return [c.text for c in Chooser(store).choose(wanted, "lamp fog bell rings", [])]

    near = {"with_neighbours": 1}
    by_score = [TIDES[3], TIDES[4], *LAMPS]
    assert chosen(**near) == chosen(**near, order="score") == by_score
    assert chosen(**near, order="source") == [*LAMPS, TIDES[3], TIDES[4]]
    assert sorted(chosen(**near, order="shuffle", seed=3)) == sorted(by_score)
    ids = [chunk_id(TIDES[4])]
    with ChunkStore.open(library.root / "store", read_only=True) as store:
        settings = load_settings({"with_neighbours": 1})
        named = Chooser(store).choose(settings, "fog", ids)
    assert [c.text for c in named] == [TIDES[4]]  # who names chunks gets those


def test_min_score_drops_what_is_below_and_says_what_the_best_has(library: Library) -> None:
    hits = library.hits("log of the boat")
    assert len(hits) == 2
    least = (hits[0]["score"] + hits[1]["score"]) / 2
    assert library.texts("log of the boat", "--min-score", str(least)) == [TIDES[3]]
    result = library("log of the boat", "--min-score", "99", "--json", code=3)
    error = json.loads(result.stderr)["error"]
    assert result.stdout == ""
    assert f"the best has {hits[0]['score']:.4g}" in error["message"]


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("zeppelin",), 3, "in common"),
        ((" ",), 2, "empty"),
        (("boat", "--top-k", "0"), 2, "top-k"),
        (("boat", "--min-score", "much"), 2, "min-score"),
        (("boat", "--with-neighbours", "-1"), 2, "with-neighbours"),
        (("boat", "--store", "nowhere"), 3, "nowhere"),
    ],
)
def test_failures_are_one_line(
    library: Library, args: tuple[str, ...], code: int, word: str
) -> None:
    result = library(*args, "--json", code=code)
    assert result.stdout == ""
    assert word in json.loads(result.stderr)["error"]["message"]


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    ChunkStore.open(tmp_path / "store", limit_bytes=10**8).close()
    assert "no chunks" in Library(tmp_path)("boat", code=3).stderr


def test_ask_takes_ids_from_a_pipe_or_in_one_argument(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def choose(self: Chooser, settings: object, question: str, names: list[str]) -> list[Any]:
        asked.append(list(names))
        raise SystemExit(7)  # far enough

    monkeypatch.setattr(Chooser, "choose", choose)
    env = {"CACHEBLEND_HOME": str(library.root)}
    found = library("boat", "-q").stdout
    ids = found.split()
    assert len(ids) == 2
    assert run("ask", "--chunk", "-", "Who?", input=found, env=env).exit_code == 7
    assert run("ask", "--chunk", found, "--chunk", "abcd,ef01", "Who?", env=env).exit_code == 7
    assert asked == [ids, [*ids, "abcd", "ef01"]]
    nothing = run("ask", "--chunk", "-", "Who?", input="", env=env)
    assert (nothing.exit_code, "no chunk" in nothing.stderr) == (3, True)
    assert run("ask", "--chunk", "-", input="boat", env=env).exit_code == 2


@pytest.fixture
def embedding(library: Library) -> str:
    pytest.importorskip("model2vec")
    write_static_model(library.root / "static")
    library.add("ropes.txt", ("A cord is coiled with the sun.", "The lamp burns oil."))
    return "./static"


def test_retrievers_by_meaning_and_by_both(library: Library, embedding: str) -> None:
    by_meaning = ("--retriever", "embed", "--embed-model", embedding)
    assert library.texts("rope", *by_meaning) == ["A cord is coiled with the sun."]
    both = library.texts("zeppelin rope log", "--retriever", "hybrid", "--embed-model", embedding)
    assert set(both) == {"A cord is coiled with the sun.", TIDES[3]}
    assert "fits the question" in library("zeppelin", *by_meaning, code=3).stderr
    least = library("rope", *by_meaning, "--min-score", "1.1", code=3)
    assert "score of 1.1 or more" in least.stderr


def test_an_embedding_model_that_is_not_here_is_said(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = library("rope", "--retriever", "embed", "--offline", "--json", code=3)
    error = json.loads(result.stderr)["error"]
    assert "minishlab/potion-retrieval-32M" in error["message"]
    assert "--embed-model" in error["hint"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = library("rope", "--retriever", "embed", "--json", code=2)
    assert json.loads(result.stderr)["error"]["hint"] == "pip install 'cacheblend[embed]'"


def test_an_own_retriever_from_a_project_whose_folder_is_above(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library.root / "mine.py").write_text(
        "def find(question, chunks, top_k):\n"
        "    print('looking')\n"
        "    return [(c, len(c.text)) for c in chunks if question in c.text]\n"
        "def leave(question, chunks, top_k):\n"
        "    raise SystemExit(5)\n"
        "print('imported')\n"
        "def fail(question, chunks, top_k):\n"
        "    raise OSError('no index')\n"
    )
    below = library.root / "below"
    below.mkdir()
    (below / "mine.py").write_text("def find(question, chunks, top_k):\n    return chunks\n")
    monkeypatch.chdir(below)
    for name in ("mine:find", "mine.py:find"):
        (library.root / "cacheblend.toml").write_text(f'retriever = "{name}"\n')
        monkeypatch.delenv("CACHEBLEND_TRUST", raising=False)
        assert "sets retriever, which runs code" in library("boat", code=2).stderr
        monkeypatch.setenv("CACHEBLEND_TRUST", str(library.root))
        result = library("boat", "--jsonl")
        hits = [json.loads(line) for line in result.stdout.splitlines()]
        assert [hit["text"] for hit in hits] == [TIDES[1], TIDES[3]]
        assert hits[0]["score"] == len(TIDES[1])
        assert "imported\nlooking\n" in result.stderr
    failed = library("boat", "--retriever", "../mine.py:fail", "--json", code=1)
    assert failed.stdout == ""
    assert "failed: OSError: no index" in json.loads(last_line(failed))["error"]["message"]
    left = library("boat", "--retriever", "../mine.py:leave", "--json", code=1)
    assert "failed: SystemExit: 5" in json.loads(last_line(left))["error"]["message"]
    wrong = library("boat", "--retriever", "bm26", "--json", code=2)
    assert "module:function" in json.loads(wrong.stderr)["error"]["hint"]


def test_the_example_of_an_own_retriever_forgives_slips(library: Library) -> None:
    example = Path(__file__).parents[2] / "examples/own_retriever.py"
    for name in ("Letters", "words_and_letters"):
        found = library.texts("teh lihgthouse lapm", "--retriever", f"{example}:{name}", "-k", "1")
        assert found == [LAMPS[0]]


def test_a_long_reading_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbcli.retrievers.SHOWN_FROM", 1)
    monkeypatch.setattr("cbcli.progress.PLAIN_INTERVAL", 0)
    result = library("boat", "--progress", "plain")
    assert "indexing: 0 of 7 chunks" in result.stderr
    assert "indexing" not in result.stdout


def test_the_index_of_a_large_store_is_kept_and_of_a_small_one_not(library: Library) -> None:
    library("boat")
    assert not (library.root / "search").exists()
    library.add("many.txt", tuple(f"buoy number {number}" for number in range(300)))
    found = library.texts("buoy 77")
    kept = list((library.root / "search").glob("*/words.idx"))
    assert len(kept) == 1
    assert library.texts("buoy 77") == found
    assert found[0] == "buoy number 77"
    library.add("many.txt", ("a zeppelin",) * 300)
    assert library.texts("buoy 77 zeppelin") == ["a zeppelin"]
