"""Measuring on the user's own machine: time to first token, ingest, loading, decoding.

`layout` makes the prompts, `measure` takes turns, one module a bench does the measuring, `peers`
runs other engines on the same token ids, `conditions` says what all of it ran on.
"""
