"""JSON schemas as they are found in practice, with instances that are valid and invalid.

Arguments of tools, records taken from text, configuration, orders, answers of services, trees. All
written for this project. Valid instances have their properties in the order of the schema, so that
they can be generated as they stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True)
class NamedSchema:
    """`valid` and `invalid` are instances of `schema` (draft 2020-12, formats asserted)."""

    name: str
    schema: Schema
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def _closed(properties: Schema, *optional: str, **more: Any) -> Schema:
    """An object of these properties and no others, all required but the `optional` ones."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
        **more,
    }


def _open(properties: Schema, *required: str, **more: Any) -> Schema:
    """An object with these properties and perhaps others."""
    schema: Schema = {"type": "object", "properties": properties, **more}
    return schema | ({"required": list(required)} if required else {})


def _list(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return schema


def _text(least: int, most: int) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most}


def _format(name: str) -> Schema:
    return {"type": "string", "format": name}


def _pattern(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def _between(low: float, high: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TOOL_CALLS = (
    NamedSchema(
        "tool_weather",
        _closed(
            {
                "location": STRING,
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": _between(1, 14),
            },
            "days",
        ),
        (
            {"location": "São Paulo", "unit": "celsius", "days": 3},
            {"location": "", "unit": "celsius"},
        ),
        ({"location": "Oslo", "unit": "kelvin"}, {"unit": "celsius"}),
    ),
    NamedSchema(
        "tool_search",
        _closed(
            {"query": _text(1, 120), "limit": _between(1, 50), "sort": {"enum": ["date", "score"]}},
            "limit",
            "sort",
        ),
        ({"query": "radix tree"}, {"query": 'a "quoted" word', "limit": 50, "sort": "date"}),
        ({"query": ""}, {"query": "x", "limit": 0}),
    ),
    NamedSchema(
        "tool_call_named",
        {
            "oneOf": [
                _closed(
                    {"name": {"const": "add"}, "arguments": _closed({"a": NUMBER, "b": NUMBER})}
                ),
                _closed({"name": {"const": "echo"}, "arguments": _closed({"text": STRING})}),
                _closed({"name": {"const": "now"}, "arguments": _closed({})}),
            ]
        },
        (
            {"name": "add", "arguments": {"a": 1, "b": -2.5}},
            {"name": "now", "arguments": {}},
        ),
        ({"name": "echo", "arguments": {"a": 1, "b": 2}}, {"name": "later", "arguments": {}}),
    ),
    NamedSchema(
        "tool_send_email",
        _closed(
            {
                "to": _list(_format("email"), 1, 5),
                "subject": _text(1, 80),
                "body": STRING,
                "send_at": _format("date-time"),
            },
            "send_at",
        ),
        (
            {"to": ["ada@example.org"], "subject": "Hello", "body": "Line one\nline two"},
            {
                "to": ["a@b.co", "c@d.co"],
                "subject": "Later",
                "body": "",
                "send_at": "2025-03-01T08:00:00+01:00",
            },
        ),
        ({"to": [], "subject": "x", "body": "y"}, {"to": ["nobody"], "subject": "x", "body": "y"}),
    ),
    NamedSchema(
        "tool_calendar_event",
        _closed(
            {
                "title": STRING,
                "start": _format("date-time"),
                "minutes": {"type": "integer", "minimum": 15, "maximum": 480, "multipleOf": 15},
                "attendees": _list(STRING, most=10),
                "online": BOOLEAN,
            },
            "attendees",
        ),
        (
            {
                "title": "Review",
                "start": "2024-05-06T14:30:00Z",
                "minutes": 45,
                "attendees": ["Ada", "Grace"],
                "online": True,
            },
        ),
        (
            {"title": "Review", "start": "2024-05-06T14:30:00Z", "minutes": 50, "online": True},
            {"title": "Review", "start": "tomorrow", "minutes": 30, "online": True},
        ),
    ),
    NamedSchema(
        "tool_sql_query",
        _closed(
            {
                "table": _pattern("^[a-z_][a-z0-9_]*$"),
                "columns": _list(_pattern("^[a-z_][a-z0-9_]*$"), 1),
                "where": _list(
                    _closed(
                        {
                            "column": STRING,
                            "op": {"enum": ["=", "<", ">", "<=", ">=", "!=", "like"]},
                            "value": {"type": ["string", "number", "boolean", "null"]},
                        }
                    )
                ),
                "limit": _between(1, 1000),
            },
            "where",
            "limit",
        ),
        (
            {
                "table": "orders",
                "columns": ["id", "total"],
                "where": [{"column": "total", "op": ">=", "value": 9.5}],
            },
        ),
        ({"table": "Orders", "columns": ["id"]}, {"table": "orders", "columns": []}),
    ),
    NamedSchema(
        "tool_move_file",
        _closed({"from": _pattern("^/"), "to": _pattern("^/"), "overwrite": BOOLEAN}, "overwrite"),
        ({"from": "/a/b.txt", "to": "/c", "overwrite": False},),
        ({"from": "a", "to": "/c"}, {"from": "/a"}),
    ),
    NamedSchema(
        "tool_draw_shape",
        {
            "oneOf": [
                _closed({"shape": {"const": "circle"}, "radius": _between(0, 100, "number")}),
                _closed(
                    {
                        "shape": {"const": "rectangle"},
                        "width": _between(0, 100, "number"),
                        "height": _between(0, 100, "number"),
                    }
                ),
                _closed(
                    {
                        "shape": {"const": "polygon"},
                        "points": _list(
                            {
                                "type": "array",
                                "prefixItems": [NUMBER, NUMBER],
                                "items": False,
                                "minItems": 2,
                            },
                            3,
                        ),
                    }
                ),
            ]
        },
        (
            {"shape": "circle", "radius": 12.5},
            {"shape": "polygon", "points": [[0, 0], [1, 0], [0.5, 1]]},
        ),
        ({"shape": "circle", "radius": 101}, {"shape": "polygon", "points": [[0, 0], [1, 0]]}),
    ),
    NamedSchema(
        "tool_set_light",
        _closed(
            {
                "room": {"enum": ["kitchen", "bedroom", "bathroom", "living room"]},
                "brightness": _between(0, 100),
                "color": _pattern("^#[0-9a-fA-F]{6}$"),
            },
            "color",
        ),
        ({"room": "living room", "brightness": 70, "color": "#ffCC00"},),
        ({"room": "garage", "brightness": 70}, {"room": "kitchen", "brightness": 70.5}),
    ),
    NamedSchema(
        "tool_convert_currency",
        _closed(
            {
                "amount": {"type": "number", "exclusiveMinimum": 0},
                "from": _pattern("^[A-Z]{3}$"),
                "to": _pattern("^[A-Z]{3}$"),
            }
        ),
        ({"amount": 19.99, "from": "EUR", "to": "JPY"},),
        ({"amount": 0, "from": "EUR", "to": "JPY"}, {"amount": 1, "from": "eur", "to": "JPY"}),
    ),
    NamedSchema(
        "tool_parallel_calls",
        _list(
            {
                "anyOf": [
                    _closed({"tool": {"const": "read"}, "path": STRING}),
                    _closed({"tool": {"const": "write"}, "path": STRING, "content": STRING}),
                    _closed({"tool": {"const": "list"}, "depth": _between(1, 3)}),
                ]
            },
            1,
            4,
        ),
        (
            [{"tool": "read", "path": "a.txt"}, {"tool": "list", "depth": 2}],
            [{"tool": "write", "path": "b", "content": "\t\\"}],
        ),
        ([], [{"tool": "list", "depth": 4}]),
    ),
    NamedSchema(
        "tool_http_request",
        _closed(
            {
                "method": {"enum": ["GET", "POST", "PUT", "PATCH", "DELETE"]},
                "url": _format("uri"),
                "timeout": _between(0.1, 60, "number"),
                "body": _or_null(STRING),
            },
            "timeout",
            "body",
        ),
        (
            {"method": "GET", "url": "https://example.com/v1?q=1"},
            {"method": "POST", "url": "http://localhost:80/", "timeout": 2.5, "body": None},
        ),
        ({"method": "HEAD", "url": "https://example.com"}, {"method": "GET", "url": "/relative"}),
    ),
)

EXTRACTION = (
    NamedSchema(
        "person",
        _closed({"name": STRING, "age": _between(0, 150), "email": _or_null(_format("email"))}),
        ({"name": "Ada Lovelace", "age": 36, "email": None},),
        ({"name": "Ada", "age": 151, "email": None}, {"name": "Ada", "age": 36}),
    ),
    NamedSchema(
        "people",
        _list(
            _closed({"first": _text(1, 30), "last": _text(1, 30), "born": _format("date")}), 1, 8
        ),
        (
            [
                {"first": "Grace", "last": "Hopper", "born": "1906-12-09"},
                {"first": "Żaneta", "last": "O'Neil", "born": "2000-02-29"},
            ],
        ),
        ([], [{"first": "Grace", "last": "Hopper", "born": "1906-02-30"}]),
    ),
    NamedSchema(
        "sentiment",
        _closed(
            {
                "label": {"enum": ["positive", "neutral", "negative"]},
                "confidence": _between(0, 1, "number"),
            }
        ),
        ({"label": "positive", "confidence": 0.93}, {"label": "neutral", "confidence": 1}),
        ({"label": "mixed", "confidence": 0.5}, {"label": "neutral", "confidence": 1.01}),
    ),
    NamedSchema(
        "entities",
        _closed(
            {
                "entities": _list(
                    _closed(
                        {
                            "text": STRING,
                            "type": {"enum": ["PERSON", "PLACE", "ORG", "DATE", "OTHER"]},
                            "start": {"type": "integer", "minimum": 0},
                        }
                    )
                )
            }
        ),
        ({"entities": []}, {"entities": [{"text": "Paris", "type": "PLACE", "start": 17}]}),
        ({"entities": [{"text": "Paris", "type": "CITY", "start": 17}]}, {}),
    ),
    NamedSchema(
        "triples",
        _list(
            _closed({"subject": _text(1, 60), "relation": _text(1, 40), "object": _text(1, 60)}),
            most=20,
        ),
        ([{"subject": "Rome", "relation": "capital of", "object": "Italy"}], []),
        ([{"subject": "Rome", "relation": "", "object": "Italy"}],),
    ),
    NamedSchema(
        "invoice",
        _closed(
            {
                "number": _pattern("^INV-[0-9]{4,8}$"),
                "date": _format("date"),
                "currency": {"enum": ["EUR", "USD", "GBP", "CHF"]},
                "lines": _list(
                    _closed(
                        {
                            "description": STRING,
                            "quantity": {"type": "integer", "minimum": 1},
                            "unit_price": {"type": "number", "minimum": 0},
                        }
                    ),
                    1,
                ),
                "total": {"type": "number", "minimum": 0},
                "paid": BOOLEAN,
            }
        ),
        (
            {
                "number": "INV-20391",
                "date": "2023-11-30",
                "currency": "EUR",
                "lines": [
                    {"description": "Paper, A4", "quantity": 10, "unit_price": 4.5},
                    {"description": "Delivery", "quantity": 1, "unit_price": 0},
                ],
                "total": 45.0,
                "paid": False,
            },
        ),
        (
            {
                "number": "INV-20391",
                "date": "2023-11-31",
                "currency": "EUR",
                "lines": [{"description": "Paper", "quantity": 1, "unit_price": 1}],
                "total": 1,
                "paid": True,
            },
            {
                "number": "20391",
                "date": "2023-11-30",
                "currency": "EUR",
                "lines": [],
                "total": 1,
                "paid": True,
            },
        ),
    ),
    NamedSchema(
        "receipt",
        _closed(
            {
                "merchant": _text(1, 60),
                "time": _format("time"),
                "items": _list(_closed({"name": STRING, "price": NUMBER}), 1, 30),
                "card_last4": _or_null(_pattern("^[0-9]{4}$")),
            }
        ),
        (
            {
                "merchant": "Café Zoë",
                "time": "09:15:00Z",
                "items": [{"name": "Espresso", "price": 2.2}],
                "card_last4": "0042",
            },
        ),
        (
            {
                "merchant": "Café",
                "time": "9:15",
                "items": [{"name": "Espresso", "price": 2.2}],
                "card_last4": None,
            },
        ),
    ),
    NamedSchema(
        "resume",
        _closed(
            {
                "name": STRING,
                "phone": _or_null(_pattern(r"^\+?[0-9 ()-]{6,20}$")),
                "jobs": _list(
                    _closed(
                        {
                            "title": STRING,
                            "employer": STRING,
                            "from": _pattern("^(19|20)[0-9]{2}$"),
                            "to": _or_null(_pattern("^(19|20)[0-9]{2}$")),
                        }
                    ),
                    most=10,
                ),
                "skills": _list(_text(1, 30), most=15),
            }
        ),
        (
            {
                "name": "Emmy Noether",
                "phone": "+49 (0)551 39-0",
                "jobs": [
                    {"title": "Lecturer", "employer": "Göttingen", "from": "1919", "to": "1933"}
                ],
                "skills": ["algebra"],
            },
        ),
        ({"name": "Emmy", "phone": "none", "jobs": [], "skills": []},),
    ),
    NamedSchema(
        "recipe",
        _closed(
            {
                "title": STRING,
                "servings": _between(1, 24),
                "ingredients": _list(
                    _closed(
                        {
                            "name": STRING,
                            "amount": {"type": "number", "exclusiveMinimum": 0},
                            "unit": {"enum": ["g", "ml", "piece", "tsp", "tbsp", None]},
                        }
                    ),
                    1,
                ),
                "steps": _list(STRING, 1),
                "difficulty": {"enum": ["easy", "medium", "hard"]},
            },
            "difficulty",
        ),
        (
            {
                "title": "Pancakes",
                "servings": 4,
                "ingredients": [
                    {"name": "flour", "amount": 250, "unit": "g"},
                    {"name": "egg", "amount": 2, "unit": None},
                ],
                "steps": ["Mix.", "Fry."],
            },
        ),
        (
            {
                "title": "Pancakes",
                "servings": 4,
                "ingredients": [{"name": "flour", "amount": 0, "unit": "g"}],
                "steps": ["Mix."],
            },
        ),
    ),
    NamedSchema(
        "chain_of_thought",
        _closed(
            {
                "steps": _list(_closed({"explanation": STRING, "result": STRING}), 1, 6),
                "answer": {"type": "integer"},
            }
        ),
        ({"steps": [{"explanation": "2 + 2", "result": "4"}], "answer": 4},),
        (
            {"steps": [], "answer": 4},
            {"steps": [{"explanation": "x", "result": "y"}], "answer": "4"},
        ),
    ),
    NamedSchema(
        "multiple_choice",
        _closed({"reason": _text(0, 200), "answer": {"enum": ["A", "B", "C", "D"]}}),
        ({"reason": "It floats.", "answer": "C"},),
        ({"reason": "", "answer": "E"}, {"answer": "A"}),
    ),
    NamedSchema(
        "support_ticket",
        _closed(
            {
                "category": {"enum": ["billing", "technical", "account", "other"]},
                "priority": _between(1, 4),
                "summary": _text(10, 140),
                "angry": BOOLEAN,
            }
        ),
        (
            {
                "category": "billing",
                "priority": 2,
                "summary": "Charged twice in May",
                "angry": True,
            },
        ),
        ({"category": "billing", "priority": 2, "summary": "short", "angry": True},),
    ),
    NamedSchema(
        "medical_note",
        _closed(
            {
                "patient_id": _format("uuid"),
                "temperature": _between(34, 43, "number"),
                "pressure": _pattern("^[0-9]{2,3}/[0-9]{2,3}$"),
                "medication": _list(
                    _closed(
                        {"drug": STRING, "mg": _between(1, 5000), "daily": _between(1, 6)}, "daily"
                    )
                ),
            }
        ),
        (
            {
                "patient_id": "0b7f0c1e-9d1c-4e64-9a35-0f6b8f6b1d2a",
                "temperature": 38.25,
                "pressure": "120/80",
                "medication": [{"drug": "paracetamol", "mg": 500, "daily": 3}],
            },
        ),
        (
            {
                "patient_id": "0b7f0c1e",
                "temperature": 38,
                "pressure": "120/80",
                "medication": [],
            },
            {
                "patient_id": "0b7f0c1e-9d1c-4e64-9a35-0f6b8f6b1d2a",
                "temperature": 43.01,
                "pressure": "120/80",
                "medication": [],
            },
        ),
    ),
    NamedSchema(
        "citation",
        _closed(
            {
                "authors": _list(STRING, 1),
                "year": _between(1500, 2100),
                "title": STRING,
                "doi": _pattern("^10\\.[0-9]{4,9}/\\S+$"),
                "pages": {
                    "type": "array",
                    "prefixItems": [_between(1, 99999), _between(1, 99999)],
                    "items": False,
                    "minItems": 2,
                },
            },
            "doi",
            "pages",
        ),
        (
            {
                "authors": ["Thompson, K."],
                "year": 1968,
                "title": "Regular expression search algorithm",
                "doi": "10.1145/363347.363387",
                "pages": [419, 422],
            },
        ),
        (
            {"authors": [], "year": 1968, "title": "x"},
            {"authors": ["x"], "year": 1499, "title": "x"},
        ),
    ),
    NamedSchema(
        "real_estate",
        _open(
            {
                "address": STRING,
                "rooms": {"type": "number", "minimum": 1, "maximum": 20, "multipleOf": 0.5},
                "price": {"type": "integer", "minimum": 0},
                "features": _list({"enum": ["garden", "balcony", "garage", "lift"]}),
            },
            "address",
            "price",
        ),
        ({"address": "Main St 1", "rooms": 3.5, "price": 250000, "features": ["lift"]},),
        ({"address": "Main St 1", "rooms": 3.3, "price": 1}, {"address": "Main St 1"}),
    ),
)

CONFIGURATION = (
    NamedSchema(
        "server_config",
        _closed(
            {
                "host": {"anyOf": [_format("ipv4"), _format("ipv6")]},
                "port": _between(1, 65535),
                "tls": _closed({"certificate": STRING, "key": STRING}),
                "workers": _between(1, 256),
            },
            "tls",
            "workers",
        ),
        ({"host": "127.0.0.1", "port": 8080}, {"host": "::1", "port": 443, "workers": 8}),
        ({"host": "localhost", "port": 8080}, {"host": "127.0.0.1", "port": 65536}),
    ),
    NamedSchema(
        "logging_config",
        _closed(
            {
                "level": {"enum": ["debug", "info", "warning", "error"]},
                "outputs": _list(
                    {
                        "oneOf": [
                            _closed({"kind": {"const": "console"}, "color": BOOLEAN}, "color"),
                            _closed(
                                {
                                    "kind": {"const": "file"},
                                    "path": STRING,
                                    "max_mb": _between(1, 1024),
                                },
                                "max_mb",
                            ),
                        ]
                    },
                    1,
                    3,
                ),
            }
        ),
        ({"level": "info", "outputs": [{"kind": "console"}, {"kind": "file", "path": "app.log"}]},),
        ({"level": "info", "outputs": [{"kind": "file"}]}, {"level": "trace", "outputs": []}),
    ),
    NamedSchema(
        "package_manifest",
        _open(
            {
                "name": _pattern("^[a-z][a-z0-9-]*$"),
                "version": _pattern(r"^\d+\.\d+\.\d+$"),
                "private": BOOLEAN,
                "dependencies": {"type": "object", "additionalProperties": STRING},
            },
            "name",
            "version",
        ),
        ({"name": "left-pad", "version": "1.0.0", "dependencies": {"a": "^2"}},),
        ({"name": "Left", "version": "1.0.0"}, {"name": "left", "version": "1.0"}),
    ),
    NamedSchema(
        "build_matrix",
        _closed(
            {
                "os": _list({"enum": ["linux", "macos", "windows"]}, 1, 3),
                "python": _list(_pattern(r"^3\.(1[0-9]|[89])$"), 1, 6),
                "fail_fast": BOOLEAN,
            },
            "fail_fast",
        ),
        ({"os": ["linux"], "python": ["3.11", "3.12"], "fail_fast": False},),
        ({"os": ["linux"], "python": ["3.7"]}, {"os": [], "python": ["3.9"]}),
    ),
    NamedSchema(
        "feature_flags",
        {"type": "object", "additionalProperties": BOOLEAN, "propertyNames": {"maxLength": 20}},
        ({}, {"dark_mode": True, "beta": False}),
        ({"dark_mode": "yes"}, {"a_very_long_name_of_a_flag": True}),
    ),
    NamedSchema(
        "all_optional",
        _closed(
            {f"option_{i}": _between(0, 9) for i in range(12)}, *(f"option_{i}" for i in range(12))
        ),
        ({}, {"option_3": 1}, {"option_0": 0, "option_11": 9}),
        ({"option_12": 1}, {"option_3": 10}),
    ),
    NamedSchema(
        "retry_policy",
        _closed(
            {
                "attempts": _between(1, 10),
                "backoff": _between(1, 10, "number"),
                "on": _list(_between(400, 599), 1),
            }
        ),
        ({"attempts": 3, "backoff": 1.5, "on": [429, 503]},),
        ({"attempts": 3, "backoff": 1.5, "on": [200]}, {"attempts": 0, "backoff": 1, "on": [500]}),
    ),
    NamedSchema(
        "scheduled_job",
        _closed(
            {
                "name": _text(1, 40),
                "every": {"anyOf": [{"enum": ["hour", "day", "week"]}, _between(1, 86400)]},
                "timeout": _format("duration"),
                "enabled": BOOLEAN,
            },
            "timeout",
        ),
        (
            {"name": "backup", "every": "day", "timeout": "PT1H30M", "enabled": True},
            {"name": "ping", "every": 60, "enabled": False},
        ),
        ({"name": "backup", "every": "month", "enabled": True},),
    ),
    NamedSchema(
        "conditional_storage",
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["disk", "bucket"]},
                "path": STRING,
                "bucket": STRING,
            },
            "required": ["kind"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "disk"}}},
            "then": {"required": ["path"]},
            "else": {"required": ["bucket"]},
        },
        ({"kind": "disk", "path": "/data"}, {"kind": "bucket", "bucket": "b-1"}),
        ({"kind": "disk", "bucket": "b-1"}, {"kind": "bucket"}),
    ),
    NamedSchema(
        "dependent_payment",
        _closed(
            {"name": STRING, "card": _pattern("^[0-9]{16}$"), "billing_address": STRING},
            "card",
            "billing_address",
            dependentRequired={"card": ["billing_address"]},
        ),
        ({"name": "A"}, {"name": "A", "card": "4" * 16, "billing_address": "Street 1"}),
        ({"name": "A", "card": "4" * 16},),
    ),
)

ORDERS = (
    NamedSchema(
        "order",
        _closed(
            {
                "order_id": _pattern("^[A-Z]{2}[0-9]{6}$"),
                "customer": {"$ref": "#/$defs/customer"},
                "lines": _list({"$ref": "#/$defs/line"}, 1, 20),
                "shipping": {"$ref": "#/$defs/address"},
                "billing": {"$ref": "#/$defs/address"},
                "status": {"enum": ["new", "paid", "shipped", "returned"]},
            },
            "billing",
        )
        | {
            "$defs": {
                "address": _closed(
                    {
                        "street": STRING,
                        "city": STRING,
                        "postcode": _pattern("^[0-9A-Z -]{3,10}$"),
                        "country": _pattern("^[A-Z]{2}$"),
                    }
                ),
                "customer": _closed({"name": STRING, "email": _format("email")}),
                "line": _closed(
                    {
                        "sku": _pattern("^[A-Z0-9-]{4,12}$"),
                        "quantity": _between(1, 999),
                        "price": {"type": "number", "minimum": 0},
                    }
                ),
            }
        },
        (
            {
                "order_id": "DE004711",
                "customer": {"name": "Zoë", "email": "zoe@example.org"},
                "lines": [{"sku": "AB-12", "quantity": 2, "price": 3.99}],
                "shipping": {
                    "street": "Ring 1",
                    "city": "Köln",
                    "postcode": "50667",
                    "country": "DE",
                },
                "status": "paid",
            },
        ),
        (
            {
                "order_id": "DE004711",
                "customer": {"name": "Zoë", "email": "zoe@example.org"},
                "lines": [{"sku": "ab-12", "quantity": 2, "price": 3.99}],
                "shipping": {
                    "street": "Ring 1",
                    "city": "Köln",
                    "postcode": "50667",
                    "country": "DE",
                },
                "status": "paid",
            },
        ),
    ),
    NamedSchema(
        "shipment",
        _closed(
            {
                "tracking": _pattern("^1Z[0-9A-Z]{16}$"),
                "weight_kg": {"type": "number", "exclusiveMinimum": 0, "maximum": 70},
                "box": {
                    "type": "array",
                    "prefixItems": [_between(1, 300)] * 3,
                    "items": False,
                    "minItems": 3,
                },
                "events": _list(
                    _closed(
                        {
                            "at": _format("date-time"),
                            "what": {"enum": ["picked up", "in transit", "delivered"]},
                        }
                    )
                ),
            }
        ),
        (
            {
                "tracking": "1Z999AA10123456784",
                "weight_kg": 0.35,
                "box": [30, 20, 10],
                "events": [{"at": "2024-01-02T03:04:05Z", "what": "picked up"}],
            },
        ),
        (
            {"tracking": "1Z999AA10123456784", "weight_kg": 70.1, "box": [1, 1, 1], "events": []},
            {"tracking": "1Z999AA10123456784", "weight_kg": 7, "box": [1, 1], "events": []},
        ),
    ),
    NamedSchema(
        "cart",
        _closed(
            {
                "items": _list(
                    _closed(
                        {
                            "product": {"type": "integer", "minimum": 1},
                            "options": _closed(
                                {
                                    "size": {"enum": ["S", "M", "L", "XL"]},
                                    "color": {"enum": ["red", "green", "blue"]},
                                },
                                "size",
                                "color",
                            ),
                            "count": _between(1, 99),
                        },
                        "options",
                    ),
                    most=50,
                ),
                "coupon": _or_null(_pattern("^[A-Z0-9]{8}$")),
            },
            "coupon",
        ),
        (
            {"items": [{"product": 7, "options": {"color": "red"}, "count": 2}], "coupon": None},
            {"items": []},
        ),
        ({"items": [{"product": 0, "count": 1}]}, {"items": [], "coupon": "short"}),
    ),
    NamedSchema(
        "booking",
        _closed(
            {
                "guests": _between(1, 9),
                "arrival": _format("date"),
                "nights": _between(1, 30),
                "rooms": _list({"enum": ["single", "double", "suite"]}, 1, 5),
                "wishes": _or_null(_text(1, 100)),
            },
            "wishes",
        ),
        ({"guests": 2, "arrival": "2025-07-01", "nights": 7, "rooms": ["double"]},),
        ({"guests": 2, "arrival": "2025-7-1", "nights": 7, "rooms": ["double"]},),
    ),
    NamedSchema(
        "payment",
        {
            "oneOf": [
                _closed(
                    {
                        "method": {"const": "card"},
                        "number": _pattern("^[0-9]{13,19}$"),
                        "expires": _pattern("^(0[1-9]|1[0-2])/[0-9]{2}$"),
                    }
                ),
                _closed({"method": {"const": "iban"}, "iban": _pattern("^[A-Z]{2}[0-9]{13,32}$")}),
                _closed({"method": {"const": "cash"}}),
            ]
        },
        ({"method": "card", "number": "4111111111111111", "expires": "07/29"}, {"method": "cash"}),
        ({"method": "card", "number": "4111111111111111", "expires": "13/29"}, {"method": "wire"}),
    ),
)

SERVICES = (
    NamedSchema(
        "api_error",
        _closed(
            {
                "code": {"enum": [400, 401, 403, 404, 409, 422, 429, 500]},
                "message": STRING,
                "details": _list(_closed({"field": STRING, "problem": STRING})),
            },
            "details",
        ),
        ({"code": 404, "message": "not found"},),
        ({"code": 418, "message": "teapot"}, {"code": "404", "message": "x"}),
    ),
    NamedSchema(
        "api_page",
        _closed(
            {
                "data": _list(_closed({"id": _format("uuid"), "title": STRING}), most=10),
                "next": _or_null(_format("uri")),
                "total": {"type": "integer", "minimum": 0},
            }
        ),
        (
            {
                "data": [{"id": "0b7f0c1e-9d1c-4e64-9a35-0f6b8f6b1d2a", "title": "One"}],
                "next": "https://example.com/items?page=2",
                "total": 11,
            },
            {"data": [], "next": None, "total": 0},
        ),
        (
            {"data": [], "next": None, "total": -1},
            {"data": [{"id": "1"}], "next": None, "total": 1},
        ),
    ),
    NamedSchema(
        "user_profile",
        _open(
            {
                "id": INTEGER,
                "login": _pattern("^[a-zA-Z0-9-]{1,39}$"),
                "name": {"type": ["string", "null"]},
                "site_admin": BOOLEAN,
                "created_at": _format("date-time"),
            },
            "id",
            "login",
        ),
        ({"id": 1, "login": "ada", "name": None, "created_at": "2008-01-14T04:33:35Z"},),
        ({"id": "1", "login": "ada"}, {"id": 1, "login": "a b"}),
    ),
    NamedSchema(
        "geojson_point",
        _closed(
            {
                "type": {"const": "Point"},
                "coordinates": {
                    "type": "array",
                    "prefixItems": [_between(-180, 180, "number"), _between(-90, 90, "number")],
                    "items": False,
                    "minItems": 2,
                },
            }
        ),
        ({"type": "Point", "coordinates": [13.405, 52.52]},),
        ({"type": "Point", "coordinates": [180.5, 0]}, {"type": "Point", "coordinates": [1]}),
    ),
    NamedSchema(
        "geometry",
        {
            "oneOf": [
                _closed({"type": {"const": "Point"}, "coordinates": {"$ref": "#/$defs/position"}}),
                _closed(
                    {
                        "type": {"const": "LineString"},
                        "coordinates": _list({"$ref": "#/$defs/position"}, 2),
                    }
                ),
                _closed(
                    {
                        "type": {"const": "Polygon"},
                        "coordinates": _list(_list({"$ref": "#/$defs/position"}, 4), 1),
                    }
                ),
            ],
            "$defs": {"position": _list(NUMBER, 2, 3)},
        },
        (
            {"type": "LineString", "coordinates": [[0, 0], [1, 1, 5]]},
            {"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 0]]]},
        ),
        ({"type": "LineString", "coordinates": [[0, 0]]}, {"type": "Point", "coordinates": [1]}),
    ),
    NamedSchema(
        "weather_report",
        _closed(
            {
                "station": _pattern("^[A-Z]{4}$"),
                "observed": _format("date-time"),
                "celsius": _between(-90, 60, "number"),
                "wind": _closed({"degrees": _between(0, 359), "knots": _between(0, 250)}),
                "sky": _list({"enum": ["clear", "few", "scattered", "broken", "overcast"]}, 1, 4),
            }
        ),
        (
            {
                "station": "EDDF",
                "observed": "2024-06-01T12:20:00Z",
                "celsius": -3.5,
                "wind": {"degrees": 270, "knots": 12},
                "sky": ["few", "broken"],
            },
        ),
        (
            {
                "station": "EDDF",
                "observed": "2024-06-01T12:20:00Z",
                "celsius": 60.1,
                "wind": {"degrees": 270, "knots": 12},
                "sky": ["few"],
            },
        ),
    ),
    NamedSchema(
        "chat_message",
        _closed(
            {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": {
                    "anyOf": [
                        STRING,
                        _list(
                            {
                                "oneOf": [
                                    _closed({"type": {"const": "text"}, "text": STRING}),
                                    _closed({"type": {"const": "image"}, "url": _format("uri")}),
                                ]
                            },
                            1,
                        ),
                    ]
                },
            }
        ),
        (
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
        ),
        ({"role": "user", "content": []}, {"role": "bot", "content": "hi"}),
    ),
    NamedSchema(
        "webhook_event",
        {
            "type": "object",
            "properties": {"id": _format("uuid"), "event": {"enum": ["created", "deleted"]}},
            "required": ["id", "event"],
            "allOf": [{"properties": {"actor": STRING}, "required": ["actor"]}],
            "unevaluatedProperties": False,
        },
        (
            {
                "id": "0b7f0c1e-9d1c-4e64-9a35-0f6b8f6b1d2a",
                "event": "created",
                "actor": "root",
            },
        ),
        ({"id": "0b7f0c1e-9d1c-4e64-9a35-0f6b8f6b1d2a", "event": "created"},),
    ),
    NamedSchema(
        "json_patch",
        _list(
            {
                "oneOf": [
                    _open(
                        {"op": {"enum": ["add", "replace", "test"]}, "path": STRING, "value": {}},
                        "op",
                        "path",
                        "value",
                    ),
                    _open({"op": {"const": "remove"}, "path": STRING}, "op", "path"),
                    _open(
                        {"op": {"enum": ["move", "copy"]}, "from": STRING, "path": STRING},
                        "op",
                        "from",
                        "path",
                    ),
                ]
            }
        ),
        ([{"op": "add", "path": "/a", "value": {"b": [1, None]}}, {"op": "remove", "path": "/c"}],),
        ([{"op": "add", "path": "/a"}], [{"op": "swap", "path": "/a"}]),
    ),
    NamedSchema(
        "metrics",
        _list(
            _closed(
                {
                    "name": _pattern("^[a-z_]+(\\.[a-z_]+)*$"),
                    "value": NUMBER,
                    "tags": {"type": "object", "additionalProperties": STRING},
                },
                "tags",
            )
        ),
        ([{"name": "http.requests", "value": 1.5e3, "tags": {"code": "200"}}],),
        ([{"name": "HTTP", "value": 1}],),
    ),
    NamedSchema(
        "any_json",
        {"type": "object"},
        ({}, {"a": [1, {"b": None}]}),
        ([], "text"),
    ),
)

TREES = (
    NamedSchema(
        "tree",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": _closed(
                    {"value": INTEGER, "children": _list({"$ref": "#/$defs/node"})}, "children"
                )
            },
        },
        ({"value": 1, "children": [{"value": 2}, {"value": 3, "children": []}]},),
        ({"value": 1, "children": [{"value": "2"}]}, {"children": []}),
    ),
    NamedSchema(
        "linked_list",
        _closed({"head": STRING, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        ({"head": "a", "tail": {"head": "b", "tail": None}},),
        ({"head": "a", "tail": {"head": "b"}}, {"head": "a"}),
    ),
    NamedSchema(
        "expression",
        {
            "$ref": "#/$defs/expression",
            "$defs": {
                "expression": {
                    "anyOf": [
                        NUMBER,
                        _pattern("^[a-z]$"),
                        _closed(
                            {
                                "op": {"enum": ["+", "-", "*", "/"]},
                                "args": _list({"$ref": "#/$defs/expression"}, 2, 2),
                            }
                        ),
                    ]
                }
            },
        },
        (7, {"op": "+", "args": ["x", {"op": "*", "args": [2, "y"]}]}),
        ({"op": "+", "args": ["x"]}, "xy"),
    ),
    NamedSchema(
        "file_tree",
        {
            "$ref": "#/$defs/entry",
            "$defs": {
                "entry": {
                    "anyOf": [
                        _closed({"kind": {"const": "file"}, "name": STRING, "bytes": INTEGER}),
                        _closed(
                            {
                                "kind": {"const": "folder"},
                                "name": STRING,
                                "entries": _list({"$ref": "#/$defs/entry"}),
                            }
                        ),
                    ]
                }
            },
        },
        (
            {
                "kind": "folder",
                "name": "src",
                "entries": [{"kind": "file", "name": "a.py", "bytes": 12}],
            },
        ),
        ({"kind": "folder", "name": "src", "entries": [{"kind": "file", "name": "a.py"}]},),
    ),
    NamedSchema(
        "comment_thread",
        {
            "$ref": "#/$defs/comment",
            "$defs": {
                "comment": _open(
                    {
                        "author": STRING,
                        "text": _text(1, 500),
                        "likes": {"type": "integer", "minimum": 0},
                        "replies": _list({"$ref": "#/$defs/comment"}),
                    },
                    "author",
                    "text",
                )
            },
        },
        ({"author": "a", "text": "Hm.", "likes": 2, "replies": [{"author": "b", "text": "?"}]},),
        ({"author": "a", "text": "Hm.", "replies": [{"author": "b"}]}, {"author": "a", "text": ""}),
    ),
    NamedSchema(
        "filter_query",
        {
            "$ref": "#/$defs/filter",
            "$defs": {
                "filter": {
                    "oneOf": [
                        _closed({"and": _list({"$ref": "#/$defs/filter"}, 1)}),
                        _closed({"or": _list({"$ref": "#/$defs/filter"}, 1)}),
                        _closed({"field": STRING, "equals": {"type": ["string", "number"]}}),
                    ]
                }
            },
        },
        ({"and": [{"field": "a", "equals": 1}, {"or": [{"field": "b", "equals": "x"}]}]},),
        ({"and": []}, {"field": "a"}),
    ),
    NamedSchema(
        "ui_component",
        {
            "$ref": "#/$defs/component",
            "$defs": {
                "component": _closed(
                    {
                        "type": {"enum": ["div", "button", "header", "section", "field", "form"]},
                        "label": STRING,
                        "children": _list({"$ref": "#/$defs/component"}),
                        "attributes": _list(_closed({"name": STRING, "value": STRING})),
                    }
                )
            },
        },
        (
            {
                "type": "form",
                "label": "",
                "children": [
                    {"type": "button", "label": "Go", "children": [], "attributes": []},
                ],
                "attributes": [{"name": "class", "value": "wide"}],
            },
        ),
        ({"type": "form", "label": "", "children": []},),
    ),
)

VALUES = (
    NamedSchema("one_word", {"enum": ["yes", "no", "maybe"]}, ("yes", "maybe"), ("Yes", None)),
    NamedSchema("an_integer", {"type": "integer"}, (0, -17, 123456), (1.5, "1")),
    NamedSchema("percentage", _between(0, 100, "number"), (0, 99.5, 100), (100.5, -1)),
    NamedSchema("price", {"type": "number", "exclusiveMinimum": 0}, (0.01, 12), (0, -3)),
    NamedSchema(
        "rating",
        {"type": "number", "minimum": 0, "maximum": 5, "multipleOf": 0.5},
        (0, 4.5, 5),
        (4.4, 5.5),
    ),
    NamedSchema(
        "even_numbers",
        _list({"type": "integer", "multipleOf": 2}, 1),
        ([0], [2, -4, 1000]),
        ([1], []),
    ),
    NamedSchema("a_date", _format("date"), ("2024-02-29",), ("2023-02-29", "24-02-29")),
    NamedSchema("a_moment", _format("date-time"), ("1999-12-31T23:59:59Z",), ("1999-12-31",)),
    NamedSchema("an_identifier", _format("uuid"), ("123e4567-e89b-12d3-a456-426614174000",), ("",)),
    NamedSchema("short_text", _text(3, 10), ("naïve", "😀😀😀"), ("ab", "x" * 11)),
    NamedSchema(
        "vector", _list(_between(-1, 1, "number"), 3, 3), ([0, -0.5, 1],), ([0, 0], [0, 0, 2])
    ),
    NamedSchema("matrix", _list(_list(INTEGER, 2, 2), 2, 2), ([[1, 0], [0, 1]],), ([[1, 0]],)),
    NamedSchema(
        "distinct_tags",
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        ([], ["b", "a"]),
        (["a", "a"], ["d"]),
    ),
    NamedSchema(
        "not_reserved",
        {"type": "string", "maxLength": 12, "not": {"enum": ["root", "admin"]}},
        ("ada",),
        ("root", "x" * 13),
    ),
    NamedSchema(
        "scalar_or_list",
        {"anyOf": [STRING, _list(STRING, 1)]},
        ("a", ["a", "b"]),
        ([], 3),
    ),
    NamedSchema(
        "overlapping_ranges",
        {"oneOf": [_between(0, 10), _between(5, 20)]},
        (3, 15),
        (7, 21),
    ),
)

SCHEMAS = (*TOOL_CALLS, *EXTRACTION, *CONFIGURATION, *ORDERS, *SERVICES, *TREES, *VALUES)
