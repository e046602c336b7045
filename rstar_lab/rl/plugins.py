"""User functions that a recipe names as `module:name`, imported from the working directory."""

import contextvars
import difflib
import hashlib
import importlib
import inspect
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_named(name: str, key: str) -> Any:
    """Return the object `module:name`. Raises UserError; its message starts with the recipe key `key`."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # `python -m` does the same
    importlib.invalidate_caches()  # the file may have been written after the import system cached the folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.split(".")[0]:
            raise UserError(
                f"{key}: {name}: no module {module_name} in {here} or among the installed packages"
            ) from None
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = error.filename if isinstance(error, SyntaxError) else at.filename
        line = error.lineno if isinstance(error, SyntaxError) else at.lineno
        raise UserError(f"{key}: {name}: {where}:{line}: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(module), n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}: {name}: {module.__file__} has no {attribute}{hint}") from None


@cache
def load_function(name: str, key: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """Return the function `module:name`; a call of it raises UserError if the function fails.

    key: the recipe key that names it. parameters: names of the arguments of a call, in order, for the error message.
    Raises UserError if it does not exist, is not callable, or does not accept that number of arguments.
    """
    function = load_named(name, key)
    if not callable(function):
        raise UserError(f"{key}: {name} is a {type(function).__name__}; expected a function")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise UserError(f"{key}: {name} is called with ({', '.join(parameters)}): {error}") from None
    except ValueError:  # a built-in function without a signature
        pass

    def checked(*arguments: Any) -> Any:
        with calling(f"{key}: {name}"):
            return function(*arguments)

    return checked


@contextmanager
def calling(where: str) -> Iterator[None]:
    """Convert an error of the user's code in the block to UserError, which starts with `where` and names the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"{where} failed at {at.filename}:{at.lineno}: {type(error).__name__}: {error}") from error


def start_call(function: Callable[..., Any], *values: Any, **named: Any) -> Future[Any]:
    """Call a function in a new daemon thread, for which the exit of the process does not wait. Return the future of its result.

    An exception that would end the process, such as SystemExit, is a RuntimeError in the future.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # so that a waiting task that is cancelled does not cancel it

    def run() -> None:
        try:
            result.set_result(function(*values, **named))
        except BaseException as error:
            # asyncio's futures do not accept StopIteration.
            fits = isinstance(error, Exception) and not isinstance(error, StopIteration)
            result.set_exception(error if fits else RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return result


def finite_number(value: Any, where: str) -> float:
    """Return the result of a user's function as a number. Raises UserError, which starts with `where`, unless it is finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where} returned {value!r}; expected a finite number")
    return number


def source_hash(name: str, key: str) -> str:
    """Return a hash of the source file that defines `module:name`; for an object, of the file of the module."""
    target = inspect.unwrap(load_named(name, key))
    is_code = inspect.isclass(target) or inspect.isroutine(target)
    source = inspect.getsourcefile(target if is_code else sys.modules[name.partition(":")[0]])
    content = Path(source).read_bytes() if source else b""
    return hashlib.blake2b(content, digest_size=8).hexdigest()
