"""Text to token ids and back for one model, and which text may become a control token.

Knows Hugging Face tokenizers and chat templates. Refuses to know schemas, prompts, models and frameworks.

The rule this module keeps: the ids are those the tokenizer gives for the whole text, except that a control token
spelled out in text that is not the template's (a document, a label, a description) is plain text there. Cutting the
text into pieces and encoding each alone would keep the second half of the rule and break the first: merges across
the cuts would be lost. So there is a second copy of the tokenizer in which every control token bears a private name,
drawn anew at each load, that no document can know. Control tokens in template text are rewritten to their private
names, everything else stays as it is, and the whole text is encoded at once.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from pcdlab.errors import ModelError, TokenizationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Codec", "HFCodec", "Piece"]


class Piece(NamedTuple):
    """A stretch of text, and whether control tokens in it count as such.

    Attributes
    ----------
    text : str
        The text.
    control : bool
        True for text of the chat template: control tokens in it are recognised. False for everything that came from
        outside: it is plain text whatever it spells.
    """

    text: str
    control: bool


class Codec(Protocol):
    """What the rest of the workbench needs from a tokenizer."""

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""

    @property
    def fingerprint(self) -> str:
        """Hash over vocabulary and template, the same in every process."""

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of the concatenated pieces; no token is added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, control tokens included, nothing cleaned up."""

    def render(self, messages: list[dict[str, str]], generate: bool) -> str:
        """Conversation as text; `generate` opens the assistant's turn at the end."""

    def start(self) -> str:
        """Text of the control tokens the tokenizer itself puts in front of plain text."""


class HFCodec:
    """Codec over a Hugging Face fast tokenizer.

    A control token is an added token that is marked special or that contains anything but letters, digits and white
    space: `<|im_end|>`, `<think>`, `[INST]`. Ordinary text are runs of spaces or newlines and plain words added to a
    vocabulary, the tokens of single bytes, and a printable ASCII character, even one marked special (`!` for padding):
    a vocabulary has no second way to spell it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerFast
        The model's tokenizer.
    template_options : mapping, optional
        Variables handed to the chat template, such as ``{"enable_thinking": False}``.

    Attributes
    ----------
    control_ids : frozenset[int]
        Ids of the control tokens. Contains the unknown token where that is an added token; it is the one control id
        that a document can still produce, by a character the vocabulary lacks.
    has_template : bool
        Whether the tokenizer brings a chat template.
    fingerprint : str
        SHA-256 (hex) over the tokenizer, the template and its options.

    Raises
    ------
    TokenizationError
        If the tokenizer cannot be copied: it is not a fast tokenizer, or holds parts written in Python.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any] | None = None) -> None:
        self._hf = tokenizer
        self._options = dict(template_options or {})
        self._original = _backend(tokenizer)
        try:
            description = json.loads(self._original.to_str())
        except Exception as error:  # the Rust side raises a bare Exception
            raise TokenizationError(
                f"tokenizer {_name(tokenizer)!r}: cannot be serialised ({error}); parts written in Python are not "
                "supported, save the tokenizer with standard parts (tokenizer.json)"
            ) from error
        # Truncation and padding are state that other users of the tokenizer may have left behind, not vocabulary.
        description["truncation"] = description["padding"] = None

        model = description["model"]
        ordinary = re.compile(r"[!-~]|<0x[0-9A-F]{2}>" if model.get("byte_fallback") else r"[!-~]")
        controls = {
            token["content"]: token["id"]
            for token in description["added_tokens"]
            if _is_markup(token) and not ordinary.fullmatch(token["content"])
        }
        self._spelling = {token_id: content for content, token_id in controls.items()}
        self.control_ids = frozenset(self._spelling)
        self.has_template = bool(tokenizer.chat_template)
        self.fingerprint = _fingerprint(description, tokenizer, self._options)

        # Brackets: no added token of ordinary text can run into them, and no Unicode normal form composes them.
        nonce = secrets.token_hex(8)
        private = {content: f"[{nonce}:{token_id}]" for content, token_id in controls.items()}
        self._tokenizer = _private_copy(description, private)
        moved = [content for content, name in private.items() if self._tokenizer.token_to_id(name) != controls[content]]
        if moved or self._tokenizer.get_vocab_size() != self._original.get_vocab_size():
            raise TokenizationError(
                f"tokenizer {_name(tokenizer)!r}: added tokens {moved[:5]} change their ids when the tokenizer is "
                "saved and loaded; give added tokens ids that follow the vocabulary without gaps"
            )
        # What the spotter finds, by its own ids: the token's spelling, its private name, its id. None: not a control.
        self._spotter = _spotter(description)
        self._spotted = {
            self._spotter.token_to_id(token["content"]): (token["content"], private[token["content"]], token["id"])
            if token["content"] in private
            else None
            for token in description["added_tokens"]
        }
        unk = model.get("unk_id") if "unk_id" in model else self._original.token_to_id(model.get("unk_token") or "")
        self._fixed_ids = self.control_ids - {unk}

    @classmethod
    def load(cls, folder: str | Path, template_options: Mapping[str, Any] | None = None) -> HFCodec:
        """Load the tokenizer of a local model folder.

        Parameters
        ----------
        folder : str or Path
            Folder with tokenizer.json and tokenizer_config.json. Nothing is fetched.
        template_options : mapping, optional
            Variables handed to the chat template.

        Returns
        -------
        HFCodec

        Raises
        ------
        ModelError
            If the folder is missing or holds no tokenizer that can be read.
        TokenizationError
            If the tokenizer cannot be copied.
        """
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise ModelError(f"{folder}: no such folder; give the local folder that holds the model's tokenizer.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # readers of a dozen formats, each with its own exceptions
            reason = " ".join(str(error).split())
            raise ModelError(
                f"{folder}: no tokenizer could be read ({reason}); add the model's tokenizer.json"
            ) from error
        return cls(tokenizer, template_options)

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of the concatenated pieces, control tokens recognised in control pieces only.

        Parameters
        ----------
        pieces : sequence of Piece
            The text in order.

        Returns
        -------
        list[int]
            What the tokenizer gives for the whole text without adding special tokens.

        Raises
        ------
        TokenizationError
            If a piece holds a lone surrogate, or if text next to a control token keeps it from being recognised.
        """
        for piece in pieces:
            _check_unicode(piece.text)
        text, expected = self._private_text(pieces)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        # The one assertion the safety of a prompt rests on: the template's control tokens and no others.
        if [i for i in ids if i in self._fixed_ids] != [i for i in expected if i in self._fixed_ids]:
            raise TokenizationError(
                f"tokenizer {_name(self._hf)!r}: the normalizer changed a control token of the chat template next to "
                f"other text (expected ids {expected}); set normalized=false for the added tokens in tokenizer.json"
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
            The text. Bytes that are no UTF-8 become U+FFFD.
        """
        return self._original.decode(list(ids), skip_special_tokens=False)

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
            If the template refuses the messages, with the template's own reason.
        """
        try:
            text = self._hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **self._options
            )
        except Exception as error:  # the template is a program of the model's makers; it raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise TokenizationError(
                f"chat template of {_name(self._hf)!r} refused the turns ({roles}): {error}; "
                "check template_options or use a model with another template"
            ) from error
        return str(text)

    def to_json(self) -> str:
        """The model's own tokenizer in the format of ``tokenizer.json``, for libraries that read it."""
        return self._original.to_str()

    def start(self) -> str:
        """Text of the control tokens the tokenizer itself puts in front of plain text.

        Returns
        -------
        str
            Usually the bos token, often nothing.
        """
        bare = self._hf("a", add_special_tokens=False)["input_ids"]
        full = self._hf("a", add_special_tokens=True)["input_ids"]
        for n in range(len(full) - len(bare) + 1):
            if full[n : n + len(bare)] == bare:
                return "".join(self._spelling.get(i, "") for i in full[:n])
        return ""

    def _private_text(self, pieces: Iterable[Piece]) -> tuple[str, list[int]]:
        """Concatenate the pieces, control tokens under their private names; and list these tokens' ids in order."""
        runs = [(control, "".join(p.text for p in group)) for control, group in groupby(pieces, lambda p: p.control)]
        # A fixed stand-in for plain text: what is a control token must not depend on the document beside it.
        skeleton = "".join(text if control else "." for control, text in runs)
        spots = self._spotter.encode(skeleton, add_special_tokens=False)
        found = list(zip(spots.ids, spots.offsets, strict=True))
        parts: list[str] = []
        ids: list[int] = []
        begin = 0
        for control, text in runs:
            end = begin + (len(text) if control else 1)
            done = 0
            for spot, (left, right) in found if control else []:
                token = self._spotted[spot]
                if token is None or left < begin or right > end:
                    continue
                content, name, token_id = token
                # The span takes in white space that the token's lstrip and rstrip swallow; that must stay outside
                # the name, to be swallowed again. Only a normalizer makes the spelling differ from the content.
                span = skeleton[left:right]
                spelling = content if content in span else span.strip()
                at = left - begin + span.index(spelling)
                parts += [text[done:at], name]
                ids.append(token_id)
                done = at + len(spelling)
            parts.append(text[done:])
            begin = end
        return "".join(parts), ids


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Get at the `tokenizers` object inside a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizationError(
            f"tokenizer {_name(tokenizer)!r}: {type(tokenizer).__name__} is not a fast tokenizer; "
            "convert it to a tokenizer.json (transformers.PreTrainedTokenizerFast)"
        )
    return backend


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Name the tokenizer for a message."""
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _is_markup(token: Mapping[str, Any]) -> bool:
    """Tell whether an added token steers the model, rather than being a frequent piece of ordinary text.

    Vocabularies also add runs of spaces and newlines (Gemma, GPT-NeoX) and plain words; spelling those differently
    in a document would only make the model read it worse.
    """
    return token["special"] or not all(
        c.isspace() or c == "▁" or unicodedata.category(c)[0] in "LMN" for c in token["content"]
    )


def _fingerprint(description: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    """Hash everything that decides ids and prompts."""
    parts = [description, tokenizer.chat_template, tokenizer.special_tokens_map, options]
    return hashlib.sha256(json.dumps(parts, default=str, separators=(",", ":")).encode()).hexdigest()


def _private_copy(description: Mapping[str, Any], private: Mapping[str, str]) -> Tokenizer:
    """Copy the tokenizer with control tokens renamed, in its added tokens and inside its model.

    Renaming inside the model matters where the model could reach the entry from plain text: a Unigram piece, a whole
    word of WordPiece, a byte-pair vocabulary read without merges. Merges that make such an entry go.
    """
    model = dict(description["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {private.get(piece, piece): i for piece, i in model["vocab"].items()}
        if model.get("unk_token") in private:
            model["unk_token"] = private[model["unk_token"]]
    else:
        model["vocab"] = [[private.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        skip = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            pair
            for pair in model["merges"]
            if not (pair[0] in private or pair[1] in private or pair[0] + pair[1][skip:] in private)
        ]
    # single_word was honoured when the token was spotted; a document beside it must not undo that.
    added = [
        token | {"content": private[token["content"]], "single_word": False} if token["content"] in private else token
        for token in description["added_tokens"]
    ]
    return Tokenizer.from_str(json.dumps({**description, "added_tokens": added, "model": model}))


def _spotter(description: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer that sees the added tokens of a text, by the library's own rules, and nothing else.

    Byte-pair encoding over an empty vocabulary drops all other text.
    """
    added = [token | {"id": i} for i, token in enumerate(description["added_tokens"])]
    model = {"type": "BPE", "vocab": {}, "merges": []}
    parts = {"pre_tokenizer": None, "post_processor": None, "decoder": None}
    return Tokenizer.from_str(json.dumps({**description, **parts, "added_tokens": added, "model": model}))


def _check_unicode(text: str) -> None:
    """Refuse halves of surrogate pairs: they are no characters and have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizationError(
            f"text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, near "
            f"{text[max(0, error.start - 10) : error.start]!r}: it was decoded wrongly; mend it with "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from error
