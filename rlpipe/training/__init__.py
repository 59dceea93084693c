"""The training loops and what one iteration of them is made of."""
