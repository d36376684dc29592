"""Ranks on several hosts, which ssh reaches: the launcher on one machine, an agent of its own on each host.

    launcher (weft.launch.local)                           host
      elsewhere ── ssh ── agent ── weft.launch.running.local_ranks ── ranks
      page  <──────────── page <─────────────────────────────── their signs

What the launcher and an agent say to each other goes through ssh's standard streams, so ssh proves who they are and
nobody else can read it. Each host has a page of all ranks; what changes in one is copied into the others.

wire (messages) -> mirror (two pages alike), recordings -> agent (on a host) | elsewhere (beside the launcher)
"""
