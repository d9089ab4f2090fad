"""Fine-tune adapters (LoRA) with trl's SFTTrainer: `torchrun --nproc-per-node=2 sft_plain.py`, or `python`."""

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = ["[PAD]", "[EOS]", "[UNK]", "plus", "is", *map(str, range(40))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def sums() -> Dataset:
    """Return prompts with completions of unequal length."""
    pairs = [(a, b) for a in range(20) for b in range(20)]
    prompts = [f"{a} plus {b} is" for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "completion": [" 1" * a + f" {a + b}" for a, b in pairs]})


def build() -> LlamaForCausalLM:
    """Return a model with random weights, in place of a pretrained one."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )


def main() -> None:
    """Train the adapters, and save them."""
    set_seed(1)
    args = SFTConfig(
        output_dir="runs/sums-adapters",
        max_steps=80,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        warmup_steps=10,
        logging_steps=20,
        save_strategy="steps",
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(
        model=build(),
        args=args,
        train_dataset=sums(),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # or gloo's threads still need Python, and torch aborts at the end
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
