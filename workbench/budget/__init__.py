"""How many drafted nodes of each request are verified."""
