"""Figures and widgets."""
