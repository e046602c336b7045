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
# Class prefix: channel, palest and strongest colour on a light page, then on a dark one. Every step keeps
# text on it readable. Orange against blue, which every kind of colour vision tells apart.
_RAMPS: dict[str, tuple[str, tuple[str, str], tuple[str, str]]] = {
    "e": ("entropy", ("#fff3d1", "#f0a43c"), ("#2c2411", "#84590c")),
    "l": ("log_prob", ("#f3edfb", "#bb9ae6"), ("#251d33", "#654891")),
    "dp": ("mismatch", ("#fdeadf", "#ee9a72"), ("#33201a", "#8c4722")),
    "dn": ("mismatch", ("#e2eefb", "#86b8ec"), ("#14263b", "#235c97")),
    "ap": ("advantage", ("#e2eefb", "#86b8ec"), ("#14263b", "#235c97")),
    "an": ("advantage", ("#fdeadf", "#ee9a72"), ("#33201a", "#8c4722")),
}
_INK = ("#1b2330", "#e4e8ee")
SYNTAX: dict[str, tuple[str, str]] = {
    "kw": ("#7a1fa2", "#d7a6f5"),
    "str": ("#0a5c3b", "#8fd6ae"),
    "num": ("#0b4f9e", "#9accff"),
    "com": ("#565f6e", "#a3adbb"),
    "bi": ("#7d3c00", "#f3bd8d"),
}
READABLE = 4.5  # contrast of text on its ground, as WCAG AA asks
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


def contrast(one: str, two: str) -> float:
    """WCAG contrast ratio of two #rrggbb colours."""
    low, high = sorted((_luminance(one), _luminance(two)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def takes_ink(light: str, dark: str) -> bool:
    """Is a colour so strong that some syntax colour cannot be read on it? Then its text is plain ink."""
    return any(contrast(ink[0], light) < READABLE or contrast(ink[1], dark) < READABLE for ink in SYNTAX.values())


def page_css() -> str:
    """Style sheet of transcripts: typography, and one rule a colour step for highlights, swatches and exported spans."""
    rules = []
    for name, (light, dark) in SYNTAX.items():
        colour = f"color: light-dark({light}, {dark});"
        rules.append(f".rl-text::highlight(rl-py-{name}) {{ {colour} }}")
        rules.append(f".rl span.rl-py-{name} {{ {colour} }}")
    for name, (channel, light, dark) in steps().items():
        colour = f"background-color: light-dark({light}, {dark});"
        if takes_ink(light, dark):
            colour += f" color: light-dark({_INK[0]}, {_INK[1]});"
        rules.append(f".rl-text::highlight(rl-{name}) {{ {colour} }}")
        rules.append(f".rl i.rl-{name}, .rl:has(.rl-by-{channel}:checked) span.rl-{name} {{ {colour} }}")
    return (Path(__file__).parent / "static" / "transcript.css").read_text(encoding="utf-8") + "\n".join(rules) + "\n"
