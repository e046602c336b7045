"""Keep secrets out of logs and job files: values of secret environment variables, and passwords in URLs."""

import os
import re
from collections.abc import Collection, Mapping

from rstar_lab.common.errors import UserError
from rstar_lab.runs import provenance

SECRET_NAME = re.compile(r"(^|[_.\-])(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
# Without the scheme: a pattern that begins with a repeated class takes quadratic time on long lines.
URL_PASSWORD = re.compile(r"(?P<before>://[^\s:/@]*:)(?P<password>[^\s/@]+)(?P<after>@)")
HIDDEN = "***"
# Shorter values occur in ordinary output by chance; replacing them would garble logs.
MIN_LENGTH = 6


def secret_values(environ: Mapping[str, str] = os.environ, names: Collection[str] = ()) -> list[str]:
    """Return the values to hide, longest first, so that a secret inside another one leaves no remainder.

    names: variables that are secret whatever they are called. A value of several lines is hidden line by line.
    """
    named = {value for name, value in environ.items() if name in names or SECRET_NAME.search(name)}
    named |= {match["password"] for value in environ.values() for match in URL_PASSWORD.finditer(value)}
    lines = {line for value in named for line in value.splitlines()}
    return sorted((line for line in lines if len(line) >= MIN_LENGTH), key=len, reverse=True)


def redact(text: str, values: list[str]) -> str:
    """Return `text` with every secret value and every password of a URL replaced by ***."""
    for value in values:
        text = text.replace(value, HIDDEN)
    return URL_PASSWORD.sub(rf"\g<before>{HIDDEN}\g<after>", text)


def refuse_secrets(overrides: Mapping[str, object]) -> None:
    """Reject secrets among the overrides, which are stored with the job and the run. Raises UserError with the key."""
    for key, value in overrides.items():
        if provenance.redact(value, key) != value:
            raise UserError(
                f"{key}: a secret cannot be an override, because overrides are stored with the job; "
                "set an environment variable instead (for Redis: RSTAR_LAB_REDIS_URL) and remove the key"
            )
