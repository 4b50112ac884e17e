"""Supervised fine-tuning of a chat model, as in the documentation of TRL, on spot machines.

It needs no network: questions, tokenizer, and the model's weights are made on the spot.
"""

import itertools

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from vcasgd.integrations.huggingface import TrainerTask

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Morocco": "Rabat",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Senegal": "Dakar",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Thailand": "Bangkok",
    "Uruguay": "Montevideo",
    "Vietnam": "Hanoi",
    "Zambia": "Lusaka",
}
QUESTIONS = [
    "What is the capital of {} ?",
    "Name the capital of {} .",
    "Which city is the capital of {} ?",
    "Where is the government of {} ?",
    "I am looking for the capital of {} .",
    "Do you know the capital of {} ?",
    "Tell me which city governs {} .",
    "{} has a capital . Which one ?",
    "What do you call the capital of {} ?",
    "Name the seat of government of {} .",
]


def make_trainer(learning_rate=3e-3, epochs=10):
    pairs = itertools.product(CAPITALS.items(), QUESTIONS)
    dataset = Dataset.from_list(
        [
            {"prompt": question.format(country), "completion": f" It is {capital} ."}
            for (country, capital), question in pairs
        ]
    ).train_test_split(test_size=64, seed=0)

    vocabulary = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    vocabulary.train_from_iterator(
        [row["prompt"] + row["completion"] for row in dataset["train"]],
        trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "[EOS]"]),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )

    training_args = SFTConfig(
        output_dir="capitals",
        learning_rate=learning_rate,
        per_device_train_batch_size=16,
        num_train_epochs=epochs,
        bf16=False,
        save_strategy="no",
        report_to="none",
    )

    return SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        processing_class=tokenizer,
    )


task = TrainerTask(make_trainer)

if __name__ == "__main__":
    trainer = make_trainer()
    trainer.train()
    print(trainer.evaluate())
