"""`rstar-lab doctor`: why does this run not learn? Rules over the log of a run, of this project or of another trainer."""

from rstar_lab.doctor.diagnosis import Diagnosis, doctor
from rstar_lab.doctor.rule import Evidence, Log, Rule, rule

__all__ = ["Diagnosis", "Evidence", "Log", "Rule", "doctor", "rule"]
