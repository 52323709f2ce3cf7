"""Parts that all commands share: options, output, failures with their exit codes, and the session in which they run."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import ssl
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Final, NoReturn, TextIO

import typer
from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SlaveNotFoundError
from redis.backoff import NoBackoff
from rich.console import Console

from redis_sync_aio import CommandRefused, SyncError
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.errors._base import page

from .._client.address import Address, BadAddress, parse_address
from .._core.keys import checked_prefix

# -- Failures of commands: one line that says what to do, and the exit code for it -----------------------------


USAGE: Final = 2
UNREACHABLE: Final = 69
"""EX_UNAVAILABLE of sysexits.h."""
BUG: Final = 70
"""EX_SOFTWARE."""
DENIED: Final = 77
"""EX_NOPERM."""
INTERRUPTED: Final = 130
EXPECTED: Final = (exceptions.RedisError, exceptions.RedisClusterException, SyncError, OSError)
"""The errors that servers and networks cause; any other exception is a bug."""
COMMON_EXITS: Final = {
    USAGE: "wrong usage, or an address that cannot be read",
    UNREACHABLE: "the server cannot be reached, or cannot serve now",
    BUG: "a bug of this command",
    DENIED: "the server refused the password, or a command",
    INTERRUPTED: "ended by Ctrl-C",
}
"""Exit codes of every command."""


class Failure(Exception):
    """The end of a command by an error: one line for people, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def explained(error: BaseException, address: Address) -> Failure:
    """Explain an error of a server, of the network or of this package to the user."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, BaseExceptionGroup):
        return explained(error.exceptions[0], address)
    if isinstance(error, exceptions.ConnectionError) and isinstance(error.__cause__, exceptions.AuthenticationError):
        return explained(error.__cause__, address)  # redis-py wraps what a server on a unix socket refuses
    where = address.shown
    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)):
        return Failure(f"{where} refused the login: {_reason(error)}. {_LOG_IN}", DENIED)
    if isinstance(error, PermissionDenied):
        return Failure(f"{where}: {_reason(error)}", DENIED)
    if isinstance(error, (exceptions.NoPermissionError, exceptions.AuthorizationError)):
        what = f"{where} refused a command: {_reason(error)}. The rights: {_RIGHTS}"
        return Failure(what, DENIED)
    if isinstance(error, CommandRefused) and error.code == "MOVED":
        return Failure(f"{where} is one node of a cluster: use redis+cluster://{where}", UNREACHABLE)
    if isinstance(error, (MasterNotFoundError, SlaveNotFoundError)):
        # Their message shows the clients of all sentinels.
        advice = "Check the service name and that Sentinel runs; during a failover, try again in some seconds"
        return Failure(f"no primary was found for {where}. {advice}", UNREACHABLE)
    if address.topology == "sentinel" and "unknown command 'sentinel'" in str(error).lower():
        return Failure(f"cannot use {where}: that is no sentinel. For a server, use redis://HOST:PORT", UNREACHABLE)
    if isinstance(error, exceptions.RedisClusterException):
        return Failure(_about_cluster(error, address), UNREACHABLE)
    if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError)) and not isinstance(
        error, SyncError
    ):
        return Failure(f"cannot reach {where}: {_reason(error)}. {_advice(error, address)}", UNREACHABLE)
    return Failure(f"{where}: {_reason(error)}", UNREACHABLE)


_LOG_IN: Final = "Set REDIS_USERNAME and REDIS_PASSWORD, or put USER:PASSWORD@ into REDIS_URL"
_RIGHTS: Final = page("operations/servers", "rights")


def _reason(error: BaseException) -> str:
    """Return an error's message in one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and what led to it."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _about_cluster(error: exceptions.RedisClusterException, address: Address) -> str:
    for one in _chain(error):
        if isinstance(one, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
            return str(explained(one, address))
    advice = "Check --url (or REDIS_URL) and that its nodes run; for a server that is no cluster, use redis://HOST:PORT"
    return f"cannot use {address.shown}: {_reason(error)}. {advice}"


def _advice(error: BaseException, address: Address) -> str:
    tls = [one for one in _chain(error) if isinstance(one, ssl.SSLError)]
    if tls and isinstance(tls[0], ssl.SSLCertVerificationError):
        return "Name the authority of its certificate with --tls-ca FILE"
    if tls:
        return "Does it speak TLS? If not, use redis:// in place of rediss://"
    if address.tls and isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return "Does it run, and does it speak TLS? If not, use redis:// in place of rediss://"
    if "closed by server" in str(error).lower() and not address.tls:
        return "If it speaks TLS, use rediss:// in place of redis://"
    return "Check --url (or REDIS_URL) and that the server runs"


# -- The output of commands: text for people, JSON for programs, errors in one line on stderr ------------------


NAME = "redis-sync-aio"


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 name" or "2 names"; ``many`` is the word for several if that is not ``one`` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Output:
    """Standard output in the way that the options ask for."""

    def __init__(self, *, as_json: bool = False, color: bool = True) -> None:
        self.as_json = as_json
        self.console = console(color=color)
        """For text; it has no colours when the output is no terminal."""

    def json(self, value: object) -> None:
        """Print a value as one JSON document in one line."""
        sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()

    def show(self, value: object, text: Callable[[Console], None]) -> None:
        """Print ``value`` with --json, else whatever ``text`` prints."""
        if self.as_json:
            self.json(value)
        else:
            text(self.console)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error, which `end_output` is for; rich would end the program with a code of its own."""
        raise BrokenPipeError


def console(*, color: bool = True, file: IO[str] | None = None) -> Console:
    """Return a console without markup or colours of its own making; NO_COLOR is heeded."""
    return _Console(file=file, highlight=False, no_color=None if color and not os.environ.get("NO_COLOR") else True)


def end_output(stream: TextIO) -> None:
    """Print nothing more there: whatever read the output has closed it."""
    with suppress(OSError):  # the interpreter flushes again in the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_error(text: str) -> None:
    """Print on stderr, if anything reads it: a command continues, and has its own exit code, in any case."""
    try:
        print(_without_secrets(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        end_output(sys.stderr)


def complain(message: str) -> None:
    """Print one line on stderr."""
    print_error(f"{NAME}: {' '.join(message.split())}")


def print_traceback(error: BaseException) -> None:
    """Print the traceback that --debug promises."""
    print_error("".join(traceback.format_exception(error)).rstrip("\n"))


_secrets: set[str] = set()


def keep_secret(*values: str | None) -> None:
    """Never print these: libraries may quote them in errors."""
    _secrets.update(value for value in values if value)


def _without_secrets(text: str) -> str:
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


# -- Options that all commands share: where the server is, who asks, how to print ------------------------------


CONNECTION = "Connection"
OUTPUT = "Output"
LOCALHOST = "redis://localhost:6379"


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


@dataclass(frozen=True, slots=True, repr=False)
class Shared:
    """The values of the options that all commands share. It has no ``repr``: some are secrets."""

    # fmt: off
    url: Annotated[str, typer.Option(envvar="REDIS_URL", show_envvar=False, show_default=False, metavar="URL",
        rich_help_panel=CONNECTION, help="redis://, rediss://, unix://, redis+sentinel://HOST,HOST/SERVICE or "
        "redis+cluster://HOST. From REDIS_URL, else localhost.")] = LOCALHOST
    username: Annotated[str | None, typer.Option(envvar="REDIS_USERNAME", show_envvar=False, metavar="USER",
        rich_help_panel=CONNECTION, help="ACL user. From REDIS_USERNAME; one in the address wins.")] = None
    password: Annotated[str | None, typer.Option(envvar="REDIS_PASSWORD", show_envvar=False, metavar="PASSWORD",
        rich_help_panel=CONNECTION, help="Its password. Better in REDIS_PASSWORD: `ps` shows options to "
        "all users.")] = None
    sentinel_username: Annotated[str | None, typer.Option(envvar="REDIS_SENTINEL_USERNAME", show_envvar=False,
        metavar="USER", rich_help_panel=CONNECTION, help="ACL user of the sentinels. From "
        "REDIS_SENTINEL_USERNAME.")] = None
    sentinel_password: Annotated[str | None, typer.Option(envvar="REDIS_SENTINEL_PASSWORD", show_envvar=False,
        metavar="PASSWORD", rich_help_panel=CONNECTION, help="Password of the sentinels. Better in "
        "REDIS_SENTINEL_PASSWORD.")] = None
    tls_ca: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE",
        rich_help_panel=CONNECTION, help="Certificate of the authority that signed the server's.")] = None
    tls_cert: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE",
        rich_help_panel=CONNECTION, help="Certificate of this client.")] = None
    tls_key: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE",
        rich_help_panel=CONNECTION, help="Private key of that certificate.")] = None
    tls_insecure: Annotated[bool, typer.Option("--tls-insecure", rich_help_panel=CONNECTION,
        help="Do not check the server's certificate.")] = False
    connect_timeout: Annotated[float, typer.Option(min=0.01, metavar="S",
        rich_help_panel=CONNECTION, help="Seconds for connecting and for each answer.")] = 5.0
    json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print JSON.")] = False
    no_color: Annotated[bool, typer.Option("--no-color", callback=_no_color, is_eager=True, rich_help_panel=OUTPUT,
        help="Print no colours; so does NO_COLOR.")] = False
    debug: Annotated[bool, typer.Option("--debug", rich_help_panel=OUTPUT,
        help="Print the traceback of an error.")] = False
    prefix: Annotated[str, typer.Option(callback=_checked_prefix, metavar="PREFIX", show_default=False,
        rich_help_panel=CONNECTION, help="Prefix of the coordinators, such as app1: (default: none).")] = ""
    # fmt: on

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


@dataclass(frozen=True, slots=True)
class Session:
    """The client, server and output that a command works with."""

    client: Redis | RedisCluster
    address: Address
    output: Output
    another_client: Callable[..., Redis]
    """Makes a client of the same server (in a cluster: of one node), with some options changed."""
    response_timeout: float
    """Seconds that an answer may take."""
    sentinels: tuple[Redis, ...] = ()
    """A client of each sentinel, for an address with Sentinel."""
    prefix: str = ""
    """The prefix of the coordinators that the command is about."""
    server_at: Callable[[str, int], Redis] | None = None
    """Makes a client of any server of that service, by its address."""
    sentinel_at: Callable[[str, int], Redis] | None = None
    """Makes a client of any sentinel, by its address."""


def command_of(body: Callable[..., Any], **client: Any) -> Callable[..., None]:
    """Return ``body`` as typer takes a command: a dataclass among its parameters stands for an option of each field.

    The parameter ``session`` stands for the shared options, which come last; ``body`` is then a coroutine function
    that returns an exit code. ``client``: options of the client of its session.
    """
    own = [*inspect.signature(body, eval_str=True).parameters.values()]
    if in_session := own[0].annotation is Session:
        own = [*own[1:], own[0].replace(annotation=Shared)]
    signature: Any = partial(inspect.signature, eval_str=True)
    groups = {one.name: signature(one.annotation).parameters for one in own if is_dataclass(one.annotation)}
    parameters = [it.replace(kind=it.KEYWORD_ONLY) for one in own for it in groups.get(one.name, {"": one}).values()]

    def command(**given: Any) -> None:
        def value(one: inspect.Parameter) -> Any:
            if one.name not in groups:
                return given[one.name]
            return one.annotation(**{name: given[name] for name in groups[one.name]})

        if in_session:
            *rest, shared = own
            _execute(value(shared), lambda: partial(body, **{one.name: value(one) for one in rest}), client)
        else:
            body(**{one.name: value(one) for one in own})

    command.__name__, command.__doc__ = body.__name__, body.__doc__
    command.__annotations__ = {it.name: it.annotation for it in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _execute(shared: Shared, prepare: Callable[[], Callable[[Session], Awaitable[int]]], client: Any) -> NoReturn:
    """Run the coroutine of ``prepare`` in an event loop with a connected client, and exit with its exit code.

    Errors of servers, networks and addresses become one line on stderr; so does a Failure of ``prepare``, which is
    called before that, for wrong usage.
    """
    if not shared.debug:  # what matters of it is said in one line
        logging.getLogger("redis_sync_aio").addHandler(logging.NullHandler())

    async def connected(body: Callable[[Session], Awaitable[int]]) -> int:
        with _interruptible():
            async with connect(shared, **client) as session:
                return await body(session)

    try:
        code = asyncio.run(connected(prepare()))
        sys.stdout.flush()
    except BrokenPipeError:  # as in `redis-sync-aio ls | head`
        end_output(sys.stdout)
        code = 0
    except Failure as failure:
        if shared.debug:
            print_traceback(failure)
        complain(str(failure))
        code = failure.code
    except (KeyboardInterrupt, asyncio.CancelledError):  # the latter while asyncio.run ends
        code = INTERRUPTED
    raise typer.Exit(code)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C cancel this task.

    The handler of `asyncio.run` is called between bytecodes: a signal that comes after the last of them, before the
    loop begins to wait, is not noticed until something else wakes the loop. One that the loop knows wakes it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:  # what `asyncio.run` does at last may wait for a name server: Ctrl-C ends that again
        loop.remove_signal_handler(signal.SIGINT)


@asynccontextmanager
async def connect(shared: Shared, **options: Any) -> AsyncIterator[Session]:
    """Connect as the options say, and close in the end; raise Failure for errors there and in the body.

    The connection is tried before the body runs, without a command that an ACL might refuse.
    """
    address = shared.address()
    try:
        async with _connected(shared, address, _client_options(shared, address) | options) as session:
            yield session
    except BrokenPipeError:  # of the output: redis-py has errors of its own
        raise
    except EXPECTED as error:
        raise explained(error, address) from error
    except ExceptionGroup as errors:
        if errors.split(EXPECTED)[1] is not None:
            raise
        raise explained(errors, address) from errors


def _client_options(shared: Shared, address: Address) -> dict[str, Any]:
    limit = shared.connect_timeout
    # RESP2 is what every server and proxy speaks. Locks have a connection of their own, which tries RESP3.
    options: dict[str, Any] = {"socket_timeout": limit, "socket_connect_timeout": limit, "protocol": 2}
    if (user := address.username or shared.username) is not None:
        options["username"] = user
    if (password := address.password or shared.password) is not None:
        options["password"] = password
    for name, path in (("ca_certs", shared.tls_ca), ("certfile", shared.tls_cert), ("keyfile", shared.tls_key)):
        if path is not None:
            options[f"ssl_{name}"] = str(path)
    if shared.tls_insecure:
        options |= {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    return options


@asynccontextmanager
async def _connected(shared: Shared, address: Address, options: dict[str, Any]) -> AsyncIterator[Session]:
    output, timeout, retry = shared.output(), shared.connect_timeout, Retry(NoBackoff(), 0)
    if address.topology == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        options |= {"ssl": address.tls}
        # A cluster that is not whole is what some commands are for.
        async with RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options) as cluster:

            def node(**more: Any) -> Redis:
                first: Any = cluster.get_primaries()[0]
                return Redis(host=first.host, port=first.port, retry=retry, **(options | more))

            yield Session(cluster, address, output, node, timeout, prefix=shared.prefix)
    elif address.topology == "server":

        def server(**more: Any) -> Redis:
            return Redis.from_url(address.url, retry=retry, **(options | more))

        async with server() as client:
            await try_to_connect(client)
            yield Session(client, address, output, server, timeout, prefix=shared.prefix)
    else:
        own = {"username": shared.sentinel_username, "password": shared.sentinel_password, "ssl": address.tls}
        kept = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl_", "protocol"))}
        options |= {"ssl": address.tls, "db": address.db, "retry": retry}
        kept |= own | {"retry": retry}
        sentinel: Any = Sentinel(address.hosts, sentinel_kwargs=kept)  # type: ignore[no-untyped-call]

        def primary(**more: Any) -> Redis:
            made: Redis = sentinel.master_for(address.service, **(options | more))
            return made

        def server_at(host: str, port: int) -> Redis:
            return Redis(host=host, port=port, **options)

        def sentinel_at(host: str, port: int) -> Redis:
            return Redis(host=host, port=port, **kept)

        try:
            async with primary() as client:
                await try_to_connect(client)
                watching = tuple(sentinel.sentinels)
                yield Session(
                    client, address, output, primary, timeout, watching, shared.prefix, server_at, sentinel_at
                )
        finally:
            for one in sentinel.sentinels:
                await one.aclose()


async def try_to_connect(client: Redis) -> None:
    """Open a connection, without a command that an ACL might refuse; raise redis-py's errors."""
    pool: Any = client.connection_pool
    await pool.release(await pool.get_connection())
