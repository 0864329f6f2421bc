"""What a model's calibration decides: whether to blend a prompt, with which policy and ratio."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING

from cache_store.errors import CacheblendError, IntegrityError, UsageError
from cbcli.output import Output
from cbcli.settings import Settings, data_root
from cbcli.values import AUTO

if TYPE_CHECKING:
    from cache_store.store import ChunkStore
    from engine.blueprint import Blueprint
    from engine.calibration.bandwidth import Bandwidth
    from engine.calibration.controller import Prompt
    from engine.calibration.curve import Curve
    from engine.calibration.profile import Profile, TaskProfile
    from engine.calibration.speed import Speed
    from engine.results import AskResult

# How strong the place is that a value comes from.
_STRENGTH = {"default": 0, "user": 1, "project": 2, "environment": 3, "flag": 4, "line": 5}
_HINT = "measure it: cacheblend calibrate"
LATELY = 20  # audited prompts that a ratio is raised by


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens: in all, of chunks, and of the prefix."""

    total: int
    cached: int
    prefix: int


@dataclass
class Calibrated:
    """The calibration of one model on its device, for prompts from one store.

    profile: None where there is none, or it is damaged, which `open` has said then.
    """

    blueprint: Blueprint
    profile: Profile | None
    out: Output
    store: ChunkStore | None = None
    _said: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, blueprint: Blueprint, out: Output, store: ChunkStore | None = None) -> Calibrated:
        """Reads the profile; a damaged one is told of once, and as good as none."""
        profile = None
        try:
            profile = read(blueprint)
        except IntegrityError as error:
            out.warn(error.message, error.hint)
        return cls(blueprint, profile, out, store)

    def settle(
        self,
        settings: Settings,
        tokens: PromptTokens,
        *,
        own: Collection[str] = (),
    ) -> Settings:
        """The settings with the policy and ratio that a prompt is to be blended with.

        own: names of settings that this prompt has values of its own for. Raises IntegrityError
        for a model whose gate failed, unless it is forced; UsageError for a target KL or ratio
        `auto` that nothing is calibrated for.
        """
        if settings.mode not in ("blend", "reuse"):
            return without_auto(settings)
        self._require_gate(settings)
        if settings.mode == "reuse" or settings.policy == "explicit":
            return without_auto(settings)
        if self._threshold_counts(settings, own):
            return without_auto(settings)
        target = self._target(settings, own)
        if target is not None or settings.ratio == AUTO:
            return self._found(settings, tokens, own, target)
        task = self._task(settings)
        if any(_strength(settings, name, own) for name in ("ratio", "policy", "threshold")):
            return settings
        if task is None or self.profile is None or not self.profile.passed:
            self._say(f"policy {settings.policy}, ratio {_text(settings.ratio)}: the usual ones")
            self._say(f"{self.blueprint.name} has no calibration for {settings.task} ({_HINT})")
            return settings
        self._say(
            f"policy {task.policy}, ratio {task.ratio}: calibrated for a mean KL of "
            f"{task.target_kl:g} ({task.task}, {task.date[:10]})"
        )
        return self._with(settings, task.policy, task.ratio, task.curve(task.policy), own)

    def saw(self, settings: Settings, result: AskResult) -> None:
        """Remembers how fast stored KV came, for the next ratio `auto`."""
        seconds = sum(layer.load_s for layer in result.timing.layers)
        if settings.ratio == AUTO or self._speed() is not None:
            _bandwidth(settings).saw(result.kv.bytes_loaded, seconds)

    # What it is made of.

    def _require_gate(self, settings: Settings) -> None:
        if self.profile is None or self.profile.gate is None or self.profile.gate.passed:
            return
        if settings.force:
            self._say(f"the gate failed, which is overruled: {self.profile.gate.why}")
            return
        raise IntegrityError(
            f"{self.blueprint.name} must not be blended here, its calibration failed: "
            f"{self.profile.gate.why}",
            "check its config.json and run `cacheblend calibrate` again; --mode full always "
            "works, --force blends all the same",
        )

    def _threshold_counts(self, settings: Settings, own: Collection[str]) -> bool:
        """Whether nothing as strong as a threshold says otherwise how much to recompute."""
        if settings.threshold is None:
            return False
        names = ("threshold", "ratio", "target_kl")
        threshold, ratio, target = (_strength(settings, name, own) for name in names)
        if threshold == target == _STRENGTH["line"]:
            raise UsageError("target_kl and threshold exclude each other", "give one of them")
        return threshold > max(ratio, target)

    def _target(self, settings: Settings, own: Collection[str]) -> float | None:
        """The target KL, unless something stronger sets a ratio."""
        if settings.target_kl is None or settings.ratio == AUTO:
            return None  # the controller keeps to the target by itself
        target, ratio = (_strength(settings, name, own) for name in ("target_kl", "ratio"))
        if target == ratio == _STRENGTH["line"]:
            raise UsageError("target_kl and ratio exclude each other", "give one of them")
        return settings.target_kl if target >= ratio else None

    def _found(
        self,
        settings: Settings,
        tokens: PromptTokens,
        own: Collection[str],
        target: float | None,
    ) -> Settings:
        """With the ratio for a target KL, or the one of the loading controller."""
        wanted = "--ratio auto" if target is None else "--target-kl"
        task = self._task(settings)
        if task is None:
            raise UsageError(
                f"{wanted} needs a calibration of {self.blueprint.name} for {settings.task}, "
                f"context {settings.context}, on {self.blueprint.device.type} in "
                f"{self.blueprint.dtype}",
                _HINT,
            )
        policy = settings.policy if _strength(settings, "policy", own) else task.policy
        curve = self._curve(task, policy, settings, own)
        if target is not None:
            ratio = curve.ratio_for(target)
            self._say(f"policy {policy}, ratio {ratio}: calibrated for a mean KL of {target:g}")
            return self._with(settings, policy, ratio, curve, own)
        speed = self._speed()
        if speed is None:
            raise UsageError(
                f"{wanted} needs the speed of {self.blueprint.name} on this machine", _HINT
            )
        from engine.calibration.controller import Controller
        from engine.policies import make_policy

        least = settings.target_kl if settings.target_kl is not None else task.target_kl
        loads_first = len(make_policy(policy).question_layers(self.blueprint.config.layers)) > 0
        controller = Controller(speed, curve, least, loads_first)
        observed_kl = self._observed(policy, controller.minimum())
        bandwidth = _bandwidth(settings).latest() or speed.warm
        ratio = controller.ratio(_prompt(tokens), bandwidth, observed_kl)
        at_least = controller.minimum(observed_kl)
        self._say(
            f"policy {policy}, ratio {ratio}: "
            + ("what loading takes anyway" if ratio > at_least else "the calibrated minimum")
            + (f" at {bandwidth / 1e9:.2g} GB/s" if bandwidth else "")
        )
        return self._with(settings, policy, ratio, curve, own)

    def _observed(self, policy: str, minimum: Decimal) -> float | None:
        """Mean KL of the blends audited lately, None without any. What somebody blended with a
        smaller ratio, wanting it so, says nothing of the calibrated one."""
        from engine.audit import AuditLog, running_kl

        if self.store is None:
            return None
        model, dtype = self.blueprint.spec.model, self.blueprint.dtype
        try:
            return running_kl(
                AuditLog(self.store.journal),
                model,
                policy,
                at_least=float(minimum),
                dtype=dtype,
                last=LATELY,
            )
        except CacheblendError:
            return None  # what is wrong with the log is told where it is shown

    def _curve(
        self, task: TaskProfile, policy: str, settings: Settings, own: Collection[str]
    ) -> Curve:
        curve = task.curve(policy)
        layers = settings.check_layers if _strength(settings, "check_layers", own) else None
        if curve is None or (layers and curve.check_layers and curve.check_layers != layers):
            where = "" if curve is None else f" at check layers {', '.join(map(str, layers or ()))}"
            raise UsageError(
                f"policy {policy}{where} isn't calibrated for {self.blueprint.name}",
                f"measure it: cacheblend calibrate --policies {policy}",
            )
        return curve

    def _with(
        self,
        settings: Settings,
        policy: str,
        ratio: Decimal,
        curve: Curve | None,
        own: Collection[str],
    ) -> Settings:
        layers = settings.check_layers
        if (
            curve is not None
            and curve.check_layers
            and not _strength(settings, "check_layers", own)
        ):
            layers = curve.check_layers
        return replace(settings, policy=policy, ratio=(ratio,), threshold=None, check_layers=layers)

    def _task(self, settings: Settings) -> TaskProfile | None:
        return self.profile.of(settings.task, settings.context) if self.profile else None

    def _speed(self) -> Speed | None:
        """As measured on this machine."""
        from engine.calibration.speed import here

        speed = self.profile.speed if self.profile else None
        return speed if speed and speed.machine == here(self.blueprint.device) else None

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.out.note(text, level=1)


def read(blueprint: Blueprint) -> Profile | None:
    """The profile of a model as it is used here. Raises IntegrityError for a damaged one."""
    from engine.calibration.profile import Subject, places_of, read_profile

    subject = Subject(blueprint.spec.model, blueprint.dtype, blueprint.device.type)
    return read_profile(subject, places_of(blueprint.path, subject.model, data_root()))


def _bandwidth(settings: Settings) -> Bandwidth:
    from engine.calibration.bandwidth import Bandwidth

    return Bandwidth(data_root() / "bandwidth.json", settings.store)


def _prompt(tokens: PromptTokens) -> Prompt:
    from engine.calibration.controller import Prompt

    return Prompt(tokens.total, tokens.cached, tokens.cached + tokens.prefix)


def _strength(settings: Settings, name: str, own: Collection[str]) -> int:
    """How strong the place is that sets it; 0 where nobody does."""
    return _STRENGTH["line" if name in own else settings.origin(name).kind]


def without_auto(settings: Settings) -> Settings:
    """With some ratio in place of `auto`, where none counts."""
    return settings if settings.ratio != AUTO else replace(settings, ratio=(Decimal(0),))


def _text(ratios: tuple[Decimal, ...]) -> str:
    return ",".join(map(str, ratios))
