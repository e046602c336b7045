"""The commands of `rstar-lab` that are not in a group, one file each. A file holds the options and the help text. The
implementation is in the package that the file imports when the command runs.
"""
