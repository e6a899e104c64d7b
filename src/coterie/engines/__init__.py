"""Engines: token ids in, sampled token ids and their log-probs out. See :mod:`coterie.engines.base`."""
