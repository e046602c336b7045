"""What runs on the far side of the border: zygotes, keepers and the programs they fork. Standard library only."""
