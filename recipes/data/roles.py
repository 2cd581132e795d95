"""Who says a message: ShareGPT's names as roles, roles that no template knows, and turns that are
not to be learned."""

from collections.abc import Mapping, Sequence
from typing import Any

from longctx_patch.recipes.data.records import Record
from longctx_patch.rules.names import did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_SPEAKERS = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}


def with_roles(record: Record) -> Record:
    """A record whose messages have `role` and `content` where ShareGPT's have `from` and `value`,
    and its field `system` as the first message.

    Raises BadRecord for who is neither human, gpt nor a role.
    """
    found = {name: record.fields.get(name) for name in _LISTS}
    named = {name: value for name, value in found.items() if _is_sharegpt(value)}
    if not named:
        return record
    fields = {**record.fields}
    for name, messages in named.items():
        fields[name] = [_with_role(record, name, n, m) for n, m in enumerate(messages or (), 1)]
    system = fields.pop("system", None)
    if system and "conversations" in named:
        fields["conversations"].insert(0, {"role": "system", "content": system})
    return record._replace(fields=fields)


def _is_sharegpt(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(message, Mapping) and "from" in message and "role" not in message
        for message in value
    )


def _with_role(record: Record, field: str, number: int, message: Mapping[str, Any]) -> Any:
    if not isinstance(message, Mapping) or "from" not in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    role = _SPEAKERS.get(str(message["from"]))
    if role is None:
        raise record.refused(
            f"message {number} of {field} is from {message['from']!r}. Of ShareGPT's names "
            f"`human`, `gpt` and `system` are read. Write it with `role` ({', '.join(ROLES)}) and "
            "`content`: a call of a tool as tool_calls of the assistant, its result with the role "
            "tool."
        )
    return {"role": role, "content": message.get("value"), **rest}


def check_roles(
    record: Record, field: str, messages: Sequence[Mapping[str, Any]], template: Any
) -> None:
    """Raise BadRecord for a role that neither is usual nor stands in the chat template, whose turn
    a template for any role would write, and which would not be learned as the assistant's."""
    text = " ".join(template.values()) if isinstance(template, dict) else str(template)
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in text and f'"{role}"' not in text:
            raise record.refused(
                f"message {number} of {field} has the role {role!r}, which the chat template does "
                "not name, so that its turn would not be learned as the assistant's."
                f"{did_you_mean(role, ROLES)} Give one of {', '.join(ROLES)}, or a template that "
                "names it (--chat-template FILE)."
            )


def check_weights(
    record: Record, field: str, messages: Sequence[Mapping[str, Any]], *, assistant_only: bool
) -> None:
    """Raise BadRecord for a turn that is learned, and of which the record says otherwise."""
    for number, message in enumerate(messages, start=1):
        if assistant_only and message["role"] != "assistant":
            continue
        for name in ("weight", "train"):
            if message.get(name) not in (None, 1):
                raise record.refused(
                    f"message {number} of {field} has {name}={message[name]!r}, and its turn would "
                    f"be learned like any other. Leave {name} out, or split the record: what is "
                    "not to be learned as `prompt`, what follows as `completion`."
                )
