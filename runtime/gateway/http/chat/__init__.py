"""What all chat interfaces share: a conversation in, the pieces of an answer out.

Each interface reads its bodies as a `request.ChatRequest`, lets `chats.Chats` run it, and writes
what comes back in its own dialect.
"""
