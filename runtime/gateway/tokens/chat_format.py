"""A chat template as per-role text, found by taking small rendered conversations apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChatFormat, Part, RoleFormat, Text

Render = Callable[..., str]

_S, _U, _A, _V, _T = (f"\u2603{name}\u2603" for name in ("sys", "one", "two", "three", "tool"))


def plain(bos: str = "") -> ChatFormat:
    """The format of models without a template."""
    return ChatFormat(
        opening=bos,
        roles={
            "system": RoleFormat("SYSTEM: ", "\n"),
            "user": RoleFormat("USER: ", "\n"),
            "assistant": RoleFormat("ASSISTANT:", "\n"),
            "tool": RoleFormat("TOOL: ", "\n"),
        },
    )


def write(
    form: ChatFormat, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
) -> tuple[Part, ...]:
    """A conversation in a format. Raises InvalidRequest for an unknown role or no text content."""
    parts: list[Part] = [Text(form.opening, special=True)] if form.opening else []
    if form.default_system and not (messages and messages[0].get("role") == "system"):
        parts.append(Text(form.default_system, special=True))
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content") or ""
        if role not in form.roles:
            raise InvalidRequest(f"messages[{index}]: unknown role {role!r}")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        if not isinstance(content, str):
            raise InvalidRequest(f"messages[{index}]: content must be text")
        space = " " if role == "assistant" and form.roles[role].begin[-1:].isalnum() else ""
        parts += [
            Text(form.roles[role].begin, special=True),
            Text(space + content),
            Text(form.roles[role].end, special=True),
        ]
    if add_generation_prompt:
        parts.append(Text(form.roles["assistant"].begin, special=True))
    return tuple(parts)


def derive(render: Render, bos: str) -> ChatFormat | None:
    """The format behind a template; None where it cannot be taken apart this way.

    The begin of `assistant` is the template's generation prompt, which may differ from how it
    writes an answer that is history (a thinking model's opens its thoughts). Templates that put
    the system message inside the first user turn have no exact per-role form: there the system
    message is written as a user turn of its own.
    """
    try:
        return _derive(render, bos)
    except (InvalidRequest, _NoFormatError):
        return None


class _NoFormatError(Exception):
    pass


def _derive(render: Render, bos: str) -> ChatFormat:
    user, answer, again = _message("user", _U), _message("assistant", _A), _message("user", _V)
    before_user, user_end = _cut(_text(render, [user]), _U)
    _, generation = _cut(_text(render, [user], generate=True), _U)
    assistant_begin = _without_prefix(generation, user_end)
    _, assistant_end = _cut(_text(render, [user, answer]), _A)
    _, between = _cut(_text(render, [user, answer, again]), _A)
    between, _ = _cut(between, _V)
    user_begin = _without_prefix(between, assistant_end)
    head = _without_suffix(before_user, user_begin)
    user_format = RoleFormat(user_begin, user_end)
    roles = {"user": user_format, "assistant": RoleFormat(assistant_begin, assistant_end)}
    opening, default, system = _system(render, head, user_format, bos)
    roles["system"] = system
    tool = _tool(render, [user, answer], assistant_end)
    if tool is not None:
        roles["tool"] = tool
    return ChatFormat(opening, default, roles)


def _system(render: Render, head: str, user: RoleFormat, bos: str) -> tuple[str, str, RoleFormat]:
    """Opening, default system text, and the system role's format.

    `head` is what the template writes before a conversation without a system message.
    """
    opening = bos if bos and head.startswith(bos) else ""
    try:
        text = _text(render, [_message("system", _S), _message("user", _U)])
        before, after = _cut(text, _S)
        between, _ = _cut(after, _U)
        end = _without_suffix(between, user.begin)
        if before.startswith(head):
            opening = head
        return opening, head[len(opening) :], RoleFormat(_without_prefix(before, opening), end)
    except (InvalidRequest, _NoFormatError):
        # No system messages, or inside the user's turn.
        return opening, head[len(opening) :], user


def _tool(render: Render, before: list[dict[str, Any]], assistant_end: str) -> RoleFormat | None:
    try:
        text = _text(render, [*before, _message("tool", _T)])
        begin, end = _cut(text, _T)
        _, begin = _cut(begin, _A)
        return RoleFormat(_without_prefix(begin, assistant_end), end)
    except (InvalidRequest, _NoFormatError):
        return None


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(render: Render, messages: list[dict[str, Any]], generate: bool = False) -> str:
    return render(messages=messages, add_generation_prompt=generate)


def _cut(text: str, sentinel: str) -> tuple[str, str]:
    before, found, after = text.partition(sentinel)
    if not found or sentinel in after:
        raise _NoFormatError
    return before, after


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise _NoFormatError
    return text[len(prefix) :]


def _without_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise _NoFormatError
    return text[: len(text) - len(suffix)]
