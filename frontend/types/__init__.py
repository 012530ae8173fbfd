"""Python types as constraints: the JSON schema of a type, and its value read back from text.

`values` is the whole of it; `msgspec_types` and `pydantic_types` describe the types that these
libraries know, `text_patterns` are the texts that their readers accept. `partial_json` reads a
value that is still being written, `schema_keywords` finds misspelt keywords in schemas.
"""

from rootlace.types.msgspec_types import name_of
from rootlace.types.values import Schema, parse_as, schema_of, schema_text

__all__ = ["Schema", "name_of", "parse_as", "schema_of", "schema_text"]
