"""Chooses the number of layer groups from recent forwards, for mode auto.

The formula of mode on knows neither the machine's compute nor its connection. With compute C, transfer T and N equal
groups, the two stages overlap like two machines in a flow shop:

    total(N) = C + max(T/N, C/N + T - C),   where T and C grow a little with every group

The model only proposes values of N to try. The tuner uses the N with the lowest measured time, and does not divide
forwards (N = 1) until another N was measured to be faster: where the transfer takes next to nothing, as over NVLink,
groups only cost the engine time. A bounded share of forwards is used for trials, so a wrong model loses the possible
gain but is not slower than undivided forwards.
"""

from __future__ import annotations

import threading
from math import inf, log2, sqrt
from random import Random

_ENOUGH = 3  # number of forwards with an N after which the mean of that N is used
_MEMORY = 16  # number of recent forwards in the mean of an N
_LINE_MEMORY = 128  # number of recent forwards to which the model is fitted
_STALE = 512  # number of forwards of a size class without an N after which the mean of that N is dropped
_HEAD_START, _SHARE = 8, 16  # allowed trials: _HEAD_START, plus one per _SHARE forwards
_TURN = 3  # a trial takes place in one of _TURN forwards at random, so that not all ranks try at once
_OUTLIER = 3.0  # standard deviations above the mean at which the exposed time of a forward is clipped
_PACE = 1.5  # ratio by which the compute time per token must change to count as another pace
_AGAIN = 64  # undivided forwards are measured again after so many others
_GROUP_NS = 2e6  # compute that a group is expected to cost, until it was measured (in SGLang 0.9 to 4 ms)
_LEAST_COMPUTE = 1 / 16  # fraction of the transfer time; forwards with less compute time hide nothing and are ignored
_GAIN = 0.01  # smallest predicted gain, as a fraction of the total time, that justifies a trial
_PER_OCTAVE = 2  # number of size classes of prompts per factor of two
_LADDER = (2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 26, 32, 40, 52, 64, 80, 104, 128)  # the curve is flat between these


class GroupSizeTuner:
    """Chooses the number of layer groups; thread-safe.

    Args:
        random: Random number generator that decides when a trial is made; tests pass a seeded one.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._lock = threading.Lock()
        self._sizes: dict[int, _Size] = {}  # by size class, the logarithm of the tokens, so there are few

    def observe(self, tokens: float, groups: int, compute_ns: int, transfer_ns: int, exposed_ns: int) -> None:
        """Records a forward whose layers were passed in groups, or in one.

        Args:
            tokens: Average tokens per request, as passed to `choose`.
            groups: Number of layer groups the forward had.
            compute_ns: Time from the forward's start to its end.
            transfer_ns: Time during which the rank was transferring parts of the forward.
            exposed_ns: Time from the forward's end until all its bytes had landed.
        """
        if tokens < 1 or groups < 1 or compute_ns <= 0 or compute_ns < transfer_ns * _LEAST_COMPUTE:
            return
        size_class = _size_class(tokens)
        with self._lock:
            size = self._sizes.setdefault(size_class, _Size())
            if size.differs_in_pace(groups, compute_ns / tokens):
                if not size.pace_changed:
                    return
                # Measurements at one pace do not apply to another: forwards are undivided until there are new ones.
                size = self._sizes[size_class] = _Size()
            size.add(groups, compute_ns / tokens, transfer_ns / tokens, exposed_ns / tokens)

    def choose(self, tokens: float, num_layers: int) -> int:
        """Returns the number of groups for a forward; 1 until undivided forwards have been measured often enough.

        Args:
            tokens: Average tokens per request.
            num_layers: Layers to divide into groups.
        """
        with self._lock:
            size = self._sizes.get(_size_class(tokens))
            if size is None or not size.is_measured(1):
                return 1
            size.choices += 1
            best = size.best()
            if size.may_try and self._random.randrange(_TURN) == 0:
                return size.trial(best, num_layers, _GROUP_NS / tokens) or best
            return best


def _size_class(tokens: float) -> int:
    # Rounded, so that powers of two, which are common prompt lengths, lie in the middle of a size class.
    return round(_PER_OCTAVE * log2(max(1.0, tokens)))


class _Arm:
    """Statistics of the exposed transfer time of forwards with one number of groups, in ns per token.

    Exposed time is the time from the end of the forward until all its bytes have landed.
    """

    __slots__ = ("count", "last", "mean", "pace", "tried")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.pace = 0.0  # mean compute time per token
        self.last = 0  # the count of the size class at the most recent forward
        self.tried = 0  # trials started; some may not have been observed yet

    def add(self, exposed: float) -> float:
        """Adds the exposed time of a forward and returns its difference from the previous mean."""
        residual = exposed - self.mean if self.count else 0.0
        self.count += 1
        self.mean += (exposed - self.mean) / min(self.count, _MEMORY)
        return residual


class _Line:
    """Weighted least-squares fit of y = base + slope * N over recent forwards; the slope is never below 0."""

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

    @property
    def empty(self) -> bool:
        return not self._w

    def likely(self, n: int) -> float:
        """Estimates y at `n`; the slope is reduced according to its standard error, so that noise does not count."""
        _, slope, error = self._fit()
        squared = slope * slope
        reduced = slope * squared / (squared + error * error) if squared else 0.0
        return (self._y + reduced * (n * self._w - self._n)) / self._w

    def possible(self, n: int) -> tuple[float, ...]:
        """Estimates y at `n` by the fit.

        If only one N was observed, returns two estimates: by the flattest and by the steepest possible line.
        """
        base, slope, error = self._fit()
        if error == inf:
            mean_n, mean = self._n / self._w, self._y / self._w
            return mean, mean / mean_n * n
        return (base + slope * n,)

    def _fit(self) -> tuple[float, float, float]:
        """Returns the base, the slope and the slope's standard error, which is inf if only one N was observed."""
        n, y = self._n / self._w, self._y / self._w
        spread = self._nn / self._w - n * n
        if spread < 1e-3 * n * n:
            return y, 0.0, inf
        slope = min(y / n, max(0.0, (self._ny / self._w - n * y) / spread))
        left = max(0.0, self._yy / self._w - y * y - slope * slope * spread)
        return y - slope * n, slope, sqrt(left / (self._w * spread))


class _Size:
    """Measurements of forwards with prompts of one size class, and the choices and trials based on them."""

    def __init__(self) -> None:
        self._arms: dict[int, _Arm] = {}
        # Of divided forwards; what undivided ones take is on neither line, because concurrent transfers slow compute.
        self._compute = _Line()
        self._transfer = _Line()
        self._undivided = (0.0, 0.0)  # mean compute and transfer of undivided forwards
        self.choices = 0  # number of choices; forwards with other numbers of groups may be observed, too
        self._count = 0
        self._trials = 0
        self._other_pace = 0  # number of consecutive forwards at another pace
        self._variance = 0.0  # of the exposed time of a forward around the mean of its N

    def differs_in_pace(self, groups: int, compute: float) -> bool:
        """Returns whether a forward's compute time per token deviates from that of recent forwards with as many groups.

        Counts consecutive deviating forwards for `pace_changed`.
        """
        differs = False
        if self.is_measured(groups):
            pace = self._arms[groups].pace
            differs = not pace / _PACE < compute < pace * _PACE
        self._other_pace = self._other_pace + 1 if differs else 0
        return differs

    @property
    def pace_changed(self) -> bool:
        """Whether several consecutive forwards deviated in compute time per token, so that the change is not noise."""
        return self._other_pace >= _ENOUGH

    def add(self, groups: int, compute: float, transfer: float, exposed: float) -> None:
        self._count += 1
        arm = self._arms.get(groups)
        if arm is None or self._is_stale(arm):
            arm = self._arms[groups] = _Arm()
        arm.last = self._count
        if arm.count >= _ENOUGH:
            # A delay caused by other load does not depend on N; unclipped, it would distort the mean for many forwards.
            exposed = min(exposed, arm.mean + _OUTLIER * sqrt(self._variance))
        residual = arm.add(exposed)
        arm.pace += (compute - arm.pace) / min(arm.count, _MEMORY)
        if arm.count > 1:
            self._variance += (residual * residual - self._variance) / min(self._count, _LINE_MEMORY)
        if groups > 1:
            self._compute.add(groups, compute)
            self._transfer.add(groups, transfer)
        else:
            share = 1 / min(arm.count, _MEMORY)
            before = self._undivided
            self._undivided = before[0] + (compute - before[0]) * share, before[1] + (transfer - before[1]) * share

    def is_measured(self, groups: int) -> bool:
        arm = self._arms.get(groups)
        return arm is not None and arm.count >= _ENOUGH and not self._is_stale(arm)

    def _is_stale(self, arm: _Arm) -> bool:
        return self._count - arm.last > _STALE

    def best(self) -> int:
        """Returns the N with the lowest measured time.

        An N other than 1 must be faster by at least the standard error of its mean.
        """

        def score(groups: int) -> float:
            arm = self._arms[groups]
            return self._whole(groups) + (0.0 if groups == 1 else self._standard_error(arm))

        return min((groups for groups in self._arms if self.is_measured(groups)), key=score)

    @property
    def may_try(self) -> bool:
        return self._trials < _HEAD_START + self.choices / _SHARE

    def trial(self, best: int, num_layers: int, expected: float) -> int | None:
        """Returns an N other than `best` to measure in the next forward; None if no trial is worthwhile.

        Args:
            expected: compute that a group is expected to cost until it was measured, in ns per token.
        """
        now = min(self._predicted(best, expected))
        predicted = {
            groups: min(self._predicted(groups, expected))
            for groups in _ladder(num_layers)
            if (best == 1 or best / 2 <= groups <= best * 2) and groups != best and self._open(groups, best)
        }
        chosen = min(predicted, key=lambda groups: predicted[groups], default=None)
        if chosen is None or predicted[chosen] > now * (1 - _GAIN):
            if best == 1 or self._count - self._arms[1].last < _AGAIN:
                return None
            chosen = 1
        self._trials += 1
        arm = self._arms.get(chosen)
        if arm is None or self._is_stale(arm):
            arm = self._arms[chosen] = _Arm()
            arm.last = self._count
        arm.tried += 1
        return chosen

    def _open(self, groups: int, best: int) -> bool:
        """Returns whether a trial of `groups` is useful.

        It is if the measurements do not decide whether `groups` is faster than `best`, and the results of earlier
        trials are known.
        """
        arm = self._arms.get(groups)
        if arm is None or self._is_stale(arm):
            return True
        if arm.tried >= arm.count + _ENOUGH:
            return False
        return not self.is_measured(groups) or (
            arm.count < _MEMORY and self._whole(groups) - self._standard_error(arm) < self._whole(best)
        )

    def _standard_error(self, arm: _Arm) -> float:
        """Returns the standard error of the mean exposed time of one number of groups."""
        return sqrt(self._variance / min(arm.count, _MEMORY))

    def _whole(self, groups: int) -> float:
        """Returns the estimated total time of forwards with this number of groups, in ns per token."""
        compute = self._undivided[0] if groups == 1 else self._compute.likely(groups)
        return compute + self._arms[groups].mean

    def _predicted(self, groups: int, expected: float) -> list[float]:
        """Returns the total time predicted by the model, in ns per token.

        There are two predictions if only one N was observed, as in `_Line.possible`.
        """
        compute, transfer = self._undivided
        if groups == 1:
            return [compute + transfer]
        if self._compute.empty:
            return [compute + expected * groups + max(transfer / groups, compute / groups + transfer - compute)]
        compute = self._compute.likely(groups)
        return [
            compute + max(transfer / groups, compute / groups + transfer - compute)
            for transfer in self._transfer.possible(groups)
        ]


def _ladder(num_layers: int) -> set[int]:
    """Returns the numbers of groups to consider: those that division into equal groups of whole layers can yield."""
    return {-(-num_layers // -(-num_layers // groups)) for groups in _LADDER if groups <= num_layers} - {1}
