import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import type { Machine, Worker } from "../src/api/types";
import { Machines } from "../src/pages/fleet/Machines";
import { show } from "./factories";

const MACHINES = ["gpu-1", "cpu-1"].map((id) => ({ id, state: "running" }) as Machine);
const WORKER = { name: "j.gpu-1", job: "j", machine: "gpu-1", gpus: 2, device: "GPU 0 (L4)" };

test("a machine shows its GPUs with their use", () => {
  const memory = { gpu_memory_bytes: 24e9, gpu_memory_free_bytes: 6e9, gpu_utilization: 97 };
  const workers = [
    { ...WORKER, ...memory },
    { ...WORKER, name: "j.gpu-1_2", device: "GPU 1 (L4)" },
    { ...WORKER, name: "j.cpu-1", machine: "cpu-1", gpus: 0, device: "cpu" },
  ] as Worker[];
  show(<Machines machines={MACHINES} workers={workers} />);

  const cells = within(screen.getByText("gpu-1").closest("tr") as HTMLElement);
  expect(cells.getByText("GPU 0 (L4), 97% busy, 18.0 GB of 24.0 GB; GPU 1 (L4)")).toBeTruthy();
  expect(screen.queryByText(/cpu,/)).toBeNull();
});

test("a fleet without GPUs has no column for them", () => {
  show(<Machines machines={MACHINES} workers={[]} />);

  expect(screen.queryByText("GPUs")).toBeNull();
});
