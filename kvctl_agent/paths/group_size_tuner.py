"""How many layer groups pay, learnt from recent forwards: what mode `measured` asks in place of the formula.

A formula knows neither the machine's compute nor its connection. With compute C, transfer T and N equal groups, the two
stages overlap like two machines in a flow shop:

    total(N) = C + max(T/N, C/N + T - C),   where T and C themselves grow a little with every group

The model only proposes which N is worth trying. What is taken is what was measured to be fastest, and the formula's N
has the benefit of the doubt: nothing else is chosen before it has shown to be better, and a bounded share of forwards
goes into trying. So a wrong model costs the gain, not more than the formula.
"""

from __future__ import annotations

import threading
from math import inf, log2, sqrt
from random import Random

_ENOUGH = 3  # forwards with one N before its mean is believed
_MEMORY = 16  # forwards that an N's mean reaches back over
_LINE_MEMORY = 128  # forwards that the model reaches back over
_STALE = 512  # forwards of a size after which what an N cost is no longer known
_HEAD_START, _SHARE = 4, 16  # forwards that may go into trying: so many, and one in so many
_TURN = 3  # one in so many forwards is free for trying, so that ranks do not try in step
_OUTLIER = 3.0  # standard deviations beyond which a forward counts as no worse
_PACE = 1.5  # factor between what a token's compute takes from which an engine computes at another pace
_LEAST_COMPUTE = 1 / 16  # of the transfer: behind less than that nothing can be hidden, and nothing is learnt
_GAIN = 0.01  # share of the whole from which it is worth trying
_PER_OCTAVE = 2  # sizes of prompts told apart
_LADDER = (2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 26, 32, 40, 52, 64, 80, 104, 128)  # between these the curve is flat


class GroupSizeTuner:
    """Chooses the number of layer groups; safe to be asked and told from different threads.

    Args:
        random: decides whose turn it is to try; seeded by tests.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._lock = threading.Lock()
        self._sizes: dict[int, _Size] = {}  # by the logarithm of the tokens, hence few

    def observe(self, tokens: float, groups: int, compute_ns: int, transfer_ns: int, exposed_ns: int) -> None:
        """Takes in one forward that was pipelined.

        Args:
            tokens: what `choose` was asked with.
            groups: layer groups it really had, 2 or more.
            compute_ns: from the forward's start to its end.
            transfer_ns: time in which its parts were with a transfer worker, overlaps counted once.
            exposed_ns: from the forward's end until its bytes were there.
        """
        if tokens < 1 or groups < 2 or compute_ns <= 0 or compute_ns < transfer_ns * _LEAST_COMPUTE:
            return
        place = _place(tokens)
        with self._lock:
            size = self._sizes.setdefault(place, _Size())
            if size.strays(compute_ns / tokens):
                if not size.astray:
                    return
                # What one pace has taught says nothing of another: the formula decides again until enough is known.
                size = self._sizes[place] = _Size()
            size.add(groups, compute_ns / tokens, transfer_ns / tokens, exposed_ns / tokens)

    def choose(self, tokens: float, num_layers: int, formula: int) -> int:
        """The number of groups for a forward.

        Args:
            tokens: average tokens per request.
            num_layers: layers to cut.
            formula: what the formula says; the answer until enough is known.
        """
        with self._lock:
            size = self._sizes.get(_place(tokens))
            if size is None or not size.knows(formula):
                return formula
            size.asked += 1
            best = size.best(formula)
            if size.may_try and self._random.randrange(_TURN) == 0:
                return size.trial(best, num_layers, formula) or best
            return best


def _place(tokens: float) -> int:
    # Rounded: powers of two, which prompts often are, lie in the middle, so that a page more or less is the same size.
    return round(_PER_OCTAVE * log2(max(1.0, tokens)))


class _Arm:
    """What forwards with one number of groups left exposed, in ns per token."""

    __slots__ = ("count", "last", "mean", "tried")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.last = 0  # the size's count when it was seen last
        self.tried = 0  # times it was given out on trial; some may still be under way

    def add(self, exposed: float) -> float:
        """Returns how far it was from what was expected."""
        residual = exposed - self.mean if self.count else 0.0
        self.count += 1
        self.mean += (exposed - self.mean) / min(self.count, _MEMORY)
        return residual


class _Line:
    """y = base + slope * N over recent forwards, by weighted least squares; the slope is never below 0."""

    __slots__ = ("_n", "_nn", "_ny", "_w", "_y", "_yy")

    def __init__(self) -> None:
        self._w = self._n = self._nn = self._y = self._ny = self._yy = 0.0

    def add(self, n: int, y: float) -> None:
        keep = 1 - 1 / _LINE_MEMORY
        self._w = self._w * keep + 1
        self._n = self._n * keep + n
        self._nn = self._nn * keep + n * n
        self._y = self._y * keep + y
        self._ny = self._ny * keep + n * y
        self._yy = self._yy * keep + y * y

    def likely(self, n: int) -> float:
        """y at N, the slope made the flatter the less it stands out of the noise: most of that is not about N."""
        _, slope, error = self._fit()
        squared = slope * slope
        believed = slope * squared / (squared + error * error) if squared else 0.0
        return (self._y + believed * (n * self._w - self._n)) / self._w

    def possible(self, n: int) -> tuple[float, ...]:
        """y at N: by the fit, or by the flattest and the steepest line there is while only one N was seen."""
        base, slope, error = self._fit()
        if error == inf:
            mean_n, mean = self._n / self._w, self._y / self._w
            return mean, mean / mean_n * n
        return (base + slope * n,)

    def _fit(self) -> tuple[float, float, float]:
        """Base, slope, and the slope's standard error."""
        n, y = self._n / self._w, self._y / self._w
        spread = self._nn / self._w - n * n
        if spread < 1e-3 * n * n:
            return y, 0.0, inf
        slope = min(y / n, max(0.0, (self._ny / self._w - n * y) / spread))
        left = max(0.0, self._yy / self._w - y * y - slope * slope * spread)
        return y - slope * n, slope, sqrt(left / (self._w * spread))


class _Size:
    """Forwards of about one size."""

    def __init__(self) -> None:
        self._arms: dict[int, _Arm] = {}
        self._compute = _Line()
        self._transfer = _Line()
        self.asked = 0  # choices made; forwards cut in other ways may be observed, too
        self._count = 0
        self._tried = 0
        self._pace = 0.0  # compute per token, recent forwards
        self._strayed = 0  # forwards in a row at another pace
        self._variance = 0.0  # of what is exposed around the mean of its N

    def strays(self, compute: float) -> bool:
        """Whether a forward's compute is at another pace than those before it."""
        strays = bool(self._pace) and not self._pace / _PACE < compute < self._pace * _PACE
        self._strayed = self._strayed + 1 if strays else 0
        return strays

    @property
    def astray(self) -> bool:
        """Several in a row were at another pace: it is no accident."""
        return self._strayed >= _ENOUGH

    def add(self, groups: int, compute: float, transfer: float, exposed: float) -> None:
        self._count += 1
        self._pace += (compute - self._pace) / min(self._count, _MEMORY)
        arm = self._arms.get(groups)
        if arm is None or self._count - arm.last > _STALE:
            arm = self._arms[groups] = _Arm()
        arm.last = self._count
        if arm.count >= _ENOUGH:
            # A machine that was busy with something else says nothing about N, but would for many forwards.
            exposed = min(exposed, arm.mean + _OUTLIER * sqrt(self._variance))
        residual = arm.add(exposed)
        if arm.count > 1:
            self._variance += (residual * residual - self._variance) / min(self._count, _LINE_MEMORY)
        self._compute.add(groups, compute)
        self._transfer.add(groups, transfer)

    def knows(self, groups: int) -> bool:
        arm = self._arms.get(groups)
        return arm is not None and arm.count >= _ENOUGH and self._count - arm.last <= _STALE

    def best(self, formula: int) -> int:
        """The cheapest N that is known; others than the formula's must be so beyond the noise."""

        def score(groups: int) -> float:
            arm = self._arms[groups]
            return self._whole(groups) + (0.0 if groups == formula else self._doubt(arm))

        return min((groups for groups in self._arms if self.knows(groups)), key=score)

    @property
    def may_try(self) -> bool:
        return self._tried < _HEAD_START + self.asked / _SHARE

    def trial(self, best: int, num_layers: int, formula: int) -> int | None:
        """An N that may be better than the best known; None where nothing promises to be."""
        now = min(self._predicted(best))
        promise = {
            groups: min(self._predicted(groups))
            for groups in _ladder(num_layers)
            if best / 2 <= groups <= best * 2 and groups != best and self._open(groups, best)
        }
        chosen = min(promise, key=lambda groups: promise[groups], default=None)
        if chosen is None or promise[chosen] > now * (1 - _GAIN):
            if formula == best or self._count - self._arms[formula].last < _SHARE:
                return None
            chosen = formula  # is it still the worse one?
        self._tried += 1
        self._arms.setdefault(chosen, _Arm()).tried += 1
        return chosen

    def _open(self, groups: int, best: int) -> bool:
        """Whether it is cheaper has not been settled, and not too many forwards are out already to see."""
        arm = self._arms.get(groups)
        if arm is None:
            return True
        if arm.tried >= arm.count + _ENOUGH:
            return False
        return not self.knows(groups) or (
            arm.count < _MEMORY and self._whole(groups) - self._doubt(arm) < self._whole(best)
        )

    def _doubt(self, arm: _Arm) -> float:
        """Standard error of its mean."""
        return sqrt(self._variance / min(arm.count, _MEMORY))

    def _whole(self, groups: int) -> float:
        """What forwards cut like this took, as far as the cut decides: ns per token."""
        return self._compute.likely(groups) + self._arms[groups].mean

    def _predicted(self, groups: int) -> list[float]:
        """The same by the model, for each overhead per group that what was seen allows."""
        compute = self._compute.likely(groups)
        return [
            compute + max(transfer / groups, compute / groups + transfer - compute)
            for transfer in self._transfer.possible(groups)
        ]


def _ladder(num_layers: int) -> set[int]:
    """Numbers of groups worth telling apart that equal groups of whole layers can have."""
    return {-(-num_layers // -(-num_layers // groups)) for groups in _LADDER if groups <= num_layers} - {1}
