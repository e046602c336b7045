"""Token colours: value scales, and the style rules that the widget and exported pages share."""

from pathlib import Path

# Lower ends of the colour steps. Fixed, so that two transcripts can be compared by eye.
# entropy in nats; log_prob is -log p under the engine; mismatch is |engine - trainer|; advantage is |advantage|.
SCALES: dict[str, tuple[float, ...]] = {
    "entropy": (0.05, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0),
    "log_prob": (0.05, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "mismatch": (0.01, 0.03, 0.1, 0.3, 1.0),
    "advantage": (0.05, 0.25, 0.5, 1.0, 1.5),
}
# Class prefix: channel, palest and strongest colour on a light page, then on a dark one. Every step keeps text on it at
# a contrast of 4.5 or more. Orange against blue, which every kind of colour vision tells apart.
_RAMPS: dict[str, tuple[str, tuple[str, str], tuple[str, str]]] = {
    "e": ("entropy", ("#fff3d1", "#f0a43c"), ("#2c2411", "#84590c")),
    "l": ("log_prob", ("#f3edfb", "#bb9ae6"), ("#251d33", "#654891")),
    "dp": ("mismatch", ("#fdeadf", "#ee9a72"), ("#33201a", "#8c4722")),
    "dn": ("mismatch", ("#e2eefb", "#86b8ec"), ("#14263b", "#235c97")),
    "ap": ("advantage", ("#e2eefb", "#86b8ec"), ("#14263b", "#235c97")),
    "an": ("advantage", ("#fdeadf", "#ee9a72"), ("#33201a", "#8c4722")),
}
_MASK = {"m0": ("mask", "#e9ecf1", "#272d37"), "m1": ("mask", "#d3efe4", "#153f35")}


def _mix(ends: tuple[str, str], share: float) -> str:
    low, high = ([int(end[i : i + 2], 16) for i in (1, 3, 5)] for end in ends)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))


def steps() -> dict[str, tuple[str, str, str]]:
    """Colour class to (channel, colour on a light page, colour on a dark one)."""
    ramps = {
        f"{prefix}{level + 1}": (channel, _mix(light, share), _mix(dark, share))
        for prefix, (channel, light, dark) in _RAMPS.items()
        for level in range(len(SCALES[channel]))
        for share in [level / (len(SCALES[channel]) - 1)]
    }
    return ramps | _MASK


def page_css() -> str:
    """Style sheet of transcripts: typography, and one rule a colour step for highlights, swatches and exported spans."""
    rules = []
    for name, (channel, light, dark) in steps().items():
        colour = f"light-dark({light}, {dark})"
        rules.append(f".rl-text::highlight(rl-{name}) {{ background-color: {colour}; }}")
        rules.append(
            f".rl i.rl-{name}, .rl:has(.rl-by-{channel}:checked) span.rl-{name} {{ background-color: {colour}; }}"
        )
    return (Path(__file__).parent / "static" / "transcript.css").read_text(encoding="utf-8") + "\n".join(rules) + "\n"
