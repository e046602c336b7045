"""Rollouts wait for tools most of their time."""

from rstar_lab.doctor.rule import Evidence, Log, examples, rule


@rule(
    "waiting for tools",
    reads=("rollouts.generate_s", "rollouts.queue_s"),
    cause="rollouts spend more time in the queue of the tool than generating",
    remedy="start more sandbox workers (`rstar-lab sandbox worker`)",
    source="rStar2-Agent, arXiv 2508.20722, section 3.1",
)
def check(log: Log) -> Evidence | None:
    rows = log.last().dropna(subset=["queue_s", "generate_s"])
    waiting, generating = float(rows.queue_s.sum()), float(rows.generate_s.sum())
    if waiting < 60 or waiting < generating:
        return None
    text = f"{waiting:,.0f} s in the queue of the tool against {generating:,.0f} s of generation in the last steps"
    return Evidence(text, {"queue_s": waiting, "generate_s": generating}, (), examples(rows), 0.3)
