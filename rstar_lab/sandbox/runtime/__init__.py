"""Code of the sandbox's own processes: zygotes, supervisors, and the programs they fork. Imports only the standard library."""
