"""User functions that a recipe names as `module:name`, imported from the working directory."""

import difflib
import importlib
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_named(name: str, key: str) -> Any:
    """Return the object `module:name`. Raises UserError, whose message starts with the recipe key `key`."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it
    importlib.invalidate_caches()  # the file may be younger than this process's last look
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]:
            raise UserError(f"{key}: {name}: there is no module {module_name} in {here}, nor installed") from None
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = error.filename if isinstance(error, SyntaxError) else at.filename
        line = error.lineno if isinstance(error, SyntaxError) else at.lineno
        raise UserError(f"{key}: {name}: {where}:{line}: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(module), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}: {name}: {module.__file__} has no {attribute}{hint}") from None
