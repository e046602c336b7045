"""A form in a notebook that describes and submits a job: `SubmitForm()`."""

from pathlib import Path
from typing import Any

import ipywidgets as widgets

from rstar_lab.errors import UserError
from rstar_lab.hardware.profiles import profile_names
from rstar_lab.jobs.job import Job, JobDescription, describe, submit
from rstar_lab.jobs.prepare import RECIPES, override_pairs
from rstar_lab.runs.locate import find_runs_dir
from rstar_lab.visible_text import escaped

COMMANDS = {"SFT, RL and evaluation": None, "RL": "train", "SFT": "sft"}


class SubmitForm:
    """Recipe, profile, host and overrides, a description of the job, and a button that submits it.

    Without a profile the job uses the profile of the host, or `laptop` on this machine.
    Submit is enabled only after Check has found no failed check for exactly these settings. After submitting, `job` is the
    submitted job. runs_dir: default: the folder that `find_runs_dir` finds.
    """

    def __init__(self, recipe: str = "tiny_fast", profile: str = "", *, host: str = "", runs_dir: str | Path = ""):
        self.runs_dir = find_runs_dir(runs_dir)
        self.description: JobDescription | None = None
        self.job: Job | None = None
        wide = widgets.Layout(width="36em")
        recipes = sorted(path.stem for path in RECIPES.glob("*.yaml"))
        self.recipe = widgets.Combobox(description="Recipe", value=recipe, options=recipes, layout=wide)
        self.profile = widgets.Combobox(description="Profile", value=profile, options=profile_names(), layout=wide)
        self.profile.placeholder = "the profile of the host; laptop on this machine"
        self.host = widgets.Text(description="Host", value=host, placeholder="this machine", layout=wide)
        self.command = widgets.Dropdown(description="Run", options=list(COMMANDS), layout=wide)
        self.overrides = widgets.Textarea(description="Overrides", placeholder="rl.lr=1e-6, one per line", layout=wide)
        self.check_button = widgets.Button(
            description="Check", tooltip="run preflight and estimate time, cost and disk"
        )
        self.submit_button = widgets.Button(description="Submit", disabled=True, button_style="primary")
        self.message = widgets.HTML()
        self.check_button.on_click(lambda _: self.check())
        self.submit_button.on_click(lambda _: self.submit())
        fields = [self.recipe, self.profile, self.host, self.command, self.overrides]
        for field in fields:
            field.observe(lambda _: self._forget(), "value")
        buttons = widgets.HBox([self.check_button, self.submit_button])
        self.root = widgets.VBox([*fields, buttons, self.message])

    def check(self) -> None:
        """Describe the job with the current settings. Enables Submit if no check failed."""
        self._forget()
        self.message.value = "checking ..."
        try:
            self.description = describe(
                self.recipe.value, self.profile.value or None, self._pairs(), host=self.host.value or None,
                command=COMMANDS[self.command.value],
            )  # fmt: skip
        except UserError as error:
            self.message.value = f"<b>{escaped(error)}</b>"
            return
        self.message.value = self.description._repr_html_()
        self.submit_button.disabled = not self.description.ready

    def submit(self) -> None:
        """Submit the job that was checked."""
        if self.description is None or not self.description.ready:
            return
        self.submit_button.disabled = True
        try:
            # The checks have just run.
            self.job = submit(
                self.recipe.value, self.profile.value or None, self._pairs(), command=COMMANDS[self.command.value],
                runs_dir=self.runs_dir, host=self.host.value or None, preflight=False, log=lambda _: None,
            )  # fmt: skip
        except UserError as error:
            self.message.value = f"<b>{escaped(error)}</b>"
            return
        self.message.value = f"submitted as <code>{escaped(self.job.id)}</code>"

    def _forget(self) -> None:
        """Disable Submit, because the settings have changed since the last check."""
        self.description = None
        self.submit_button.disabled = True

    def _pairs(self) -> dict[str, str]:
        return override_pairs(filter(None, map(str.strip, self.overrides.value.splitlines())), "override")

    def _ipython_display_(self) -> None:
        from IPython.display import display

        bundle: dict[str, Any] = self.root._repr_mimebundle_() or {}
        text = f"form for recipe {self.recipe.value} on {self.host.value or 'this machine'}; open the notebook in JupyterLab to use it"
        display({**bundle, "text/html": f"<p>{escaped(text)}</p>", "text/plain": text}, raw=True)
