"""The base class of the methods in a recipe: a section of keys that is also the method itself."""

from typing import Any

from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.section import Section


class MethodSection(Section, MethodHooks):
    """The keys of a method, and the hooks that read them."""

    def check(self, rl: Any) -> None:
        """Raise ValueError, which names the key, if the method cannot be combined with the other keys of `rl`."""

    def check_recipe(self, recipe: Any, rl: Any) -> None:
        """Raise ValueError, which names the key, if the method cannot be combined with other sections of a recipe. rl: the section
        of a stage."""

    def bound(self, rl: Any) -> MethodHooks:
        """Return the hooks with what they need of the section `rl`. Loads the functions that the method names."""
        return self
