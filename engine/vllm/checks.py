"""What blending in vLLM cannot be used with: found before weights are loaded, said in a line."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cache_store.errors import CacheblendError, UsageError
from engine.blueprint import Blueprint
from engine.config import ModelConfig, load_config
from engine.vllm.settings import ConnectorSettings, model_folder

_log = logging.getLogger("vllm.cacheblend")

VERSIONS = ((0, 32), (0, 33))
"""vLLM's versions that this is tested with: from the first one on, before the second."""

DECLARED = ">=0.32,<0.33"

_FAMILIES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "Phi3ForCausalLM",
)
_KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
_SPECULATION: tuple[str, ...] = ()  # methods that blending was seen to work with


@dataclass(frozen=True)
class Facts:
    """What vLLM was told to do, as far as blending depends on it.

    windows: of the model's layers, in tokens; None: attends to everything. overrides: names in the
    model's configuration that vLLM was told to read otherwise. load_format: where the weights come
    from. layout: the kinds of KV cache that vLLM keeps, as it names them; (): not known yet.
    """

    version: str
    architecture: str
    own_layers: bool = True
    runner: str = "generate"
    role: str = "kv_both"
    pipeline: int = 1
    prefill_context: int = 1
    decode_context: int = 1
    mla: bool = False
    hybrid: bool = False
    lora: bool = False
    multimodal: bool = False
    encoder_decoder: bool = False
    speculation: str | None = None
    rope: str = "default"
    windows: tuple[int | None, ...] = ()
    max_length: int = 0
    kv_dtype: str = "auto"
    overrides: tuple[str, ...] = ()
    load_format: str = "auto"
    layout: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One of vLLM's attention layers, as it was made."""

    backend: str
    head_dim: int
    scale: float
    takes_kv: bool = True
    decodes: bool = True
    alibi: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    window: int | None = None
    shares_kv: bool = False


def refusal(facts: Facts, *, any_version: bool = False) -> str | None:
    """Why vLLM can't blend when it is started so, in one line with what to do; None: it can."""
    least, below = VERSIONS
    release = release_of(facts.version)
    if not any_version and not least <= release < below:
        return (
            f"vLLM {facts.version} is not one of the versions {DECLARED} that blending is tested "
            'with: install one of them, or try with "any_version": true'
        )
    window = min((w for w in facts.windows if w is not None), default=None)
    name = facts.architecture
    reasons = (
        (
            facts.runner != "generate",
            f"it needs a model that generates, not one for {facts.runner}",
        ),
        (facts.role != "kv_both", f"it needs kv_role kv_both, not {facts.role}"),
        (facts.pipeline > 1, "it doesn't work with pipeline parallel: use tensor parallel"),
        (facts.prefill_context > 1, "it doesn't work with prefill context parallel"),
        (facts.decode_context > 1, "it doesn't work with decode context parallel"),
        (facts.mla, f"{name} has multi-head latent attention (MLA), whose KV can't be moved"),
        (facts.multimodal, f"it doesn't work with multimodal models, as {name} is"),
        (facts.encoder_decoder, f"it doesn't work with encoder-decoder models, as {name} is"),
        (facts.hybrid, f"{name} has other layers than attention, whose state can't be moved"),
        (
            not facts.own_layers or name not in _FAMILIES,
            f"it works with vLLM's own {', '.join(_FAMILIES)}; not with {name}"
            + ("" if facts.own_layers else " through the transformers library"),
        ),
        (facts.lora, "it doesn't work with LoRA: merge the adapter into the weights"),
        (
            facts.speculation is not None and facts.speculation not in _SPECULATION,
            f"it doesn't work with speculative decoding ({facts.speculation})",
        ),
        (
            facts.rope in ("dynamic", "longrope"),
            f"RoPE of type {facts.rope} depends on the length, which vLLM takes otherwise",
        ),
        (
            window is not None and window < facts.max_length,
            f"{name} has a sliding window of {window} tokens: use --max-model-len {window} with "
            "--disable-sliding-window, or the torch engine",
        ),
        (
            facts.kv_dtype not in _KV_DTYPES,
            f"it can't write a KV cache of type {facts.kv_dtype}: use one of "
            + ", ".join(_KV_DTYPES),
        ),
        (
            bool(facts.overrides),
            f"vLLM is told to read {', '.join(facts.overrides)} otherwise than config.json has it, "
            "so that stored KV would be taken for the model's own: write it into config.json",
        ),
        (
            facts.load_format == "dummy",
            "random weights (load format dummy) would be stored as the model's",
        ),
        (
            facts.layout not in ((), ("FullAttentionSpec",)),
            f"it needs one kind of KV cache for all layers, not {', '.join(facts.layout)}",
        ),
    )
    found = next((reason for refused, reason in reasons if refused), None)
    return None if found is None else f"blending can't be used here: {found}"


def layers_refusal(layers: Mapping[str, Layer], expected: int) -> str | None:
    """The same for attention layers, by name, of a model that has so many."""
    if len(layers) != expected:
        return f"blending can't be used here: {len(layers)} attention layers found, not {expected}"
    for name, layer in layers.items():
        usual = layer.head_dim**-0.5
        reasons = (
            (not layer.decodes, "is not causal"),
            (layer.alibi, "has ALiBi"),
            (layer.soft_cap != 0, f"has scores capped at {layer.soft_cap:g}"),
            (layer.sinks, "has attention sinks"),
            (layer.window is not None, f"has a sliding window of {layer.window} tokens"),
            (layer.shares_kv, "uses another layer's KV"),
            (
                abs(layer.scale - usual) > 1e-6 * usual,
                f"scales scores by {layer.scale:g}, not by {usual:g}",
            ),
            (not layer.takes_kv, f"({layer.backend}) cannot be given KV from outside"),
        )
        found = next((reason for refused, reason in reasons if refused), None)
        if found is not None:
            return f"blending can't be used here: attention of {name} {found}"
    return None


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number; (0, 0) for one that has none."""
    parts = version.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0


def facts_of(vllm_config: Any, model: ModelConfig, version: str, kv_cache: Any = None) -> Facts:
    """Reads vLLM's configuration. model: as the engine reads the same folder. kv_cache: vLLM's
    KVCacheConfig, where it is known already."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    overrides = config.hf_overrides
    names = tuple(overrides) if isinstance(overrides, Mapping) else ("its configuration",)
    groups = () if kv_cache is None else kv_cache.kv_cache_groups
    return Facts(
        version=version,
        architecture=model.architecture,
        own_layers=not config.using_transformers_backend(),
        runner=config.runner_type,
        role=vllm_config.kv_transfer_config.kv_role,
        pipeline=parallel.pipeline_parallel_size,
        prefill_context=parallel.prefill_context_parallel_size,
        decode_context=parallel.decode_context_parallel_size,
        mla=config.use_mla,
        hybrid=config.is_hybrid or config.is_attention_free,
        lora=vllm_config.lora_config is not None,
        multimodal=config.is_multimodal_model,
        encoder_decoder=config.is_encoder_decoder,
        speculation=None if speculative is None else str(speculative.method),
        rope=model.rope.type,
        windows=model.windows,
        max_length=config.max_model_len,
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        overrides=names,
        load_format=str(vllm_config.load_config.load_format),
        layout=tuple(type(group.kv_cache_spec).__name__ for group in groups),
    )


def layer_of(layer: Any) -> Layer:
    """Reads one of vLLM's `Attention` layers."""
    impl = layer.impl
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, tuple):  # FlashAttention's: what is seen before and after a token
        window = window[0]
    return Layer(
        backend=type(impl).__name__,
        head_dim=layer.head_size,
        scale=float(impl.scale),
        takes_kv=hasattr(impl, "do_kv_cache_update")
        and not layer.attn_backend.forward_includes_kv_cache_update,
        decodes=bool(layer.attn_type == "decoder"),
        alibi=getattr(impl, "alibi_slopes", None) is not None,
        soft_cap=float(getattr(impl, "logits_soft_cap", None) or 0),
        sinks=getattr(impl, "sinks", None) is not None or layer.has_sink,
        window=None if window is None or window < 0 else int(window),
        shares_kv=layer.kv_sharing_target_layer_name is not None,
    )


@contextmanager
def said() -> Iterator[None]:
    """Says an error in a line of its own, before vLLM shows where it was raised."""
    try:
        yield
    except CacheblendError as error:
        hint = f" ({error.hint})" if error.hint else ""
        _log.error("cacheblend: %s%s", error, hint)
        raise


def check_config(vllm_config: Any, version: str, kv_cache: Any = None) -> None:
    """Raises UsageError, NotFoundError for a vLLM that can't blend when it is started so; needs no
    weights."""
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    settings = ConnectorSettings.of(given)
    config = vllm_config.model_config
    folder = settings.model or model_folder(config.model, config.revision)
    model = load_config(folder, quantised=True)
    found = refusal(
        facts_of(vllm_config, model, version, kv_cache), any_version=settings.any_version
    )
    if found is not None:
        raise UsageError(found)


def as_computed(blueprint: Blueprint, model_config: Any) -> Blueprint:
    """The model as vLLM computes it: weights that it quantises while it loads them are others than
    those in the folder, and their KV isn't that of these."""
    quantisation, config = model_config.quantization, blueprint.config
    if quantisation is None or config.quantisation is not None:
        return blueprint
    how = f"vLLM: {quantisation} {model_config.quantization_config or ''}".rstrip()
    return replace(blueprint, config=replace(config, quantisation=how))


def check_layers(layers: Mapping[str, Any], expected: int) -> None:
    """Raises UsageError for attention layers that blending can't write for."""
    found = layers_refusal({name: layer_of(layer) for name, layer in layers.items()}, expected)
    if found is not None:
        raise UsageError(found)
