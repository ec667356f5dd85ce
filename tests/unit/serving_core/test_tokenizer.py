"""Tokenizer and incremental detokenization against decoding everything at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from serving_core.errors import CheckpointError, UnsupportedError
from serving_core.tokenizer import IncrementalDetokenizer, Tokenizer

TEXT = "plain, naïve, 数据流, \N{FAMILY}\N{GRINNING FACE}e\N{COMBINING ACUTE ACCENT} end"


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer: one token a byte."""
    directory = tmp_path_factory.mktemp("byte_level")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1} | {piece: 2 + index for index, piece in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def byte_fallback_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of lower-case letters that spells everything else in byte tokens."""
    directory = tmp_path_factory.mktemp("byte_fallback")
    pieces = ["<unk>", "<bos>", "<eos>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(params=["byte_level_dir", "byte_fallback_dir"])
def byte_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Both ways to spell characters in bytes."""
    return Tokenizer.from_dir(request.getfixturevalue(request.param))


def pieces_of(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], sizes: random.Random | None = None
) -> list[str]:
    """The incremental pieces of `output`, pushed one by one or in random sizes."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces: list[str] = []
    start = 0
    while start < len(output):
        size = 1 if sizes is None else sizes.randint(0, 4)
        pieces.append(detokenizer.push(output[start : start + size]))
        start += size
    return [*pieces, detokenizer.finish()]


def test_tokenizer_text_round_trips(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_detokenizer_prompt_ends_anywhere_pieces_join_to_whole_text(
    byte_tokenizer: Tokenizer, seed: int | None
) -> None:
    """Also where the prompt ends inside a character, whose end the first piece then brings."""
    token_ids = byte_tokenizer.encode(TEXT)
    starts = [len(byte_tokenizer.encode(TEXT[:index])) for index in range(len(TEXT) + 1)]
    for end in range(len(token_ids) + 1):
        num_characters = max(index for index, start in enumerate(starts) if start <= end)
        sizes = None if seed is None else random.Random(seed)
        pieces = pieces_of(byte_tokenizer, token_ids[:end], token_ids[end:], sizes)
        assert "".join(pieces) == TEXT[num_characters:], f"prompt of {end} tokens"


def test_detokenizer_inside_character_holds_back(byte_tokenizer: Tokenizer) -> None:
    token_ids = byte_tokenizer.encode("数")
    assert len(token_ids) == 3
    assert pieces_of(byte_tokenizer, [], token_ids) == ["", "", "数", ""]


def test_detokenizer_unfinished_character_ends_as_replacement(byte_tokenizer: Tokenizer) -> None:
    token_ids = byte_tokenizer.encode("a数")[:-1]
    text = "".join(pieces_of(byte_tokenizer, [], token_ids))
    assert text.rstrip("\N{REPLACEMENT CHARACTER}") == "a"
    assert text != "a"


def test_detokenizer_endless_invalid_bytes_are_not_held_for_ever(byte_tokenizer: Tokenizer) -> None:
    continuation = byte_tokenizer.encode("数")[1]
    detokenizer = IncrementalDetokenizer(byte_tokenizer, [])
    pieces = [detokenizer.push([continuation]) for _ in range(64)]
    assert sum(map(len, pieces)) >= 56


def test_detokenizer_special_tokens_are_left_out_or_kept(byte_level_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level_dir)
    token_ids = [0, *tokenizer.encode("ab"), 1]
    assert "".join(pieces_of(tokenizer, [], token_ids)) == "ab"
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
    assert detokenizer.push(token_ids) + detokenizer.finish() == "<bos>ab<eos>"


def test_detokenizer_words_join_with_spaces(recall_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(recall_dir)
    text = "? alice river stone cloud ."
    token_ids = tokenizer.encode(text)
    assert pieces_of(tokenizer, token_ids[:2], token_ids[2:]) == [
        " river",
        " stone",
        " cloud",
        " .",
        "",
    ]
    assert "".join(pieces_of(tokenizer, [], token_ids)) == text


def test_detokenizer_special_token_between_words_leaves_one_space(recall_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(recall_dir)
    token_ids = tokenizer.encode("alice river <eos> <bos> stone")
    pieces = pieces_of(tokenizer, token_ids[:1], token_ids[1:])
    assert pieces == [" river", "", "", " stone", ""]


def test_detokenizer_prompt_of_special_tokens_adds_no_space(recall_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(recall_dir)
    token_ids = tokenizer.encode("<bos> river")
    assert pieces_of(tokenizer, token_ids[:1], token_ids[1:]) == ["river", ""]


def test_detokenizer_unknown_id_has_no_text(recall_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(recall_dir)
    token_ids = [*tokenizer.encode("alice"), 100_000, *tokenizer.encode("river")]
    assert "".join(pieces_of(tokenizer, [], token_ids)) == "alice river"


def test_tokenizer_directory_without_one_refuses_text_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert not tokenizer.is_available
    for needs_text in (
        lambda: tokenizer.encode("text"),
        lambda: tokenizer.decode([1]),
        tokenizer.files_zip,
        lambda: IncrementalDetokenizer(tokenizer, []),
        lambda: tokenizer.require("sampling_params.stop"),
    ):
        with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
            needs_text()


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_tokenizer_broken_file_raises_checkpoint_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_dir(tmp_path)
    assert caught.value.field == "tokenizer.json"


def test_tokenizer_padding_and_truncation_of_the_file_are_off(byte_level_dir: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_dir(save_to(byte_level_dir.parent / "padded", backend))
    assert len(tokenizer.encode("abcdefgh")) == 8
    assert len(tokenizer.encode("a")) == 1


def save_to(directory: Path, backend: tokenizers.Tokenizer) -> Path:
    """Writes a tokenizer to a new directory."""
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    return directory
