"""An internet on one machine: hosts are network namespaces, joined by a switch in user space.

1. `bloombee.config.networks` reads a network file; `plan` resolves it to numbers.
2. `network.Emulation` starts the switch, a process that dies with its parent.
3. `switch` makes a namespace with a TUN device for each host, and a device here.
4. Every packet passes `fabric`: the sender's line up, the path (rate, delay, loss), the
   receiver's line down. A line is a `line.Line`: one rate, one queue that drops at its tail.
5. The kernel's TCP runs between the hosts as it is; cubic is pinned on every route.

Nothing survives the switch but what still runs in a namespace: `leftovers` ends that.
Rates count IP packets, their headers included, as a line does that carries no frames.
"""
