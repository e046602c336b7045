"""The package inside verl: its agent loop, RoC, objective and run store behind verl's hooks. Nothing is imported here,
since verl loads the plug-in of this package while it is being imported itself."""
