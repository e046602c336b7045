"""The commands of `rstar-lab` that are not in a group, one file each. A file holds the options and the help; the work is done by
the package that it imports when the command runs.
"""
