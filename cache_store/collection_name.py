"""What a collection can be called."""

from __future__ import annotations

import re

MAX_NAME = 80
_NAME = re.compile(rf"[A-Za-z0-9._/-]{{1,{MAX_NAME}}}")
NAME_RULE = f"up to {MAX_NAME} letters, digits and - _ . /"


def is_collection_name(name: str) -> bool:
    """Whether a collection can have this name: ASCII letters, digits, and - _ . /"""
    return _NAME.fullmatch(name) is not None
