"""A vLLM worker's own forward, asked as its scheduler asks it, before there is any request."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from vllm import SamplingParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from engine.vllm.messages import StepMetadata
from engine.vllm.paged import PagedKV
from engine.vllm.plan import StepPlan
from engine.vllm.selftest import FIRST_BLOCK, Prefiller, first_blocks

T = TypeVar("T")

# On a CPU that has AMX vLLM rounds activations for these as well, and says so in the layers.
_WEIGHTS_ONLY = ("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin")


class WorkerPrefiller(Prefiller):
    """Works with either of vLLM's model runners: each is given scheduler outputs, keeps the last
    hidden states until it is to sample, and forgets a request that is said to have finished.

    paged: vLLM's blocks.
    """

    def __init__(self, worker: Any, paged: PagedKV) -> None:
        self._worker, self._paged = worker, paged
        self._requests = 0
        self._blocks = 0  # so many were written to
        config = worker.vllm_config
        self.vocab = config.model_config.get_vocab_size()
        quantisation = config.model_config.quantization
        self.eight_bits = (quantisation is not None and quantisation not in _WEIGHTS_ONLY) or any(
            getattr(part, "use_w4a8", False) for part in worker.get_model().modules()
        )
        blocks = worker.model_runner.kv_cache_config.num_blocks - FIRST_BLOCK
        self.room = min(
            config.model_config.max_model_len - 1,
            config.scheduler_config.max_num_batched_tokens,
            blocks * paged.block_size,
        )

    def logits(self, token_ids: Sequence[int], held: int, count: int) -> torch.Tensor | None:
        runner, ids = self._worker.model_runner, list(token_ids)
        self._requests += 1
        name = f"cacheblend-self-test-{self._requests}"
        blocks = list(first_blocks(len(ids), self._paged.block_size))
        self._blocks = max(self._blocks, len(blocks))
        step = _step()
        step.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=ids,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0, max_tokens=1),
                pooling_params=None,
                block_ids=(blocks,),
                num_computed_tokens=held,
                lora_request=None,
                prefill_token_ids=ids,
            )
        ]
        rows = len(ids) - held
        step.num_scheduled_tokens = {name: rows}
        step.total_num_scheduled_tokens = rows
        try:
            self._worker.execute_model(step)
            hidden = runner.execute_model_state.hidden_states[rows - count : rows]
            found = runner.model.compute_logits(hidden)
            self._worker.sample_tokens(None)
        finally:
            finished = _step()
            finished.finished_req_ids = {name}
            runner.execute_model_state = None
            self._worker.execute_model(finished)
        return None if found is None else found.float()

    def clear(self) -> None:
        """Zeros what was written: blocks are as they were made."""
        layers = self._paged.attention.values()
        first = FIRST_BLOCK * self._paged.block_size
        end = first + self._blocks * self._paged.block_size
        slots = self._paged.slots(range(FIRST_BLOCK + self._blocks), first, end)
        for index, layer in enumerate(layers):
            shape = (len(slots), layer.num_kv_heads, layer.head_size)
            zeros = torch.zeros(shape, dtype=layer.dtype, device=slots.device)
            self._paged.put(index, zeros, zeros, slots)

    def gathered(self, said: T) -> list[T]:
        group = get_tp_group()
        if group.world_size == 1:
            return [said]
        heard: list[Any] = [None] * group.world_size
        dist.all_gather_object(heard, said, group=group.cpu_group)
        return heard


def _step() -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.kv_connector_metadata = StepMetadata(StepPlan())
    return step
