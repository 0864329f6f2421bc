"""Whether a value that was read from a file is a number."""

import math


def is_number(value: object) -> bool:
    """For one that counts; not for true, infinities and what isn't a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
