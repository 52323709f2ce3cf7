"""Options that all commands share: where the server is, who asks, how to print."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from .._client.address import Address, BadAddress, parse_address
from .._core.prefixes import checked_prefix
from ._failures import USAGE, Failure
from ._output import Output, keep_secret

P = ParamSpec("P")
CONNECTION = "Connection"
OUTPUT = "Output"
LOCALHOST = "redis://localhost:6379"


@dataclass(frozen=True, slots=True)
class Shared:
    """The values of those options; secrets are not in its ``repr``."""

    url: str = field(repr=False)
    username: str | None = field(repr=False)
    password: str | None = field(repr=False)
    sentinel_username: str | None = field(repr=False)
    sentinel_password: str | None = field(repr=False)
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_insecure: bool
    connect_timeout: float
    json: bool
    no_color: bool
    debug: bool
    prefix: str = ""

    def address(self) -> Address:
        """Return where to connect to; Failure if the address and the TLS options make no sense."""
        keep_secret(self.password, self.sentinel_password)
        try:
            address = parse_address(self.url)
        except BadAddress as error:
            raise Failure(f"--url (or REDIS_URL): {error}", USAGE) from None
        keep_secret(address.password)
        if not address.tls and (self.tls_ca or self.tls_cert or self.tls_key or self.tls_insecure):
            raise Failure("--tls-… options need an address that begins with rediss", USAGE)
        return address

    def output(self) -> Output:
        """Return where to print."""
        return Output(as_json=self.json, color=not self.no_color)


def not_empty(name: str) -> str:
    """Return a name or pattern of the command line; raise BadParameter if it is empty, or no text."""
    if not name:
        raise typer.BadParameter("it is empty")
    if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
        raise typer.BadParameter("it is not UTF-8; in a pattern, ? stands for such a byte")
    return name


def _checked_prefix(value: str) -> str:
    try:
        checked_prefix(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


def _no_color(value: bool) -> bool:
    if value:
        os.environ["NO_COLOR"] = "1"  # for the help, too, and for what a child process prints
    return value


def _options(
    url: Annotated[str, typer.Option(envvar="REDIS_URL", show_envvar=False, show_default=False, metavar="URL",
        rich_help_panel=CONNECTION, help="redis://, rediss://, unix://, redis+sentinel://HOST,HOST/SERVICE or "
        "redis+cluster://HOST. From REDIS_URL, else localhost.")] = LOCALHOST,
    username: Annotated[str | None, typer.Option(envvar="REDIS_USERNAME", show_envvar=False, metavar="USER",
        rich_help_panel=CONNECTION, help="ACL user. From REDIS_USERNAME; one in the address wins.")] = None,
    password: Annotated[str | None, typer.Option(envvar="REDIS_PASSWORD", show_envvar=False, metavar="PASSWORD",
        rich_help_panel=CONNECTION, help="Its password. Better in REDIS_PASSWORD: `ps` shows options to "
        "everybody.")] = None,
    sentinel_username: Annotated[str | None, typer.Option(envvar="REDIS_SENTINEL_USERNAME", show_envvar=False,
        metavar="USER", rich_help_panel=CONNECTION, help="ACL user of the sentinels. From "
        "REDIS_SENTINEL_USERNAME.")] = None,
    sentinel_password: Annotated[str | None, typer.Option(envvar="REDIS_SENTINEL_PASSWORD", show_envvar=False,
        metavar="PASSWORD", rich_help_panel=CONNECTION, help="Password of the sentinels. Better in "
        "REDIS_SENTINEL_PASSWORD.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE",
        rich_help_panel=CONNECTION, help="Certificate of the authority that signed the server's.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE",
        rich_help_panel=CONNECTION, help="Certificate of this client.")] = None,
    tls_key: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE",
        rich_help_panel=CONNECTION, help="Private key of that certificate.")] = None,
    tls_insecure: Annotated[bool, typer.Option("--tls-insecure", rich_help_panel=CONNECTION,
        help="Do not check the server's certificate.")] = False,
    connect_timeout: Annotated[float, typer.Option(min=0.01, metavar="S",
        rich_help_panel=CONNECTION, help="Seconds for connecting and for each answer.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print JSON.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", callback=_no_color, is_eager=True, rich_help_panel=OUTPUT,
        help="Print no colours; so does NO_COLOR.")] = False,
    debug: Annotated[bool, typer.Option("--debug", rich_help_panel=OUTPUT,
        help="Print the traceback of an error.")] = False,
    prefix: Annotated[str, typer.Option(callback=_checked_prefix, metavar="PREFIX", show_default=False,
        rich_help_panel=CONNECTION, help="Prefix of the coordinators, such as app1: (default: none).")] = "",
) -> None:  # fmt: skip
    """Declare the options; their names are the fields of `Shared`."""


def with_shared(command: Callable[Concatenate[Shared, P], None]) -> Callable[..., None]:
    """Return ``command`` as typer takes it: the shared options follow its own, and come to it as one `Shared`."""

    def expanded(**arguments: Any) -> None:
        shared = Shared(**{name: arguments.pop(name) for name in options})
        command(shared, **arguments)  # type: ignore[call-arg]

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = inspect.signature(_options, eval_str=True).parameters
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *options.values())]
    expanded.__name__, expanded.__doc__ = command.__name__, command.__doc__
    expanded.__annotations__ = {one.name: one.annotation for one in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded
