"""Models, prompts, blending and generation; `Engine` is the Python API."""
