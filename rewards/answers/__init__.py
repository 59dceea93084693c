"""Answers: finding them in a response, bringing them into a plain form, comparing them."""
