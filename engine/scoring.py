"""The question reads the reused KV, so that what it looks at can be recomputed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.policies import LayerKV
from engine.rope import Tables


@dataclass(frozen=True)
class Reading:
    """What came of it. question: `Candidates.question` of all hits; kept: their stored K (before
    RoPE) and V at check layers."""

    question: torch.Tensor
    kept: Mapping[int, LayerKV]


class QuestionReader:
    """Runs what is always computed over stored KV, layer by layer, as at ratio 0.

    Its own K and V go into the cache too, and are overwritten when it is computed for good. Call it
    under `torch.inference_mode`.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        tables: Tables,
        positions: Sequence[int],
        asking: int,
        looks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """positions: of what is computed, in order; the last `asking` of them are the question.
        looks: `Policy.looks`."""
        self.model, self.cache = model, cache
        self.plan, self.asking, self.looks = model.plan(list(positions)), asking, looks
        self.rows = tables[self.plan.positions]
        self._looks: list[torch.Tensor] = []
        self._x = torch.empty(0)

    def begin(self, token_ids: Sequence[int]) -> None:
        """token_ids: of the whole prompt."""
        ids = torch.tensor(token_ids, device=self.model.device)
        self._x = self.model.embed(ids[self.plan.positions])

    def layer(self, layer: int, counted: range) -> None:
        """One layer, whose stored KV is in the cache; its attention is taken where it is among
        those `counted`, the last of which ends the reading."""
        model, cache = self.model, self.cache
        normed = model.norm_in(layer, self._x)
        k, v = model.keys_values(layer, normed)
        model.store(layer, cache, self.plan.positions, k, v, self.rows)
        q = model.rotated(layer, model.queries(layer, normed), self.rows)
        if layer in counted:
            mass = model.mass(layer, q, cache, self.plan, self.asking)
            self._looks.append(self.looks(mass, model.value_norms(layer, cache)))
        if layer < counted.stop - 1:
            self._x = model.finish(layer, self._x, model.attend(layer, q, cache, self.plan))

    def looked(self, positions: torch.Tensor) -> torch.Tensor:
        """How much the question looked at the tokens at some positions, int64 [T], layer by layer:
        float32 [layers, T]."""
        return torch.stack(self._looks)[:, positions]
