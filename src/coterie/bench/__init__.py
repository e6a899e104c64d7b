"""Measurements of this machine: `coterie bench NAME`."""
