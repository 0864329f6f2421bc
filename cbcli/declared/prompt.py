"""How a prompt is written."""

from __future__ import annotations

from dataclasses import dataclass

from cbcli import values
from cbcli.declaration import PROMPT, setting
from engine.context import CONTEXT_KINDS


@dataclass(frozen=True)
class PromptSettings:
    context: str = setting(
        "prefix",
        values.choice(*CONTEXT_KINDS),
        "What new chunks are computed behind: prefix, bos (its first token alone) or none",
        group=PROMPT,
    )
    system: str | None = setting(
        None,
        values.text,
        "System prompt; unset: the built-in one",
        group=PROMPT,
        example='"Answer briefly."',
    )
    cite: bool = setting(
        False,
        values.flag,
        "Number the chunks in the prompt, ask for the numbers in the answer, and say what they "
        "stand for",
    )
    separator: str = setting("\n\n", values.text, "Text between two chunks in the prompt")
    text_separator: str = setting(
        " # # ",
        values.some_text,
        "Text between the chunks of a prompt that comes as one text; the model never sees it",
        flag="--separator",
    )
    template_date: str = setting(
        "2024-07-26", values.day, "The day a chat template is told, fixed so that prefixes last"
    )
