"""The forms for notebooks: keys of a recipe, the mix of its data, and a reward on stored rollouts."""

import json
from pathlib import Path

import pytest
import yaml
from ipywidgets.widgets import widget

from rstar_lab.analysis import import_messages
from rstar_lab.errors import UserError
from rstar_lab.rl.forms import MixForm, RecipeForm, RewardPreview
from rstar_lab.rl.forms.recipe_form import MOST_SHOWN
from rstar_lab.rl.overrides import RECIPES, load_recipe, parse_overrides
from rstar_lab.rl.renderers.conversations import Conversation, Message, write_conversations
from rstar_lab.rl.rescore import rescore

RUN = Path(__file__).parents[2] / "golden" / "runs" / "tiny_fast-eval-rl"


def test_the_form_has_the_keys_of_the_types_that_the_recipe_selects():
    form = RecipeForm("release_dapo")  # prompt: {format: released}
    assert "rl.prompt.format" in form.keys and "rl.prompt.system_prompt" not in form.keys
    for key in form.keys:
        form.field(key)
    form.field("rl.method.roc.rule").value = "paper"
    assert form.overrides == {"rl.method.roc.rule": "paper"} and form.recipe.rl.method.roc.rule == "paper"


@pytest.mark.parametrize("name", ["tiny_fast", "evaluate", "qwen3_14b_mi300x"])
def test_the_form_has_every_key_and_changes_nothing_by_itself(name):
    form = RecipeForm(name)
    assert form.recipe == load_recipe(name) and form.overrides == {} and form.message.value == ""
    recipe = form.recipe.model_dump(mode="json")
    for section in ("rl", "sft", "engine", "sandbox", "evaluate"):
        for key, value in (recipe[section] or {}).items():
            if not isinstance(value, dict):
                below = f"{section}.{key}."  # of a section that the recipe does not have
                assert f"{section}.{key}" in form.keys or any(name.startswith(below) for name in form.keys)
    for stage in recipe["stages"]:
        assert f"stages.{stage['name']}.steps" in form.keys


def test_a_change_is_an_override_that_the_command_line_reads_alike():
    form = RecipeForm("tiny_fast")
    for key, value in {
        "rl.lr": "1e-4",
        "rl.method.roc.rule": "released",
        "stages.rl.steps": "9",
        "rl.tools": "[python]",
    }.items():
        form.field(key).value = value
    assert form.overrides == parse_overrides(["rl.lr=1e-4", "rl.method.roc.rule=released", "stages.rl.steps=9"]), (
        "tools is unchanged"
    )
    assert form.recipe == load_recipe("tiny_fast", form.overrides)
    assert "--set rl.lr=0.0001" in form.command.value
    form.field("rl.lr").value = RecipeForm("tiny_fast").field("rl.lr").value
    assert "rl.lr" not in form.overrides


def test_a_wrong_value_is_an_error_at_its_key_until_it_is_corrected():
    form = RecipeForm("tiny_fast")
    form.field("rl.group_size").value = "0"
    assert form.recipe is None and "rl.group_size: " in form.message.value and form.command.value == ""
    form.section.value = "rl"
    notes = dict(zip(form.shown(), [row.children[1].value for row in form.body.children], strict=True))
    assert "not valid" in notes["rl.group_size"] and "<b>" not in notes["rl.lr"]
    form.field("rl.group_size").value = "16"
    assert form.recipe.rl.group_size == 16 and form.message.value == ""


def test_search_finds_keys_of_all_sections_and_texts():
    form = RecipeForm("tiny_fast")
    form.section.value = "engine"
    assert len(form.body.children) == len(form.shown()) and all(key.startswith("engine.") for key in form.shown())
    form.search.value = "max_response_tokens"
    assert {"rl.limits.max_response_tokens", "evaluate.max_response_tokens"} <= set(form.shown())
    assert "rl.lr" not in form.shown() and form.found.value == ""


def test_a_new_form_has_few_widgets_and_a_search_shows_a_part_of_many_keys():
    before = len(widget._instances)
    form = RecipeForm("qwen3_14b_mi300x")
    assert len(widget._instances) - before < 200, "each one is a message to the browser"
    form.search.value = "e"
    assert len(form.shown()) > MOST_SHOWN == len(form.body.children)
    assert form.found.value == f"{MOST_SHOWN} of {len(form.shown())} keys that match are shown."


def mixed_recipe(folder, environments=()):
    messages = (Message(role="user", content="?"), Message(role="assistant", content="!"))
    for name, count in (("chat", 5), ("calls", 20)):
        rows = [Conversation(conversation_id=f"{name}-{n}", source="test", messages=messages) for n in range(count)]
        write_conversations(folder / f"{name}.jsonl", rows)
    recipe = yaml.safe_load((RECIPES / "tiny_fast.yaml").read_text())
    recipe["sft"] = {
        "conversations": [{"file": str(folder / "chat.jsonl")}, {"file": str(folder / "calls.jsonl"), "count": 10}]
    }
    recipe["rl"] |= {"environments": [{"name": name, "weight": weight} for name, weight in environments]}
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_sliders_give_the_counts_and_overrides_of_the_mix(tmp_path):
    form = MixForm(mixed_recipe(tmp_path, [("maths", 1.0), ("sql", 2.0)]))
    assert form.counts == {"chat": 5, "calls": 10, "maths": 4.0, "sql": 8.0} and form.overrides == {}, (
        "12 groups a step"
    )
    form.sliders["calls"].value = 15
    form.sliders["maths"].value = 4.0
    assert form.counts == {"chat": 5, "calls": 15, "maths": 8.0, "sql": 4.0}
    assert "<td>75.0%</td>" in form.table.value and "<td>66.7%</td>" in form.table.value
    recipe = load_recipe(form.source, form.overrides)
    assert [entry.count for entry in recipe.sft.conversations] == [None, 15]
    assert [entry.weight for entry in recipe.rl.environments] == [4.0, 2.0]
    form.sliders["calls"].value = 99
    assert form.counts["calls"] == 20, "the file has no more"


def test_a_recipe_without_a_mix_is_refused():
    with pytest.raises(UserError, match="has no data mix"):
        MixForm("tiny_fast")


def test_the_preview_equals_a_dry_run_of_rescore():
    preview = RewardPreview(RUN, n=10_000)
    for reward, answer in (("verify", "tagged"), ("verify", "last_number"), ("released", "tagged")):
        preview.reward.value, preview.answer.value = reward, answer
        expected = rescore(RUN, reward=reward, answer=answer, dry_run=True)
        changed = preview.table[preview.table.changed]
        assert dict(zip(changed.traj_id, changed.reward, strict=True)) == {
            c.traj_id: c.reward for c in expected.changes
        }
        assert f"of {expected.trajectories} rollouts changes" in preview.summary()


def test_imported_rollouts_without_a_reward_are_scored(tmp_path):
    rows = [
        {
            "id": number,
            "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": text}],
            "truth": "2",
        }
        for number, text in enumerate(("<answer>\\boxed{2}</answer>", "<answer>\\boxed{3}</answer>"))
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    run = import_messages(file, tmp_path / "runs")
    found = rescore(run, dry_run=True)
    assert [(change.reward_before, change.reward) for change in found.changes] == [(None, 1.0), (None, 0.0)]
    assert (found.correct_before, found.correct) == (0, 1)
    preview = RewardPreview(run)
    assert preview.output.value.count("not scored") == 2 and preview.table.changed.all()
    for row in rows:
        del row["truth"]
    file.write_text("\n".join(map(json.dumps, rows)))
    run = import_messages(file, tmp_path / "runs", run_id="no_truth")
    with pytest.raises(UserError, match="2 of 2 trajectories have no correct answer"):
        rescore(run, dry_run=True)
    assert "has no correct answer" in RewardPreview(run).message.value


def test_an_error_of_the_reward_is_shown_and_the_table_stays():
    preview = RewardPreview(RUN)
    before = preview.output.value
    assert len(preview.table) == 12 and not preview.table.changed.any()
    preview.reward.value = "no_such_module:reward"
    assert "no_such_module" in preview.message.value and preview.output.value == before
    preview.reward.value = "verify"
    assert preview.message.value == ""


def test_rollouts_of_the_preview_can_be_chosen():
    first = RewardPreview(RUN).table.traj_id[:3].tolist()
    assert RewardPreview(RUN, traj_ids=first[::-1]).table.traj_id.tolist() == first[::-1]
    with pytest.raises(UserError, match="no rollout nobody"):
        RewardPreview(RUN, traj_ids=["nobody"])
    with pytest.raises(UserError, match="no step 99"):
        RewardPreview(RUN, step=99)
