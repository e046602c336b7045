"""Cases of a test as data, in a YAML file beside it."""

from pathlib import Path
from typing import Any

import yaml


def read_cases(test_file: str, name: str = "cases.yaml") -> Any:
    """Return the content of a file in the folder of a test. test_file: the test's `__file__`."""
    return yaml.load((Path(test_file).parent / name).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
