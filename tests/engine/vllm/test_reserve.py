from engine.vllm.reserve import computed_bytes, left_for_blocks, staged_bytes


def test_a_staged_prompt_has_all_layers_and_those_being_loaded() -> None:
    # 30 layers of 3 heads, 64 wide, in two bytes: 23,040 bytes a token, as the store counts
    assert staged_bytes(4096, 30, 3, 64, 2, 0) == 4096 * 23_040
    assert staged_bytes(4096, 30, 3, 64, 2, 2) == 4096 * 23_040 * 32 // 30
    assert staged_bytes(1, 1, 1, 1, 2, 2) == staged_bytes(1, 1, 1, 1, 2, None) == 8


def test_blocks_keep_at_least_half_of_the_memory() -> None:
    assert left_for_blocks(1000, 100) == (900, 100)
    assert left_for_blocks(1000, 900) == (500, 500)


def test_a_layers_tokens_are_counted_with_q_k_and_v() -> None:
    """Hidden states and their norm, the fused product, its three parts, attention's output."""
    assert computed_bytes(10, 64, 4, 2, 8, 2) == 10 * 2 * (64 + 64 + (32 + 2 * 16) * 2 + 32)
