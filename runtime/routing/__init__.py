"""Which replica a request goes to, where several engines serve one model. NumPy only.

`index` knows what each replica's cache holds, `router` sends a request to where it costs least.
"""
