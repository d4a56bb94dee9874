"""Speculative decoding workbench: drafters, search, verification, measurement."""
