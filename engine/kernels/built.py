"""The inner loops in C, the sources beside this file, as functions.

The library is built when the project is installed, where a C compiler is there; it is found as a
file and called through ctypes. CACHEBLEND_NATIVE=0 does without it.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

POINTER, LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "cb_norm": (POINTER, POINTER, POINTER, POINTER, LONG, LONG, _FLOAT, _INT),
    "cb_linear": (*(POINTER,) * 6, LONG, LONG, LONG, _INT, _INT),
    "cb_gate": (POINTER, POINTER, LONG, _INT, _INT),
    "cb_gate_pairs": (POINTER, POINTER, LONG, LONG, _INT, _INT),
    "cb_place": (
        *(POINTER, LONG, POINTER, POINTER, POINTER, POINTER),
        *(LONG, LONG, LONG, LONG, LONG, LONG, LONG, _INT),
    ),
    "cb_place_runs": (
        *(POINTER, POINTER, POINTER, POINTER, LONG, POINTER, POINTER, POINTER, POINTER),
        *(LONG, LONG, LONG, LONG, _INT),
    ),
    "cb_shift": (
        *(POINTER, POINTER, POINTER, POINTER, POINTER, LONG, POINTER, POINTER),
        *(LONG, LONG, LONG, LONG, _INT),
    ),
    "cb_deviations": (*(POINTER,) * 7, LONG, POINTER, POINTER, *(LONG,) * 4, _INT),
    "cb_norms": (POINTER, POINTER, LONG, LONG, LONG, LONG, _INT),
    "cb_attend": (
        *(POINTER, POINTER, POINTER, POINTER, POINTER),
        *(LONG, LONG, LONG, LONG, LONG, LONG, _FLOAT, POINTER, _INT),
    ),
    "cb_attend_few": (
        *(POINTER, POINTER, POINTER, POINTER, POINTER),
        *(LONG, LONG, LONG, LONG, LONG, LONG, _FLOAT, POINTER, _INT),
    ),
    "cb_mass": (
        *(POINTER, POINTER, POINTER, POINTER),
        *(LONG, LONG, LONG, LONG, LONG, LONG, LONG, _FLOAT, LONG, POINTER, _INT),
    ),
    "cb_unpack": (POINTER, POINTER, *(LONG,) * 4, _INT, _INT, _INT),
}
INTERFACE = 6  # native.h's CB_INTERFACE
_ANSWERS = ("cb_linear", "cb_gate_pairs", "cb_place")  # they return whether they did it


def wanted() -> bool:
    """Whether CACHEBLEND_NATIVE leaves them on."""
    value = os.environ.get("CACHEBLEND_NATIVE", "1")
    return value.strip().lower() not in ("0", "off", "no", "false")


@cache
def library() -> ctypes.CDLL | None:
    """The built kernels; None where there are none, they don't load, or they aren't wanted."""
    if not wanted():
        return None
    built = (load(path) for path in sorted(Path(__file__).parent.glob("_native*.so")))
    return next((found for found in built if found is not None), None)


def load(path: Path) -> ctypes.CDLL | None:
    """The kernels in a file; None if they are of another machine, or of another version."""
    try:
        found = ctypes.CDLL(str(path))
        if found.cb_interface() != INTERFACE:
            return None
        for name, types in _SIGNATURES.items():
            getattr(found, name).argtypes = types
            getattr(found, name).restype = _INT if name in _ANSWERS else None
    except (OSError, AttributeError):
        return None
    return found
