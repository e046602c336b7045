"""Tests of the tokenizer that is trained from scratch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rstar_lab.rl.models.tokenizer import repeated_texts, train_tokenizer
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.formats import render_prompt
from rstar_lab.rl.synthetic.families import synthesize

PROMPTS = [render_prompt(problem.question) for problem in synthesize(0, 200)]
TOKENIZER = train_tokenizer(PROMPTS, 512)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.slow
@given(st.text())
def test_decoding_returns_the_encoded_text(text):
    assert TOKENIZER.decode(ids(text)) == text


def test_digits_are_single_tokens():
    tokens = [TOKENIZER.decode([i]) for i in ids("print(4096 * 17)")]
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("409617")


def test_merges_cross_word_boundaries():
    assert any(
        str(TOKENIZER.decode([i])).strip().count(" ") >= 2 for i in range(300, len(TOKENIZER) - len(repeated_texts()))
    )


def test_repeated_texts_are_single_tokens():
    prompt = ids(PROMPTS[0])
    for text in repeated_texts():
        assert len(ids(text)) == 1
        assert ids(text)[0] in prompt
    assert len(prompt) < 60


def test_special_tokens_are_single_and_end_of_turn_is_eos():
    assert all(len(ids(token)) == 1 for token in chat.SPECIAL_TOKENS)
    assert TOKENIZER.eos_token == chat.END_OF_TURN
    assert TOKENIZER.pad_token == "<|endoftext|>"


def test_a_vocabulary_smaller_than_the_bytes_is_an_error():
    with pytest.raises(ValueError, match="vocab_size"):
        train_tokenizer(PROMPTS, 200)


def test_a_saved_tokenizer_encodes_the_same_after_loading(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": chat.format_question("What is 2 + 2?")}]
    rendered = loaded.apply_chat_template(messages, tools=[chat.CODE_TOOL], add_generation_prompt=True, tokenize=False)
    assert rendered == render_prompt("What is 2 + 2?", system="")
    for text in [*PROMPTS[:20], "naïve 漢字 <|im_end|> 007"]:
        assert loaded.encode(text, add_special_tokens=False) == ids(text)
