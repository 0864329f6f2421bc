"""`prefetch`: every layer is asked for before the first is computed."""

from engine.loaders.background import BackgroundLoader


class PrefetchLoader(BackgroundLoader):
    """One thread reads on whatever computing does, with space for all layers.

    Waits least where layers take unequally long to compute, as around a check layer.
    """

    name = "prefetch"
    threads = 1
    space = None
