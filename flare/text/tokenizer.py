"""Token ids of text, and the exact bytes of token ids, over the core's tokenizer.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flare.errors import CoreError, RequestError
from flare.text.controls import Controls
from flare.text.fewest import WORTH, Fewest, measure

if TYPE_CHECKING:
    import tokenizers

_UNKNOWN = "\0text"  # stands for any text between two controls in the splitter's vocabulary
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")
_DECODERS = {"ByteLevel", "Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """Encodes text and gives tokens their bytes.

    Immutable after `load`: every method may be called from several threads at once. Tables are filled on first use;
    two threads that fill the same entry write the same value. Encoding runs in native code that lets other Python
    threads run.
    """

    def __init__(
        self, base: tokenizers.Tokenizer, *, bos_token_id: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        base.no_truncation()
        base.no_padding()
        self._base = base
        self._added = base.get_added_tokens_decoder()
        self._decoders = _decoder_types(base.decoder)
        runs = {i for i, token in self._added.items() if not token.content.strip("▁").strip()}

        self.vocab_size: int = base.get_vocab_size(with_added_tokens=True)
        """Number of tokens, added ones included. Ids may have gaps, and a model's logits may be wider."""
        self.special_ids: frozenset[int] = frozenset(i for i, token in self._added.items() if token.special)
        """Ids of tokens that are left out of text."""
        self.control_ids: frozenset[int] = frozenset(self._added) - runs
        """Ids that message text never encodes to: see `flare.text.controls`."""
        self.bos_token_id = bos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.space_prefix: str = self._space_prefix()
        """Where encoding puts a space before text and decoding takes it away: "never", "first" (only where the whole
        text begins) or "always" (behind a control as well)."""

        self.unprefixed_ids: frozenset[int] = frozenset(self._added if "Metaspace" in self._decoders else ())
        """Ids whose leading space is never that prefix."""

        self._plain, self._plain_ids = self._without_controls(runs)
        # Some files list an ordinary character as special, for padding say. In text it stays what it is.
        characters = {i for i in self.control_ids if len(self._added[i].content) == 1}
        self.control_ids -= {i for i in characters if i in self._plain.encode(self._added[i].content).ids}
        self._texts: dict[frozenset[int], dict[int, str]] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(
        cls, source: Path | bytes, *, bos_token_id: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> Tokenizer:
        """Reads a Hugging Face tokenizers file, or its bytes. Raises CoreError when it is not one."""
        # The server has its own pool of threads; a second one inside the library would only compete with the engine.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Base

        try:
            base = Base.from_buffer(source) if isinstance(source, bytes) else Base.from_file(str(source))
        except Exception:
            name = "tokenizer.json" if isinstance(source, bytes) else source
            raise CoreError(f"{name}: not a tokenizers file that this version reads; export the core again") from None
        return cls(base, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)

    # Encoding

    def encode(self, text: str, *, special: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`.

        `special`: spellings of controls become controls; without it they are encoded as the text they are.
        `add_special_tokens`: what the tokenizer's own policy puts around a text (often a leading bos), as for raw
        prompts. Rendered prompts bring theirs along.
        """
        if special:
            return _ids(self._base, text, add_special_tokens)
        return self._encode_text(text, at_start=True)

    def encode_rendered(self, rendered: str, mark: str = "") -> list[int]:
        """Token ids of a rendered prompt whose broken spellings carry `mark` (see `flare.text.controls`).

        Equal to `encode(rendered)` where no spelling was broken.
        """
        if not mark:
            return _ids(self._base, rendered, False)
        ids: list[int] = []
        start = 0
        for added, begin, end in self._split(rendered, mark):
            if begin > start:
                ids += self._encode_text(rendered[start:begin].replace(mark, ""), at_start=start == 0)
            ids.append(added)
            start = end
        if start < len(rendered):
            ids += self._encode_text(rendered[start:].replace(mark, ""), at_start=start == 0)
        return ids

    def encode_joined(self, text: str) -> list[int]:
        """Token ids of text that stands right behind other text; spellings of controls are encoded as the text they are."""
        return self._real_ids(_ids(self._plain_joined, text, False))

    def fewest_tokens(self, text: str, mark: str = "") -> int:
        """A number of tokens that `encode(text)` and `encode_rendered(text, mark)` have at least, found without encoding: 0 for
        texts of fewer than WORTH characters, and where this tokenizer allows no bound (see `flare.text.fewest`)."""
        if len(text) < WORTH or self._fewest is None:
            return 0
        return self._fewest.tokens(text, mark)

    @cached_property
    def _fewest(self) -> Fewest | None:
        return measure(self._base, self._added.values(), _BYTE_OF_CHAR)

    @cached_property
    def controls(self) -> Controls:
        """The spellings that `flare.text.prompt` breaks in messages."""
        tokens = [self._added[i] for i in sorted(self.control_ids)]
        normalizer = self._base.normalizer
        folding = normalizer is not None and any(token.normalized for token in tokens)
        return Controls([t.content for t in tokens], normalizer.normalize_str if folding else None)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's exact spelling in the vocabulary."""
        return self._base.token_to_id(token)

    def _encode_text(self, text: str, *, at_start: bool) -> list[int]:
        ids = self._real_ids(_ids(self._plain if at_start else self._plain_inner, text, False))
        if not self.control_ids.isdisjoint(ids):
            ids = self._spell_out(text, at_start)
        return ids

    def _spell_out(self, text: str, at_start: bool) -> list[int]:
        """Encodes text that the model's own vocabulary would turn into a control: it is cut inside that spelling."""
        ids: list[int] = []
        pieces = [(text, self._plain if at_start else self._plain_inner)]
        while pieces:
            text, plain = pieces.pop()
            encoding = plain.encode(_well_formed(text), add_special_tokens=False)
            real = self._real_ids(encoding.ids)
            hit = next((n for n, i in enumerate(real) if i in self.control_ids), None)
            if hit is None:
                ids += real
                continue
            begin, end = encoding.offsets[hit]
            spelling = text[begin:end]
            cut = begin + min(len(spelling) - len(spelling.lstrip()) + 1, len(spelling) - 1)
            if not 0 < cut < len(text):
                raise RequestError(f"the character {spelling[:1]!r} is a control token and cannot be written as text")
            pieces += [(text[cut:], self._plain_joined), (text[:cut], plain)]
        return ids

    def _real_ids(self, ids: list[int]) -> list[int]:
        return [self._plain_ids.get(i, i) for i in ids] if self._plain_ids else ids

    def _split(self, rendered: str, mark: str) -> list[tuple[int, int, int]]:
        """(id, begin, end) of the added tokens in a rendered prompt, where the library itself would find them."""
        splitter, real = self._splitter
        encoding = splitter.encode(_well_formed(rendered), add_special_tokens=False)
        cuts = []
        for i, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            added = real.get(i)
            # A spelling of one character cannot be broken from inside: there the mark stands behind it.
            if added is not None and not rendered.startswith(mark, end):
                cuts.append((added, begin, end))
        return cuts

    @cached_property
    def _splitter(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer that knows the added tokens and calls all other text unknown, and its ids' real ids."""
        from tokenizers import Tokenizer as Base
        from tokenizers import models

        splitter = Base(models.WordLevel({_UNKNOWN: 0}, unk_token=_UNKNOWN))
        if self._base.normalizer is not None:
            splitter.normalizer = self._base.normalizer
        real = {}
        for i, token in sorted(self._added.items()):
            (splitter.add_special_tokens if token.special else splitter.add_tokens)([token])
            real[splitter.token_to_id(token.content) or 0] = i
        return splitter, real

    def _without_controls(self, runs: set[int]) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer over the same model that recognises no controls, only added runs of white space, and the real
        ids of those that it numbers differently."""
        from tokenizers import Tokenizer as Base

        plain = Base(self._base.model)  # shares the model: costs microseconds
        if self._base.normalizer is not None:
            plain.normalizer = self._base.normalizer
        if self._base.pre_tokenizer is not None:
            plain.pre_tokenizer = self._base.pre_tokenizer
        plain.add_tokens([self._added[i] for i in sorted(runs)])
        numbered = {plain.token_to_id(self._added[i].content) or 0: i for i in runs}
        return plain, {there: here for there, here in numbered.items() if there != here}

    @cached_property
    def _plain_inner(self) -> tokenizers.Tokenizer:
        """`_plain` for text behind a control, where a prefix space for the first text only is not put."""
        return self._plain_variant(lambda part: _without_prefix(part) if _prepends(part) == "first" else part)

    @cached_property
    def _plain_joined(self) -> tokenizers.Tokenizer:
        """`_plain` for text right behind text, where no prefix space is put."""
        return self._plain_variant(lambda part: _without_prefix(part) if _prepends(part) else part)

    def _plain_variant(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> tokenizers.Tokenizer:
        """`_plain` with changed parts; the model is shared."""
        from tokenizers import Tokenizer as Base

        def changed(part: Any) -> Any:
            if isinstance(part, list):
                return [changed(child) for child in part]
            if not isinstance(part, dict):
                return part
            part = {key: changed(value) for key, value in part.items()}
            return change(part) if "type" in part else part

        parts = {
            name: changed(json.loads(_state(getattr(self._base, name)) or "null"))
            for name in ("normalizer", "pre_tokenizer")
        }
        model = {"type": "WordLevel", "vocab": {_UNKNOWN: 0}, "unk_token": _UNKNOWN}
        shell = Base.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}))
        variant, _ = self._without_controls(set(self._added) - self.control_ids)
        if shell.normalizer is not None:
            variant.normalizer = shell.normalizer
        if shell.pre_tokenizer is not None:
            variant.pre_tokenizer = shell.pre_tokenizer
        return variant

    # Decoding

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; b"" for an id without a token. A control's bytes are its spelling."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def text_table(self, hidden: frozenset[int]) -> dict[int, str]:
        """The detokenizers' shared table of tokens that are whole characters, filled by them as tokens turn up.

        One for each set of `hidden` tokens, of which there are as many as callers have constants.
        """
        return self._texts.setdefault(hidden, {})

    def _find_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        token = self._base.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # a token outside of the byte alphabet stands for itself
                return token.encode()
        if "ByteFallback" in self._decoders:
            byte = _BYTE_TOKEN.match(token)
            if byte:
                return bytes([int(byte[1], 16)])
        if "Metaspace" in self._decoders or "Replace" in self._decoders:
            token = token.replace("▁", " ")
        return token.encode()

    def _space_prefix(self) -> str:
        strips = "Strip" in self._decoders
        if "Metaspace" in self._decoders:
            strips = '"prepend_scheme":"never"' not in _state(self._base.decoder)
        if not strips:
            return "never"
        return "first" if '"prepend_scheme":"first"' in _state(self._base.pre_tokenizer) else "always"


def _ids(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # The batch call skips the offsets (a third of the time) and lets other Python threads run meanwhile.
    return tokenizer.encode_batch_fast([_well_formed(text)], add_special_tokens=add_special_tokens)[0].ids


def _well_formed(text: str) -> str:
    """Half surrogates, which JSON escapes can smuggle in, are no characters: they become U+FFFD, one for one."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _state(part: Any) -> str:
    """The JSON of a tokenizer's part, such as its decoder, as the library states it; "" without that part."""
    return "" if part is None else part.__getstate__().decode()


def _prepends(part: dict[str, Any]) -> str:
    """Where a normalizer or pre-tokenizer puts a prefix space: "first", "always", or "" for nowhere."""
    if part["type"] == "Prepend":
        return "always"
    scheme = part.get("prepend_scheme", "") if part["type"] == "Metaspace" else ""
    return "" if scheme == "never" else scheme


def _without_prefix(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": []} if part["type"] == "Prepend" else part | {"prepend_scheme": "never"}


def _decoder_types(decoder: Any) -> set[str]:
    if decoder is None:
        return set()

    def types(part: dict[str, Any]) -> set[str]:
        return {part["type"]}.union(*(types(child) for child in part.get("decoders", [])))

    found = types(json.loads(_state(decoder)))
    unknown = sorted(found - _DECODERS)
    if unknown:
        raise CoreError(f"tokenizer.json: decoder {unknown[0]} is not supported; byte-level and SentencePiece ones are")
    return found


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write a byte as a printable character: Latin-1's own where it has one, else the next
    free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
