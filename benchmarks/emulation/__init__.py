"""An internet on one machine: hosts are network namespaces, joined by a switch in user space.

1. `bloombee.config.networks` reads a network file; `plan` resolves it to numbers.
2. `network.Emulation` starts the switch, a process that dies with its parent.
3. `switch` makes a namespace with a TUN device for each host, and a device here.
4. Every packet passes `fabric`: the sender's line up, the path (rate, delay, loss), the
   receiver's line down. A line is a `line.Line`: one rate, one queue that drops at its tail.
5. The kernel's TCP runs between the hosts as it is; cubic is pinned on every route.

Nothing survives the switch but what still runs in a namespace: `leftovers` ends that.

Measured by `scripts/emulate --check` on two cores that were five times overcommitted (load
10): rates of 20 to 500 Mbit/s within 2 %, round trips 0.2 to 0.4 ms too long in the median (a
twentieth of them up to 5 ms: the probes wait for their turn), packets 0.02 ms late in the
mean. The switch takes 4 % of a core at 20 Mbit/s, 13 % at 250, 21 to 25 % at 500; without
limits it carries 9 Gbit/s with 70 %. It runs before other processes (real-time class; where
that is refused, niceness).

Rates count IP packets, their headers included, as a line does that carries no frames.
"""
