"""Other engines, measured on the same token ids: each in a process of its own."""

from engine.bench.peers.process import (
    Peer,
    PeerFacts,
    PeerSetup,
    PeerSpec,
    setup_for,
)

__all__ = [
    "Peer",
    "PeerFacts",
    "PeerSetup",
    "PeerSpec",
    "setup_for",
]
