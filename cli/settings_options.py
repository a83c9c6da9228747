"""Commands from records of settings: options, help, completion, the keys of a file, and the check of their use.

What a record declares is declared nowhere else. A command that shows an option in another way, or has one besides, says
so in a dataclass of its own, whose fields replace those options, or follow the one that is declared above them.
"""

import glob
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from evenrank.core import files
from evenrank.core.errors import ConfigError, DataError, first_line
from evenrank.core.rules import AllBut, Needs, OneOf, Option, Where, without_rules
from evenrank.core.settings import Wording, check_keys, check_use, check_value, help_texts, rules_of
from evenrank.core.storage import is_url

Record = TypeVar("Record")
LINE, FILE = "COMMANDLINE", "DEFAULT_MAP"  # Click's names of where parameters are given


@dataclass(frozen=True)
class CommandOption:
    """An option of a command, which is also a key of its file."""

    name: str
    kind: Any
    """Of its value, with rules."""
    default: Any
    text: str
    rules: Sequence[Any]
    show: Option
    places: tuple[tuple[str, ...], ...]
    """Names of the fields of records, from the outermost one, that have its value."""

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return self.show.metavar if self.show.is_argument else f"--{self.name.replace('_', '-')}"

    @property
    def type(self) -> Any:
        """The type of its value, or of one of several, on the command line and in a file."""
        first = without_rules(self.kind)
        if self.show.parse is not None:
            return str
        if get_origin(first) in (Union, UnionType):
            parts = [part for part in get_args(first) if part is not NoneType]
            first = Path if Path in parts else parts[0]
        first = get_args(first)[0] if self.is_list else first
        return str if get_origin(first) is Literal else first

    @property
    def is_list(self) -> bool:
        """Whether there may be several values."""
        return get_origin(without_rules(self.kind)) in (tuple, Mapping)

    @property
    def choices(self) -> Sequence[str]:
        """The texts that it may be; none: it may have others."""
        plain = without_rules(self.kind)
        literal = get_args(plain) if get_origin(plain) is Literal else ()
        return next((tuple(rule.names) for rule in self.rules if isinstance(rule, OneOf)), literal)


def options_of(record: Any, besides: Any = None) -> dict[str, CommandOption]:
    """Return the options of a command by name, from the fields of a record and of the records in it."""
    found: dict[str, CommandOption] = {}
    for option in _declared(record):
        places = found[option.name].places if option.name in found else ()
        found[option.name] = replace(found.get(option.name, option), places=(*places, *option.places))
    listed, place = list(found), 0
    for own in _declared(besides) if besides is not None else ():
        if own.name in found:
            place = listed.index(own.name)
            old = found[own.name]
            show = own.show if own.show != Option() else old.show
            text, rules = own.text or old.text, [*own.rules, *old.rules]
            found[own.name] = replace(own, places=old.places, text=text, show=show, rules=rules)
        else:
            found[own.name] = replace(own, places=())
            place += 1
            listed.insert(place, own.name)
    panel, options = "", {}
    for name in listed:
        panel = found[name].show.panel or panel
        options[name] = replace(found[name], show=replace(found[name].show, panel=panel))
    return options


def _declared(record: Any, place: tuple[str, ...] = (), outer: Sequence[Any] = ()) -> Iterator[CommandOption]:
    texts, rules = help_texts(record), rules_of(record)
    shows = {name: [Option(), *(rule for rule in rules[name] if isinstance(rule, Option))][-1] for name in rules}
    names = {name: show.name or name for name, show in shows.items()}
    for field in fields(record):
        own = [
            replace(rule, other=names[rule.other]) if isinstance(rule, Needs) else rule for rule in rules[field.name]
        ]
        here, show = (*place, field.name), shows[field.name]
        if (inner := _record_in(field.type)) is not None and show.parse is None:
            yield from _declared(inner, here, own)
            continue
        # What is made of a text has the text, or texts, as the argument of its default.
        default = getattr(field.default_factory, "args", (field.default,))[0]
        default = None if default is MISSING and place else default  # the record is made if the option is given
        text = texts.get(field.name, "")
        yield CommandOption(names[field.name], field.type, default, text, [*outer, *own], show, (here,))


def _record_in(kind: Any) -> Any:
    kind = without_rules(kind)
    return next((part for part in (kind, *get_args(kind)) if is_dataclass(part)), None)


def command_of(options: Mapping[str, CommandOption]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command for Typer, with these options, of a function; help is its docstring.

    The function gets the context, which has the values of options, and the parameters that it declares besides.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        @wraps(run)
        def command(ctx: typer.Context, **values: Any) -> None:
            run(ctx, **{name: value for name, value in values.items() if name not in options})

        named = inspect.Parameter.KEYWORD_ONLY
        context, *further = (one.replace(kind=named) for one in inspect.signature(run).parameters.values())
        declared = (_parameter(option, options) for option in options.values())
        signature = inspect.Signature([context, *declared, *further])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(option: CommandOption, options: Mapping[str, CommandOption]) -> inspect.Parameter:
    """Return the parameter of an option, whose text is without Markdown, and has options as on the command line."""
    choices, show = option.choices, option.show

    def shown(found: re.Match[str]) -> str:
        is_option = found[1] in options and found[1] not in (*choices, *show.completions())
        return options[found[1]].flag if is_option else found[1]

    def complete(incomplete: str) -> list[str]:
        return [incomplete[: incomplete.rfind(",") + 1] + name for name in choices or show.completions()]

    text = re.sub("`([^`]+)`", shown, option.text).replace(" None: ", " Default: ")
    if show.metavar and any(isinstance(rule, OneOf) for rule in option.rules):
        text += f" One of {', '.join(choices)}."
    kind, default = option.type, option.default
    metavar = show.metavar or "|".join(choices) or {bool: None, int: "NUMBER", float: "NUMBER", str: "TEXT"}.get(kind)
    declared: dict[str, Any] = {"help": text, "metavar": metavar}
    declared |= {"show_default": False} if show.is_argument else {"rich_help_panel": show.panel or None}
    declared |= {"autocompletion": complete} if choices or show.completions is not tuple else {}
    declared |= {"callback": _split_names} if option.is_list and kind is str and show.parse is None else {}
    annotation = list[kind] if option.is_list else kind  # type: ignore[valid-type]
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty
        if default is MISSING
        else list(default or ()) or None
        if option.is_list
        else default,
        annotation=Annotated[annotation | None, (typer.Argument if show.is_argument else typer.Option)(**declared)],
    )


def _split_names(context: typer.Context, parameter: typer.CallbackParam, texts: list[str] | None) -> tuple[str, ...]:
    if source_of(context, str(parameter.name)) == FILE:  # a list, whose names may have commas
        return tuple(texts or ())
    return tuple(name.strip() for text in texts or () for name in text.split(",") if name.strip())


def source_of(context: typer.Context, name: str) -> str:
    """Return where a parameter was given: on the command `LINE`, which wins over the `FILE` of `--config`, if any."""
    return getattr(context.get_parameter_source(name), "name", "")


class Shown(Wording):
    """Messages show options as on the command line or, where they are given there, as in the file."""

    def __init__(self, context: typer.Context, options: Mapping[str, CommandOption]) -> None:
        self.context, self.options = context, options

    def option(self, name: str) -> str:
        """Return an option without a value."""
        return self.options[name].flag

    def given(self, name: str, value: Any) -> str:
        """Return an option as it was given."""
        if value is None:
            return self.values(name, (None,))
        values = value if isinstance(value, list | tuple) else [value]
        text = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
        text = text.lower() if isinstance(value, bool) else text
        if source_of(self.context, name) == FILE:
            return f"{name} = {text} in {self.context.params['config_file']}"
        if self.options[name].show.is_argument:
            return text
        return self.option(name) if isinstance(value, bool) else f"{self.option(name)} {text}"

    def values(self, name: str, allowed: Any) -> str:
        """Return an option with the values that a rule allows."""
        if isinstance(allowed, Where):
            return allowed.text if self.options[name].show.is_argument else f"{self.option(name)} {allowed.text}"
        if tuple(allowed) == (None,):
            return f"commands {'with' if isinstance(allowed, AllBut) else 'without'} {self.option(name)}"
        return f"{self.option(name)} {'other than ' * isinstance(allowed, AllBut)}{' or '.join(map(str, allowed))}"


def check_options(context: typer.Context, options: Mapping[str, CommandOption]) -> dict[str, Any]:
    """Check the options of a command, and return the values of those that were given, even with their defaults.

    Raises:
        ConfigError: an option is out of range, or has no effect together with the others.
    """
    raw = {name: context.params[name] for name in options}
    given = {name: raw[name] for name in options if source_of(context, name) in (LINE, FILE)}
    for name, value in given.items():
        option = options[name]
        if option.show.parse is None:
            given[name] = tuple(value) if option.is_list else value
            is_in_file = source_of(context, name) == FILE
            try:
                check_value(name if is_in_file else option.flag, given[name], option.kind)
            except ConfigError as error:
                place = f"{context.params['config_file']}: " if is_in_file else ""
                raise ConfigError(f"{place}{error}") from error
    check_use({name: list(option.rules) for name, option in options.items()}, raw, given, Shown(context, options))
    return given


def chosen(record: Callable[..., Record], context: typer.Context, options: Mapping[str, CommandOption]) -> Record:
    """Check the options of a command, and return the record of those that were given."""
    return make(record, check_options(context, options), options)


def make(
    record: Callable[..., Record], values: Mapping[str, Any], options: Mapping[str, CommandOption], **others: Any
) -> Record:
    """Return a record with the values of options; records in it are made if one of their options has a value."""
    parsed = {
        name: value if (parse := options[name].show.parse) is None else parse(value) for name, value in values.items()
    }
    places = {place: value for name, value in parsed.items() for place in options[name].places}

    def arguments(of: Any, place: tuple[str, ...]) -> dict[str, Any]:
        found = {}
        for field in fields(of):
            here, inner = (*place, field.name), _record_in(field.type)
            if here in places:
                found[field.name] = places[here]
            elif inner is not None and (of_inner := arguments(inner, here)):
                found[field.name] = inner(**of_inner)
        return found

    return record(**arguments(record, ()) | others)


def config_option(options: Mapping[str, CommandOption], text: str, panel: str | None = None) -> Any:
    """Declare `--config`, a file with any of these options, for the parameter `config_file`; `text` is its help."""

    def read(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None:  # the values become defaults, which are read after this option
            context.default_map = read_config(file, options)
        return file

    return typer.Option("--config", callback=read, is_eager=True, help=text, metavar="FILE", rich_help_panel=panel)


def read_config(path: Path, options: Mapping[str, CommandOption]) -> dict[str, Any]:
    """Return the options of a TOML file, with paths relative to the current folder."""
    with files.open_regular(path) as file:
        try:
            raw = tomllib.load(file)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not valid TOML ({first_line(error)}); fix it") from error
    check_keys(path, raw, [*options])
    return {name: _read_value(path, options[name], value) for name, value in raw.items()}


def _read_value(path: Path, option: CommandOption, value: Any) -> Any:
    kind, is_list = option.type, option.is_list
    values = value if isinstance(value, list) and is_list else [value]
    allowed = {float: (float, int), Path: (str,)}.get(kind, (kind,))
    if any(type(one) not in allowed or "\0" in str(one) for one in values):
        wanted = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "a string")
        several = " or a list of strings" * is_list
        raise ConfigError(f"{path}: {option.name} must be {wanted}{several}, got {value!r}")
    if kind is Path:
        values = [_relative_to(path.parent, one) for one in values]
    elif kind is str:
        values = [re.sub(option.show.paths, lambda found: _relative_to(path.parent, found[0]), one) for one in values]
    return values if is_list else values[0]


def _relative_to(folder: Path, path: str) -> str:
    prefix = glob.escape(str(folder)) if glob.has_magic(path) else folder
    return path if is_url(path) else str(Path(prefix, path))
