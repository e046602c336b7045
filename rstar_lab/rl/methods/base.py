"""The base class of the methods in a recipe: a section of keys that is also the method itself."""

from typing import Any, Self

from pydantic import PrivateAttr

from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.section import Section


class MethodSection(Section, MethodHooks):
    """The keys of a method, and the hooks that read them. `_rl`: the section `rl` of the stage, after `bound`."""

    _rl: Any = PrivateAttr(None)

    def check(self, rl: Any) -> None:
        """Raise ValueError, which names the key, if the method cannot be combined with the other keys of `rl`."""

    def check_recipe(self, recipe: Any, rl: Any) -> None:
        """Raise ValueError, which names the key, if the method cannot be combined with other sections of a recipe. rl: the section
        of a stage."""

    def bound(self, rl: Any) -> Self:
        """Return the method with the section `rl`, which its hooks may read. Loads the functions that the method names."""
        found = self.model_copy()
        found._rl = rl
        return found
