"""Twenty patterns that constrained outputs are asked for, with texts that match them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NamedRegex:
    """`pattern` in the syntax of Python's `re`; `examples` match it whole."""

    name: str
    pattern: str
    examples: tuple[str, ...]


REGEXES = (
    NamedRegex("integer", r"-?(0|[1-9][0-9]*)", ("0", "-17", "907214")),
    NamedRegex(
        "float", r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", ("3", "-0.25", "6.022e23", "+1E-9")
    ),
    NamedRegex(
        "date",
        r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
        ("2024-02-29", "1999-12-31"),
    ),
    NamedRegex(
        "iso_datetime",
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})",
        ("2024-02-29T12:30:00Z", "2024-02-29T12:30:00.123456+02:00"),
    ),
    NamedRegex(
        "email",
        r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*\.[a-zA-Z]{2,}",
        ("ada@example.org", "first.last+tag@mail.example.co.uk"),
    ),
    NamedRegex(
        "url",
        r"https?://[a-z0-9-]+(\.[a-z0-9-]+)+(:[0-9]{1,5})?(/[A-Za-z0-9._~%/-]*)?"
        r"(\?[A-Za-z0-9=&%._-]*)?",
        ("https://example.org", "http://a.example.org:8080/x/y.html?q=1&r=%20"),
    ),
    NamedRegex(
        "ipv4",
        r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
        ("127.0.0.1", "255.249.10.0"),
    ),
    NamedRegex(
        "uuid",
        r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        ("123e4567-e89b-12d3-a456-426614174000",),
    ),
    NamedRegex(
        "phone",
        r"(\+\d{1,3} )?(\(\d{3}\) |\d{3}-)\d{3}-\d{4}",
        ("555-010-4477", "+1 (555) 010-4477"),
    ),
    NamedRegex(
        "enumeration",
        r"(pending|processing|shipped|delivered|cancelled|refunded)",
        ("pending", "refunded"),
    ),
    NamedRegex(
        "json_string",
        r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"',
        ('"plain"', r'"tab\t é \u00e9"', '""'),
    ),
    NamedRegex("hex_colour", r"#([0-9a-fA-F]{3}|[0-9a-fA-F]{6})", ("#fff", "#1E90FF")),
    NamedRegex(
        "semantic_version",
        r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
        r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?",
        ("1.0.0", "2.10.3-rc.1+build.77"),
    ),
    NamedRegex(
        "base64",
        r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
        ("", "Um9vdGxhY2U=", "YQ=="),
    ),
    NamedRegex("identifier", r"[A-Za-z_][A-Za-z0-9_]{0,63}", ("x", "_private_name2")),
    NamedRegex(
        "csv_row",
        r'("([^"]|"")*"|[^",\r\n]*)(,("([^"]|"")*"|[^",\r\n]*)){2,9}',
        ("a,b,c", '"say ""hi""",2,,last'),
    ),
    NamedRegex("currency", r"[$€£¥]\d{1,3}(,\d{3})*(\.\d{2})?", ("$5", "€1,234,567.89")),
    NamedRegex("short_text", r".{0,200}", ("", "One sentence, 中文 and 🙂 within 200 characters.")),
    NamedRegex("words", r"\w+( \w+)*", ("word", "naïve Größe 二 words")),
    NamedRegex(
        "key_value",
        r"""(?i)(name|title|id)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""",
        ('name = "a \\"quoted\\" text"', "ID='7'"),
    ),
)
