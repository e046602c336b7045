"""The model writes role markers."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples, percent, share


def check(log: Log) -> Evidence | None:
    texts = log.texts()
    if len(texts) < 20:
        return None
    marked = texts.own.str.contains(r"<\|(?:im_start|start_header_id|user|system)\|?>|<tool_response>", regex=True)
    value = share(marked, texts)
    if value[1] < 0.05:
        return None
    text = f"{percent(value)} of {len(texts)} rollouts that were read contain a role marker written by the model"
    return Evidence(
        text,
        {"share": value[0], "low": value[1]},
        sorted(texts.step[marked].unique().astype(int)),
        examples(texts[marked]),
        0.5,
    )


RULE = Rule(
    name="control tokens in the text",
    reads=("texts",),
    cause=(
        "the model writes control tokens such as role markers: a mask is shifted, end tokens are missing, or "
        "collapse has begun"
    ),
    remedy=(
        "check the loss mask and the stop tokens; exclude such rollouts (`{type: control_tokens}` in `rl.method.add`)"
    ),
    source="arXiv 2606.26027",
    check=check,
)
