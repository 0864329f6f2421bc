"""Tiers of a store besides the local disk: memory above it, a remote store below.

To add a kind of remote: a class that is a `Remote`, and its scheme in `addresses.connect`.
"""
