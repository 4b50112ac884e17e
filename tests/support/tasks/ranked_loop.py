"""The task of ``ranked.py`` as a script, whose session makes the steps, or whose loop does."""

import argparse

import torch
from ranked import Ranked
from torch.utils.data import DataLoader

import vcasgd

parser = argparse.ArgumentParser()
parser.add_argument("--own_steps", action="store_true")
own_steps = parser.parse_args().own_steps

task = Ranked()
model, data = task.model(), task.dataset("train")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = vcasgd.Session(model, optimizer)
session.evaluation(data)(task.evaluate)

if own_steps:
    for batch in session.loader(DataLoader(data, task.batch_size)):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
else:
    for batch in session.batches(data, task.batch_size):
        session.step(task.loss(model, batch))
