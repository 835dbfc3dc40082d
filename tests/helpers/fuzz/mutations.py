"""Damage: to bytes, to trees of JSON and TOML, to zip archives and to protocol buffers. All drawn from one `Random`."""

import copy
import functools
import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

ODD_NUMBERS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63))
ODD_STRINGS = (
    "", " ", "x", "a" * 5000, "é\u2028\u202e", "a\nb", "\x00", "\ud800", "../../../etc/passwd", "/", ".",
    "%s%n{0}", "NaN", "-1", "1e999", "[bold]", "'\"`", "class",
)  # fmt: skip
ODD_VALUES = (
    None, True, False, 0, -1, 3, 1e308, math.nan, math.inf, -0.5, 2**63, 10**4000, 1e-300, [], {}, [[]],
    [None], {"": None}, ["a", 1], *ODD_STRINGS,
)  # fmt: skip
Bytes = Callable[[bytes, Random], bytes]


def damaged(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """One to four edits of bytes; `others` are what spliced parts come from."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = random.choice(_EDITS)(data, random) if data else random.randbytes(random.randint(0, 40))
        if others and random.random() < 0.1:
            data = _spliced(data, random.choice(others), random)
    return data


def _span(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data))
    return start, min(len(data), start + random.choice((1, 2, 4, 16, 100, len(data))))


def _flipped(data: bytes, random: Random) -> bytes:
    edited = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        edited[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(edited)


def _flipped_early(data: bytes, random: Random) -> bytes:
    """Headers stand first, and hold what decides."""
    head = 1 + min(len(data) - 1, random.choice((8, 32, 200)))
    return _flipped(data[:head], random) + data[head:]


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def _left_out(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:start] + data[end:]


def _repeated(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:end] + data[start:end] * random.choice((1, 2, 50)) + data[end:]


def _overwritten(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:start] + random.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * (end - start) + data[end:]


def _number(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data))
    kind = random.choice(["<I", ">I", "<Q", ">Q", "<H", ">H"])
    size = struct.calcsize(kind)
    return data[:start] + struct.pack(kind, random.choice(ODD_NUMBERS) % (1 << 8 * size)) + data[start + size :]


def _noise(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:start] + random.randbytes(random.randint(0, 64)) + data[end:]


def _spliced(data: bytes, other: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


_EDITS: tuple[Bytes, ...] = (
    _flipped, _flipped, _flipped_early, _flipped_early, _cut, _left_out, _repeated, _overwritten, _number, _noise,
)  # fmt: skip


def tree_damaged(tree: Any, random: Random) -> Any:
    """A copy of a JSON-like tree with one to three of its values replaced, left out, renamed, doubled or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 2, 3))):
        holders = [(holder, key) for holder in _holders(tree) for key in _keys(holder)]
        if not holders:
            return random.choice(ODD_VALUES)
        holder, key = random.choice(holders)
        edit = random.choice(("odd", "odd", "odd", "near", "gone", "renamed", "doubled", "exchanged", "new"))
        if edit == "odd":
            holder[key] = copy.deepcopy(random.choice(ODD_VALUES))
        elif edit == "near":
            holder[key] = _nearby(holder[key], random)
        elif edit == "gone":
            del holder[key]
        elif edit == "renamed" and isinstance(holder, dict):
            holder[random.choice((*ODD_STRINGS[:4], f"{key}s"))] = holder.pop(key)
        elif edit == "doubled" and isinstance(holder, list):
            holder.extend([copy.deepcopy(holder[key])] * random.choice((1, 1000)))
        elif edit == "new" and isinstance(holder, dict):
            holder[random.choice(ODD_STRINGS)] = random.choice(ODD_VALUES)
        else:
            other, at = random.choice(holders)
            holder[key] = copy.deepcopy(other[at])
    return tree


def _holders(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list):
        yield tree
        for value in list(tree.values()) if isinstance(tree, dict) else tree:
            yield from _holders(value)


def _keys(holder: Any) -> Sequence[Any]:
    return list(holder) if isinstance(holder, dict) else range(len(holder))


def _nearby(value: Any, random: Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        third = value / 3 if abs(value) < 1e300 else value // 3  # no float is as large as an integer can be
        return random.choice((value + 1, value - 1, -value, value * 2, third, str(value), [value]))
    if isinstance(value, str) and value:
        place = random.randrange(len(value))
        return value[:place] + random.choice("aZ0/:\\. \0é") + value[place + 1 :]
    return random.choice(ODD_VALUES)


def json_damaged(data: bytes, random: Random) -> bytes:
    """A JSON file with an odd tree, odd bytes, or nested deeper than anyone reads."""
    how = random.random()
    if how < 0.25:
        return damaged(data, random)
    if how < 0.3:
        return random.choice((b"[", b'{"a":')) * 200_000
    return json.dumps(tree_damaged(json.loads(data), random), indent=1).encode()


def toml_damaged(values: Mapping[str, Any], random: Random) -> bytes:
    """A TOML file of `values`, with an odd tree or odd bytes."""
    how = random.random()
    if how < 0.25:
        return damaged(toml(values), random)
    if how < 0.3:
        return b"a = " + b"[" * 50_000
    tree = tree_damaged(values, random)
    return toml(tree if isinstance(tree, dict) else {"a": tree})


def toml(values: Mapping[str, Any]) -> bytes:
    return "".join(f"{_toml(str(key))} = {_toml(value)}\n" for key, value in values.items()).encode(errors="replace")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return "1979-05-27T07:32:00Z" if value is None else json.dumps(value)


def archive_damaged(data: bytes, random: Random, inside: Bytes = damaged) -> bytes:
    """A zip file one of whose members is damaged (by `inside`), missing, renamed, doubled, or swells as it is read."""
    if random.random() < 0.25:
        return damaged(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    place = random.randrange(len(members))
    name, content = members[place]
    edit = random.choice(("inside", "inside", "inside", "gone", "renamed", "doubled", "exchanged", "bomb"))
    if edit == "inside":
        members[place] = (name, inside(content, random))
    elif edit == "gone":
        del members[place]
    elif edit == "renamed":
        members[place] = (random.choice(("x", f"{name}x", f"../{name}", name.upper(), members[0][0])), content)
    elif edit == "doubled":
        members.append((name, inside(content, random)))
    elif edit == "exchanged":
        members[place] = (name, random.choice(members)[1])
    else:
        return bomb({each: None if each == name else kept for each, kept in members})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for each, kept in members:
            archive.writestr(zipfile.ZipInfo(each), kept)
    return stream.getvalue()


BOMB_BYTES = 4 << 30


def bomb(members: Mapping[str, bytes | None]) -> bytes:
    """A zip file in which what is None swells to BOMB_BYTES zeros, after as much of sense as a header of numpy's."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            if content is not None:
                archive.writestr(info, content)
                continue
            packed = _zeros(name)
            info.compress_type, info.file_size, info.compress_size = zipfile.ZIP_DEFLATED, BOMB_BYTES, len(packed)
            info.CRC, info.header_offset = 0, stream.tell()
            stream.write(info.FileHeader(zip64=True) + packed)
            archive.filelist.append(info)
            archive.NameToInfo[name] = info
            archive.start_dir = stream.tell()
            archive._didModify = True
    return stream.getvalue()


@functools.cache
def _zeros(name: str) -> bytes:
    """BOMB_BYTES deflated without computing them: one block again and again."""
    head = (
        npy_header({"descr": "|u1", "fortran_order": False, "shape": (BOMB_BYTES // 768, 16, 16, 3)})
        if name.endswith(".npy")
        else b""
    )
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + block * (BOMB_BYTES >> 20) + packer.flush(zlib.Z_FINISH)


def npy_header(values: Mapping[str, Any]) -> bytes:
    text = repr(dict(values)).encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text


def npy_damaged(data: bytes, random: Random) -> bytes:
    """An .npy file whose header says something odd of what follows."""
    if random.random() < 0.3:
        return damaged(data, random)
    says = {"descr": "|u1", "fortran_order": False, "shape": (9, 16, 16, 3)}
    says[random.choice(("descr", "descr", "shape", "shape", "shape", "fortran_order"))] = random.choice(_SAID)
    length = struct.unpack("<H", data[8:10])[0]
    return npy_header(says) + data[10 + length :]


_SAID = (
    "<f4", "<f8", "<i8", ">u2", "|b1", "|O", "<U100000000", "|V8", "<M8[s]", [("a", "|u1")], "x", None, True, (),
    (0,), (9,), (0, 16, 16, 3), (9, 16, 16), (9, 0, 16, 3), (2**20, 16, 16, 3), (2**40, 16, 16, 3), (2**62, 16, 16, 3),
    (-1, 16, 16, 3), (9, 16, 16, 3, 1), (9, 2**40, 2**40, 3), (True, 16, 16, 3), (1.5, 16), "a" * 20000,
)  # fmt: skip


def safetensors_damaged(data: bytes, random: Random) -> bytes:
    """A safetensors file whose header says something odd of what follows, or is not as long as it says."""
    if random.random() < 0.3:
        return damaged(data, random)
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(tree_damaged(json.loads(data[8 : 8 + length]), random)).encode(errors="replace")
    said = random.choice(ODD_NUMBERS) % 2**64 if random.random() < 0.1 else len(header)
    return said.to_bytes(8, "little") + header + data[8 + length :]


def proto_damaged(message: Message, random: Random, words: Sequence[str] = ()) -> bytes:
    """A copy of `message`, serialized, with one to four fields cleared, changed, doubled or taken from elsewhere in it.

    `words` are names that mean something at other places: operators, types.
    """
    if random.random() < 0.1:
        return damaged(message.SerializeToString(), random)
    edited = type(message)()
    edited.CopyFrom(message)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _edit_field(edited, random, words)
    return edited.SerializeToString()


def _edit_field(message: Message, random: Random, words: Sequence[str]) -> None:
    fields = list(_fields(message))
    holder, field = random.choice(fields)
    value = getattr(holder, field.name)
    if _is_map(field) or random.random() < 0.15:
        holder.ClearField(field.name)
    elif field.is_repeated:
        place = random.randrange(len(value))
        edit = random.choice(("gone", "doubled", "changed", "changed", "first"))
        if edit == "gone":
            del value[place]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            source = value[place] if edit == "doubled" else _like(fields, field, value[place], random)
            value.add().CopyFrom(source)
        elif edit == "doubled":
            value.append(value[place])
        else:
            _set(value, place, _scalar(field, value[place], fields, random, words))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        value.CopyFrom(_like(fields, field, value, random))
    else:
        _set(holder, field.name, _scalar(field, value, fields, random, words))


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(key, int):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field that is set in `message` and below, with the message that holds it."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            held = list(value.values()) if _is_map(field) else list(value) if field.is_repeated else [value]
            for each in held:
                if isinstance(each, Message):
                    yield from _fields(each)


def _is_map(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry


def _like(
    fields: Sequence[tuple[Message, FieldDescriptor]], field: FieldDescriptor, own: Message, random: Random
) -> Message:
    """A message of the same type from elsewhere; an empty one now and then."""
    if random.random() < 0.2:
        return type(own)()
    found = [
        each
        for holder, other in fields
        if other.message_type is field.message_type and not _is_map(other)
        for each in (getattr(holder, other.name) if other.is_repeated else [getattr(holder, other.name)])
    ]
    copied = type(own)()
    copied.CopyFrom(random.choice(found) if found else own)
    return copied


def _scalar(
    field: FieldDescriptor,
    own: Any,
    fields: Sequence[tuple[Message, FieldDescriptor]],
    random: Random,
    words: Sequence[str],
) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        held = [getattr(holder, other.name) for holder, other in fields if other.type == FieldDescriptor.TYPE_STRING]
        strings = [text for each in held for text in ([each] if isinstance(each, str) else each)]
        usable = [text for text in ODD_STRINGS if text != "\ud800"]
        return random.choice(random.choice((strings, words or strings, usable)))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return damaged(own, random)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return random.choice([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not own
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return random.choice((0.0, -1.0, 1e30, math.nan, math.inf, own * 2))
    bits, signed = _WHOLE.get(field.type, (32, False))
    number = random.choice((*ODD_NUMBERS, own + 1, own - 1, random.randint(0, 30), -own))
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) if signed else number % (1 << bits)


_WHOLE = {  # bits, and whether there is a sign
    FieldDescriptor.TYPE_INT64: (64, True),
    FieldDescriptor.TYPE_INT32: (32, True),
    FieldDescriptor.TYPE_UINT64: (64, False),
}
