"""Running plans: launches, the programs that they are, and the executor that issues their collectives."""
