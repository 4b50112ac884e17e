"""Downloaded models of jobs with a base: complete state dicts and PEFT adapters."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.api_harness import Api
from support.training import TASKS
from torch import Tensor, nn

from vcasgd.client import Client
from vcasgd.errors import SpecError
from vcasgd.learning.layout import Layout
from vcasgd.learning.vector import gather
from vcasgd.storage.model_checkpoints import ModelCheckpoints
from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, encode_integers
from vcasgd.task.task import use_base
from vcasgd.worker.adapter import adapter_of

Store = Callable[..., str]

CODE = """
import torch, vcasgd

class Half(vcasgd.Task):
    def model(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        model[0].requires_grad_(False)
        return model
"""


@pytest.fixture(autouse=True)
def _no_base() -> Iterator[None]:
    yield
    use_base(None)


@pytest.fixture
def store(api: Api) -> Store:
    """Return a function that stores a model as a job's checkpoint, as the controller does."""

    def store(job: str, model: nn.Module, average: float = 1.0) -> str:
        layout, adapter = Layout.of(model), adapter_of(model)
        floats, integers = gather(model, layout)
        meta = Meta(
            *(3, 1, layout.floats, layout.parameters, layout.digest()),
            integers=encode_integers(integers),
        )
        whole, state = (Snapshot(meta, Record()),), floats * average
        checkpoints = ModelCheckpoints(api.storage, job)
        vectors = (lambda: iter([floats])), (lambda: iter([state]))
        text = adapter.to_json() if adapter is not None else ""
        return checkpoints.write(whole, layout, *vectors, text).name

    return store


def half_frozen(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def trained(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.arange(parameter.numel()).view_as(parameter))
    return model


def test_the_base_is_found_in_its_file_whatever_its_names_are_there(
    api: Api, client: Client, store: Store, tmp_path: Path
) -> None:
    # Given a job whose base is a file with tensors of other names, and some more
    model = trained(half_frozen())
    file = tmp_path / "base.safetensors"
    save_file(
        {"encoder.w": model[0].weight.data, "encoder.b": model[0].bias.data, "x": torch.ones(4)},
        file,
    )
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    job = api.submit(base={"location": str(file), "sha256": digest})
    name = store(job, model)

    # When it is downloaded
    path = client.job(job).download(tmp_path / "model.safetensors", name)

    # Then the file is the whole state dict
    assert path == tmp_path / "model.safetensors"
    loaded = load_file(path)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[key], each) for key, each in model.state_dict().items())
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode

    # and without the base only what was trained, as it is stored
    alone = client.job(job).download(tmp_path / "trained.safetensors", name, trained_only=True)
    assert load_file(alone).keys() == {"1.weight", "1.bias", "vcasgd:rule_state"}
    assert {each.name for each in tmp_path.iterdir() if each.name.startswith(".")} == set()


def test_the_average_is_downloaded_if_asked(
    api: Api, client: Client, store: Store, tmp_path: Path
) -> None:
    # Given a job whose checkpoint has an average, and a tensor beside the model
    model = trained(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    model.register_buffer("beside:seen", torch.tensor([5.0]))
    with_average, without = api.submit(ema=0.9), api.submit()
    name = store(with_average, model, average=-1.0)

    # Then the download has it in place of the parameters
    job = client.job(with_average)
    loaded = load_file(job.download(tmp_path / "average.safetensors", name, ema=True))
    assert loaded.keys() == model.state_dict().keys() - {"beside:seen"}
    assert torch.equal(loaded["0.weight"], -model[0].weight)
    assert load_file(tmp_path / "average-beside.safetensors") == {"seen": torch.tensor([5.0])}
    assert torch.equal(load_file(job.download(tmp_path, name))["0.weight"], model[0].weight)

    # and a job without one says what to do
    other = client.job(without)
    with pytest.raises(SpecError, match="set ema in the job file"):
        other.download(tmp_path / "x.safetensors", store(without, model), ema=True)


def test_a_base_without_a_location_is_built_by_the_code(
    api: Api, client: Client, store: Store, tmp_path: Path
) -> None:
    # Given a job whose task builds its base
    job = api.submit(task="half_code:Half", seed=5)
    (tmp_path / "half_code.py").write_text(CODE)
    model = trained(half_frozen(5))
    name = store(job, model)

    # Then its code is needed
    with pytest.raises(SpecError, match=r"0\.weight of the base was not found .* --working-dir"):
        client.job(job).download(tmp_path / "model.safetensors", name)
    assert not (tmp_path / "model.safetensors").exists()

    # and must build the values that the job has
    other = api.submit(task="half_code:Half", seed=6)
    with pytest.raises(SpecError, match=r"0\.weight of the base was not found with the values"):
        client.job(other).download(
            tmp_path / "model.safetensors", store(other, half_frozen()), working_dir=tmp_path
        )

    path = client.job(job).download(tmp_path, name, working_dir=tmp_path)
    assert path == tmp_path / f"{job}-{name}"
    loaded = load_file(path)
    assert all(torch.equal(loaded[key], each) for key, each in model.state_dict().items())


@pytest.mark.ci
def test_a_peft_model_is_downloaded_as_an_adapter_that_peft_loads(
    api: Api, client: Client, store: Store, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    pytest.importorskip("transformers", reason="needs the extra huggingface")
    sys.path.insert(0, str(TASKS))
    try:
        from lora import Lora
    finally:
        sys.path.remove(str(TASKS))
    # Given a LoRA whose second matrices are no longer zero
    torch.manual_seed(0)
    model = trained(Lora(layers=1).model()).eval()
    job = api.submit(task="lora:Lora")
    name = store(job, model)

    # When it is downloaded
    folder = client.job(job).download(tmp_path / "adapter", name)

    # Then PEFT loads it, and the model gives the same answers
    assert sorted(each.name for each in folder.iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors")
    ]
    torch.manual_seed(0)
    network = Lora(layers=1).model().unload()
    tokens = torch.arange(8).view(1, 8)
    before = scores(network, tokens)
    loaded = peft.PeftModel.from_pretrained(network, folder).eval()
    assert torch.equal(scores(loaded, tokens), scores(model, tokens))
    assert not torch.allclose(before, scores(loaded, tokens))

    # and into a folder, it has the checkpoint's name
    inside = client.job(job).download(tmp_path, name)
    assert inside == tmp_path / f"{job}-{name.removesuffix('.safetensors')}"
    assert inside.is_dir()


def scores(network: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return network.eval()(input_ids=tokens).logits
