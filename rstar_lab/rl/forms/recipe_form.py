"""A form for the keys of a recipe, with their documentation and validation at every change: `RecipeForm()`."""

import html
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import ipywidgets as widgets
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rstar_lab.rl.forms.form import Form
from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.recipe import Recipe, RecipeError

TOP = "top level"


class RecipeForm(Form):
    """A form with one field for every recipe key: value, default, description, and the error if the value is invalid.

    recipe: name of a shipped recipe, or a file. `overrides` holds the changed keys, as for `submit` and `--set`; `recipe` is the
    changed recipe, or None while a value is invalid. Raises RecipeError if the recipe cannot be loaded.
    """

    def __init__(self, recipe: str | Path = "tiny_fast"):
        super().__init__()
        self.source = recipe
        self.base = load_recipe(recipe)
        self.recipe: Recipe | None = self.base
        self.overrides: dict[str, Any] = {}
        self.fields: dict[str, widgets.ValueWidget] = {}
        self._rows: dict[str, widgets.VBox] = {}
        self._errors: dict[str, widgets.HTML] = {}
        self._sections: dict[str, list[str]] = {}
        for section, key, field in _keys(self.base):
            self._sections.setdefault(section, []).append(key)
            self._add(key, field)
        wide = widgets.Layout(width="30em")
        self.section = widgets.Dropdown(description="Section", options=list(self._sections), layout=wide)
        self.search = widgets.Text(description="Search", placeholder="part of a key or of its description", layout=wide)
        self.command = widgets.HTML()
        self.body = widgets.VBox(layout=widgets.Layout(max_height="28em", overflow="auto"))
        for chooser in (self.section, self.search):
            chooser.observe(lambda _: self._show(), "value")
        head = widgets.HBox([self.section, self.search], layout=widgets.Layout(flex_flow="row wrap"))
        self.root = widgets.VBox([head, self.body, self.message, self.command])
        self._show()
        self._validate()

    def summary(self) -> str:
        changed = ", ".join(f"{key}={value}" for key, value in self.overrides.items()) or "no key changed"
        return f"recipe {self.source}: {changed}"

    def _add(self, key: str, field: FieldInfo) -> None:
        value = _text(_value(self.base, key, field))
        self.fields[key] = entry = _entry(field, value)
        entry.observe(lambda change: self._change(key, change["new"], value), "value")
        self._errors[key] = widgets.HTML()
        about = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(" ".join((field.description or "").split())))
        if not field.is_required():
            default = _text(field.get_default(call_default_factory=True)) or "none"
            about += f" Default value: <code>{html.escape(default)}</code>."
        label = widgets.HTML(f"<code>{html.escape(key)}</code>", layout=widgets.Layout(width="20em"))
        line = widgets.HBox([label, entry], layout=widgets.Layout(flex_flow="row wrap"))
        self._rows[key] = widgets.VBox([line, self._errors[key], widgets.HTML(f"<small>{about}</small>")])

    def _show(self) -> None:
        """Show the keys of the selected section, or during a search the matching keys of all sections."""
        text = self.search.value.strip().lower()
        keys = [key for key in self.fields if text in key or text in self._rows[key].children[2].value.lower()]
        self.body.children = [self._rows[key] for key in (keys if text else self._sections[self.section.value])]

    def _change(self, key: str, new: Any, before: str) -> None:
        if _text(new) == before:
            self.overrides.pop(key, None)
        else:
            # Parsed by the function that parses --set, so that both read a value in the same way.
            try:
                self.overrides |= parse_overrides([f"{key}={_text(new)}"])
            except RecipeError:
                self.overrides[key] = new
        self._validate()

    def _validate(self) -> None:
        problems = ""
        try:
            self.recipe = load_recipe(self.source, self.overrides)
        except RecipeError as error:
            self.recipe, problems = None, re.sub(r"^recipe \S+: ", "", str(error))
        for key, line in self._errors.items():
            wrong = key in self.overrides and f"{key}:" in problems
            line.value = "<b>not valid</b>" if wrong else "<b>changed</b>" if key in self.overrides else ""
        self.show_error(RecipeError(problems) if problems else None)
        pairs = [f"--set {shlex.quote(f'{key}={_text(value)}')}" for key, value in self.overrides.items()]
        text = " ".join(["rstar-lab run", shlex.quote(str(self.source)), *pairs])
        self.command.value = "" if problems else f"<code>{html.escape(text)}</code>"


def _keys(recipe: Recipe) -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, dotted key, field) of all keys with a value; stages by their names, other lists of sections as a whole."""

    def walk(model: type[BaseModel], path: str) -> Iterator[tuple[str, str, FieldInfo]]:
        for name, field in model.model_fields.items():
            key = f"{path}.{name}" if path else name
            below = next((kind for kind in _kinds(field.annotation) if _is_section(kind)), None)
            if below is not None and key == "stages":
                for stage in recipe.stages:
                    yield from walk(below, f"stages.{stage.name}")
            elif below is None or get_origin(field.annotation) in (tuple, dict):
                yield path or TOP, key, field
            else:
                yield from walk(below, key)

    yield from walk(Recipe, "")


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _value(recipe: BaseModel, key: str, field: FieldInfo) -> Any:
    """Return the value of a key, or its default if the recipe does not have its section."""
    here: Any = recipe
    for part in key.split("."):
        if here is None:
            return None if field.is_required() else field.get_default(call_default_factory=True)
        here = next(item for item in here if item.name == part) if isinstance(here, tuple) else getattr(here, part)
    return here


def _text(value: Any) -> str:
    """Return a value as it is written in a recipe, on one line."""
    if isinstance(value, str | Path):
        return str(value)
    if value is None or value in ((), {}):
        return ""
    plain = to_jsonable_python(value, exclude_none=True)
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def _entry(field: FieldInfo, value: str) -> widgets.ValueWidget:
    """Return the widget of a key: a drop-down list if it has a fixed set of values, else a text field."""
    layout = widgets.Layout(width="22em")
    choices = [
        str(choice) for kind in _kinds(field.annotation) if get_origin(kind) is Literal for choice in get_args(kind)
    ]
    if field.annotation is bool:
        return widgets.Dropdown(options=["true", "false"], value=value, layout=layout)
    if get_origin(field.annotation) is Literal:
        return widgets.Dropdown(options=choices, value=value, layout=layout)
    if choices:
        return widgets.Combobox(options=choices, value=value, layout=layout)
    return widgets.Text(value=value, continuous_update=False, layout=layout)
