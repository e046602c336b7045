"""A form for the keys of a recipe, with their documentation and validation at every change: `RecipeForm()`."""

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

from rstar_lab.common.visible_text import escaped
from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.recipe import Recipe, RecipeError

TOP = "top level"
# Largest number of keys that a search shows. Each key needs about six messages to the browser.
MOST_SHOWN = 40


class RecipeForm:
    """A form with one field for every recipe key: value, default, description, and the error if the value is invalid.

    recipe: name of a shipped recipe, or a file. `overrides` holds the changed keys, as for `submit` and `--set`; `recipe` is the
    changed recipe, or None while a value is invalid. Raises RecipeError if the recipe cannot be loaded.
    """

    def __init__(self, recipe: str | Path = "tiny_fast"):
        self.source = recipe
        self.base = load_recipe(recipe)
        self.recipe: Recipe | None = self.base
        self.overrides: dict[str, Any] = {}
        self.keys: dict[str, FieldInfo] = {}
        self._sections: dict[str, list[str]] = {}
        for section, key, field in _keys(self.base):
            self._sections.setdefault(section, []).append(key)
            self.keys[key] = field
        self._problems = ""
        self._about = {key: _about(field) for key, field in self.keys.items()}
        # Created when they are first shown, because the browser needs seconds for the thousand widgets of all keys.
        self._fields: dict[str, widgets.ValueWidget] = {}
        self._notes: dict[str, widgets.HTML] = {}
        self._rows: dict[str, widgets.VBox] = {}
        self._label_layout, self._line_layout = widgets.Layout(width="20em"), widgets.Layout(flex_flow="row wrap")
        self._field_layout, self._row_layout = widgets.Layout(width="22em"), widgets.Layout()
        self._text_style = widgets.HTML().style
        wide = widgets.Layout(width="30em")
        self.section = widgets.Dropdown(description="Section", options=list(self._sections), layout=wide)
        self.search = widgets.Text(description="Search", placeholder="part of a key or of its description", layout=wide)
        self.found = widgets.HTML()
        self.message = widgets.HTML()
        self.command = widgets.HTML()
        self.body = widgets.VBox(layout=widgets.Layout(max_height="28em", overflow="auto"))
        for chooser in (self.section, self.search):
            chooser.observe(lambda _: self._show(), "value")
        head = widgets.HBox([self.section, self.search], layout=self._line_layout)
        self.root = widgets.VBox([head, self.found, self.body, self.message, self.command])
        self._show()
        self._validate()

    def field(self, key: str) -> widgets.ValueWidget:
        """Return the widget with the value of a key. Raises KeyError if the recipe does not have the key."""
        if key not in self._fields:
            value = _text(_value(self.base, key, self.keys[key]))
            self._fields[key] = entry = _entry(self.keys[key], value, self._field_layout)
            entry.observe(lambda change: self._change(key, change["new"], value), "value")
        return self._fields[key]

    def shown(self) -> list[str]:
        """Return the keys of the selected section, or during a search the matching keys of all sections."""
        text = self.search.value.strip().lower()
        if not text:
            return self._sections[self.section.value]
        return [key for key, about in self._about.items() if text in key or text in about.lower()]

    def _ipython_display_(self) -> None:
        """Show the form; where widgets cannot run, as on GitHub, the changed keys."""
        from IPython.display import display

        changed = ", ".join(f"{key}={value}" for key, value in self.overrides.items()) or "no key changed"
        text = f"recipe {self.source}: {changed}; open the notebook in JupyterLab to use the form"
        bundle: dict[str, Any] = self.root._repr_mimebundle_() or {}
        display({**bundle, "text/html": f"<p>{escaped(text)}</p>", "text/plain": text}, raw=True)

    def _show(self) -> None:
        keys = self.shown()
        most = MOST_SHOWN if self.search.value.strip() else len(keys)
        self.body.children = [self._row(key) for key in keys[:most]]
        self.found.value = f"{most} of {len(keys)} keys that match are shown." if len(keys) > most else ""

    def _row(self, key: str) -> widgets.VBox:
        if key not in self._rows:
            entry = self.field(key)
            label = widgets.HTML(f"<code>{escaped(key)}</code>", layout=self._label_layout, style=self._text_style)
            line = widgets.HBox([label, entry], layout=self._line_layout)
            self._notes[key] = widgets.HTML(self._note(key), layout=self._row_layout, style=self._text_style)
            self._rows[key] = widgets.VBox([line, self._notes[key]], layout=self._row_layout)
        return self._rows[key]

    def _note(self, key: str) -> str:
        """Return the text below a field: whether it is changed or invalid, and its description."""
        wrong = key in self.overrides and f"{key}:" in self._problems
        mark = "<b>not valid</b> " if wrong else "<b>changed</b> " if key in self.overrides else ""
        return f"{mark}<small>{self._about[key]}</small>"

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
        self._problems = ""
        try:
            self.recipe = load_recipe(self.source, self.overrides)
        except RecipeError as error:
            self.recipe, self._problems = None, re.sub(r"^recipe \S+: ", "", str(error))
        for key, note in self._notes.items():
            note.value = self._note(key)
        self.message.value = f'<span role="alert"><b>{escaped(self._problems)}</b></span>' if self._problems else ""
        pairs = [f"--set {shlex.quote(f'{key}={_text(value)}')}" for key, value in self.overrides.items()]
        text = " ".join(["rstar-lab run", shlex.quote(str(self.source)), *pairs])
        self.command.value = "" if self._problems else f"<code>{escaped(text)}</code>"


def _keys(recipe: Recipe) -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, dotted key, field) of all keys with a value; stages by their names, other lists of sections as a whole."""

    def walk(model: type[BaseModel], path: str, section: BaseModel | None) -> Iterator[tuple[str, str, FieldInfo]]:
        for name, field in model.model_fields.items():
            key, value = f"{path}.{name}" if path else name, getattr(section, name, None)
            below = next((kind for kind in _kinds(field.annotation) if _is_section(kind)), None)
            if below is not None and key == "stages":
                for stage in recipe.stages:
                    yield from walk(below, f"stages.{stage.name}", stage)
            elif below is None or get_origin(field.annotation) in (tuple, dict):
                yield path or TOP, key, field
            elif isinstance(value, BaseModel):  # of a union, the section of the recipe
                yield from walk(type(value), key, value)
            else:
                yield from walk(below, key, None)

    yield from walk(Recipe, "", recipe)


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


def _about(field: FieldInfo) -> str:
    """Return the description of a key and its default value as HTML."""
    about = re.sub(r"`([^`]*)`", r"<code>\1</code>", escaped(" ".join((field.description or "").split())))
    if not field.is_required():
        default = _text(field.get_default(call_default_factory=True)) or "none"
        about += f" Default value: <code>{escaped(default)}</code>."
    return about


def _entry(field: FieldInfo, value: str, layout: widgets.Layout) -> widgets.ValueWidget:
    """Return the widget of a key: a drop-down list if it has a fixed set of values, else a text field."""
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
