"""How long a rollout will be: what its problem did before, what its siblings did in this run, what it has written so far."""

import math
from collections.abc import Iterable, Mapping

_SQRT2 = math.sqrt(2.0)
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class LengthPredictor:
    """Expected response tokens of a rollout, as a lognormal whose mean log belongs to its problem.

    log(length) = problem mean + noise. The problem means are normal around a mean over all problems; finished rollouts move
    both (normal posterior, known variances). A rollout that has already written `generated` tokens is longer than that:
    what is left is the mean of the truncated lognormal.

    max_tokens: where a response is cut. mean_tokens: a first guess, worth `prior_rollouts` observations.
    sigma_problem, sigma_rollout: standard deviations of the log between problems and within one.
    history: response tokens of earlier rollouts by problem (an earlier epoch, say).
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        mean_tokens: float | None = None,
        sigma_problem: float = 0.55,
        sigma_rollout: float = 0.6,
        prior_rollouts: float = 8.0,
        history: Mapping[str, Iterable[float]] | None = None,
    ):
        self.max_tokens = max_tokens
        self.sigma = sigma_rollout
        self._shrink = (sigma_rollout / sigma_problem) ** 2
        guess = mean_tokens or max_tokens / 4
        self._weight = prior_rollouts
        self._total = prior_rollouts * (math.log(guess) - 0.5 * (sigma_problem**2 + sigma_rollout**2))
        self._problems: dict[str, tuple[int, float]] = {}
        self.version = 0
        for problem, lengths in (history or {}).items():
            for length in lengths:
                self.observe(problem, length)

    def observe(self, problem: str, tokens: float) -> None:
        """A rollout of `problem` ended with `tokens` response tokens."""
        log_tokens = math.log(max(tokens, 1.0))
        count, total = self._problems.get(problem, (0, 0.0))
        self._problems[problem] = (count + 1, total + log_tokens)
        self._weight += 1
        self._total += log_tokens
        self.version += 1

    def mean_log(self, problem: str) -> float:
        """Posterior mean of the log length of `problem`."""
        overall = self._total / self._weight
        count, total = self._problems.get(problem, (0, 0.0))
        return (total + self._shrink * overall) / (count + self._shrink)

    def remaining(self, problem: str, generated: float = 0.0) -> float:
        """Expected response tokens still to come after `generated`, at least 1."""
        return max(_mean_past(self.mean_log(problem), self.sigma, generated, self.max_tokens) - generated, 1.0)


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
