"""Blending inside an unpatched vLLM: a KV connector, a worker, and vLLM's model as a `Decoder`.

Only this package imports vLLM, and only when it is used.
"""
