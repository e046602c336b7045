"""The model writes role markers."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "control tokens in the text",
    reads=("texts",),
    cause=(
        "the model writes control tokens such as role markers: a mask is shifted, end tokens are missing, or "
        "collapse has begun"
    ),
    remedy=(
        "check the loss mask and the stop tokens; exclude such rollouts (`{type: control_tokens}` in `rl.method.add`)"
    ),
    source="arXiv 2606.26027",
)
def check(log: Log) -> Evidence | None:
    texts = log.texts()
    marked = texts.own.str.contains(r"<\|(?:im_start|start_header_id|user|system)\|?>|<tool_response>", regex=True)
    return among(texts, marked, "rollouts contain a role marker written by the model", above=0.02)
