"""The colours of the application itself, dark and light; those of what it shows are in `theme`."""

from textual.theme import Theme

DARK = Theme(
    name="cacheblend-dark",
    primary="#6cbcee",
    secondary="#2fbf94",
    accent="#eda62d",
    warning="#eda62d",
    error="#e8702a",
    success="#2fbf94",
    foreground="#d9dce3",
    background="#14161b",
    surface="#1b1e25",
    panel="#262a33",
    dark=True,
)
LIGHT = Theme(
    name="cacheblend-light",
    primary="#005f97",
    secondary="#00664a",
    accent="#8f5200",
    warning="#8f5200",
    error="#b34700",
    success="#00664a",
    foreground="#1d2026",
    background="#fbfbf9",
    surface="#f1f1ee",
    panel="#e2e3e0",
    dark=False,
)
