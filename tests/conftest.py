"""Its place makes the modules of this folder importable from every test."""
