"""`pipelined`: the next layer while this one is computed."""

from engine.loaders.background import BackgroundLoader


class PipelinedLoader(BackgroundLoader):
    """One thread, and space for two layers: the one in use and the next.

    A layer's space is free as soon as its KV is in the KV cache, early in its computation.
    """

    name = "pipelined"
    threads = 1
    space = 2
