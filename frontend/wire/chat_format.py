"""Texts of roles as the served model's chat template writes them (`protocol.ChatFormat`)."""

from __future__ import annotations

import re

from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChatFormat, RoleFormat, Text

PLAIN = ChatFormat(
    roles={
        role: RoleFormat(begin=f"{role.upper()}:", end="\n")
        for role in ("system", "user", "assistant")
    }
)
"""Format for models without a chat template."""


def usable(chat: ChatFormat) -> ChatFormat:
    """Return `chat`, or the plain format for a model without one."""
    return chat if chat.roles else PLAIN


def role_format(chat: ChatFormat, role: str) -> RoleFormat:
    """Return the format of a role. Raises InvalidRequest for a role the template does not have."""
    found = chat.roles.get(role)
    if found is None:
        roles = ", ".join(sorted(chat.roles))
        raise InvalidRequest(f"the model's chat template has no role {role!r}; it has {roles}")
    return found


def begin(chat: ChatFormat, role: str, opened: bool) -> list[Text]:
    """Return the texts before a message's content. `opened`: other messages stand before it."""
    texts = []
    if not opened:
        texts.append(chat.opening)
        if role != "system":
            texts.append(chat.default_system)
    texts.append(role_format(chat, role).begin)
    return [Text(text, special=True) for text in texts if text]


def end(chat: ChatFormat, role: str) -> list[Text]:
    """Return the texts after a message's content."""
    text = role_format(chat, role).end
    return [Text(text, special=True)] if text else []


def enclosed(content: str, end: str, before: str = "") -> str:
    """Escape closing tags of `end`, such as `</tool_response>`, in the `content` of a message. A
    backslash breaks such a tag in any case of letters, with white space or not.

    `before` is earlier text of the message, in which such a tag may begin.
    """
    tags = {re.escape(tag) for tag in re.findall(r"[<\[]/\s*(\w+)", end)}
    if not tags:
        return content
    tag = re.compile(rf"([<\[])(?=/\s*(?:{'|'.join(sorted(tags))}))", re.IGNORECASE)
    whole = tag.sub(r"\1\\", before + content)
    if whole.startswith(before):
        return whole.removeprefix(before)
    return "\\" + tag.sub(r"\1\\", content)
