"""Several engine processes of one model behind the interface of one engine; no torch.

`replicas` starts the engines, continues a dead engine's requests at another, and merges several
answers. `dispatch` sends requests to the cheapest engine (`rootlace.runtime.routing`), and notices
lost reports of caches. `handover` has some engines compute prompts for other engines; `remote` has
places for engines of other machines.
"""
