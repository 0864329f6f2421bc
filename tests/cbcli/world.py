"""A tiny model in a library of its own, a store and documents, for tests of the commands."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.cbcli import schemas
from tests.cbcli.terminal import run
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = {
    "one.md": "# Tides\n\nThe tide turns twice a day. The pilot boat leaves at six.\n\n"
    "The harbour master is called Orla. She keeps the log of every boat.\n",
    "two.txt": "The lamp of the lighthouse was lit in 1871. It burns oil, and its keeper sleeps "
    "by day.\n\nHe is paid in silver.\n",
    "sub/three.rst": "Ropes\n=====\n\nA rope is coiled with the sun. Wet ropes are hung, never "
    "stowed.\n",
}


@dataclass(frozen=True)
class World:
    """`ask` and the like run the command with this library, store and working folder."""

    root: Path

    @property
    def docs(self) -> Path:
        return self.root / "docs"

    def env(self, model: str = "tiny") -> dict[str, str]:
        """What the commands are run with."""
        return {
            "CACHEBLEND_HOME": str(self.root / "home"),
            "CACHEBLEND_MODEL": model,
            "CACHEBLEND_DTYPE": "fp32",
            "CACHEBLEND_MIN_TOKENS": "0",
            "CACHEBLEND_LIMIT": "500MB",
            "CACHEBLEND_MAX_TOKENS": "5",
        }

    def __call__(self, *args: str, input: str | None = None, model: str = "tiny") -> Result:
        return run(*args, input=input, env=self.env(model))

    def json(self, *args: str, code: int = 0, **options: Any) -> Any:
        """The JSON document a command prints, as its schema has it."""
        result = self(*args, "--json", **options)
        assert result.exit_code == code, result.stderr
        document = json.loads(result.stdout)
        schemas.check(schemas.schema_name(args), document)
        return document

    def error(self, *args: str, code: int, **options: Any) -> dict[str, str]:
        """What a command that fails says with --json; nothing on stdout, no traceback."""
        result = self(*args, "--json", **options)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        document = json.loads(lines[0])
        schemas.check("error", document)
        error: dict[str, str] = document["error"]
        return error

    def chunks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.json("store", "ls")["chunks"]
        return found


def add_model(root: Path, name: str, seed: int = 0, **shape: Any) -> Path:
    folder = root / "home" / "models" / name
    recipe = Tiny(name, "Llama", {"vocab_size": 1000, "max_position_embeddings": 2048, **shape})
    build(recipe, folder, seed)
    return write_tokenizer(folder, chat_template=CHATML)


def make_world(root: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    add_model(root, "tiny")
    world = World(root)
    for name, text in TEXTS.items():
        path = world.docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    monkeypatch.chdir(root)
    return world
