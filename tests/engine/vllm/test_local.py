"""What of the engine with vLLM needs no vLLM."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache_store.errors import UsageError
from cbcli.lines.order import LineSource, at_once
from cbcli.lines.prompts import LineName, PromptLine
from cbcli.lines.runner import Answer
from engine.options import BlendOptions
from engine.prompt import PromptChunk, lay_out
from engine.vllm import start
from engine.vllm.naming import RequestReader
from engine.vllm.request import parameters
from engine.vllm.settings import ConnectorSettings
from engine.vllm.start import read_extra, together
from tests.cbcli.terminal import run


def test_vllms_arguments_are_json_or_text() -> None:
    read = read_extra(["max-num-seqs=4", "quantization=awq", "enforce_eager=false", "x="])
    assert read == {"max_num_seqs": 4, "quantization": "awq", "enforce_eager": False, "x": ""}
    assert (together(read), together({})) == (4, 16)
    for wrong in ("worker_cls=x", "seed=1", "max_num_seqs", "=3"):
        with pytest.raises(UsageError):
            read_extra([wrong])
    for count in (0, "4", True, 1.5):
        with pytest.raises(UsageError, match="max_num_seqs"):
            together({"max_num_seqs": count})


@pytest.mark.parametrize(
    "given",
    [
        dict(policy="value", ratio=("0.5", "0.25"), check_layers=(1, 2), min_tokens=3),
        dict(policy="question:layers=1-2", threshold="0.4", transfer=False),
        dict(policy="random", seed=9, strict_context=True),
        dict(policy="explicit", indices=[5, 4]),
        dict(mode="reuse", min_tokens=0),
        dict(mode="prefix", min_tokens=0),
    ],
    ids=str,
)
def test_the_connector_reads_the_very_options(given: dict[str, Any], tmp_path: Any) -> None:
    chunks = [PromptChunk((4, 5, 6), "a" * 64), PromptChunk((7, 8))]
    prompt, options = lay_out((1, 2), chunks, (3,), (9, 10)), BlendOptions.of(**given)
    reader = RequestReader(ConnectorSettings.of({"store": str(tmp_path)}, env={}), layers=8)
    plan = reader.read("1", prompt.token_ids, parameters(prompt, options))
    assert plan is not None
    assert plan.prompt == prompt
    assert plan.options == options
    assert (plan.save, plan.trace, plan.question_tokens) == (False, None, None)


def test_nothing_is_said_of_a_prompt_that_is_computed() -> None:
    prompt = lay_out((1,), [PromptChunk((2,))], (), (3,))
    assert parameters(prompt, BlendOptions.of(mode="full")) == {}
    assert parameters(prompt, BlendOptions.of(ratio=1)) == {}


class Lines:
    """A source of ready lines; every second `take` finds that input must be read first."""

    def __init__(self, count: int) -> None:
        self.left: Iterator[int] = iter(range(count))
        self.ended, self.filled = False, False

    def fileno(self) -> None:
        return None

    def fill(self) -> None:
        self.filled = True

    def take(self) -> PromptLine | Answer | None:
        if not self.filled:
            return None
        self.filled = False
        number = next(self.left, None)
        if number is None:
            self.ended = True
            return None
        if number % 5 == 4:
            return Answer(number, {"error": {"message": "bad"}})
        return PromptLine(LineName(number, None, ""), "?", None, {})


class Engine:
    """Ends the lines it has been given the wrong way round."""

    def __init__(self) -> None:
        self.running: list[_Line] = []
        self.most = 0

    def begin(self, line: PromptLine) -> "_Line | Answer":
        if line.name.number == 1:
            return Answer(1, {"error": {"message": "refused"}})
        self.running.append(_Line(line.name.number))
        self.most = max(self.most, len(self.running))
        return self.running[-1]

    def go_on(self) -> None:
        self.running.pop().done = True


class _Line:
    def __init__(self, number: int) -> None:
        self.number, self.done = number, False

    def answer(self) -> Answer:
        assert self.done
        return Answer(self.number, {})


@pytest.mark.parametrize("most", [1, 3, 50])
def test_lines_that_are_computed_together_come_out_in_order(most: int) -> None:
    engine, lines = Engine(), Lines(23)
    source: LineSource = lines  # type: ignore[assignment]
    assert [answer.number for answer in at_once(source, engine, most)] == list(range(23))
    assert 1 <= engine.most <= most


def test_without_vllm_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.vllm.start.find_spec", lambda name: None)
    for command in (["ask", "?"], ["run", "-"], ["ingest", "."], ["bench", "ttft"], ["eval", "x"]):
        result = run(*command, "--engine", "vllm", input="")
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert "vLLM is not installed" in result.stderr
        assert "pip install" in result.stderr


def test_what_runs_here_asks_no_remote_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its connector's store is an empty one, which another takes the place of."""
    monkeypatch.setenv("CACHEBLEND_REMOTE", "redis://h:1/0")
    blueprint = SimpleNamespace(path=tmp_path, name="m", kv_dtype="bf16", context="bos", memo=None)
    told = start._connector(cast(Any, blueprint), tmp_path)
    assert ConnectorSettings.of(told).remote is None


def test_a_very_long_source_is_not_told() -> None:
    prompt = lay_out((1,), [PromptChunk((4, 5), None, "x" * 5000)], (), (9,))
    assert "source" not in parameters(prompt, BlendOptions())["cacheblend"]["segments"][1]
