"""Text of requests, as it may stand in a log."""

_LONGEST = 300


def one_line(value: object) -> str:
    """One line without control characters, cut where it is long: it may quote what a request
    said."""
    text = " ".join(str(value).split())
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
