"""Memory that blending takes on a worker's device, beside what vLLM counts there."""

LARGEST_SHARE = 0.5  # of what vLLM would give to its own KV cache


def staged_bytes(
    tokens: int, layers: int, kv_heads: int, head_dim: int, itemsize: int, loaded: int | None
) -> int:
    """What one prompt of so many tokens needs while it is blended, and at most one is at a time: K
    and V of all layers, where a question reads them before they are computed with (one layer
    otherwise), and those of the `loaded` layers that a loader holds, None: all.

    kv_heads: of one tensor-parallel rank. itemsize: bytes of a number.
    """
    held = layers + min(layers if loaded is None else loaded, layers)
    return 2 * held * tokens * kv_heads * head_dim * itemsize


def computed_bytes(
    tokens: int, hidden: int, heads: int, kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """What one prompt needs where all its tokens are computed at a layer: hidden states, these
    normed, Q, K and V side by side and apart, and attention's output. What the products in between
    need is in vLLM's own measure, for they are made in slices of what it measured with."""
    return tokens * (2 * hidden + (3 * heads + 4 * kv_heads) * head_dim) * itemsize


def left_for_blocks(available: int, staged: int) -> tuple[int, int]:
    """Bytes for vLLM's blocks out of those that it found, and those kept back. No more is kept than
    `LARGEST_SHARE`: a prompt too long for it may fail to be blended, and is computed then."""
    kept = min(staged, int(available * LARGEST_SHARE))
    return available - kept, kept
