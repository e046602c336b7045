"""How long a rollout will be: what its problem did before, what its siblings did in this run, what it has written so far."""

import math
from collections.abc import Iterable, Mapping

_SQRT2 = math.sqrt(2.0)
_SQRT_2PI = math.sqrt(2.0 * math.pi)


class LengthPredictor:
    """Expected response tokens of a rollout, as a lognormal whose mean log belongs to its problem.

    log(length) = problem mean + noise. The problem means are normal around a mean over all problems; both are estimated from
    rollouts that ended and from rollouts under way, which are at least as long as what they have written (without them the
    estimate would know the short ones first and be too low all through a step): one step of expectation-maximisation each time
    something is heard of a problem. A rollout that has written `generated` tokens has the mean of the truncated lognormal to go.

    max_tokens: where a response is cut. mean_tokens: a first guess, worth `prior_rollouts` observations.
    sigma_problem, sigma_rollout: standard deviations of the log between problems and within one.
    history: response tokens of earlier rollouts by problem (an earlier epoch, say).
    """

    MEMORY = 256  # the policy moves, and lengths with it

    def __init__(
        self,
        max_tokens: int,
        *,
        mean_tokens: float | None = None,
        sigma_problem: float = 0.55,
        sigma_rollout: float = 0.6,
        prior_rollouts: float = 32.0,
        history: Mapping[str, Iterable[float]] | None = None,
    ):
        self.max_tokens = max_tokens
        self.sigma = sigma_rollout
        self._shrink = (sigma_rollout / sigma_problem) ** 2
        guess = math.log(mean_tokens or max_tokens / 4) - 0.5 * (sigma_problem**2 + sigma_rollout**2)
        self._count, self._total = prior_rollouts, prior_rollouts * guess
        self._problems: dict[str, _Seen] = {}
        for problem, lengths in (history or {}).items():
            for length in lengths:
                self.observe(problem, length)
            self.mean_log(problem)

    def observe(self, problem: str, tokens: float, rollout: int | None = None) -> None:
        """A rollout of `problem` ended with `tokens` response tokens."""
        seen = self._problems.setdefault(problem, _Seen())
        seen.ended += 1
        seen.ended_total += math.log(max(tokens, 1.0))
        if rollout is not None:
            seen.under_way.pop(rollout, None)
        seen.stale = True

    def progress(self, problem: str, tokens: float, rollout: int) -> None:
        """A rollout of `problem` has written `tokens` response tokens and goes on."""
        seen = self._problems.setdefault(problem, _Seen())
        seen.under_way[rollout] = math.log(max(tokens, 1.0))
        seen.stale = True

    def new_step(self) -> None:
        """What was under way is gone; what has been heard so far counts as `MEMORY` rollouts at most, in each problem and in all."""
        for problem, seen in self._problems.items():
            self.mean_log(problem)
            if seen.ended > self.MEMORY:
                seen.ended_total *= self.MEMORY / seen.ended
                seen.ended = self.MEMORY
            seen.under_way.clear()
            seen.count, seen.total, seen.stale = seen.ended, seen.ended_total, False
        if self._count > self.MEMORY:
            self._total *= self.MEMORY / self._count
            self._count = self.MEMORY

    def mean_log(self, problem: str) -> float:
        """Posterior mean of the log length of `problem`."""
        overall = self._total / self._count
        seen = self._problems.get(problem)
        if seen is None:
            return overall
        if seen.stale:
            guess = (seen.total + self._shrink * overall) / (seen.count + self._shrink)
            sigma = self.sigma
            total = seen.ended_total
            for written in seen.under_way.values():
                total += guess + sigma * _mills((written - guess) / sigma)
            count = seen.ended + len(seen.under_way)
            self._count += count - seen.count
            self._total += total - seen.total
            seen.count, seen.total, seen.stale = count, total, False
        return (seen.total + self._shrink * overall) / (seen.count + self._shrink)

    def remaining(self, problem: str, generated: float = 0.0) -> float:
        """Expected response tokens still to come after `generated`, at least 1."""
        return max(_mean_past(self.mean_log(problem), self.sigma, generated, self.max_tokens) - generated, 1.0)


class _Seen:
    """Rollouts of one problem: sums over those that ended, logs of what those under way have written, and the last estimate."""

    __slots__ = ("count", "ended", "ended_total", "stale", "total", "under_way")

    def __init__(self) -> None:
        self.ended, self.ended_total = 0, 0.0
        self.under_way: dict[int, float] = {}
        self.count, self.total = 0, 0.0
        self.stale = True


def _mills(z: float) -> float:
    """E[Z | Z > z] of a standard normal."""
    if z > 6:
        return z + 1 / z
    return math.exp(-0.5 * z * z) / (_SQRT_2PI * 0.5 * math.erfc(z / _SQRT2))


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / _SQRT2)


def _mean_past(mu: float, sigma: float, start: float, end: float) -> float:
    """E[min(X, end) | X > start] for log X normal(mu, sigma), in tokens."""
    if start >= end:
        return end
    z_end = (math.log(end) - mu) / sigma
    z_start = (math.log(start) - mu) / sigma if start > 0 else -math.inf
    survive = 1.0 - _cdf(z_start) if start > 0 else 1.0
    if survive < 1e-9:  # far longer than anything seen of this problem: the tail is flat there
        return 0.5 * (start + end)
    inside = math.exp(mu + 0.5 * sigma * sigma) * (_cdf(z_end - sigma) - (_cdf(z_start - sigma) if start > 0 else 0.0))
    return (inside + end * (1.0 - _cdf(z_end))) / survive
