"""The tokenizer and chat template of a GGUF file, run by llama.cpp, as a codec.

Knows the vocabulary part of GGUF files and llama.cpp's tokenizer. Refuses to know models, prompts and schemas.

The rule is that of :mod:`pcdlab.tokenizer`: the ids are those llama.cpp gives for the whole text, except that a control token
spelled out in text that is not the template's is plain text there. Leaving control tokens to llama.cpp's `parse_special`
would not do: it decides for a whole call, so text would have to be cut; tokens a converter marked as user-defined
(``<think>``) are recognised all the same; and SentencePiece's merges can spell out ``<s>``. So documents meet a copy of the
vocabulary in which every control token bears a private name, drawn anew at each load.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import re
import secrets
import struct
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from pcdlab.backends.llamacpp_library import Model, llama_cpp
from pcdlab.errors import ModelError, TokenizationError
from pcdlab.tokenizer import Piece, _check_unicode, _is_markup

__all__ = ["GGUFCodec"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What looks like a control token wherever a template writes it.
_LOOKS_CONTROL = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_turn>")
# Some models were trained with these as ordinary text.
_ROLE_TAGS = frozenset({"<|system|>", "<|user|>", "<|assistant|>"})
_SPACE = r"[ \t\n\v\f\r]*"

# Metadata value types of GGUF, and the bytes of those with a fixed size.
_INT32, _STRING, _ARRAY = 5, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, _INT32: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_LENGTH = struct.Struct("<Q")  # of strings and arrays
_NORMAL_TYPE, _CONTROL_TYPE = 1, 3  # of tokens

_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_ADDED = _CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_LEFT, _RIGHT = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP, llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP


class GGUFCodec:
    """Codec over the vocabulary of a GGUF file.

    Parameters
    ----------
    path : str or Path
        The file.
    template_options : mapping, optional
        Variables handed to the chat template, such as ``{"enable_thinking": False}``.

    Attributes
    ----------
    control_ids : frozenset[int]
        Ids of the control tokens: what llama.cpp treats as control or unknown token, and user-defined tokens that hold
        anything but letters, digits and white space. The unknown token is the one a document can still produce.
    has_template : bool
        Whether there is a chat template: the file's own, or ChatML where the file has none but the two tokens it takes.
    fingerprint : str
        SHA-256 (hex) over the tokenizer's metadata, the template and its options.

    Raises
    ------
    ModelError
        If the file holds no vocabulary llama.cpp can read, or its chat template writes control tokens that the vocabulary
        does not have.
    """

    def __init__(self, path: str | Path, template_options: Mapping[str, Any] | None = None) -> None:
        path = self._path = Path(path)
        self._options = dict(template_options or {})
        try:
            version, pairs = _read_metadata(path)
            spellings = _strings(pairs["tokenizer.ggml.tokens"])
        except (OSError, ValueError, LookupError, ArithmeticError, struct.error) as error:
            Model(path, vocabulary_only=True)  # llama.cpp has the better words for what is wrong, if it sees it
            raise ModelError(f"{path}: the metadata holds no vocabulary this project can read ({error!r})") from error
        if len(set(spellings)) < len(spellings):  # llama.cpp would end the process
            raise ModelError(f"{path}: its vocabulary names a token twice; the file was converted wrongly, get another")
        self._original = Model(path, vocabulary_only=True)
        vocab = self._original.vocab
        self._size = llama_cpp.llama_vocab_n_tokens(vocab)
        attributes = [llama_cpp.llama_vocab_get_attr(vocab, i) for i in range(self._size)]
        self._spelling = {
            i: spelling.decode(errors="replace")
            for i, (spelling, attribute) in enumerate(zip(spellings, attributes, strict=True))
            if spelling and attribute & _ADDED and _is_control(attribute, spelling.decode(errors="replace"))
        }
        self.control_ids = frozenset(self._spelling)
        self._ids = {spelling: i for i, spelling in self._spelling.items()}
        unknown = {i for i, attribute in enumerate(attributes) if attribute & llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN}
        if (named := pairs.get("tokenizer.ggml.unknown_token_id")) is not None:
            unknown.add(struct.unpack_from("<I", named, 4)[0])
        self._fixed_ids = self.control_ids - unknown
        self._template, self._source = self._find_template(pairs)
        self.has_template = self._template is not None
        self.fingerprint = _fingerprint(pairs, self._source, self._options)
        self._check_template()

        nonce = secrets.token_hex(8)
        self._private = {i: f"[{nonce}:{i}]" for i in self.control_ids}
        self._vocabulary = _private_copy(path, version, pairs, spellings, self._private)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._spotter = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # Tokens that swallow white space beside them; the copy's, under their private names, do not.
        left = [re.escape(self._private[i]) for i in self.control_ids if attributes[i] & _LEFT]
        right = [re.escape(self._private[i]) for i in self.control_ids if attributes[i] & _RIGHT]
        self._swallow = [
            *([re.compile(f"{_SPACE}({'|'.join(left)})")] if left else []),
            *([re.compile(f"({'|'.join(right)}){_SPACE}")] if right else []),
        ]
        self._space_first = self._pieces(self._tokenize("a")) == b" a"

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of the concatenated pieces, control tokens recognised in control pieces only.

        Parameters
        ----------
        pieces : sequence of Piece
            The text in order.

        Returns
        -------
        list[int]
            What llama.cpp gives for the whole text with special tokens parsed and none added.

        Raises
        ------
        TokenizationError
            If a piece holds a lone surrogate, or the vocabulary turns other text into control tokens.
        """
        for piece in pieces:
            _check_unicode(piece.text)
        text, expected = self._private_text(pieces)
        ids = self._tokenize(text)
        # The one assertion the safety of a prompt rests on: the template's control tokens and no others.
        if [i for i in ids if i in self._fixed_ids] != [i for i in expected if i in self._fixed_ids]:
            raise TokenizationError(
                f"{self._path}: llama.cpp's tokenizer does not keep control tokens and text apart (expected ids {expected}); "
                "use this model with another backend"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids: control tokens spelled out, nothing cleaned up.

        Parameters
        ----------
        ids : sequence of int
            Token ids.

        Returns
        -------
        str
            The text; bytes that are no UTF-8 become U+FFFD. The space that some tokenizers put in front of every text is
            taken away again.

        Raises
        ------
        TokenizationError
            If an id is not in the vocabulary.
        """
        text = self._pieces(ids)
        return (text.removeprefix(b" ") if self._space_first else text).decode(errors="replace")

    def render(self, messages: list[dict[str, str]], generate: bool) -> str:
        """Put a conversation through the chat template.

        Parameters
        ----------
        messages : list of dict
            Turns with the keys ``role`` and ``content``.
        generate : bool
            Whether to open the assistant's turn at the end.

        Returns
        -------
        str
            The conversation as text.

        Raises
        ------
        TokenizationError
            If there is no template, or it refuses the messages, with the template's own reason.
        """
        if self._template is None:
            raise TokenizationError(f"{self._path}: this model has no chat template")
        vocab = self._original.vocab
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=generate,
                bos_token=self._text(llama_cpp.llama_vocab_bos(vocab)),
                eos_token=self._text(llama_cpp.llama_vocab_eos(vocab)),
                tools=None,  # templates written for transformers compare these with none
                documents=None,
                **self._options,
            )
        except Exception as error:  # the template is a program of the model's makers; it raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise TokenizationError(
                f"chat template of {self._path} refused the turns ({roles}): {error}; "
                "check template_options or use a model with another template"
            ) from error

    def start(self) -> str:
        """Text of the bos token where llama.cpp puts one in front of plain text, else nothing."""
        vocab = self._original.vocab
        return self._text(llama_cpp.llama_vocab_bos(vocab)) if llama_cpp.llama_vocab_get_add_bos(vocab) else ""

    @property
    def vocab(self) -> Any:
        """llama.cpp's handle of the file's own vocabulary, for libraries that read it; valid as long as this codec."""
        return self._original.vocab

    # --- text ---------------------------------------------------------------------------------------------------

    def _private_text(self, pieces: Sequence[Piece]) -> tuple[str, list[int]]:
        """Concatenate the pieces, the control tokens of control pieces under their private names; list their ids."""
        expected: list[int] = []

        def rename(match: re.Match[str]) -> str:
            expected.append(self._ids[match[0]])
            return self._private[expected[-1]]

        text, run = "", ""
        for piece in [*pieces, Piece("", False)]:
            if piece.control:  # a token may be written across control pieces
                run += piece.text
                continue
            text += self._spotter.sub(rename, run) + piece.text
            run = ""
        for swallow in self._swallow:
            text = swallow.sub(r"\1", text)
        return text, expected

    def _tokenize(self, text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        while True:
            ids = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(self._vocabulary.vocab, data, len(data), ids, room, False, True)
            if count >= 0:
                return ids[:count]
            room = -count

    def _pieces(self, ids: Sequence[int]) -> bytes:
        """Bytes of the ids one after another."""
        buffer = ctypes.create_string_buffer(64)
        parts = []
        for i in ids:
            if not 0 <= i < self._size:
                raise TokenizationError(f"{self._path}: {i} is not an id of its {self._size} tokens")
            vocab = self._original.vocab
            length = llama_cpp.llama_token_to_piece(vocab, i, buffer, len(buffer), 0, True)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = llama_cpp.llama_token_to_piece(vocab, i, buffer, len(buffer), 0, True)
            parts.append(buffer.raw[:length])
        return b"".join(parts)

    # --- template -----------------------------------------------------------------------------------------------

    def _text(self, token: int) -> str:
        if not 0 <= token < self._size:
            return ""
        return self._spelling.get(token) or self._pieces([token]).decode(errors="replace")

    def _find_template(self, pairs: Mapping[str, memoryview]) -> tuple[jinja2.Template | None, str]:
        if "tokenizer.chat_template" in pairs:
            source = _strings(pairs["tokenizer.chat_template"])[0].decode(errors="replace")
        elif {"<|im_start|>", "<|im_end|>"} <= self._ids.keys():
            source = CHATML
        else:
            return None, ""
        try:
            return _environment().from_string(source), source
        except jinja2.TemplateError as error:
            raise ModelError(f"{self._path}: its chat template is not valid ({error}); get the file again") from error

    def _check_template(self) -> None:
        """Refuse a template whose control tokens the vocabulary would spell letter by letter."""
        user, assistant = {"role": "user", "content": "."}, {"role": "assistant", "content": "."}
        written: set[str] = set()
        for turns in ([{"role": "system", "content": "."}, user, assistant], [user, assistant]):
            for generate in (True, False):
                try:
                    written.update(_LOOKS_CONTROL.findall(self.render(turns, generate)))
                except TokenizationError:
                    continue  # no system role, or no answer before a new one
        if not self._ids.keys() & _ROLE_TAGS:
            written -= _ROLE_TAGS
        if missing := sorted(written - self._ids.keys()):
            raise ModelError(
                f"{self._path}: its chat template writes {', '.join(missing)}, and its vocabulary has no such control "
                f"token{'s' * (len(missing) > 1)}; the file was converted wrongly, get another"
            )


def _is_control(attribute: int, spelling: str) -> bool:
    """Tell whether an added token steers the model; see :class:`pcdlab.tokenizer.HFCodec`."""
    if re.fullmatch(r"[!-~]", spelling):  # there is no second way to spell it
        return False
    return _is_markup({"special": bool(attribute & _CONTROL), "content": spelling})


def _fingerprint(pairs: Mapping[str, memoryview], template: str, options: Mapping[str, Any]) -> str:
    """Hash everything that decides ids and prompts."""
    digest = hashlib.sha256(f"{template} {sorted(options.items())}".encode())
    for key in sorted(pairs):
        if key.startswith("tokenizer."):
            digest.update(key.encode())
            digest.update(pairs[key])
    return digest.hexdigest()


# --- templates --------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, with which templates mark the assistant's text for training: its content as it is."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> jinja2.Environment:
    """What chat templates are written for: jinja with transformers' settings and additions, sandboxed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


# --- the metadata of GGUF files -----------------------------------------------------------------------------------
# The gguf package reads it too, at tens of microseconds per token: seconds for the vocabularies of today.


def _read_metadata(path: Path) -> tuple[int, dict[str, memoryview]]:
    """Version of the format, and each key's value as it stands in the file: type, then content."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    magic, version, _, count = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version < 2:
        raise ValueError(f"not a GGUF file of version 2 or later: begins with {magic!r}, {version}")
    pairs = {}
    at = 24
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, at)
        key = bytes(data[at + 8 : at + 8 + length]).decode()
        at += 8 + length
        (kind,) = struct.unpack_from("<I", data, at)
        end = _skip(data, at + 4, kind)
        pairs[key] = data[at:end]
        at = end
    return version, pairs


def _skip(data: memoryview, at: int, kind: int) -> int:
    """Where a value ends that begins at `at`."""
    if kind in _SIZES:
        return at + _SIZES[kind]
    if kind == _STRING:
        return at + 8 + int(_LENGTH.unpack_from(data, at)[0])
    if kind != _ARRAY:
        raise ValueError(f"value of unknown type {kind}")
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SIZES:
        return at + count * _SIZES[inner]
    for _ in range(count):
        at = _skip(data, at, inner)
    return at


def _strings(value: memoryview) -> list[bytes]:
    """The strings of a value that is an array of strings, or one string."""
    (kind,) = struct.unpack_from("<I", value)
    count, at = (1, 4) if kind == _STRING else (_LENGTH.unpack_from(value, 8)[0], 16)
    data = bytes(value)
    found = []
    for _ in range(count):
        end = at + 8 + _LENGTH.unpack_from(data, at)[0]
        found.append(data[at + 8 : end])
        at = end
    return found


def _string_array(strings: Sequence[bytes]) -> bytes:
    body = b"".join([_LENGTH.pack(len(s)) + s for s in strings])
    return struct.pack("<IIQ", _ARRAY, _STRING, len(strings)) + body


def _private_copy(
    path: Path, version: int, pairs: Mapping[str, memoryview], spellings: Sequence[bytes], private: Mapping[int, str]
) -> Model:
    """Open the vocabulary with control tokens renamed and marked as such; merges that would make one go."""
    names = [private[i].encode() if i in private else spelling for i, spelling in enumerate(spellings)]
    types = [_NORMAL_TYPE] * len(spellings)
    if "tokenizer.ggml.token_type" in pairs:
        types = list(struct.unpack_from(f"<{len(spellings)}i", pairs["tokenizer.ggml.token_type"], 16))
    for i in private:
        types[i] = _CONTROL_TYPE
    # llama.cpp looks up tokens by name for models it knows by name, and the other files of a split model.
    changed: dict[str, memoryview | bytes] = {
        key: value for key, value in pairs.items() if key != "general.name" and not key.startswith("split.")
    }
    changed["tokenizer.ggml.tokens"] = _string_array(names)
    changed["tokenizer.ggml.token_type"] = struct.pack(f"<IIQ{len(types)}i", _ARRAY, _INT32, len(types), *types)
    if "tokenizer.ggml.merges" in pairs:
        hidden = {spellings[i] for i in private}
        merges = _strings(pairs["tokenizer.ggml.merges"])
        left = [merge for merge in merges if merge[:1] + merge[1:].replace(b" ", b"", 1) not in hidden]
        if len(left) < len(merges):
            changed["tokenizer.ggml.merges"] = _string_array(left)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "vocabulary.gguf"
        with copy.open("wb") as file:
            file.write(struct.pack("<4sIQQ", b"GGUF", version, 0, len(changed)))
            for key, value in changed.items():
                file.write(_LENGTH.pack(len(key.encode())) + key.encode())
                file.write(value)
        try:
            return Model(copy, vocabulary_only=True)
        except ModelError as error:
            raise ModelError(f"{path}: its vocabulary cannot be copied: {error}") from error
