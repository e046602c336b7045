"""What runs on the far side of the border: zygotes, supervisors and the programs they fork. Standard library only."""
