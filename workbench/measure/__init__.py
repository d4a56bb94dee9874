"""Timing, records, sweeps."""
