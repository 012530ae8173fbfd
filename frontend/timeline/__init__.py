"""What a run did and when: `spans` is the data, `page` draws it as one HTML page.

It stands beneath the language, so that a state can give its timeline. `rootlace.program` makes it.
"""
