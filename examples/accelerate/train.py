"""Digits with Accelerate, in the loop of its documentation, on spot machines."""

import argparse
import math

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import vcasgd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--accumulate", type=int, default=1, help="batches for each step")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
split = torch.Generator().manual_seed(0)
training_set, validation_set = random_split(digits, [1437, 360], generator=split)
training_dataloader = DataLoader(training_set, batch_size=32, shuffle=True)
validation_dataloader = DataLoader(validation_set, batch_size=120)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
steps = args.epochs * math.ceil(len(training_dataloader) / args.accumulate)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def judge(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    loss = loss_function(outputs, targets) * len(targets)
    correct = (outputs.argmax(dim=1) == targets).sum()
    return {"loss": loss, "accuracy": correct, "count": torch.tensor(len(targets))}


session = vcasgd.Session(model, optimizer, schedule=scheduler, schedule_steps=steps)
session.evaluation(validation_set)(judge)
training_dataloader = session.loader(training_dataloader)

accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
model, optimizer, training_dataloader, validation_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, validation_dataloader, scheduler
)

for epoch in range(args.epochs):
    model.train()
    for batch in training_dataloader:
        with accelerator.accumulate(model):
            inputs, targets = batch
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        correct = sum(judge(model, batch)["accuracy"] for batch in validation_dataloader)
    accelerator.print(f"epoch {epoch + 1}: accuracy {correct / len(validation_set):.4f}")
