"""The memory tier's limit holds whatever threads do, and what is read stays."""

import random
import threading

from cache_store.entry import EntryHeader
from cache_store.tiers.memory import MemoryTier
from tests.cache_store.support import SPEC, make_layers

TOKENS = 10
SIZE = TOKENS * SPEC.token_bytes


def header(number: int) -> EntryHeader:
    return EntryHeader(SPEC, tuple(range(number, number + TOKENS)), (), "", "")


def fill(tier: MemoryTier, number: int) -> bool:
    return tier.put(str(number), header(number), make_layers(SPEC, TOKENS, number))


def test_the_least_recently_used_leave_first() -> None:
    tier = MemoryTier(3 * SIZE)
    assert all(fill(tier, number) for number in range(3))
    reader = tier.open("0")
    assert reader is not None
    reader.close()
    assert fill(tier, 3)
    assert tier.keys() == ["2", "0", "3"]
    assert tier.used == 3 * SIZE


def test_what_is_being_read_stays_and_what_does_not_fit_is_not_taken() -> None:
    tier = MemoryTier(2 * SIZE)
    fill(tier, 0)
    fill(tier, 1)
    readers = [tier.open("0"), tier.open("1")]
    assert not fill(tier, 2)
    tier.drop(["0"])
    assert "0" not in tier
    assert tier.used == 2 * SIZE  # its bytes are still there
    for reader in readers:
        assert reader is not None
        reader.close()
        reader.close()
    assert tier.used == SIZE
    assert fill(tier, 2)
    assert not MemoryTier(SIZE - 1).put("0", header(0), make_layers(SPEC, TOKENS))


def test_threads_never_pass_the_limit_nor_see_other_bytes() -> None:
    tier = MemoryTier(4 * SIZE)
    wrong: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            number = chance.randrange(12)
            fill(tier, number)
            reader = tier.open(str(number))
            if reader is not None:
                if bytes(reader.layer(1)[1]) != make_layers(SPEC, TOKENS, number)[1][1]:
                    wrong.append(f"{number} holds another")
                reader.close()
            if chance.random() < 0.2:
                tier.drop([str(number)])
            if tier.used > tier.limit:
                wrong.append(f"{tier.used} bytes")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tier.clear()
    assert tier.used == 0
