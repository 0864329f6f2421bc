"""`async`: several reads in flight."""

from engine.loaders.background import BackgroundLoader


class AsyncLoader(BackgroundLoader):
    """Four layers are read at the same time, ahead of the one in use.

    For storage that answers late but to many at once, such as network disks.
    """

    name = "async"
    threads = 4
    space = threads + 1
