"""The tables of the shortest run that does everything; settings above the tables are the test's own."""

SHORT = """
threads = 1
[tasks.count_bits]
params = { min_n = 1, max_n = 1023 }
[rollout]
problems = 2
[eval]
problems = 2
samples = 1
"""
