"""Run the command line: `python -m rstar_lab.cli`."""

from rstar_lab.cli import main

if __name__ == "__main__":
    main()
