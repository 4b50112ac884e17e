"""Text classification, as in the documentation of transformers, on spot machines.

It needs no network: sentences, vocabulary, and the model's weights are made on the spot.
"""

import itertools

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from vcasgd.integrations.huggingface import TrainerTask

GOOD = ["great", "wonderful", "moving", "clever", "funny", "charming", "brilliant", "honest"]
BAD = ["awful", "boring", "clumsy", "dull", "empty", "loud", "pointless", "tired"]
FILMS = ["story", "film", "cast", "script", "music", "ending", "dialogue", "camera"]
DEGREES = ["very", "quite", "rather", "truly", "so", "really", "never", "hardly"]


def reviews(label):
    """Return sentences such as "the film is never dull", which praise if the label is 1."""
    sentences = []
    for (good, bad), film, degree in itertools.product(zip(GOOD, BAD, strict=True), FILMS, DEGREES):
        negated = degree in ("never", "hardly")
        word = bad if negated == bool(label) else good
        sentences.append(f"the {film} is {degree} {word}")
    return sentences


def make_trainer(learning_rate=1e-3, epochs=4):
    labeled = [(text, label) for label in (0, 1) for text in reviews(label)]

    vocabulary = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]"]
    vocabulary.train_from_iterator(
        [text for text, _ in labeled], trainers.WordLevelTrainer(special_tokens=special)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]"
    )

    def preprocess_function(text, label):
        return {**tokenizer(text, truncation=True), "label": label}

    order = np.random.default_rng(0).permutation(len(labeled))
    tokenized = [preprocess_function(*labeled[index]) for index in order]
    data_collator = DataCollatorWithPadding(tokenizer=tokenizer)

    def compute_metrics(eval_pred):
        predictions, labels = eval_pred
        return {"accuracy": (np.argmax(predictions, axis=1) == labels).mean()}

    model = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(tokenizer), dim=64, hidden_dim=128, n_layers=2, n_heads=4, num_labels=2
        )
    )

    training_args = TrainingArguments(
        output_dir="reviews",
        learning_rate=learning_rate,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        num_train_epochs=epochs,
        weight_decay=0.01,
        warmup_steps=0.1,
        save_strategy="no",
        report_to="none",
    )

    return Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized[200:],
        eval_dataset=tokenized[:200],
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
    )


task = TrainerTask(make_trainer)

if __name__ == "__main__":
    trainer = make_trainer()
    trainer.train()
    print(trainer.evaluate())
