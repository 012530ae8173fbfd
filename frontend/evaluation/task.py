"""Task of an evaluation: a small YAML file with data, prompts and scoring."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rootlace.language import sampling
from rootlace.wire.errors import InvalidRequest

# Template -----------------------------------------------------------------------------------------
#
# Texts with `{fields}` in them.


_FIELD = re.compile(
    r"\{(?P<escaped>\{\w+(?:\[\w+\])*\})\}|\{(?P<name>\w+)(?P<inside>(?:\[\w+\])*)\}"
    r"|\{(?P<open>\w+)(?![\w:])(?=(?P<rest>[^\n]*))"  # `{key: {` is an object
)


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """Fill each `{field}`, `{list[0]}` or `{object[key]}` of `template`. `{{field}}` becomes
    {field}; braces around other text stay.

    Raises InvalidRequest for a missing field, or a brace not closed in its line.
    """

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return match["escaped"]
        if match["open"]:
            if match["open"] in fields and match["rest"].count("{") >= match["rest"].count("}"):
                raise InvalidRequest(f"the brace of {{{match['open']} is not closed")
            return match[0]
        leaf = look_up(fields, match["name"])
        for key in re.findall(r"\w+", match["inside"]):
            leaf = _inside(leaf, key, match[0])
        return str(leaf)

    return _FIELD.sub(value, template)


def look_up(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field. Raises InvalidRequest if it is missing."""
    try:
        return fields[name]
    except KeyError:
        raise InvalidRequest(f"no {name!r}; there are: {', '.join(fields)}") from None


def _inside(value: Any, key: str, whole: str) -> Any:
    try:
        return value[int(key)] if isinstance(value, (list, tuple)) else value[key]
    except (KeyError, IndexError, TypeError, ValueError):
        raise InvalidRequest(f"{whole}: there is no {key!r} in {value!r:.60}") from None


# Formats ------------------------------------------------------------------------------------------
#
# Well-known data sets: their rows' fields, and their tasks.
#
# Prompts and metrics are those of lm-evaluation-harness's tasks of these names, so that numbers can
# be compared.


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """Format of a data set: `read` makes a row's template fields; `task` has the defaults of a
    task's keys."""

    read: Callable[[Row], dict[str, Any]] = dict
    task: Mapping[str, Any] = field(default_factory=dict)


def _text(row: Row, key: str) -> str:
    value = look_up(row, key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{key}: not a text, but {value!r:.60}")
    return value


def _texts(row: Row, key: str) -> list[str]:
    value = look_up(row, key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(f"{key}: not a list of texts, but {value!r:.60}")
    return value


def _mmlu(row: Row) -> dict[str, Any]:
    subject = row.get("subject") or ""
    return {
        **row,
        "question": _text(row, "question").strip(),
        "choices": _texts(row, "choices"),
        "subject": subject,
        "about": f" about {subject.replace('_', ' ')}" if subject else "",
    }


def _hellaswag(row: Row) -> dict[str, Any]:
    if "ctx_a" in row:
        context = f"{_text(row, 'ctx_a')} {_text(row, 'ctx_b').capitalize()}"
    else:
        context = _text(row, "ctx")
    query = f"{_text(row, 'activity_label')}: {context}"
    endings = [_without_marks(text) for text in _texts(row, "endings")]
    return {**row, "query": _without_marks(query), "choices": endings}


def _without_marks(text: str) -> str:
    """Remove the marks in brackets of HellaSwag's WikiHow half."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _arc(row: Row) -> dict[str, Any]:
    """Read a row in the hub's form, or in that of the authors' files."""
    question, choices = look_up(row, "question"), row.get("choices")
    if isinstance(question, Mapping):
        listed = question.get("choices") or []
        choices = {name: [choice.get(name) for choice in listed] for name in ("text", "label")}
        question = _text(question, "stem")
    if not isinstance(choices, Mapping):
        raise InvalidRequest("choices: not an object with the lists 'text' and 'label'")
    labels, key = _texts(choices, "label"), _text(row, "answerKey")
    if key not in labels:
        raise InvalidRequest(f"answerKey: {key!r} is none of {labels}")
    texts = _texts(choices, "text")
    return {**row, "question": question, "choices": texts, "answer": labels.index(key)}


def _boolq(row: Row) -> dict[str, Any]:
    key = "label" if "label" in row else "answer"
    answer = look_up(row, key)
    if answer not in (0, 1):
        raise InvalidRequest(f"{key}: true or false, 1 or 0, not {answer!r:.60}")
    return {**row, "answer": int(answer)}


def _piqa(row: Row) -> dict[str, Any]:
    return {**row, "choices": [_text(row, "sol1"), _text(row, "sol2")]}


def _winogrande(row: Row) -> dict[str, Any]:
    before, blank, after = _text(row, "sentence").partition("_")
    if not blank:
        raise InvalidRequest("sentence: there is no _ in it")
    if row.get("answer") not in ("1", "2"):
        raise InvalidRequest(f"answer: '1' or '2', not {row.get('answer')!r}")
    return {
        **row,
        "contexts": [before + _text(row, name) for name in ("option1", "option2")],
        "ending": after.strip(),
        "answer": int(row["answer"]) - 1,
    }


_ARC = {"prompt": "Question: {question}\nAnswer:", "metrics": ["acc", "acc_norm"]}
_NUMBER = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"

FORMATS: dict[str, Format] = {
    "questions": Format(),
    "mmlu": Format(
        _mmlu,
        {
            "description": "The following are multiple choice questions (with answers){about}.\n\n",
            "prompt": "{question}\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\n"
            "D. {choices[3]}\nAnswer:",
            "choices": ["A", "B", "C", "D"],
            "group": "subject",
            "shots": {"same": "subject"},
        },
    ),
    "hellaswag": Format(
        _hellaswag,
        {"prompt": "{query}", "answer": "label", "id": "ind", "metrics": ["acc", "acc_norm"]},
    ),
    "arc": Format(_arc, _ARC),
    "boolq": Format(
        _boolq, {"prompt": "{passage}\nQuestion: {question}?\nAnswer:", "choices": ["no", "yes"]}
    ),
    "piqa": Format(_piqa, {**_ARC, "prompt": "Question: {goal}\nAnswer:", "answer": "label"}),
    "winogrande": Format(_winogrande, {"contexts": "contexts", "prompt": "{ending}"}),
    "gsm8k": Format(
        task={
            "score": "generate",
            "prompt": "Question: {question}\nAnswer:",
            "answer": "{answer}",
            "generate": {"max_tokens": 256, "stop": ["Question:", "</s>", "<|im_end|>"]},
            "extract": {
                "strict": {"pattern": r"#### (\-?[0-9\.\,]+)"},
                "flexible": {"pattern": _NUMBER, "take": "last"},
            },
            "match": {"ignore": [",", r"\$", r"(?s).*#### ", r"\.$"], "ignore_case": True},
        }
    ),
    # Prompts that are ready: OLMES's files, beside which the examples lie as text (`shots.text`).
    "prepared": Format(
        task={"prompt": "{query}", "answer": "gold", "metrics": ["acc", "acc_norm", "acc_bytes"]}
    ),
}


# Places -------------------------------------------------------------------------------------------
#
# YAML and JSON lines; errors name the file, the line and the key.


Struct = TypeVar("Struct", bound=msgspec.Struct)
Keys = tuple[str, ...]

_PLACE = re.compile(r"^(?P<reason>.*?)(?: - at (?P<key>`key` in )?`\$(?P<keys>.*)`)?$", re.DOTALL)
_YAML_FIELD = re.compile(r"(?P<kind>unknown|missing required) field `(?P<name>.*)`")


class Document:
    """YAML file: its `content`, a mapping, and the line of each key. `kind` is the error for
    another content. Raises InvalidRequest."""

    def __init__(self, path: Path, kind: str) -> None:
        import yaml

        self.path = path
        self._lines: dict[Keys, int] = {}
        try:
            text = path.read_text("utf-8")
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            self._number(node, ())
            content = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise InvalidRequest(f"{path}:{line}: {error.problem}") from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise InvalidRequest(f"{path}: cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise InvalidRequest(f"{path}:1: {kind}")
        self.content: dict[str, Any] = content

    def _number(self, node: Any, keys: Keys) -> None:
        import yaml

        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*keys, str(key.value))
                if inner in self._lines:
                    raise InvalidRequest(
                        f"{self.path}:{key.start_mark.line + 1}: {key.value}: given twice"
                    )
                self._lines[inner] = key.start_mark.line + 1
                self._number(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[*keys, str(index)] = item.start_mark.line + 1
                self._number(item, (*keys, str(index)))

    def wrong(self, keys: Keys, reason: str) -> InvalidRequest:
        """Return the error for the value of `keys`, with its file and line."""
        place, known = "", keys
        while known and known not in self._lines:
            known = known[:-1]
        if known:
            place = f":{self._lines[known]}"
        return InvalidRequest(f"{self.path}{place}: {'.'.join(keys)}: {reason}")


def convert(fields: Mapping[str, Any], kind: type[Struct]) -> tuple[Struct | None, Keys, str]:
    """Convert `fields` to `kind`; or return None, the wrong value's keys, and the reason."""
    try:
        return msgspec.convert(fields, kind), (), ""
    except msgspec.ValidationError as error:
        match = _PLACE.match(str(error))
        assert match is not None
        keys = tuple(re.findall(r"[^.\[\]]+", match["keys"] or ""))
        reason = f"a key: {match['reason']}" if match["key"] else match["reason"]
        field = _YAML_FIELD.search(reason)
        if field:
            keys = (*keys, field["name"])
            near = get_close_matches(field["name"], _names(kind), n=1)
            reason = "there is no such key" + (f"; did you mean {near[0]!r}?" if near else "")
            if field["kind"] != "unknown":
                reason = "is missing"
        elif reason.startswith("Invalid enum value"):
            reason += f"; there are {', '.join(map(repr, _values_at(kind, keys)))}"
        return None, keys, reason


def _values_at(kind: type[msgspec.Struct], keys: Keys) -> Sequence[Any]:
    """Return the values of the Literal at `keys`; msgspec's errors omit a dict's key."""
    type_ = msgspec.inspect.type_info(kind)
    for key in keys:
        if isinstance(type_, msgspec.inspect.DictType):
            type_ = type_.value_type
        if isinstance(type_, msgspec.inspect.StructType):
            (type_,) = (field.type for field in type_.fields if field.encode_name == key)
        elif isinstance(type_, msgspec.inspect.ListType):
            type_ = type_.item_type
    return type_.values if isinstance(type_, msgspec.inspect.LiteralType) else ()


def _names(kind: type[msgspec.Struct]) -> list[str]:
    """Return the names of all fields, nested structs' included."""
    names = []
    for each in msgspec.structs.fields(kind):
        names.append(each.encode_name)
        if isinstance(each.type, type) and issubclass(each.type, msgspec.Struct):
            names += _names(each.type)
    return names


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line of JSON. Raises InvalidRequest."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(line, path, number)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path}:{number}: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}:{number}: a row is an object, not {line.strip()[:40]!r}")
    return value


# Task ---------------------------------------------------------------------------------------------


Count = Annotated[int, msgspec.Meta(ge=0)]
Some = Annotated[int, msgspec.Meta(ge=1)]
Files = str | list[str]
LikelihoodMetric = Literal["acc", "acc_norm", "acc_bytes", "acc_tokens", "acc_mutual_info"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a task file's parts."""


class Shots(_Part, frozen=True):
    """Examples before each question: the first `count` rows of `data`, a random sample by `seed`,
    or the `rows` of these indices. All questions share them; with `same`, all questions with an
    equal value of this field. Without `data`, examples are taken from the questions, and not asked.
    `text`: a file with fixed text before each question."""

    count: Count = 0
    data: Files = ""
    seed: int | None = None
    rows: list[Count] = []
    same: str = ""
    text: str = ""
    separator: str = "\n\n"


class Extract(_Part, frozen=True):
    """Extraction of the answer from a response: the first or last match of `pattern` (its first
    matching group, if any)."""

    pattern: str
    take: Literal["first", "last"] = "first"


class Match(_Part, frozen=True):
    """Normalisation before two texts are compared: matches of `ignore` and outer white space are
    removed."""

    ignore: list[str] = []
    ignore_case: bool = False


class Judge(_Part, frozen=True):
    """Judge of responses: a `prompt` with the question's fields and {response}, and the `choices`.
    The choice `right` accepts the response."""

    prompt: str
    choices: list[str] = msgspec.field(default_factory=lambda: ["yes", "no"])
    right: str = "yes"


class Task(_Part, frozen=True):
    """Task of an evaluation. `prompt`, `description`, `choices` and `answer` are templates
    (`fill`).

    `score`: "likelihood" scores each choice after the prompt; "generate" matches the extracted
    answer of a response; "judge" has a response judged. `choices` names the field with the choices,
    or lists their texts. With `contexts`, the name of a field, its texts precede the prompt, whose
    likelihood counts. `answer` is the field of the right choice (index, letter or text), or of the
    right text. `votes`: the number of responses for a majority vote.
    """

    data: Files
    name: str = ""
    format: str = "questions"
    score: Literal["likelihood", "generate", "judge"] = "likelihood"
    description: str = ""
    prompt: str = "{question}"
    choices: str | list[str] = "choices"
    contexts: str = ""
    answer: str = "answer"
    delimiter: str = " "
    id: str = "id"
    group: str = ""
    limit: Some | None = None
    shots: Shots = Shots()
    metrics: Annotated[list[LikelihoodMetric], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["acc"]
    )
    generate: dict[str, Any] = {}
    votes: Some = 1
    extract: dict[str, Extract] = {}
    match: Match = Match()
    judge: Judge | None = None
    chat: bool = False


def read_task(path: str | Path, changes: Mapping[str, Any] | None = None) -> Task:
    """Read a task from a file; its paths are relative to the file. `changes` overrides values by
    dotted keys ("shots.count"). Raises InvalidRequest naming the file, line and key."""
    document = Document(Path(path), "a task is a mapping of keys to values")
    fields = {"name": document.path.stem, **document.content}
    return _made(fields, changes or {}, document.path.parent, document.wrong)


def ready_task(name: str, changes: Mapping[str, Any]) -> Task:
    """Make a task of a well-known format from `changes` alone. Paths are relative to the current
    folder."""

    def wrong(keys: Keys, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{name}: {'.'.join(keys)}: {reason}")

    return _made({"name": name, "format": name}, changes, Path(), wrong)


def _made(fields: dict[str, Any], changes: Mapping[str, Any], folder: Path, wrong: Any) -> Task:
    name = fields.get("format", "questions")
    if not isinstance(name, str) or name not in FORMATS:
        raise wrong(("format",), f"one of {', '.join(FORMATS)}, not {name!r}")
    fields = _merged(FORMATS[name].task, fields)
    for key, value in changes.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        fields = _merged(fields, value)
    task, keys, reason = convert(fields, Task)
    if task is None:
        raise wrong(keys, reason)
    _check(task, wrong)
    shots = task.shots
    return msgspec.structs.replace(
        task,
        data=_absolute(task.data, folder),
        shots=msgspec.structs.replace(
            shots,
            data=_absolute(shots.data, folder) if shots.data else "",
            text=str(folder / shots.text) if shots.text else "",
        ),
    )


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` onto `under`, also within the task's parts."""
    merged = {**under, **over}
    for key in ("shots", "generate", "match"):
        if isinstance(under.get(key), Mapping) and isinstance(over.get(key), Mapping):
            merged[key] = {**under[key], **over[key]}
    return merged


def _absolute(files: Files, folder: Path) -> list[str]:
    return [str(folder / file) for file in ([files] if isinstance(files, str) else files)]


def _check(task: Task, wrong: Any) -> None:
    """Check the constraints that types cannot express. Raises InvalidRequest."""
    if task.score == "judge" and task.judge is None:
        raise wrong(("judge",), "score: judge needs it")
    if task.judge is not None and task.judge.right not in task.judge.choices:
        raise wrong(("judge", "right"), f"none of the choices {task.judge.choices}")
    if task.chat and task.score == "likelihood":
        raise wrong(("chat",), "likelihoods are asked for behind plain text")
    if task.contexts and "acc_mutual_info" in task.metrics:
        raise wrong(("metrics",), "acc_mutual_info: with contexts, all choices have one ending")
    if task.shots.rows and (task.shots.count or task.shots.seed is not None):
        raise wrong(("shots", "rows"), "given beside a count or a seed")
    try:
        sampling.normalise(task.generate, "generate")
    except (TypeError, InvalidRequest) as error:
        raise wrong(("generate",), str(error).removeprefix("generate: ")) from None
    if task.generate.get("n", 1) != 1:
        raise wrong(("generate", "n"), "a row has one response; votes asks for several")
    for keys, pattern in _patterns(task):
        try:
            re.compile(pattern)
        except re.error as error:
            raise wrong(keys, f"no pattern: {error}") from None
    plain = Task(data=task.data)
    for key in ("generate", "extract", "votes", "judge"):
        if task.score == "likelihood" and getattr(task, key) != getattr(plain, key):
            raise wrong((key,), "the model writes nothing with score: likelihood, the default")


def _patterns(task: Task) -> list[tuple[Keys, str]]:
    extracts = [(("extract", name, "pattern"), one.pattern) for name, one in task.extract.items()]
    ignored = enumerate(task.match.ignore)
    return [*extracts, *[(("match", "ignore", str(at)), one) for at, one in ignored]]
