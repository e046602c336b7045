"""Tests of the measured rates of the doctor: the page and the shown confidence follow from the recorded scores."""

import json
from pathlib import Path

from benchmarks.doctor import HONEST, REPORTED, fault_table, jobs, named, rates, recorded, summary
from benchmarks.faults import FAULTS
from benchmarks.planted import PLANTED, chosen
from benchmarks.trl_faults import FAULTS as FAULTS_IN_TRL
from benchmarks.trl_faults import logs_summary, recorded_logs
from benchmarks.verl_faults import FAULTS as FAULTS_IN_VERL
from benchmarks.verl_faults import HONEST as HONEST_IN_VERL
from benchmarks.verl_faults import (
    grader_refuses,
    keys_of,
    lenient_grader,
    recorded_runs,
    runs_summary,
    wrong_reward_sign,
)
from rstar_lab.doctor.diagnosis import RATES_FILE
from rstar_lab.doctor.rules import RULES
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.overrides import load_recipe, parse_overrides
from rstar_lab.rl.verl.unsupported import check

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_the_page_and_the_rates_follow_from_the_recorded_scores():
    scores = recorded()
    page = PAGE.read_text()
    for name, content in (("summary", summary), ("faults", fault_table)):
        assert page.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0] == content(scores), name
    assert json.loads(RATES_FILE.read_text()) == rates(scores)


def test_the_page_follows_from_the_recorded_logs_of_trl():
    scores = recorded_logs()
    assert PAGE.read_text().split("<!-- trl -->\n")[1].split("<!-- end -->")[0] == logs_summary(scores)
    assert {*scores.fault} <= {"honest", *FAULTS_IN_TRL} and set(scores.rule) <= {"", *(rule.name for rule in RULES)}


def test_the_page_follows_from_the_recorded_runs_of_verl():
    scores = recorded_runs()
    assert PAGE.read_text().split("<!-- verl -->\n")[1].split("<!-- end -->")[0] == runs_summary(scores)
    assert {*scores.fault} <= {HONEST_IN_VERL, *FAULTS_IN_VERL} and set(scores.rule) <= {
        "",
        *(rule.name for rule in RULES),
    }


def test_recorded_scores_name_known_rules_faults_and_seeds():
    scores = recorded()
    assert set(scores.rule) <= {"", *(rule.name for rule in RULES)}
    assert set(scores.fault) <= {"honest", *PLANTED} and set(scores[scores.fault == "honest"].strength) <= set(HONEST)
    runs = scores[scores.rule == ""]
    assert not runs.duplicated(["fault", "strength", "seed"]).any() and set(runs.seed) & set(REPORTED)
    assert len(named(scores)) == (runs.fault != "honest").sum()


def test_at_least_20_faults_exist_and_each_is_named_by_known_rules():
    names = {rule.name for rule in RULES}
    assert len({*FAULTS, *PLANTED}) >= 30
    assert all(set(fault.named_by) <= names for fault in PLANTED.values())
    assert all(fault.named_by for fault in PLANTED.values())
    assert len({job.name for job in jobs()}) == len(jobs())


def test_keys_of_a_fault_are_valid_and_its_program_is_repaired(subtests):
    for fault in PLANTED.values():
        for strength in fault.strengths:
            with subtests.test(fault.name):
                load_recipe("tiny_fast", dict(fault.keys(strength)))
                with fault.planted(strength):
                    pass
    assert 0.25 < sum(chosen(str(i), 0.3) for i in range(1000)) / 1000 < 0.35


def test_verl_accepts_the_recipe_of_a_fault(tmp_path, subtests):
    for fault in (HONEST_IN_VERL, *FAULTS_IN_VERL):
        with subtests.test(fault):
            problems = tmp_path / f"{fault}.jsonl"
            keys = keys_of(fault, tmp_path / "model", problems)
            pairs = parse_overrides([f"{name}={json.dumps(value)}" for name, value in keys.items()])
            recipe = load_recipe("tiny_fast", pairs | {"runs": str(tmp_path)}, load_profile("laptop"))
            check(recipe)
            changed = fault != HONEST_IN_VERL and PLANTED[fault].problems is not None
            assert recipe.stages[0].steps == 12 and problems.exists() == changed
            if changed:
                assert len(load_problems(problems)) > 100


def test_graders_of_verl_err_on_their_share_of_answers():
    texts = [rf"</reason>\n<answer>\boxed{{{number}}}</answer>" for number in range(200)]
    right = [sum(grade(text, str(n)) for n, text in enumerate(texts)) for grade in (grader_refuses, wrong_reward_sign)]
    wrong = [
        sum(grade(text, str(n + 1)) for n, text in enumerate(texts)) for grade in (lenient_grader, wrong_reward_sign)
    ]
    assert 140 < right[0] < 180 and right[1] == 0 and 20 < wrong[0] < 60 and wrong[1] == 200
