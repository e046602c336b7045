"""Recipe keys that name data: problem sets and files of conversations."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rstar_lab.rl.section import Positive, Section


class Synthetic(Section):
    """Problems generated from the synthetic families. The same keys always generate the same problems."""

    count: Positive
    """Number of problems."""
    seed: int = 0
    """Seed of the generator."""
    levels: tuple[int, ...] | None = None
    """Difficulty levels, 1 to 4. Default: all."""
    families: tuple[str, ...] | None = None
    """Problem families; `words` or `words_held_out`: word problems with disjoint templates; or your own `module:function`
    (docs/extending.md). Default: all but word problems."""


class Problems(Section):
    """A problem set: either `file` or `synthetic`."""

    file: Path | None = None
    """A Parquet, JSON, JSONL or CSV file with one problem per row, or a data set of the Hugging Face Hub, such as
    `openai/gsm8k:test` (docs/data.md)."""
    fields: dict[Literal["problem_id", "question", "answer", "source", "difficulty", "info", "environment"], str] = (
        Field({})
    )
    """Column names of the file: `{question: problem, answer: solution}`."""
    synthetic: Synthetic | None = None
    """Problems generated from the synthetic families."""
    environment: str | None = None
    """Entry of `rl.environments` that the problems belong to. Default: the field `environment` of each problem."""
    limit: Positive | None = None
    """Use only the first `limit` problems. Default: all."""

    @model_validator(mode="after")
    def _check_one_source(self) -> "Problems":
        if (self.file is None) == (self.synthetic is None):
            raise ValueError("give either file or synthetic")
        return self


class MixEntry(Section):
    """A file of SFT conversations."""

    file: Path
    """File written by `rstar-lab data convert`."""
    count: Positive | None = None
    """Maximum number of conversations, drawn at random. Default: all."""
    exact: bool = False
    """Fail if the file has fewer conversations than `count`."""
