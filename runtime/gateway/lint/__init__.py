"""What is noticed about prompts that could share more of the cache than they do.

`fingerprints` finds what two prompts have in common wherever it stands, `prompt_lint` compares each
prompt with those that came before it, and `finding` says what was found, in words.
"""
