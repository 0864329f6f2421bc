"""The loading controller (CacheBlend, arXiv 2405.16444, section 5): as much recomputing as hides
behind loading, and never less than quality needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from engine.calibration.curve import STEP, Curve
from engine.calibration.speed import Speed

RAISE = Decimal("0.05")  # the least that the minimum goes up by where quality is below the target


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens: in all; cached, of chunks; loaded, cached ones and the stored prefix;
    kept, in the KV cache already."""

    tokens: int
    cached: int
    loaded: int
    kept: int = 0

    @property
    def always(self) -> int:
        """Computed in any case."""
        return self.tokens - self.loaded - self.kept


@dataclass(frozen=True)
class Controller:
    """Chooses a ratio for each prompt. curve: of the policy in use. loads_first: with it, the
    question reads all of the stored KV before anything is recomputed, so that nothing hides."""

    speed: Speed
    curve: Curve
    target_kl: float
    loads_first: bool = False

    def minimum(self, observed_kl: float | None = None) -> Decimal:
        """The calibrated ratio for the target. observed_kl: mean KL seen lately; where it is above
        the target, the ratio is the one for a target lower by as much, and a step more at least."""
        ratio = self.curve.ratio_for(self.target_kl)
        if observed_kl is None or observed_kl <= self.target_kl:
            return ratio
        stricter = self.target_kl * self.target_kl / observed_kl
        return min(Decimal(1), max(self.curve.ratio_for(stricter), ratio + RAISE))

    def hidden(self, prompt: Prompt, bandwidth: float) -> Decimal:
        """The largest ratio, in hundredths from 0 to 1, at which recomputing a layer takes no
        longer than loading one at so many bytes a second."""
        if self.loads_first:
            return Decimal(0)
        load = self.speed.load_s(prompt.loaded, bandwidth)
        if self.speed.recompute_s(prompt.always, prompt.tokens) >= load or not prompt.cached:
            return Decimal(0)
        each = self.speed.recompute_s(prompt.always + 1, prompt.tokens)
        each -= self.speed.recompute_s(prompt.always, prompt.tokens)
        if each <= 0:
            return Decimal(1)
        spare = load - self.speed.recompute_s(prompt.always, prompt.tokens)
        share = Decimal(min(1.0, spare / each / prompt.cached))
        return share.quantize(STEP, ROUND_FLOOR)

    def ratio(
        self, prompt: Prompt, bandwidth: float | None, observed_kl: float | None = None
    ) -> Decimal:
        """The hidden ratio, never under the minimum. bandwidth: None where it isn't known."""
        least = self.minimum(observed_kl)
        return least if bandwidth is None else max(least, self.hidden(prompt, bandwidth))


@dataclass(frozen=True)
class Cell:
    """A layer of the standard prompt, at a ratio and a bandwidth: seconds, and whether the one
    hides behind the other."""

    medium: str
    bandwidth: float
    ratio: float
    recompute_s: float
    load_s: float
    hidden: bool


MEDIA = (
    ("network, hard disk", 150e6),
    ("SATA SSD", 500e6),
    ("NVMe SSD", 2e9),
    ("fast NVMe SSD", 7e9),
    ("memory", 20e9),
)


def device_table(
    speed: Speed, prompt: Prompt, ratios: Sequence[Decimal], media: Sequence[tuple[str, float]]
) -> tuple[Cell, ...]:
    """Which medium is fast enough that it isn't waited for, for each ratio: loading a layer must
    take no longer than recomputing one."""
    cells = []
    for name, bandwidth in media:
        load = speed.load_s(prompt.loaded, bandwidth)
        for ratio in ratios:
            computed = prompt.always + float(ratio) * prompt.cached
            seconds = speed.recompute_s(computed, prompt.tokens)
            cells.append(Cell(name, bandwidth, float(ratio), seconds, load, load <= seconds))
    return tuple(cells)


def enough_bandwidth(speed: Speed, prompt: Prompt, ratio: Decimal) -> float:
    """Bytes a second at which loading a layer takes just as long as recomputing one."""
    computed = prompt.always + float(ratio) * prompt.cached
    return prompt.loaded * speed.token_layer_bytes / speed.recompute_s(computed, prompt.tokens)
