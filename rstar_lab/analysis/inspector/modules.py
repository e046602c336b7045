"""The browser code of the widgets: ES modules of `static/`, joined into the single file that anywidget takes."""

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)


def join_modules(*names: str) -> str:
    """Join ES modules of `static/` into one, since anywidget takes a single file. They import only each other.

    `labels`, the headings of segments, is defined before them.
    """
    texts = [_IMPORT.sub("", (STATIC / f"{name}.js").read_text(encoding="utf-8")) for name in names]
    parts = [text.replace("\nexport ", "\n").removeprefix("export ") for text in texts[:-1]]
    labels = (STATIC / "labels.json").read_text(encoding="utf-8")
    return "\n".join([f"const labels = {labels.strip()};", *parts, texts[-1]])
