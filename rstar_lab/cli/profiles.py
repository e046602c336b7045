"""`rstar-lab profiles`."""

from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, examples, print_shipped

app = typer.Typer()


@app.command(epilog=examples("rstar-lab profiles", "rstar-lab profiles h100x8_local > mine.yaml"))
def profiles(
    name: Annotated[
        str | None, typer.Argument(help="Print the file of this profile. Default: list all profiles.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the hardware profiles in the package, or print one. Their names can be used as --profile."""
    from rstar_lab.hardware.profiles import load_profile, profile_file, profile_names

    print_shipped(name, profile_file, as_json, {each: load_profile(each).description for each in profile_names()})
