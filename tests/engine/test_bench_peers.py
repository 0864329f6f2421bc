"""Other engines over the real protocol: the real child, with stand-ins for what isn't here."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from cache_store.errors import CacheblendError, UsageError
from engine import BlendOptions, Engine
from engine.bench.decode import measure_decode
from engine.bench.peers import Peer, PeerSetup, PeerSpec, setup_for
from engine.bench.ttft import TtftSweep, measure_ttft
from engine.prompt import lay_out
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

SETUP = PeerSetup("model", "float32", "cpu", 1, 300, "weights/tiny.gguf")
TORCH = """
    __version__ = "9"
    def get_num_threads():
        import os
        return int(os.environ["OMP_NUM_THREADS"])
"""
VLLM = """
    import os, sys
    print("INFO on standard output, as vLLM does")
    class SamplingParams:
        def __init__(self, **given):
            self.given = given
    class LLM:
        def __init__(self, **given):
            assert not given["enable_prefix_caching"]
            assert given["max_num_batched_tokens"] >= 300
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            assert os.environ["HF_HUB_OFFLINE"] == "1"
        def generate(self, prompt, sampling, use_tqdm):
            print("and more of it")
            assert sampling.given["max_tokens"] == 1
            class Out: pass
            out, one = Out(), Out()
            out.outputs, one.token_ids = [one], [sum(prompt["prompt_token_ids"])]
            return [out]
"""
LLAMA = """
    class Llama:
        def __init__(self, model_path, n_ctx, **given):
            assert model_path.endswith("tiny.gguf")
            self.n_ctx, self.ids = n_ctx, []
        def reset(self):
            self.ids = []
        def eval(self, ids):
            self.ids += ids
            assert len(self.ids) <= self.n_ctx
        def sample(self, temp):
            return len(self.ids)
"""


def python_with(folder: Path, **modules: str) -> str:
    """An interpreter that finds these modules and no installed ones."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text), "utf-8")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000}), folder)
    write_tokenizer(folder)
    return Engine.load(folder, device="cpu", dtype="fp32")


def test_vllm_is_asked_for_one_token_of_the_same_ids(tmp_path: Path) -> None:
    spec = PeerSpec.of(f"vllm={python_with(tmp_path, vllm=VLLM, torch=TORCH)}")
    with Peer(spec, SETUP) as peer:
        pid = peer._process.pid
        assert (peer.facts.name, peer.facts.torch, peer.facts.threads) == ("vllm", "9", 1)
        assert "prefix caching off" in peer.facts.how
        assert [peer.prefill([3, 4, n]).token for n in (5, 6)] == [12, 13]
        assert peer.prefill([1]).seconds >= 0
        assert alive(pid)
    assert not alive(pid)


def test_llamacpp_begins_anew_for_every_prompt(tmp_path: Path) -> None:
    spec = PeerSpec.of(f"llamacpp={python_with(tmp_path, llama_cpp=LLAMA)}")
    with Peer(spec, SETUP) as peer:
        assert "weights of tiny.gguf" in peer.facts.how
        assert [peer.prefill([7] * n).token for n in (300, 200)] == [300, 200]


@pytest.mark.parametrize("name", ["transformers", "vllm", "llamacpp"])
def test_a_peer_that_is_not_installed_is_named_with_the_way_to_get_it(
    tmp_path: Path, name: str
) -> None:
    python = python_with(tmp_path)
    with pytest.raises(UsageError, match=f"--peer {name}: .* has no ") as caught:
        Peer(PeerSpec.of(f"{name}={python}"), SETUP)
    assert f"--peer {name}=/path/to/python" in caught.value.hint


@pytest.mark.parametrize("text", ["nonsense", "vllm=", "vllm=/nowhere/python"])
def test_a_peer_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        PeerSpec.of(text)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise RuntimeError('no such CPU')", "RuntimeError: no such CPU"),
        ("import sys; sys.exit(7)", "exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
    ],
)
def test_the_last_words_of_a_peer_are_told(tmp_path: Path, module: str, words: str) -> None:
    python = python_with(tmp_path, vllm=module, torch=TORCH)
    with pytest.raises(CacheblendError, match="--peer vllm failed") as caught:
        Peer(PeerSpec.of(f"vllm={python}"), SETUP)
    assert words in caught.value.message


def test_a_peer_that_dies_while_it_works_is_told_of(tmp_path: Path) -> None:
    dying = VLLM.replace('print("and more of it")', "os._exit(3)")
    spec = PeerSpec.of(f"vllm={python_with(tmp_path, vllm=dying, torch=TORCH)}")
    with Peer(spec, SETUP) as peer, pytest.raises(CacheblendError, match="failed"):
        peer.prefill([1, 2])


def test_an_interrupt_ends_the_peer(tmp_path: Path) -> None:
    spec = PeerSpec.of(f"vllm={python_with(tmp_path, vllm=VLLM, torch=TORCH)}")
    with pytest.raises(KeyboardInterrupt), Peer(spec, SETUP) as peer:
        raise KeyboardInterrupt
    assert not alive(peer._process.pid)


def test_transformers_gives_the_same_first_token(engine: Engine) -> None:
    """The real thing, on the tiny model."""
    setup = setup_for(engine, 300)
    assert (setup.dtype, setup.device) == ("float32", "cpu")
    ids = [(7 * i) % 900 + 50 for i in range(184)]
    with Peer(PeerSpec.of("transformers"), setup) as peer:
        assert peer.facts.version
        assert peer.facts.threads == torch.get_num_threads()
        run = engine.prefill(lay_out((), (), (), ids), BlendOptions.of(mode="full"))
        assert peer.prefill(ids).token == int(run.logits.argmax())
        sweep = TtftSweep(tokens=(120,), ratios=(), policies=(), pairs=1)
        full, theirs, reuse = measure_ttft(engine, sweep, [peer], None, lambda text: None)
        assert (theirs.way, theirs.bound, theirs.computed) == ("transformers", None, 120)
        assert theirs.first_token == full.first_token
        assert theirs.over_peers == {}
        assert full.over_peers == {"transformers": pytest.approx(1 / theirs.speedup)}
        assert reuse.over_peers["transformers"] == pytest.approx(theirs.median_s / reuse.median_s)
        ours, decoded = measure_decode(engine, [40], 5, 1, [peer], None, lambda text: None)
        assert (ours.way, decoded.way) == ("ours", "transformers")
        assert decoded.over_ours == pytest.approx(ours.seconds[0] / decoded.seconds[0])
