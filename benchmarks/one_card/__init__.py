"""Eight capabilities on one card that holds 40 % of them: ours beside what one would use instead.

    python -m benchmarks.one_card --minutes 6 --seed 7

One mixed hour, recorded once and scaled to this machine (`hour.py`), is played against four systems
one after the other, each with the same engines, models and budget of memory:

- `ours`: the shipped graph, arbiter included;
- `multiplexed`: a Ray Serve deployment for each capability, with `@serve.multiplexed`, whose models
  leave by count, and zero replicas after a pause;
- `one_at_a_time`: one model resident, swapped on demand;
- `static_split`: the budget in two fixed parts, the first for chat, the second for all other models
  in turn.

The last two are a bare proxy in one process, without Ray, a queue or keys, which favours them. Each
stands twice: with `fork`, the engines begin in our zygote, which has their libraries imported; with
`fresh`, in an interpreter of their own, as a program that starts model servers does (N5).
"""
