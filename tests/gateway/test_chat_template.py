"""Chat templates: what transformers renders, we render; and no word of a caller becomes a control token."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gateway.chat_template import ChatTemplate
from gateway.text import CHATML, Message, Text, TextError
from tests.wire.tiny_tokenizers import Kind, llama2, llama3, qwen2, save_folder
from wire.gguf_header import ModelFileError

# Each leans on something that real templates lean on.
HEADERS = (  # trims, and writes bos itself
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
BRACKETS = (  # slices, a namespace, loop controls, and refuses
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = none %}{%- set rest = messages %}{%- endif %}"
    "{%- set state = namespace(seen=0) %}{{- bos_token }}"
    "{%- for message in rest %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if message.role == 'user' %}{%- set state.seen = state.seen + 1 %}"
    "{{- '[INST] ' ~ (system ~ '\n\n' if system and loop.last else '') ~ message.content ~ ' [/INST]' }}"
    "{%- else %}{{- ' ' ~ message.content ~ eos_token }}{%- endif %}"
    "{%- if state.seen > 100 %}{%- break %}{%- endif %}"
    "{%- endfor %}"
)
THINKING = (  # looks into the content, splits it, writes JSON
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' }}{% generation %}{{- content }}{% endgeneration %}{{- '<|im_end|>\n' }}"
    "{%- endfor %}{{- {'a': messages[0].content, 'ä': [1, 2]} | tojson }}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MODELS = {"headers": (llama3, HEADERS), "brackets": (llama2, BRACKETS), "thinking": (qwen2, THINKING)}
CHATS = [
    [("user", "Hello, world!")],
    [("system", "Be kind."), ("user", "  Hi there \n"), ("assistant", "Hello."), ("user", "And <b>now</b>?")],
    [("user", "x"), ("assistant", "<think>\nhm\n</think>\n\nyes"), ("user", "'\"\\ é 日本 {{ x }} {% if %}")],
    [("user", "")],
]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Kind, Text, PreTrainedTokenizerFast]:
    make, template = MODELS[request.param]
    kind = make()
    folder = save_folder(kind, tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=kind.control[1] if kind.gguf_model == "llama" else kind.settings["bos_token"],
        eos_token=kind.settings["eos_token"],
    )
    reference.chat_template = template
    return kind, Text.of_model(folder), reference


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_becomes_the_tokens_that_transformers_makes_of_it(
    model: tuple[Kind, Text, PreTrainedTokenizerFast], chat: list[tuple[str, str]]
) -> None:
    _, text, reference = model
    expected = reference.apply_chat_template(
        [{"role": role, "content": content} for role, content in chat], add_generation_prompt=True, return_dict=False
    )
    assert list(text.chat_prompt([Message(role, content) for role, content in chat])) == expected


def test_control_tokens_in_what_a_caller_writes_stay_text(model: tuple[Kind, Text, Any]) -> None:
    kind, text, _ = model
    control = {kind.tokenizer.token_to_id(name) for name in kind.control}

    def controls(content: str) -> list[int]:
        prompt = text.chat_prompt([Message("user", content)])
        return [token_id for token_id in prompt if token_id in control]

    honest = controls("hello")
    assert honest
    for name in kind.control:
        for hostile in (name, f" {name} ", f"a{name}{name}b", name[:-1], name[1:], f"{name[:-1]}\n", f"\n{name[1:]}"):
            assert controls(hostile) == honest, hostile
            prompt = text.chat_prompt([Message("user", hostile)])
            assert hostile.strip().encode() in b"".join(map(text.shown_bytes, prompt))


def template(source: str, *control: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, control, **options)


def rendered(source: str, *contents: str, control: tuple[str, ...] = ("<s>", "</s>")) -> list[tuple[bool, str]]:
    return template(source, *control).render([{"role": "user", "content": content} for content in contents])


@pytest.mark.parametrize("content", ["s>", "<", "s", "<s", " s> ", "<s>", ">"])
def test_template_and_caller_together_complete_no_control_token(content: str) -> None:
    source = "<{{ messages[0].content }}>{{ messages[0].content | trim }}s>"
    pieces = rendered(source, content)
    assert all(not is_control for is_control, _ in pieces)
    assert "".join(text for _, text in pieces) == f"<{content}>{content.strip()}s>"


@settings(max_examples=300)
@given(content=st.text(alphabet=st.sampled_from("<s>/ \n\ue000\ue001a{}%")))
def test_whatever_a_caller_writes_comes_out_as_it_is_and_only_the_template_makes_control_tokens(content: str) -> None:
    pieces = rendered("<s>{{ messages[0].content }}</s>", content)
    assert (pieces[0], pieces[-1]) == ((True, "<s>"), (True, "</s>"))
    assert "".join(text for _, text in pieces[1:-1]) == content
    assert not any(is_control for is_control, _ in pieces[1:-1])


def test_a_control_token_that_a_template_makes_of_a_role_is_one() -> None:
    chat = template("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", "<|user|>", "<|assistant|>")
    pieces = chat.render([{"role": "user", "content": "assistant|>"}, {"role": "assistant", "content": "<|user"}])
    assert [text for is_control, text in pieces if is_control] == ["<|user|>", "<|assistant|>"]


def test_words_of_tools_and_documents_are_guarded_too() -> None:
    source = "{{ tools | tojson }}<s>{{ tools[0].name }}"
    pieces = template(source, "<s>").render([], tools=[{"name": "a<s>b", "<s>": 3}])
    assert [text for is_control, text in pieces if is_control] == ["<s>"]
    assert pieces[0][1] == '[{"name": "a<s>b", "<s>": 3}]'
    assert pieces[-1][1] == "a<s>b"


def test_a_template_that_asks_for_the_day_gets_it() -> None:
    chat = template("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 3, 1, tzinfo=UTC))
    assert chat.render([]) == [(False, "01 Mar 2026")]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(3) }}",
        "{{ ''.__class__.__subclasses__() }}",
    ],
)
def test_a_template_that_stumbles_or_reaches_out_is_an_error_of_its_own(source: str) -> None:
    with pytest.raises(TextError):
        rendered(source, "x")


def test_a_template_with_a_mistake_in_it_is_refused_by_its_field() -> None:
    with pytest.raises(ModelFileError, match=r"field chat_template: .*\(line 2\)"):
        template("line one\n{% for %}")


def test_a_model_without_a_template_has_no_chat_unless_it_knows_chatml(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no chat template"):
        Text.of_model(save_folder(llama2(), tmp_path / "base")).chat_prompt([Message("user", "x")])
    chatml = Text.of_model(save_folder(qwen2(), tmp_path / "chatml"))
    other = Text.of_model(save_folder(qwen2(), tmp_path / "own", chat_template=CHATML))
    assert chatml.chat_prompt([Message("user", "x")]) == other.chat_prompt([Message("user", "x")])
