"""Chats through the router: prompts as the checkpoint's template has them, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from tests.support.checkpoints import (
    BOS_TOKEN_ID,
    CHAIN_TEXT,
    write_chain_checkpoint,
    write_tiny_checkpoint,
)
from tests.support.openai_api import Api, running_api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ONE_LINE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Statements on lines of their own, a literal newline, a default, and white space at both ends.
MANY_LINES = """\

{%- set ns = namespace(system='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- set ns.system = m.content | trim %}
    {%- endif %}
{%- endfor %}
{{ bos_token + ns.system }}
{%- for m in messages if m.role != 'system' %}
    {%- if m['role'] == 'user' %}
{{ '\\n[user] ' + m['content'] }}
    {%- else %}
{{ '\\n[' ~ m.role ~ '] ' ~ m.content ~ eos_token }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
[assistant]{% endif %}
"""
CHATS: Mapping[str, list[dict[str, Any]]] = {
    "one message": [{"role": "user", "content": "hello"}],
    "system": [
        {"role": "system", "content": " be kind "},
        {"role": "user", "content": "hi\n\nyou"},
    ],
    "turns": [
        {"role": "system", "content": "be <eos> kind"},
        {"role": "user", "content": "héllo 数据 \N{GRINNING FACE}"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": " <bos>{{ bos_token }}\\n"},
    ],
}


def with_added_bos(model_dir: Path) -> None:
    """Let the tokenizer put <bos> before text, which a rendered chat must not get twice."""
    path = str(model_dir / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_TOKEN_ID)]
    )
    tokenizer.save(path)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The chain checkpoint, its template in tokenizer_config.json, as `deepseek_v32`."""
    work_dir = tmp_path_factory.mktemp("chain-api")
    model_dir = write_chain_checkpoint(work_dir / "chain")
    path = model_dir / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": ONE_LINE}))
    with_added_bos(model_dir)
    with running_api(model_dir, work_dir) as api:
        yield api


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A random checkpoint, its template in chat_template.jinja, as `glm_moe_dsa`."""
    work_dir = tmp_path_factory.mktemp("glm-api")
    model_dir = write_tiny_checkpoint("glm_plain", work_dir / "glm")
    (model_dir / "chat_template.jinja").write_text(MANY_LINES)
    with running_api(model_dir, work_dir) as api:
        yield api


def rendered_by_transformers(api: Api, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of a chat, by another implementation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(api.model_dir)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [int(token_id) for token_id in ids]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("which", ["chain", "glm"])
def test_chat_prompt_is_exactly_what_transformers_renders(
    which: str, name: str, request: pytest.FixtureRequest
) -> None:
    api: Api = request.getfixturevalue(which)
    messages = CHATS[name]
    reply = api.post("/v1/chat/completions", messages=messages, max_tokens=2, temperature=0)
    assert reply.status == 200, reply.body
    [asked] = api.requests.new()
    expected = rendered_by_transformers(api, messages)
    assert list(asked.tokenized.input_ids) == expected
    assert reply.json["usage"]["prompt_tokens"] == len(expected)


def test_completion_prompt_gets_no_added_tokens_but_those_written_in_it(chain: Api) -> None:
    """A limit of the router, told in docs/operations.md: this tokenizer would add <bos>."""
    tokenizer = tokenizers.Tokenizer.from_file(str(chain.model_dir / "tokenizer.json"))
    assert tokenizer.encode("x").ids[0] == BOS_TOKEN_ID
    for text in ("héllo <eos>", "<bos>x"):
        chain.requests.new()
        chain.post("/v1/completions", prompt=text, max_tokens=1)
        [asked] = chain.requests.new()
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert list(asked.tokenized.input_ids) == expected


def test_chat_with_the_official_client_streamed_and_not(chain: Api) -> None:
    """Characters of several tokens come whole; the end and the usage are told."""
    messages: Any = CHATS["turns"]
    num_prompt_tokens = len(rendered_by_transformers(chain, messages))
    num_tokens = len(CHAIN_TEXT.encode()) + 1  # <eos> counts
    with chain.client() as client:
        whole = client.chat.completions.create(
            model=chain.model, messages=messages, max_completion_tokens=40, temperature=0
        )
        stream = client.chat.completions.create(
            model=chain.model,
            messages=messages,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert whole.choices[0].message.content == CHAIN_TEXT
    assert whole.choices[0].finish_reason == "stop"
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == CHAIN_TEXT
    assert all(piece in CHAIN_TEXT for piece in pieces), "a piece ends inside a character"
    assert len([piece for piece in pieces if piece]) > 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens == num_prompt_tokens
        assert usage.completion_tokens == num_tokens
        assert usage.total_tokens == num_prompt_tokens + num_tokens
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_chat_cut_by_its_length_says_so(chain: Api, stream: bool) -> None:
    """Five tokens end inside a character, whose beginning is not shown."""
    reply = chain.post(
        "/v1/chat/completions",
        messages=CHATS["one message"],
        max_tokens=5,
        temperature=0,
        stream=stream,
    )
    if stream:
        choices = [event["choices"][0] for event in reply.events]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        finish_reason = choices[-1]["finish_reason"]
    else:
        [choice] = reply.json["choices"]
        text, finish_reason = choice["message"]["content"], choice["finish_reason"]
    assert CHAIN_TEXT.encode()[:5].decode(errors="ignore") == "aéb"
    assert (text, finish_reason) == ("aéb", "length")


def test_completions_of_several_prompts_with_the_official_client(chain: Api) -> None:
    with chain.client() as client:
        whole = client.completions.create(
            model=chain.model, prompt=["x", "yy"], max_tokens=40, temperature=0
        )
        stream = client.completions.create(
            model=chain.model,
            prompt=["x", "yy"],
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert {choice.text for choice in whole.choices} == {CHAIN_TEXT}
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: CHAIN_TEXT, 1: CHAIN_TEXT}
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens == 1 + 2
        assert usage.completion_tokens == 2 * (len(CHAIN_TEXT.encode()) + 1)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 0


def test_chat_without_a_template_is_a_client_error(
    tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    """A `glm_moe_dsa` checkpoint that has none; completions still work."""
    with running_api(tiny_checkpoints["glm_plain"], tmp_path) as api:
        reply = api.post("/v1/chat/completions", messages=CHATS["one message"], max_tokens=2)
        assert 400 <= reply.status < 500, reply.body
        assert "chat_template" in reply.body.decode()
        assert api.requests.new() == []
        assert api.post("/v1/completions", prompt="hello", max_tokens=2).status == 200


def test_model_list_names_the_served_model(chain: Api) -> None:
    with chain.client() as client:
        assert [model.id for model in client.models.list()] == [chain.model]
