"""Calibration: whether a model may be blended, and how much of a prompt to recompute for how close
an answer.

`gate` checks on the real weights that blending computes what it should; `curve` measures quality
over ratio; `profile` keeps both beside the model; `controller` picks a ratio for a prompt.
"""
