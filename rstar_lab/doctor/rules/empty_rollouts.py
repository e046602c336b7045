"""Rollouts without any text have reward 0."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "empty rollouts count as failures",
    reads=("texts", "rollouts.reward"),
    cause="rollouts that failed before the model wrote anything are trained on as wrong answers",
    remedy=(
        "find out why they failed (reset of the environment, engine, prompt too long); leave them out of loss and"
        " group statistics"
    ),
    source="NeMo-Gym #2552 (1,172 of 1,280 rollouts)",
)
def check(log: Log) -> Evidence | None:
    texts = log.texts()
    known_failures = texts.stop_reason.isin(["engine_error", "environment_error"])  # left out of the loss
    empty = (texts.own.str.strip() == "") & (texts.reward <= 0) & ~known_failures
    return among(texts, empty, "rollouts contain no text of the model and have no reward", above=0.005)
