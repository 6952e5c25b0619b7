"""The real core in virtual time, against a demand known in advance: what would it have cost?

Three parts: `demand` says who wants which model when and what a load of it takes, `world` answers
the core's decisions as holders and agents would, `score` adds up what requests waited. Used by
`arbiter whatif` on recorded logs and by benchmarks.replay on public traces. No rule of the core is
repeated here, and nothing here reads a clock or a file.
"""
