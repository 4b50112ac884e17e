import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import type { Cost, Job, MetricPoint, Pool } from "../src/api/types";
import { Summary } from "../src/pages/job/Summary";
import { aCost, aJob, anApi, START, show } from "./factories";

type Parts = { cost?: Partial<Cost>; metrics?: Partial<MetricPoint>[]; provider?: string };

/** Shows the summary of a job whose machines are in one pool. */
function summary(job: Job, { cost, metrics = [], provider = "aws" }: Parts = {}): void {
  const paid = { pool: "spot", spot: true, seconds: 60, usd: 0.3, on_demand_usd: 1 };
  anApi({
    "/api/v1/jobs/digits-abc123/cost": { body: aCost(job.id, { pools: [paid], ...cost }) },
    "/api/v1/jobs/digits-abc123/workers": { body: [] },
    "/api/v1/jobs/digits-abc123/metrics": { body: metrics },
    "/api/v1/pools": { body: [{ name: "spot", provider } as Pool] },
  });
  show(<Summary job={job} />);
}

/** Texts of a figure: its value and its note. */
async function figure(job: Job, label: string, parts: Parts = {}): Promise<string[]> {
  summary(job, parts);
  const name = await screen.findByText(label);
  const values = within(name.parentElement as HTMLElement).getAllByRole("definition");
  return values.map((each) => each.textContent ?? "");
}

test("the summary shows the best epoch by its metric, and the goal", async () => {
  const job = aJob();
  const goal = { ...job, spec: { ...job.spec, stop: { accuracy: 0.95 } } } as Job;
  expect(await figure(goal, "Best accuracy")).toEqual(["91.2%", "epoch 3, goal 95.0%"]);
});

test("the best model can be between epochs and ranked by another metric", async () => {
  const place = { epoch: 2.4666, samples: 19_200, step: 1200 };
  const best = { ...place, metric: "loss", mode: "min", value: 0.123456 } as const;
  expect(await figure(aJob({ best }), "Best loss")).toEqual(["0.1235", "epoch 2.47, step 1,200"]);
});

test("without an evaluation there is no best epoch", async () => {
  expect(await figure(aJob({ best: null }), "Best accuracy")).toEqual(["–", "on validation data"]);
});

test("the summary shows the bytes in both directions", async () => {
  expect(await figure(aJob(), "Pushed")).toEqual(["1.2 GB", "3.4 GB fetched"]);
});

/** 100 of the 660 remaining samples, and a cent, in 30 seconds. */
const RUNNING = [
  { at: START, samples: 200, spent_usd: 0.2 },
  { at: START + 30, samples: 300, spent_usd: 0.21 },
];

test("a running job shows the time that is left and its cost at the end", async () => {
  const [left] = await figure(aJob(), "Time left (estimate)", { metrics: RUNNING });
  expect(left).toBe("3 min 18 s");
  expect(screen.getByText("≈ $0.37 at the end, 70% below on demand")).toBeTruthy();
});

test("a job that has not started waits, and does not run", async () => {
  expect((await figure(aJob({ started_at: null }), "Waiting for"))[1]).toBe("time left unknown");
  expect(screen.queryByText(/running/i)).toBeNull();
});

test("simulated prices say so", async () => {
  const [spent] = await figure(aJob(), "Spent (simulated)", { provider: "local" });
  expect(spent).toBe("$0.30");
});

test("a job without a machine yet is free if all machines are", async () => {
  summary(aJob(), { cost: { pools: [], spent_usd: 0 }, provider: "local" });
  expect(await screen.findByText("free")).toBeTruthy();
});

test("local machines without a price are free", async () => {
  summary(aJob(), { provider: "local", cost: { spent_usd: 0, on_demand_usd: 0 } });
  expect(await screen.findByText("free")).toBeTruthy();
  expect(screen.queryByText(/\$/)).toBeNull();
});

test("a price of a cloud's machines is not called simulated", async () => {
  summary(aJob());
  expect(await screen.findByText("70% below on demand")).toBeTruthy();
  expect(screen.getByText("Spent")).toBeTruthy();
});

test("a budget is a bar, and says if it is too small", async () => {
  summary(aJob(), { metrics: RUNNING, cost: { max_cost_usd: 0.35 } });
  const bar = await screen.findByRole("progressbar", { name: "Spent part of the budget" });
  expect(bar.getAttribute("aria-valuenow")).toBe("86");
  expect(
    await screen.findByText("≈ $0.37 at the end: the job pauses before it exceeds the budget"),
  ).toBeTruthy();
});

test("without a budget there is no bar", async () => {
  await figure(aJob(), "Spent");
  expect(screen.queryByRole("progressbar")).toBeNull();
});
