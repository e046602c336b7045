"""Prediction of response lengths from earlier rollouts of the problem, its rollouts in this step, and the tokens so far."""

import math
from dataclasses import dataclass, field

_SQRT2 = math.sqrt(2.0)
_SQRT_2PI = math.sqrt(2.0 * math.pi)


class LengthPredictor:
    """Predicts response lengths with a lognormal model that has one mean per problem.

    log(length) = problem mean + noise; the problem means are normal around a common mean. Both are estimated from finished
    rollouts and from unfinished ones. An unfinished rollout is a censored observation: its length is at least the number of
    tokens so far. Without these observations the estimate would be too low during a step, because short rollouts finish first.
    Each new observation of a problem triggers one step of expectation-maximisation. The expected number of remaining
    tokens is computed from the lognormal truncated at the tokens so far.

    max_tokens: maximum response length. mean_tokens: prior mean of the length; None: a quarter of max_tokens.
    """

    MEMORY = 256  # rollouts: old lengths lose weight, because lengths change as the policy is trained
    SIGMA_PROBLEM, SIGMA_ROLLOUT = 0.55, 0.6  # standard deviations of the log length between and within problems
    PRIOR_ROLLOUTS = 32.0  # weight of the prior mean, in observations

    def __init__(self, max_tokens: int, *, mean_tokens: float | None = None):
        self.max_tokens = max_tokens
        self._shrink = (self.SIGMA_ROLLOUT / self.SIGMA_PROBLEM) ** 2
        prior = math.log(mean_tokens or max_tokens / 4) - 0.5 * (self.SIGMA_PROBLEM**2 + self.SIGMA_ROLLOUT**2)
        self._count, self._total = self.PRIOR_ROLLOUTS, self.PRIOR_ROLLOUTS * prior
        self._problems: dict[str, _ProblemLengths] = {}

    def observe(self, problem: str, tokens: float, rollout: int | None = None) -> None:
        """Record that a rollout of `problem` ended with `tokens` response tokens."""
        lengths = self._problems.setdefault(problem, _ProblemLengths())
        lengths.ended += 1
        lengths.ended_total += math.log(max(tokens, 1.0))
        if rollout is not None:
            lengths.unfinished.pop(rollout, None)
        lengths.stale = True

    def progress(self, problem: str, tokens: float, rollout: int) -> None:
        """Record that an unfinished rollout of `problem` has `tokens` response tokens so far."""
        lengths = self._problems.setdefault(problem, _ProblemLengths())
        lengths.unfinished[rollout] = math.log(max(tokens, 1.0))
        lengths.stale = True

    def new_step(self) -> None:
        """Start a step: drop unfinished rollouts, and limit the weight of the past to `MEMORY` rollouts per problem and overall."""
        for problem, lengths in self._problems.items():
            self.mean_log(problem)
            if lengths.ended > self.MEMORY:
                lengths.ended_total *= self.MEMORY / lengths.ended
                lengths.ended = self.MEMORY
            lengths.unfinished.clear()
            lengths.count, lengths.total, lengths.stale = lengths.ended, lengths.ended_total, False
        if self._count > self.MEMORY:
            self._total *= self.MEMORY / self._count
            self._count = self.MEMORY

    def mean_log(self, problem: str) -> float:
        """Return the posterior mean of the log length of `problem`."""
        overall = self._total / self._count
        lengths = self._problems.get(problem)
        if lengths is None:
            return overall
        if lengths.stale:
            guess = (lengths.total + self._shrink * overall) / (lengths.count + self._shrink)
            sigma = self.SIGMA_ROLLOUT
            total = lengths.ended_total
            for so_far in lengths.unfinished.values():
                total += guess + sigma * _mills((so_far - guess) / sigma)
            count = lengths.ended + len(lengths.unfinished)
            self._count += count - lengths.count
            self._total += total - lengths.total
            lengths.count, lengths.total, lengths.stale = count, total, False
        return (lengths.total + self._shrink * overall) / (lengths.count + self._shrink)

    def remaining(self, problem: str, generated: float = 0.0) -> float:
        """Return the expected number of further response tokens after `generated`, at least 1."""
        return max(_mean_past(self.mean_log(problem), self.SIGMA_ROLLOUT, generated, self.max_tokens) - generated, 1.0)


@dataclass(slots=True)
class _ProblemLengths:
    """Rollouts of one problem.

    ended, ended_total: number of finished rollouts and sum of their log lengths. unfinished: log of the tokens so far, by
    rollout. count, total: the same as ended, ended_total for all rollouts, with the expected log lengths of unfinished
    ones. stale: count and total must be computed again.
    """

    ended: int = 0
    ended_total: float = 0.0
    unfinished: dict[int, float] = field(default_factory=dict)
    count: int = 0
    total: float = 0.0
    stale: bool = True


def _mills(z: float) -> float:
    """Return E[Z | Z > z] of a standard normal variable."""
    return z + 1 / z if z > 6 else math.exp(-0.5 * z * z) / (_SQRT_2PI * 0.5 * math.erfc(z / _SQRT2))


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / _SQRT2)


def _mean_past(mu: float, sigma: float, start: float, end: float) -> float:
    """Return E[min(X, end) | X > start] for log X normal(mu, sigma), in tokens."""
    if start >= end:
        return end
    z_end = (math.log(end) - mu) / sigma
    z_start = (math.log(start) - mu) / sigma if start > 0 else -math.inf
    survive = 1.0 - _cdf(z_start) if start > 0 else 1.0
    if survive < 1e-9:  # far in the tail: avoid a division by zero
        return 0.5 * (start + end)
    inside = math.exp(mu + 0.5 * sigma * sigma) * (_cdf(z_end - sigma) - (_cdf(z_start - sigma) if start > 0 else 0.0))
    return (inside + end * (1.0 - _cdf(z_end))) / survive
