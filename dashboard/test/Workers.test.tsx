import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { Checkpoints } from "../src/pages/job/Checkpoints";
import { Workers } from "../src/pages/job/Workers";
import { aJob, anApi, show } from "./factories";

const JOB = aJob({ id: "digits-abc123" });

test("a row shows what a worker pushed and fetched, and the title shows the sums", async () => {
  const row = {
    name: "digits-abc123.i-7",
    job: JOB.id,
    at: 1_700_000_000,
    quarantined: null,
    leaving: null,
    doing: "training subtask 3",
    device: "cpu",
    gpus: 0,
    resident_bytes: 400_000_000,
    samples: 1200,
    pushed_bytes: 2_500_000,
    fetched_bytes: 7_000_000,
  };
  const old = { ...row, name: "digits-abc123.i-8", fetched_bytes: null };
  anApi({ "/api/v1/jobs/digits-abc123/workers": { body: [row, old] } });
  show(<Workers job={JOB} />);

  const cells = within((await screen.findByText("i-7")).closest("tr") as HTMLElement);
  expect(cells.getByText("training subtask 3")).toBeTruthy();
  expect(cells.getByText("400 MB")).toBeTruthy();
  expect(screen.queryByText("Device")).toBeNull();
  expect(cells.getByText("2.5 MB")).toBeTruthy();
  expect(cells.getByText("7.0 MB")).toBeTruthy();
  const older = within(screen.getByText("i-8").closest("tr") as HTMLElement);
  expect(older.queryByText("7.0 MB")).toBeNull();
  expect(screen.getByText("all workers so far: 1.2 GB pushed, 3.4 GB fetched")).toBeTruthy();
});

test("workers with a GPU show which one, its memory, and its use", async () => {
  const row = { name: "digits-abc123.i-7", job: JOB.id, at: null, gpus: 0, device: "cpu" };
  const memory = { gpu_memory_bytes: 80_000_000_000, gpu_memory_free_bytes: 50_000_000_000 };
  const use = { gpu_utilization: 97, flops_utilization: 0.412, samples_per_second: 605.9 };
  const gpu = {
    ...row,
    name: "digits-abc123.i-8",
    gpus: 2,
    device: "GPU 1 (A100)",
    ...memory,
    ...use,
  };
  const starting = { ...row, gpu_memory_bytes: null, gpu_memory_free_bytes: null };
  anApi({ "/api/v1/jobs/digits-abc123/workers": { body: [starting, gpu] } });
  show(<Workers job={JOB} />);

  const cells = within((await screen.findByText("i-8")).closest("tr") as HTMLElement);
  expect(cells.getByText("GPU 1 (A100)")).toBeTruthy();
  for (const text of ["30.0 GB of 80.0 GB", "97.0%", "41.2%", "605.9"])
    expect(cells.getByText(text)).toBeTruthy();
});

test("the page's head alone offers the models of a job that has ended", async () => {
  const row = { name: "v9", version: 9, digest: "d".repeat(64), size: 10, best: true, last: true };
  anApi({ "/api/v1/jobs/digits-abc123/checkpoints": { body: [row] } });
  show(<Checkpoints job={{ ...JOB, state: "succeeded", model: "v9" }} />);

  expect(await screen.findByLabelText("Download version 9")).toBeTruthy();
  expect(screen.queryByText(/^Download best/)).toBeNull();
});

test("a job without workers says so", async () => {
  anApi({ "/api/v1/jobs/digits-abc123/workers": { body: [] } });
  show(<Workers job={{ ...JOB, state: "succeeded" }} />);

  expect(await screen.findByText("The job has ended.")).toBeTruthy();
});
