"""A random model as others see it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.random_models import CONFIGS, SPECIAL_TOKENS, made_up_tokenizer, make_model


def test_transformers_reads_a_random_model(tmp_path: Path) -> None:
    folder = make_model("smoke", tmp_path / "new" / "model")
    written = (folder / "model.safetensors").stat()
    assert make_model("smoke", folder) == folder
    assert (folder / "model.safetensors").stat() == written
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == CONFIGS["smoke"]["vocab_size"]
    assert tokenizer.convert_ids_to_tokens(range(len(SPECIAL_TOKENS))) == SPECIAL_TOKENS
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    messages = [{"role": "user", "content": "Wo ist der Bär?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 3 and ids.count(4) == 1 and tokenizer.decode(ids) == text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits
    assert bool(logits.isfinite().all()) and 0.3 < float(logits.std()) < 3


@pytest.mark.parametrize("size", [262, 1000, 2000])
def test_a_vocabulary_is_as_large_as_it_is_wanted(size: int) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(made_up_tokenizer(size))
    assert tokenizer.get_vocab_size() == size
    text = "some words, 12 and Ümläute\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
