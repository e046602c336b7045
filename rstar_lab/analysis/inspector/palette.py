"""Token colours, and the style sheets and scripts of `static/` that the widgets and saved pages share."""

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
# Lower bounds of the colour levels. They are fixed so that the colours of two transcripts are comparable.
# entropy: nats; log_prob: -log p under the engine, nats; mismatch: |engine - trainer|, nats; advantage: |advantage|.
SCALES: dict[str, tuple[float, ...]] = {
    "entropy": (0.05, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0),
    "log_prob": (0.05, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "mismatch": (0.01, 0.03, 0.1, 0.3, 1.0),
    "advantage": (0.05, 0.25, 0.5, 1.0, 1.5),
}
# Class prefix: channel, then the palest and strongest colour on a light page and on a dark page. Text is readable on every
# level. Opposite signs are orange and blue, which people with any common colour vision can tell apart.
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
READABLE = 4.5  # minimum contrast of text and background, WCAG 2.2 AA
_MASK = {"m0": ("mask", "#e9ecf1", "#272d37"), "m1": ("mask", "#d3efe4", "#153f35")}


def _mix(ends: tuple[str, str], share: float) -> str:
    low, high = ([int(end[i : i + 2], 16) for i in (1, 3, 5)] for end in ends)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))


def colour_levels() -> dict[str, tuple[str, str, str]]:
    """Return colour class to (channel, colour on a light page, colour on a dark page)."""
    ramps = {
        f"{prefix}{level + 1}": (channel, _mix(light, share), _mix(dark, share))
        for prefix, (channel, light, dark) in _RAMPS.items()
        for level in range(len(SCALES[channel]))
        for share in [level / (len(SCALES[channel]) - 1)]
    }
    return ramps | _MASK


def contrast(one: str, two: str) -> float:
    """Return the WCAG contrast ratio of two #rrggbb colours."""
    low, high = sorted((_luminance(one), _luminance(two)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def needs_plain_text(light: str, dark: str) -> bool:
    """Return whether some syntax colour is unreadable on this background, so that its text needs the plain text colour."""
    return any(contrast(ink[0], light) < READABLE or contrast(ink[1], dark) < READABLE for ink in SYNTAX.values())


def page_css() -> str:
    """Return the style sheet of transcripts: typography, and one rule per colour level and syntax element."""
    rules = []
    for name, (light, dark) in SYNTAX.items():
        colour = f"color: light-dark({light}, {dark});"
        rules.append(f".rl-text::highlight(rl-py-{name}) {{ {colour} }}")
    for name, (_, light, dark) in colour_levels().items():
        colour = f"background-color: light-dark({light}, {dark});"
        if needs_plain_text(light, dark):
            colour += f" color: light-dark({_INK[0]}, {_INK[1]});"
        rules.append(f".rl-text::highlight(rl-{name}) {{ {colour} }}")
        rules.append(f".rl i.rl-{name} {{ {colour} }}")
    return (STATIC / "transcript.css").read_text(encoding="utf-8") + "\n".join(rules) + "\n"


def widget_css() -> str:
    """Return the style sheet of the inspector, which saved pages use too."""
    return page_css() + (STATIC / "inspector.css").read_text(encoding="utf-8")


def join_modules(*names: str) -> str:
    """Join ES modules of `static/` into one, since anywidget and saved pages take a single file. They import only each other.

    `labels`, the headings of segments, is defined before them.
    """
    texts = [_IMPORT.sub("", (STATIC / f"{name}.js").read_text(encoding="utf-8")) for name in names]
    parts = [text.replace("\nexport ", "\n").removeprefix("export ") for text in texts[:-1]]
    labels = (STATIC / "labels.json").read_text(encoding="utf-8")
    return "\n".join([f"const labels = {labels.strip()};", *parts, texts[-1]])
