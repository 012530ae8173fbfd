"""Blocks below the pool, on disk or in host memory: saved on eviction, read back on a match.

 pool  --evict-->  host memory  --evict-->  disk
   ^                    |                    |
   +---- fetch for a prompt that matches ----+

`levels` describes the levels and saves blocks; `fetching` reads blocks back; `transfer` moves
blocks between engines; `tiering` joins the three for the scheduler.
"""
