"""The rules of the doctor, by what they read: tables of `Rule`."""

from rstar_lab.doctor.rule import Rule
from rstar_lab.doctor.rules import answers, calls, groups, metrics, texts, tokens

RULES: tuple[Rule, ...] = tuple(
    rule for module in (groups, answers, metrics, texts, tokens, calls) for rule in module.RULES
)
