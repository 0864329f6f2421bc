"""Other engines, measured on the same token ids: each in a process of its own."""

from engine.bench.peers.process import (
    PEER_NAMES,
    Peer,
    PeerAnswer,
    PeerFacts,
    PeerSetup,
    PeerSpec,
    setup_for,
)

__all__ = [
    "PEER_NAMES",
    "Peer",
    "PeerAnswer",
    "PeerFacts",
    "PeerSetup",
    "PeerSpec",
    "setup_for",
]
