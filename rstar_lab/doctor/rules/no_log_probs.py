"""The engine returns log-probs of 0."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "the engine returns no log-probs",
    reads=("rollouts.engine_log_prob", "rollouts.model_tokens"),
    cause="the log-probs of the sampled tokens are 0, so every importance ratio is wrong",
    remedy=(
        "ask the engine for the log-probs of sampled tokens, after temperature (vLLM: `logprobs=0`, "
        "`logprobs_mode=processed_logprobs`), or use `rl.old_log_probs: trainer`"
    ),
    source="Yao et al. 2025, fengyao.notion.site/off-policy-rl",
)
def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.engine_log_prob.notna() & (log.rollouts.model_tokens.fillna(0) > 0)]
    return among(rows, rows.engine_log_prob == 0, "rollouts have log-probs of 0", above=0.5, cost=1.0)
