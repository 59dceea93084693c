"""Running a program that nobody trusts."""
