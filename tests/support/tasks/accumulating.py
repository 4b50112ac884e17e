"""The traced task as a script that accumulates scaled gradients and makes its own steps."""

import os
import time

import torch
from counting import options

import vcasgd
from vcasgd.chaos.task.audit import CountingModel, Indices

trace = os.open(options.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
model, data = CountingModel(options.samples, options.copies), Indices(options.samples)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler = torch.amp.GradScaler("cpu")
session = vcasgd.Session(model, optimizer)


@session.evaluation(data)
def counted(model, batch):
    return {"count": torch.tensor(len(batch)), "applied": model(batch).sum() / options.copies}


steps = options.batch_size
loader = session.loader(data, batch_size=1, gradient_accumulation_steps=steps)
samples = []
for batch in loader:
    samples += batch.tolist()
    # The gradient of a step is the mean over its samples: -1 / batch_size for each of them.
    loss = -model(batch).mean(dim=1).sum() * options.batch_size / steps
    scaler.scale(loss).backward()
    if loader.ends_step:
        os.write(trace, f"{os.getpid()} {' '.join(map(str, samples))}\n".encode())
        if options.hold and options.hold.exists():
            time.sleep(options.step_seconds)
        vcasgd.log({"samples": len(samples)})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        samples = []
