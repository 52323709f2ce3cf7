"""RESP is taken apart as it is meant."""

from __future__ import annotations

import pytest

from redis_sync_aio.testing._resp import Dialogue, Frame, ProtocolError, Splitter, encode

FRAMES: list[tuple[bytes, str, list[bytes]]] = [
    (b"+OK\r\n", "+", [b"OK"]),
    (b"-ERR no\r\n", "-", [b"ERR no"]),
    (b":42\r\n", ":", [b"42"]),
    (b"$5\r\nhello\r\n", "$", [b"hello"]),
    (b"$4\r\n\r\n\r\n\r\n", "$", [b"\r\n\r\n"]),
    (b"$0\r\n\r\n", "$", [b""]),
    (b"$-1\r\n", "$", [b""]),
    (b"*-1\r\n", "*", []),
    (b"*0\r\n", "*", []),
    (b"_\r\n", "_", [b""]),
    (b"#t\r\n", "#", [b"t"]),
    (b",1.5\r\n", ",", [b"1.5"]),
    (b"(123456789012345678901\r\n", "(", [b"123456789012345678901"]),
    (b"=7\r\ntxt:abc\r\n", "=", [b"txt:abc"]),
    (b"!6\r\nERR no\r\n", "!", [b"ERR no"]),
    (b"*2\r\n*1\r\n:1\r\n*2\r\n$1\r\n\n\r\n_\r\n", "*", [b"1", b"\n", b""]),
    (b"~2\r\n+a\r\n+b\r\n", "~", [b"a", b"b"]),
    (b"%2\r\n+a\r\n*0\r\n+b\r\n%1\r\n:1\r\n:2\r\n", "%", [b"a", b"b", b"1", b"2"]),
    (b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n", ">", [b"message", b"c", b"m"]),
    (b"|1\r\n+ttl\r\n*1\r\n:3\r\n$1\r\nv\r\n", "$", [b"ttl", b"3", b"v"]),
    (encode("EVALSHA", b"\x00\xff\r\n*3\r\n", 0), "*", [b"EVALSHA", b"\x00\xff\r\n*3\r\n", b"0"]),
]
STREAM = b"".join(raw for raw, _, _ in FRAMES)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_frames_are_found_however_the_stream_is_fragmented(size: int) -> None:
    splitter = Splitter()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    frames = [frame for piece in pieces for frame in splitter.feed(piece)]
    assert [(frame.raw, frame.kind, frame.items) for frame in frames] == FRAMES
    assert splitter.rest() == b""


def test_a_frame_is_given_out_with_its_last_byte_and_not_before() -> None:
    for raw, _, _ in FRAMES:
        for at in range(len(raw)):
            splitter = Splitter()
            assert splitter.feed(raw[:at]) == []
            assert [frame.raw for frame in splitter.feed(raw[at:])] == [raw]


def test_the_rest_of_a_stream_is_the_unfinished_frame() -> None:
    splitter = Splitter()
    splitter.feed(b"+OK\r\n*2\r\n:1\r\n$3\r\nab")
    assert splitter.rest() == b"*2\r\n:1\r\n$3\r\nab"
    assert [frame.raw for frame in splitter.feed(b":1\r\n")] == [b":1\r\n"]


@pytest.mark.parametrize("raw", [b"PING\r\n", b"\r\n", b"*x\r\n", b"$?\r\n", b"$1\r\nabc\r\n"])
def test_what_is_not_resp_is_an_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        Splitter().feed(raw)


# -- replies and pushes ------------------------------------------------------------------------------------


def frame_of(*items: bytes | str | int, kind: str = ">") -> Frame:
    return Splitter().feed(kind.encode() + encode(*items)[1:])[0]


OK = Frame(b"+OK\r\n", "+", [b"OK"])


def test_replies_are_paired_in_order_and_pushes_are_not_replies() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("first", [b"GET", b"a"])
    dialogue.ask("second", [b"GET", b"b"])
    assert dialogue.is_push(frame_of("invalidate", "a"))
    assert not dialogue.is_push(frame_of("message", "c", "m", kind="*"))
    assert dialogue.take(OK) == ("first", OK)
    assert dialogue.take(OK) == ("second", OK)
    assert dialogue.take(OK) == (None, OK)


def test_a_subscription_is_answered_by_a_push_for_each_channel() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"SUBSCRIBE", b"a", b"b"])
    one, two = frame_of("subscribe", "a", 1), frame_of("subscribe", "b", 2)
    assert dialogue.is_push(frame_of("message", "a", "m"))
    assert not dialogue.is_push(one)
    assert dialogue.take(one) is None
    answered = dialogue.take(two)
    assert answered is not None
    assert (answered[0], answered[1].raw) == ("sub", one.raw + two.raw)
    dialogue.ask("get", [b"GET", b"a"])
    assert dialogue.is_push(frame_of("sunsubscribe", "a", 0))  # slots move


def test_unsubscribing_from_everything_is_answered_for_each_known_channel() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"psubscribe", b"a*", b"b*"])
    dialogue.take(frame_of("psubscribe", "a*", 1))
    dialogue.take(frame_of("psubscribe", "b*", 2))
    for left in ([1, 0], [0]):  # the second time there is none left
        dialogue.ask("unsub", [b"punsubscribe"])
        for count in left:
            answered = dialogue.take(frame_of("punsubscribe", "ab"[count] + "*", count))
            assert (answered is not None) == (count == 0)


def test_a_refused_subscription_is_answered_by_an_error() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"SSUBSCRIBE", b"a"])
    refused = Frame(b"-NOPERM\r\n", "-", [b"NOPERM"])
    assert dialogue.take(refused) == ("sub", refused)


def test_in_resp2_messages_are_arrays() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"SUBSCRIBE", b"a"])
    assert dialogue.take(frame_of("subscribe", "a", 1, kind="*")) is not None
    dialogue.ask("ping", [b"PING"])
    assert dialogue.is_push(frame_of("message", "a", "m", kind="*"))
    assert not dialogue.is_push(frame_of("pong", "", kind="*"))
    dialogue.ask("hello", [b"HELLO", b"3"])
    assert not dialogue.is_push(frame_of("message", "a", "m", kind="*"))
