"""The scoring cage: worker processes in which hostile answer text can be scored (see docs/security.md)."""
