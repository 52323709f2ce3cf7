"""Durations and names: accepted and kept whole, or ValueError/TypeError; never another error (E1, E2)."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.crc import key_slot

from redis_sync_aio import AsyncLock, Coordinator
from redis_sync_aio._client.settings import encode
from redis_sync_aio._core.arguments import MAX_TTL_MS, positive_seconds, require_bool, seconds, timeout_seconds, ttl_ms
from redis_sync_aio._core.display import text
from redis_sync_aio._core.keys import (
    MAX_NAME_BYTES,
    Engine,
    Keys,
    check_slot,
    gate_keys,
    hash_tag,
    keys_around,
    lock_keys,
    permit_keys,
    robust_keys,
)

# -- durations -------------------------------------------------------------------------------------------

NOT_DURATIONS: tuple[object, ...] = ("5", b"5", True, False, Decimal(5), Fraction(1, 2), [5], object(), 1j)
NEVER: tuple[object, ...] = (-1, -0.001, math.nan, math.inf, -math.inf, timedelta(seconds=-1), 10**400, -(10**400))


def shown(value: object) -> str:
    return f"{value!r:.20}".split(" at 0x")[0]


@pytest.mark.parametrize("check", [seconds, positive_seconds, timeout_seconds, ttl_ms])
@pytest.mark.parametrize("value", NOT_DURATIONS, ids=shown)
def test_e2_what_is_not_a_duration_is_a_type_error(check: Any, value: object) -> None:
    with pytest.raises(TypeError, match="dose"):
        check(value, "dose")


@pytest.mark.parametrize("check", [seconds, positive_seconds, timeout_seconds, ttl_ms])
@pytest.mark.parametrize("value", NEVER, ids=shown)
def test_e2_what_is_out_of_range_is_a_value_error(check: Any, value: object) -> None:
    with pytest.raises(ValueError, match="dose"):
        check(value, "dose")


@pytest.mark.parametrize(
    "value",
    [0, 0.0, -0.0, 0.0001, 0.009, 1e-300, 5e-324, timedelta(0), timedelta(microseconds=1), 3.2e8, 1e18, 1e306, 1.7e308,
     timedelta.max, 10**300],
    ids=shown,
)  # fmt: skip
def test_e2_a_ttl_below_10_ms_or_above_ten_years_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"ttl must be between"):
        ttl_ms(value)


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        (0.01, 10),
        (0.0091, 10),
        (0.0101, 11),
        (0.010000001, 11),
        (0.07, 70),  # 0.07 * 1000 is 70.00000000000001
        (0.29, 290),
        (1, 1000),
        (1.0000001, 1001),
        (timedelta(milliseconds=10), 10),
        (timedelta(microseconds=10_001), 11),
        (timedelta(days=1), 86_400_000),
        (MAX_TTL_MS // 1000, MAX_TTL_MS),
    ],
    ids=shown,
)
def test_e2_a_ttl_is_rounded_up_to_whole_milliseconds(value: Any, milliseconds: int) -> None:
    assert ttl_ms(value) == milliseconds


@given(st.integers(10, 1_000_000_000))  # beyond eleven days a float may be a millisecond off
def test_whole_milliseconds_stay_what_they_are(milliseconds: int) -> None:
    assert ttl_ms(milliseconds / 1000) == milliseconds
    assert ttl_ms(timedelta(milliseconds=milliseconds)) == milliseconds


@given(st.floats(0.0091, MAX_TTL_MS / 1000))
def test_rounding_never_shortens_a_ttl_and_adds_less_than_a_millisecond(value: float) -> None:
    assert -1e-8 * max(value, 1.0) <= ttl_ms(value) / 1000 - value < 0.001 + 1e-8 * value


ANYTHING = (
    st.floats() | st.integers() | st.timedeltas() | st.booleans() | st.none() | st.text() | st.decimals() | st.binary()
)


@settings(max_examples=25)
@given(value=ANYTHING)
def test_e2_a_duration_is_accepted_or_refused_and_nothing_else(value: object) -> None:
    checks: tuple[Any, ...] = (seconds, positive_seconds, timeout_seconds, ttl_ms)
    for check in checks:
        with suppress(TypeError, ValueError):
            result = check(value, "dose")
            assert result is None or (math.isfinite(result) and result >= 0)


def test_0_is_a_timeout_but_not_a_positive_duration() -> None:
    assert timeout_seconds(0) == 0.0
    assert timeout_seconds(None) is None
    assert timeout_seconds(timedelta(milliseconds=1500)) == 1.5
    assert positive_seconds(1e-9, "dose") == 1e-9
    with pytest.raises(ValueError, match="dose"):
        positive_seconds(0, "dose")


@pytest.mark.parametrize("value", [0, 1, None, "yes", []], ids=repr)
def test_a_switch_is_a_bool(value: object) -> None:
    with pytest.raises(TypeError, match="renew must be True or False"):
        require_bool(value, "renew")
    assert require_bool(True, "renew") is True


@given(st.binary())
def test_any_bytes_of_the_server_can_be_shown(value: bytes) -> None:
    readable = text(value)
    assert readable.encode("utf-8").decode("utf-8") == readable
    try:
        assert readable == value.decode("utf-8")
    except UnicodeDecodeError:
        assert "\\x" in readable


# -- names -----------------------------------------------------------------------------------------------

ACCEPTED: tuple[bytes, ...] = (
    b"a", b"orders:42", b"a{b}c", b"{a}", b"{a}{b}", b"{a}{", b"{a}}", b"x{a}y{}z", b" ", b"\r\n", b"\x00", b"\xff\xfe",
    b"\xc3", "schl\u00fcssel".encode(), b"|", b"a:queue", b"{a}:queue", b"%s", b"{a\xff}", b"{ }", b"{a{b}",
    b"x" * MAX_NAME_BYTES,
)  # fmt: skip
REFUSED: tuple[bytes, ...] = (b"", b"x" * (MAX_NAME_BYTES + 1), b"x" * (1 << 20), b"}" * 9000)
NOT_IN_A_CLUSTER: tuple[bytes, ...] = (b"{}", b"}", b"a}{b", b"a}b", b"{}a", b"a{}b", b"{}{a}", b"{}}", b"a}")


def assert_one_slot(name: bytes) -> None:
    """The one promise about a name that a cluster accepts: its keys are different, and lie in NAME's own slot."""
    keys = lock_keys(name)
    assert keys.all == (keys.name, keys.queue, keys.fence, keys.polls)
    assert keys.name == name, "P11: the holder's key is NAME itself"
    assert len(set(keys.all)) == 4
    assert {key_slot(key) for key in keys.all} == {key_slot(name)}, keys.all


@pytest.mark.parametrize("name", ACCEPTED, ids=shown)
def test_e1_the_keys_of_a_name_share_its_slot(name: bytes) -> None:
    assert_one_slot(name)


@pytest.mark.parametrize("name", REFUSED, ids=shown)
def test_e1_an_empty_or_endless_name_is_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match="name") as caught:
        lock_keys(name)
    assert len(str(caught.value)) < 400 + len(repr(name[:MAX_NAME_BYTES])), "a message, not a dump"


@pytest.mark.parametrize("name", NOT_IN_A_CLUSTER, ids=shown)
def test_e1_a_name_that_breaks_its_hash_tag_is_refused_where_there_are_slots(name: bytes) -> None:
    """Its keys are fine elsewhere, and behind a prefix, where the name stands in braces if it can."""
    with pytest.raises(ValueError, match="braces in the name"):
        check_slot(name)
    assert len(set(lock_keys(name).all)) == 4
    if name.startswith(b"}"):
        with pytest.raises(ValueError, match="begins with a brace"):
            lock_keys(name, b"app:")
    else:
        check_slot(name, b"app:")


@given(st.binary(min_size=1) | st.lists(st.sampled_from([b"{", b"}", b"a", b":", b"\xff"]), min_size=1).map(b"".join))
def test_e1_every_accepted_name_shares_its_slot(name: bytes) -> None:
    try:
        check_slot(name)
    except ValueError:
        return
    assert_one_slot(name)


@given(st.binary())
def test_the_hash_tag_is_what_redis_hashes(key: bytes) -> None:
    tag = hash_tag(key)
    if b"{" not in tag and b"}" not in tag:
        assert key_slot(key) == key_slot(tag)


@pytest.mark.parametrize("prefix", [b"", b"app:", b"a:"])
def test_p1_no_two_names_of_braces_up_to_5_characters_share_a_key(prefix: bytes) -> None:
    """With a prefix, all their keys begin with it, and lie in one slot; and the search finds each name again."""
    owners: dict[bytes, bytes] = {}
    shared: list[tuple[bytes, bytes]] = []
    for length in range(1, 6):
        for characters in product((b"{", b"}", b"a"), repeat=length):
            name = b"".join(characters)
            if prefix and name.startswith(b"}"):
                continue  # refused
            keys = lock_keys(name, prefix).all
            if prefix:
                assert all(key.startswith(prefix) for key in keys)
                assert len({key_slot(key) for key in keys}) == 1
            for one in (lock_keys(name, prefix), permit_keys(name, "sem", prefix), permit_keys(name, "rw", prefix)):
                assert keys_around(one.all[2], prefix) == one
            shared += [(owners[key], name) for key in keys if owners.setdefault(key, name) != name]
    assert not shared, shared[:5]


NO_PREFIX = ["app1", "app1.", "{a}:", "a*:", "a b:", "caf\u00e9:", "a|b:", "x" * 64 + ":", "[a]:", "a:\n"]


@pytest.mark.parametrize("prefix", NO_PREFIX, ids=ascii)
async def test_a_prefix_that_rights_and_patterns_could_misread_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix must consist of"):
        Coordinator(Redis(), prefix=prefix)


@pytest.mark.parametrize("prefix", [b"app1:", None, 1])
async def test_a_prefix_is_text(prefix: Any) -> None:
    with pytest.raises(TypeError, match="prefix must be a str"):
        Coordinator(Redis(), prefix=prefix)


# -- names and identities of a client --------------------------------------------------------------------


NOT_TEXT: tuple[Any, ...] = (1, None, 1.5, True, bytearray(b"a"), memoryview(b"a"), ["a"], object())


@pytest.mark.parametrize("value", NOT_TEXT, ids=shown)
async def test_e1_what_is_not_text_or_bytes_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="name must be str or bytes"):
        AsyncLock(Redis(), value)
    with pytest.raises(TypeError, match="identity must be str or bytes"):
        encode(Redis(), value, "identity")


@pytest.mark.parametrize("value", ["", b"", "\ud800"], ids=ascii)
async def test_e1_text_that_can_not_be_encoded_and_nothing_at_all_are_value_errors(value: Any) -> None:
    with pytest.raises(ValueError):
        AsyncLock(Redis(), value)
    with pytest.raises(ValueError):
        AsyncLock(Redis(), "a").acquire(identity=value)


@pytest.mark.parametrize(
    ("encoding", "name", "wire"),
    [
        ("utf-8", "caf\u00e9", b"caf\xc3\xa9"),
        ("latin-1", "caf\u00e9", b"caf\xe9"),
        ("latin-1", b"caf\xc3\xa9", b"caf\xc3\xa9"),
        ("ascii", "cafe", b"cafe"),
    ],
)
async def test_text_is_encoded_as_the_client_encodes_keys(encoding: str, name: str | bytes, wire: bytes) -> None:
    assert encode(Redis(encoding=encoding), name, "name") == wire


def all_keys(name: bytes) -> list[Keys]:
    permits = [permit_keys(name, kind) for kind in ("sem", "rw")]
    return [lock_keys(name), robust_keys(name), gate_keys(name), *permits]


ENGINES: tuple[Engine, ...] = ("auto", "lua", "watch")


def test_p1_nothing_is_taken_for_something_else() -> None:
    """Whatever a name looks like, what this process knows of it is kept apart from all else."""
    names = [b"x"]
    for _ in range(2):  # names that look like the ids and the keys of others
        kinds = [keys.by(engine) for name in names for keys in all_keys(name) for engine in ENGINES]
        seen = [keys.id for keys in kinds]
        assert len(set(seen)) == len(seen)
        names = sorted({b"x", b"x lua", b"x watch"}.union(seen, *(keys.all for keys in kinds)))
