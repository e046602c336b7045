"""Adapters that run the agent loop, RoC, the objective and the run store inside verl.

This file imports nothing: verl loads the plug-in of this package while verl itself is being imported.
"""
