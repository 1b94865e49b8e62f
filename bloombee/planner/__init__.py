"""Who serves what: the cost model, the planner, and the pure policies of placement and recovery.

No torch, no clock, no I/O. From what is known to a plan:

1. `profiles` and `workload` hold the facts and what is asked; `clusters` and `roofline` make
   them from files, `memory` says what lies where, `costs` what everything takes.
2. `order_dp` is exact for peers in a given order, `set_search` for all orders of up to ten,
   `order_search` looks for good ones of many; `limits` trades latency for bottleneck in all.
3. `planning` goes over batches, micro-batches and heads, `replicas` over several routes;
   `assembly` makes the record (`plan`), `explanation` says why there is none, `alternatives`
   what else there would be.
4. `simulator` plays `jobs` in virtual time; `rehearsal` ranks plans by it, `contest` compares
   them with the `layouts` of other systems (`flow`: their max-flow).

`placement`, `moves` (with `shifts`), `recovery` and `handover` are what servers and clients
decide by while they run; `churn` plays hours of it under different `rules` of placement.
"""
