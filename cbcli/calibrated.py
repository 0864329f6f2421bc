"""What a model's calibration decides: whether to blend a prompt, with which policy and ratio."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from decimal import Decimal
from importlib import metadata
from typing import TYPE_CHECKING

from cache_store.errors import CacheblendError, IntegrityError, UsageError
from cbcli.output import Output
from cbcli.settings import Origin, Settings, data_root
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
_LINE = Origin("line").strength
_HINT = "measure it: cacheblend calibrate"
LATELY = 20  # audited prompts that a ratio is raised by
_Stamp = tuple[tuple[str, int, int], ...]  # name, size and time of change of an audit log's files
_Looked = tuple[str, str, Decimal]  # what was looked for in it: task, policy, smallest ratio


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens: in all, of chunks, and of the prefix; kept: those in front of them that
    are in the KV cache already."""

    total: int
    cached: int
    prefix: int
    kept: int = 0


@dataclass
class Calibrated:
    """The calibration of one model on its device, for prompts from one store.

    profile: None where there is none, or none that counts: it is damaged, which `open` has said
    then, or `outdated`: the version of cacheblend that made it, where that is another.
    """

    blueprint: Blueprint
    profile: Profile | None
    out: Output
    store: ChunkStore | None = None
    outdated: str = ""
    _said: set[str] = field(default_factory=set)
    _seen: dict[_Looked, tuple[_Stamp, float | None]] = field(default_factory=dict)

    @classmethod
    def open(cls, blueprint: Blueprint, out: Output, store: ChunkStore | None = None) -> Calibrated:
        """Reads the profile; a damaged one is told of once, and as good as none. So is another
        version's: what it measured may be so no longer, for better or worse."""
        profile: Profile | None = None
        outdated = ""
        try:
            profile = read(blueprint)
        except IntegrityError as error:
            out.warn(error.message, error.hint)
        if profile is not None and profile.version != this_version():
            if profile.gate is not None and not profile.gate.passed:
                out.warn(
                    f"{blueprint.name} failed the gate of {by_version(profile.version)}: "
                    f"{profile.gate.why}",
                    "check it with this one: cacheblend calibrate",
                )
            outdated = profile.version
            profile = None
        return cls(blueprint, profile, out, store, outdated)

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
        self.require_gate(settings)
        if settings.mode == "reuse" or settings.policy == "explicit":
            return without_auto(settings)
        if self._threshold_counts(settings, own):
            return without_auto(settings)
        target = self._target(settings, own)
        if target is not None or settings.ratio == AUTO:
            return self._found(settings, tokens, own, target)
        if any(_strength(settings, name, own) for name in ("ratio", "policy", "threshold")):
            return settings
        task = self._task(settings)
        usual = self._why_usual(task, settings, own)
        if task is None or usual:
            self._say(f"policy {settings.policy}, ratio {_text(settings.ratio)}: the usual ones")
            self._say(usual)
            return settings
        self._say(
            f"policy {task.policy}, ratio {task.ratio}: calibrated for a mean KL of "
            f"{task.target_kl:g} ({task.task}, {task.date[:10]})"
        )
        return self._with(settings, task.policy, task.ratio, task.curve(task.policy), own)

    def saw(self, settings: Settings, result: AskResult) -> None:
        """Remembers how fast stored KV came, for the next ratio `auto`."""
        seconds = sum(layer.load_s for layer in result.timing.layers)
        if settings.ratio == AUTO or self._speed(settings) is not None:
            _bandwidth(settings).saw(result.kv.bytes_loaded, seconds)

    def require_gate(self, settings: Settings) -> None:
        """Raises IntegrityError where the settings' mode needs a gate that failed, unless it is
        forced, which is said once."""
        if settings.mode not in ("blend", "reuse"):
            return
        if self.profile is None or self.profile.gate is None or self.profile.gate.passed:
            return
        if settings.force:
            said = f"the gate failed, which is overruled: {self.profile.gate.why}"
            if said not in self._said:
                self._said.add(said)
                self.out.warn(said)
            return
        raise IntegrityError(
            f"{self.blueprint.name} must not be blended here, its calibration failed: "
            f"{self.profile.gate.why}",
            "check its config.json and run `cacheblend calibrate` again; --mode full always "
            "works, --force blends all the same",
        )

    # What it is made of.

    def _why_usual(self, task: TaskProfile | None, settings: Settings, own: Collection[str]) -> str:
        """Why the calibration says nothing of this prompt; "" where it does."""
        name = self.blueprint.name
        if self.outdated:
            return (
                f"{name} was calibrated by {by_version(self.outdated)}: calibrate again ({_HINT})"
            )
        if self.profile is not None and self.profile.passed is False:
            return f"{name} failed the gate: what was calibrated before isn't used"
        passed = self.profile is not None and self.profile.passed
        curve = task.curve(task.policy) if task is not None and passed else None
        if curve is None:
            return f"{name} has no calibration for {settings.task} ({_HINT})"
        unlike = _unlike(curve, settings, own)
        return f"{name} isn't calibrated {unlike[0]} ({unlike[1]})" if unlike else ""

    def _threshold_counts(self, settings: Settings, own: Collection[str]) -> bool:
        """Whether nothing as strong as a threshold says otherwise how much to recompute."""
        if settings.threshold is None:
            return False
        names = ("threshold", "ratio", "target_kl")
        threshold, ratio, target = (_strength(settings, name, own) for name in names)
        if threshold == target == _LINE:
            raise UsageError("target_kl and threshold exclude each other", "give one of them")
        return threshold > max(ratio, target)

    def _target(self, settings: Settings, own: Collection[str]) -> float | None:
        """The target KL, unless something stronger sets a ratio."""
        if settings.target_kl is None or settings.ratio == AUTO:
            return None  # the controller keeps to the target by itself
        target, ratio = (_strength(settings, name, own) for name in ("target_kl", "ratio"))
        if target == ratio == _LINE:
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
            old = (
                f"; the one there is was made by {by_version(self.outdated)}"
                if self.outdated
                else ""
            )
            raise UsageError(
                f"{wanted} needs a calibration of {self.blueprint.name} for {settings.task}, "
                f"context {settings.context}, on {self.blueprint.device.type} in "
                f"{self.blueprint.precision}{old}",
                _HINT,
            )
        policy = settings.policy if _strength(settings, "policy", own) else task.policy
        curve = self._curve(task, policy, settings, own)
        if target is not None:
            ratio = curve.ratio_for(target)
            self._say(f"policy {policy}, ratio {ratio}: calibrated for a mean KL of {target:g}")
            return self._with(settings, policy, ratio, curve, own)
        speed = self._speed(settings)
        if speed is None:
            raise UsageError(
                f"{wanted} needs the speed of {self.blueprint.name} on this machine, with as many "
                "threads",
                _HINT,
            )
        from engine.calibration.controller import Controller
        from engine.policies import make_policy

        least = settings.target_kl if settings.target_kl is not None else task.target_kl
        loads_first = len(make_policy(policy).question_layers(self.blueprint.config.layers)) > 0
        controller = Controller(speed, curve, least, loads_first)
        observed_kl = self._observed(task.task, policy, controller.minimum())
        bandwidth = _bandwidth(settings).latest() or speed.warm
        ratio = controller.ratio(_prompt(tokens), bandwidth, observed_kl)
        at_least = controller.minimum(observed_kl)
        self._say(
            f"policy {policy}, ratio {ratio}: "
            + ("what loading takes anyway" if ratio > at_least else "the calibrated minimum")
            + (f" at {bandwidth / 1e9:.2g} GB/s" if bandwidth else "")
        )
        return self._with(settings, policy, ratio, curve, own)

    def _observed(self, task: str, policy: str, minimum: Decimal) -> float | None:
        """Mean KL of the blends audited lately, None without any. What somebody blended with a
        smaller ratio or other transfer, wanting it so, says nothing of what is calibrated."""
        if self.store is None:
            return None
        # Reading a log takes longer than some prompts do: again only where it has changed.
        stamp = _stamp(self.store)
        looked = task, policy, minimum
        known = self._seen.get(looked)
        if known is None or known[0] != stamp:
            known = self._seen[looked] = stamp, self._read_kl(self.store, *looked)
        return known[1]

    def _read_kl(self, store: ChunkStore, task: str, policy: str, minimum: Decimal) -> float | None:
        from engine.audit import AuditLog, running_kl
        from engine.policies import make_policy

        model, dtype = self.blueprint.spec.model, self.blueprint.precision
        try:
            return running_kl(
                AuditLog(store.journal),
                model,
                policy,
                at_least=float(minimum),
                dtype=dtype,
                transfer=make_policy(policy).transfers,
                task=task,
                last=LATELY,
            )
        except CacheblendError:
            return None  # what is wrong with the log is told where it is shown

    def _curve(
        self, task: TaskProfile, policy: str, settings: Settings, own: Collection[str]
    ) -> Curve:
        curve = task.curve(policy)
        name = self.blueprint.name
        if curve is None:
            raise UsageError(
                f"policy {policy} isn't calibrated for {name}",
                f"measure it: cacheblend calibrate --policies {policy}",
            )
        unlike = _unlike(curve, settings, own)
        if unlike:
            raise UsageError(f"policy {policy} isn't calibrated {unlike[0]} for {name}", unlike[1])
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

    def _speed(self, settings: Settings) -> Speed | None:
        """As measured on this machine, with as many threads."""
        speed = self.profile.speed if self.profile else None
        device = self.blueprint.device
        return speed if speed and speed.holds(device, settings.threads) else None

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.out.note(text, level=1)


def read(blueprint: Blueprint) -> Profile | None:
    """The profile of a model as it is used here. Raises IntegrityError for a damaged one."""
    from engine.calibration.profile import Subject, places_of, read_profile

    subject = Subject(blueprint.spec.model, blueprint.precision, blueprint.device.type)
    return read_profile(subject, places_of(blueprint.path, subject.model, data_root()))


def this_version() -> str:
    """That of the cacheblend which is running; profiles of others don't count."""
    return metadata.version("cacheblend")


def by_version(version: str) -> str:
    """Another one, as messages name it."""
    return f"another version ({version or 'unknown'})"


def _unlike(curve: Curve, settings: Settings, own: Collection[str]) -> tuple[str, str] | None:
    """How the user wants prompts blended otherwise than the curve was measured, and what to do
    about it; None where it was measured like that."""
    from engine.policies import make_policy

    transfer = settings.transfer
    if transfer is not None and transfer != make_policy(curve.policy).transfers:
        said = "with --transfer" if transfer else "with --no-transfer"
        return said, "leave transfer as the policy has it, or give a ratio"
    layers = settings.check_layers
    if not _strength(settings, "check_layers", own):
        return None
    if len(layers) > 1:
        said = f"at check layers {', '.join(map(str, layers))}"
        return said, "it is measured at one: give one --check-layer, or a ratio"
    if curve.check_layers and curve.check_layers != layers:
        command = f"cacheblend calibrate --policies {curve.policy} --check-layer {layers[0]}"
        return f"at check layer {layers[0]}", f"measure it: {command}"
    return None


def _stamp(store: ChunkStore) -> _Stamp:
    """Another one whenever the audit log has changed."""
    found = []
    try:
        for file in sorted(store.journal.path.glob("*.jsonl")):
            stat = file.lstat()
            found.append((file.name, stat.st_size, stat.st_mtime_ns))
    except OSError:
        pass  # being put aside just now: what is known is read again
    return tuple(found)


def _bandwidth(settings: Settings) -> Bandwidth:
    from engine.calibration.bandwidth import Bandwidth

    return Bandwidth(data_root() / "bandwidth.json", settings.store)


def _prompt(tokens: PromptTokens) -> Prompt:
    from engine.calibration.controller import Prompt

    return Prompt(tokens.total, tokens.cached, tokens.cached + tokens.prefix, tokens.kept)


def _strength(settings: Settings, name: str, own: Collection[str]) -> int:
    """How strong the place is that sets it; 0 where nobody does."""
    return _LINE if name in own else settings.origin(name).strength


def without_auto(settings: Settings) -> Settings:
    """With some ratio in place of `auto`, where none counts."""
    return settings if settings.ratio != AUTO else replace(settings, ratio=(Decimal(0),))


def _text(ratios: tuple[Decimal, ...]) -> str:
    return ",".join(map(str, ratios))
