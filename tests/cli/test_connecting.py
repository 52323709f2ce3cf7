"""Every command connects in the same way, and every error there is one line that says what to do."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from redis_sync_aio import Coordinator
from redis_sync_aio.embedded import EmbeddedServer

from ..support.inside import BadAddress, parse_address
from ..support.programs import command, printed_json
from ..support.tls import encrypted, make_tls

pytestmark = pytest.mark.real

UNREACHABLE, DENIED, USAGE = 69, 77, 2
WELL = (0, 1)
"""Exit codes of a doctor that could look; these servers have settings that are risky for locks."""
SECRET = "correct-horse"


def one_line(text: str) -> str:
    """Return the one line on stderr."""
    (line,) = text.splitlines()
    return line


def complaint(*words: str, code: int, **env: str) -> str:
    """Run the doctor, which has to fail with ``code``, and return its one line."""
    done = command("doctor", *words, **env)
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    return one_line(done.stderr)


# -- ways to a server --------------------------------------------------------------------------------------


@pytest.mark.ci
def test_tls(server: EmbeddedServer, tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    with encrypted(server.unix_socket, tls) as port:
        url = f"rediss://127.0.0.1:{port}"
        assert "--tls-ca" in complaint("--url", url, code=UNREACHABLE)
        assert "use rediss://" in complaint("--url", f"redis://127.0.0.1:{port}", code=UNREACHABLE)
        assert printed_json("doctor", "--url", url, "--tls-ca", str(tls.authority), expect=WELL)["findings"]
        assert printed_json("doctor", "--url", url, "--tls-insecure", expect=WELL)["findings"]
    plain = f"rediss://127.0.0.1:{server.port}"
    assert "use redis://" in complaint("--url", plain, "--connect-timeout", "1", code=UNREACHABLE)


# -- passwords ---------------------------------------------------------------------------------------------


def test_a_password_is_taken_from_everywhere_and_printed_nowhere() -> None:
    with EmbeddedServer(port=0, args=["--requirepass", SECRET]) as server:
        for words, env in (
            (["--url", f"redis://:{SECRET}@127.0.0.1:{server.port}"], {}),
            (["--url", server.url, "--password", SECRET], {}),
            (["--url", server.url], {"REDIS_PASSWORD": SECRET}),
            (["--url", server.url, "--username", "default"], {"REDIS_PASSWORD": SECRET}),
        ):
            done = command("doctor", *words, **env)
            assert done.returncode in WELL, done.stderr
            assert SECRET not in done.stdout + done.stderr
        urls = (server.url, f"unix://{server.unix_socket}")
        for url, wrong in product(urls, ({}, {"REDIS_PASSWORD": "wrong-password"})):
            line = complaint("--url", url, code=DENIED, **wrong)
            assert "refused the login" in line
            assert "REDIS_PASSWORD" in line
            assert "wrong-password" not in line


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@127.0.0.1:1",
        f"redis://:{SECRET}/x@127.0.0.1:1",
        f"redis://:{SECRET}#x@127.0.0.1:1",
        f"redis://:{SECRET}?x@127.0.0.1:1",
        f"redis://:{SECRET}@127.0.0.1:{SECRET}",
        f"redis://[{SECRET}@127.0.0.1:1",
        f"redis+sentinel://:{SECRET}@127.0.0.1:1/service",
        f"redis+cluster://:{SECRET}@127.0.0.1:1",
        f"unix://:{SECRET}@/tmp/{SECRET}.sock",
        f"http://:{SECRET}@127.0.0.1:1",
        f"default:{SECRET}@127.0.0.1:1",
        SECRET,
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    """Not even where the address cannot be read, and so nobody knows which part of it is the password."""
    done = command("doctor", "--debug", REDIS_URL=url, REDIS_SENTINEL_PASSWORD=SECRET)
    assert done.returncode in (USAGE, UNREACHABLE)
    assert SECRET not in done.stdout + done.stderr
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("redis-sync-aio: ")


# -- addresses that cannot be meant ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("localhost:6379", "no scheme, such as redis://: use redis://HOST:PORT/DB"),
        ("http://localhost", "scheme of the address is not one of redis, rediss, unix, redis+sentinel, "),
        ("redis://[::1", "a character that cannot stand where it is"),
        ("redis://one,two", "redis+sentinel://"),
        ("redis+sentinel://one,two", "names the service"),
        ("redis+cluster://one/3", "database 0 only"),
        ("redis+cluster://one?protocol=2", "use the options"),
        ("redis://one/zero", "cannot be read"),
        ("redis://one/0/1", "too long"),
        ("unix://", "path of the socket"),
    ],
)
def test_a_wrong_address_says_what_to_write(url: str, advice: str) -> None:
    with pytest.raises(BadAddress, match=re.escape(advice)):
        parse_address(url)


def test_addresses_are_taken_apart() -> None:
    found = parse_address("rediss+sentinel://us%2Fer:pa%40ss@one:1,[::1]:2,three/main/5")
    assert (found.topology, found.tls, found.service, found.db) == ("sentinel", True, "main", 5)
    assert found.hosts == (("one", 1), ("::1", 2), ("three", 26379))
    assert (found.username, found.password) == ("us/er", "pa@ss")
    assert "pa" not in repr(found) + found.shown


@pytest.mark.parametrize("blank", ["", " ", "\n", "\xa0", "\u3000"], ids=ascii)
@pytest.mark.parametrize(
    "address",
    ["redis://one", "rediss://one", "unix:///one", "redis+sentinel://one/main", "rediss+sentinel://one/main",
     "rediss+cluster://one"],
)  # fmt: skip
def test_capitals_of_the_scheme_and_blanks_around_an_address_do_not_matter(address: str, blank: str) -> None:
    """It was copied from a page, or read from a file with the end of its line."""
    scheme, _, rest = address.partition("://")
    found, usual = parse_address(f"{blank}{scheme.upper()}://{rest}{blank}"), parse_address(address)
    assert replace(found, url=usual.url) == usual


async def test_an_address_with_capitals_and_blanks_is_connected_to(server: EmbeddedServer) -> None:
    url = f" UNIX://{server.unix_socket}\n"
    assert printed_json("doctor", expect=WELL, REDIS_URL=url)["findings"]
    async with Coordinator.from_url(url) as sync:
        assert not await sync.lock("blanks").locked()


def test_what_is_not_there_or_something_else_says_what_to_check(server: EmbeddedServer) -> None:
    port = server.port
    for url, code, advice in (
        ("redis://127.0.0.1:1", UNREACHABLE, "Check --url (or REDIS_URL)"),
        ("redis+cluster://127.0.0.1:1", UNREACHABLE, "that its nodes run"),
        (f"redis+cluster://127.0.0.1:{port}", UNREACHABLE, "use redis://HOST:PORT"),
        (f"redis+sentinel://127.0.0.1:{port}/main", UNREACHABLE, "no sentinel. For a server, use redis://HOST:PORT"),
    ):
        assert advice in complaint("--url", url, code=code)
    assert "begins with rediss" in complaint("--url", "redis://127.0.0.1:1", "--tls-insecure", code=USAGE)
    shown = printed_json("doctor", "--url", f"redis://localhost:{port}/3", expect=WELL)["address"]
    assert shown.endswith("db 3")
