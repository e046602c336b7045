"""The examples of docs/extending.md as a module in a temporary working directory."""

import re
from pathlib import Path

import yaml

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def examples() -> list[str]:
    """Return the source of each Python example."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def example_recipe() -> dict:
    """Return the keys of the page's recipe."""
    return yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])


def write_module(folder: Path) -> None:
    (folder / "my_parts.py").write_text("\n\n".join(examples()))
