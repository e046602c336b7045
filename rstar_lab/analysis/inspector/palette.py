"""Levels of token colours, and the style sheets and scripts of `static/` that the widgets and saved pages share."""

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


def styles(*names: str) -> str:
    """Return style sheets of `static/` as one."""
    return "\n".join((STATIC / f"{name}.css").read_text(encoding="utf-8") for name in names)


def widget_css() -> str:
    """Return the style sheet of the inspector, which saved pages use too."""
    return styles("transcript", "levels", "inspector")


def join_modules(*names: str) -> str:
    """Join ES modules of `static/` into one, since anywidget and saved pages take a single file. They import only each other.

    `labels`, the headings of segments, is defined before them.
    """
    texts = [_IMPORT.sub("", (STATIC / f"{name}.js").read_text(encoding="utf-8")) for name in names]
    parts = [text.replace("\nexport ", "\n").removeprefix("export ") for text in texts[:-1]]
    labels = (STATIC / "labels.json").read_text(encoding="utf-8")
    return "\n".join([f"const labels = {labels.strip()};", *parts, texts[-1]])
