"""Sliders for the data mix of a recipe, with the resulting counts: `MixForm(recipe)`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from rstar_lab.errors import UserError
from rstar_lab.rl.forms.form import Form
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.renderers.conversations import read_conversations
from rstar_lab.visible_text import escaped

WEIGHT_STEP = 0.1


class MixForm(Form):
    """One slider per file of SFT conversations (how many to use) and per environment of the RL batch (its weight).

    recipe, overrides: as for `load_recipe`. `overrides` holds the moved sliders, as for `submit` and `--set`; `counts` maps each
    source to the conversations used, or to the mean number of groups per step. Raises UserError if the recipe has
    neither files of conversations nor environments.
    """

    def __init__(self, recipe: str | Path, overrides: Mapping[str, Any] | None = None):
        super().__init__()
        self.source = recipe
        loaded = load_recipe(recipe, overrides)
        self.groups = loaded.rl.problems_per_step if loaded.rl else 0
        self.sliders: dict[str, widgets.IntSlider | widgets.FloatSlider] = {}
        self._keys: dict[str, str] = {}
        self._conversations: list[str] = []
        wide = {"layout": widgets.Layout(width="40em"), "style": {"description_width": "14em"}}
        for index, entry in enumerate(loaded.sft.conversations if loaded.sft else ()):
            available = sum(1 for _ in read_conversations(entry.file))
            name = self._unused_name(entry.file.stem)
            self._keys[name] = f"sft.conversations.{index}.count"
            self._conversations.append(name)
            # Minimum 1: the recipe does not allow a count of 0.
            self.sliders[name] = widgets.IntSlider(
                min=1, max=available, value=min(entry.count or available, available), description=name, **wide
            )
        for environment in loaded.rl.environments if loaded.rl else ():
            name = self._unused_name(environment.name)
            self._keys[name] = f"rl.environments.{environment.name}.weight"
            self.sliders[name] = widgets.FloatSlider(
                min=WEIGHT_STEP, max=max(10.0, environment.weight), step=WEIGHT_STEP, value=environment.weight,
                description=name, **wide,
            )  # fmt: skip
        if not self.sliders:
            raise UserError(f"recipe {recipe} has no data mix: it needs sft.conversations or rl.environments")
        self._start = {name: slider.value for name, slider in self.sliders.items()}
        self.table = widgets.HTML()
        for slider in self.sliders.values():
            slider.observe(lambda _: self._show(), "value")
        self.root = widgets.VBox([*self.sliders.values(), self.table, self.message])
        self._show()

    @property
    def overrides(self) -> dict[str, Any]:
        """The values of the moved sliders, by recipe key."""
        return {
            self._keys[name]: slider.value for name, slider in self.sliders.items() if slider.value != self._start[name]
        }

    @property
    def counts(self) -> dict[str, float]:
        """Number of conversations of each file, and mean number of groups per step of each environment."""
        weights = {name: slider.value for name, slider in self.sliders.items() if name not in self._conversations}
        total = sum(weights.values())
        counts: dict[str, float] = {name: self.sliders[name].value for name in self._conversations}
        return counts | {name: self.groups * weight / total for name, weight in weights.items()}

    def summary(self) -> str:
        return f"mix of recipe {self.source}: " + ", ".join(
            f"{name} {count:,.6g}" for name, count in self.counts.items()
        )

    def _unused_name(self, name: str) -> str:
        """Return the name, with a number if another source has it already."""
        names = [name, *(f"{name} {number}" for number in range(2, len(self.sliders) + 3))]
        return next(candidate for candidate in names if candidate not in self.sliders)

    def _show(self) -> None:
        counts = self.counts
        parts = [
            ("conversations", self._conversations),
            ("groups per step", [n for n in counts if n not in self._conversations]),
        ]
        rows = []
        for unit, names in parts:
            total = sum(counts[name] for name in names)
            for name in [*names, *(["all"] if names else [])]:
                count = total if name == "all" else counts[name]
                rows.append(
                    f"<tr><td>{escaped(name)}</td><td>{count:,.6g} {unit}</td><td>{count / total:.1%}</td></tr>"
                )
        self.table.value = "<table><tr><th>source</th><th>count</th><th>share</th></tr>" + "".join(rows) + "</table>"
