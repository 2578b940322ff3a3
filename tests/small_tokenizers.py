"""Small real tokenizers of the kinds that checkpoints have, written to a folder as a checkpoint has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "def main():\n    return 'naïve café' + \"日本語\"\n",
    "STOP here, then stop again; the end. 😀 Привет, мир.",
]
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen, OLMoE, DeepSeek and gpt-oss have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日本 x", special=False)])
    return tokenizer


def _words() -> list[str]:
    text = " ".join(CORPUS).replace(" ", "▁").replace("\n", "")
    pairs = {text[at : at + size] for size in (2, 3) for at in range(len(text) - 2)}
    return [*sorted(set(text)), *sorted(word for word in pairs if "▁" not in word[1:])]


def byte_fallback() -> Tokenizer:
    """As Llama, Mixtral and Phi have: a prefix space, and single bytes for what the vocabulary lacks."""
    vocab = {token: place for place, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    words = [word for word in _words() if word.isascii() or "▁" in word]
    vocab |= {word: len(vocab) + place for place, word in enumerate(words)}
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1 and word[:-1] in vocab and word[-1] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def strips_two() -> Tokenizer:
    """Like byte_fallback, but two leading spaces go, so that the first tokens may show nothing."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and Switch Transformers have."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -float(len(word))) for word in _words())]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT has."""
    words = ["the", "fox", "##es", "hello", "##o", ".", ",", "!", "n", "'", "t", "é", "日"]
    vocab = {word: place for place, word in enumerate(["[UNK]", "[CLS]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]"])
    return tokenizer


def words_only() -> Tokenizer:
    """Without any decoder: tokens joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "bb": 1, "": 2, "é": 3, "<unk>": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


ALL: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "strips_two": strips_two,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "words_only": words_only,
}


def write(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """The files of a checkpoint that are about text; ``config`` goes to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_chat(folder: Path, tokenizer: Tokenizer | None = None, template: str = CHATML) -> Path:
    """A byte-level tokenizer with a ChatML template, unless others are given."""
    return write(
        folder,
        tokenizer or byte_level(),
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=template,
    )
